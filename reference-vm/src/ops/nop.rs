//! Does nothing.

use abi::NopParams;

use super::{Context, Effects, reserved};
use crate::memory::Span;
use crate::trap::Fault;

pub(super) fn inputs(_: Context<'_>, p: &NopParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    Ok(Vec::new())
}

pub(super) fn fire(_: Context<'_>, _: &NopParams) -> Result<Effects, Fault> {
    Ok(Effects::default())
}
