//! Matrix rules: row maps that cannot overflow, and dimensions that are the model's.

use crate::id::MatrixId;
use crate::program::stream::uncountable;
use crate::program::{Matrix, Program, RowMap};
use crate::violation::{At, Rule, Violations};

/// Most parts of a row map; q, k and v are three, and an expert has up to four.
const PARTS_MAX: usize = 1 << 13;

/// The number of rows of the map, or the reason why it is malformed. For an accepted map [`RowMap::rows`] does not
/// overflow.
pub(super) fn map_rows(map: &RowMap) -> Result<u32, String> {
    if map.parts.is_empty() || map.parts.len() > PARTS_MAX {
        return Err(format!(
            "the row map has {} parts, not within 1..={PARTS_MAX}",
            map.parts.len()
        ));
    }
    let mut pairs = map.parts.chunks(2);
    if map.interleaved && pairs.any(|pair| pair.iter().any(|&(_, rows)| rows != pair[0].1)) {
        return Err("a pair of parts of an interleaved row map has different rows".into());
    }
    let granule = if map.interleaved { u64::from(abi::UNIT_ROWS) } else { 1 };
    let rows: u64 =
        map.parts.iter().map(|&(_, rows)| u64::from(rows).next_multiple_of(granule)).sum();
    match u32::try_from(rows) {
        Ok(0) => Err("the row map has no rows".into()),
        Ok(rows) if rows <= 1 << 28 => Ok(rows),
        _ => Err(format!("the row map has {rows} rows, more than {}", 1 << 28)),
    }
}

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    for (index, matrix) in program.matrices.iter().enumerate() {
        if let Err(detail) = check_one(program, matrix) {
            found.push(
                Rule::PShape,
                At::Matrix(MatrixId(index as u32)),
                format!("{}: {detail}", matrix.name),
            );
        } else if let Some(detail) = uncountable(program, matrix.units_per_tile()) {
            found.push(Rule::PLimit, At::Matrix(MatrixId(index as u32)), detail);
        }
    }
}

/// Checks that experts have whole tiles, as many each.
fn experts(matrix: &Matrix, rows: u32) -> Result<(), String> {
    if matrix.experts == 1 {
        return Ok(());
    }
    let tiles = if matrix.map.interleaved { 2 } else { 1 };
    let each = rows.checked_div(matrix.experts).unwrap_or(0);
    let even = each > 0 && each.checked_mul(matrix.experts) == Some(rows);
    if !even || !each.is_multiple_of(tiles * abi::UNIT_ROWS) {
        let parts = if tiles == 2 { "whole pairs of tiles" } else { "whole tiles" };
        return Err(format!("{rows} rows of {} experts are not {parts} for each", matrix.experts));
    }
    Ok(())
}

fn check_one(program: &Program, matrix: &Matrix) -> Result<(), String> {
    let rows = map_rows(&matrix.map)?;
    experts(matrix, rows)?;
    let d = &program.dims;
    let widths = [d.hidden, d.heads * d.head_dim, d.ffn];
    // Experts and a shared one differ in width; the widest, or all that are chosen together, are `ffn`.
    let narrower = program.matrices.iter().any(|m| m.experts > 1) && matrix.cols < d.ffn;
    if !widths.contains(&matrix.cols) && !narrower {
        return Err(format!(
            "{} columns are neither hidden ({}), query width ({}) nor ffn ({})",
            matrix.cols, widths[0], widths[1], widths[2]
        ));
    }
    if matrix.format.operand() != d.dtype {
        return Err(format!(
            "{} is multiplied as {}, the program as {}",
            matrix.format.name(),
            matrix.format.operand().name(),
            d.dtype.name()
        ));
    }
    Ok(())
}
