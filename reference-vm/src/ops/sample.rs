//! Picks the token with the greatest logit, and ends the step.

use abi::SampleParams;

use super::{Context, Effects, product, reserved};
use crate::defect::Defect;
use crate::memory::Span;
use crate::trap::Fault;

pub(super) fn inputs(context: Context<'_>, p: &SampleParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    Ok(vec![context.span(0, 0, product("candidates", p.candidates, 2)?)?])
}

pub(super) fn fire(context: Context<'_>, p: &SampleParams) -> Result<Effects, Fault> {
    let words = context.read(0, 0, product("candidates", p.candidates, 2)?)?;
    let mut best = (f32::NEG_INFINITY, u32::MAX);
    for &[value, row] in words.as_chunks::<2>().0 {
        let row = row.to_bits();
        let value = Defect::rank(context.defect, value);
        if value > best.0 || value == best.0 && row < best.1 {
            best = (value, row);
        }
    }
    Ok(Effects { chosen: Some(best.1), ..Effects::default() })
}
