//! Copies a part of the token's embedding row.

use abi::EmbedParams;

use super::{Context, Effects, reserved};
use crate::memory::Span;
use crate::trap::Fault;

pub(super) fn inputs(_: Context<'_>, p: &EmbedParams) -> Result<Vec<Span>, Fault> {
    reserved(&p.reserved)?;
    Ok(Vec::new())
}

pub(super) fn fire(context: Context<'_>, p: &EmbedParams) -> Result<Effects, Fault> {
    let row = context.read(0, p.offset, p.len)?;
    Ok(Effects::store(context.writes(0)?, p.offset, &row))
}
