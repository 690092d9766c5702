//! Picks the token with the greatest logit, and ends the step: on several devices, when all have picked one.

use abi::SampleParams;

use super::{Best, Context, Effects, product, reserved};
use crate::defect::Defect;
use crate::memory::Span;
use crate::trap::Fault;

pub(super) fn inputs(context: Context<'_>, p: &SampleParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    Ok(vec![context.span(0, 0, product("candidates", p.candidates, 2)?)?])
}

pub(super) fn fire(context: Context<'_>, p: &SampleParams) -> Result<Effects, Fault> {
    let words = context.read(0, 0, product("candidates", p.candidates, 2)?)?;
    let mut best = Best { logit: f32::NEG_INFINITY, token: u32::MAX };
    for &[value, row] in words.as_chunks::<2>().0 {
        let logit = Defect::rank(context.defect, value);
        best = Best { logit, token: row.to_bits() }.better(best);
    }
    Ok(Effects { chosen: Some(best), ..Effects::default() })
}
