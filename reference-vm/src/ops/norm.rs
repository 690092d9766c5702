//! Norms the parts of a vector.

use abi::NormParams;

use super::{Context, Effects, reserved};
use crate::defect::Defect;
use crate::math::root_mean_square;
use crate::memory::Span;
use crate::trap::Fault;

/// The end of each part.
fn parts(p: &NormParams) -> Result<[u32; 2], Fault> {
    let second = p.first.checked_add(p.second).filter(|&end| end <= p.width);
    let second = second.ok_or(Fault::Parameter { name: "second", value: p.second })?;
    let end = p.offset.checked_add(p.len).filter(|&end| end <= p.width && p.len > 0);
    end.ok_or(Fault::Parameter { name: "len", value: p.len })?;
    Ok([p.first, second])
}

pub(super) fn inputs(context: Context<'_>, p: &NormParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    parts(p)?;
    Ok(vec![context.span(0, 0, p.width)?])
}

pub(super) fn fire(context: Context<'_>, p: &NormParams) -> Result<Effects, Fault> {
    let [first, second] = parts(p)?;
    let x = context.read(0, 0, p.width)?;
    let weight = context.read(1, 0, second)?;
    let scale = |part: &[f32]| match part.is_empty() {
        true => 1.0,
        false => Defect::norm_scale(context.defect, 1.0 / root_mean_square(part, p.eps)),
    };
    let scales = [scale(&x[..first as usize]), scale(&x[first as usize..second as usize])];
    let normed = (p.offset..p.offset + p.len).map(|i| {
        let value = x[i as usize];
        if i >= second {
            return value;
        }
        let scale = scales[usize::from(i >= first)];
        (f64::from(value * weight[i as usize]) * scale) as f32
    });
    let out: Vec<f32> = normed.collect();
    Ok(Effects::store(context.writes(0)?, p.offset, &out))
}
