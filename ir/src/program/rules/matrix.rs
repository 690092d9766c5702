//! Matrix rules: row maps that cannot overflow, and dimensions that are the model's.

use crate::id::MatrixId;
use crate::program::stream::uncountable;
use crate::program::{Matrix, Program, RowMap};
use crate::violation::{At, Rule, Violations};

/// Most parts of a row map; q, k and v are three.
const PARTS_MAX: usize = 16;

/// The number of rows of the map, or the reason why it is malformed. For an accepted map [`RowMap::rows`] does not
/// overflow.
pub(super) fn map_rows(map: &RowMap) -> Result<u32, String> {
    if map.parts.is_empty() || map.parts.len() > PARTS_MAX {
        return Err(format!(
            "the row map has {} parts, not within 1..={PARTS_MAX}",
            map.parts.len()
        ));
    }
    if map.interleaved && map.parts.iter().any(|&(_, rows)| rows != map.parts[0].1) {
        return Err("the parts of an interleaved row map have different rows".into());
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
        } else if let Some(detail) = uncountable(program, MatrixId(index as u32), 1) {
            found.push(Rule::PLimit, At::Matrix(MatrixId(index as u32)), detail);
        }
    }
}

fn check_one(program: &Program, matrix: &Matrix) -> Result<(), String> {
    map_rows(&matrix.map)?;
    let d = &program.dims;
    let widths = [d.hidden, d.heads * d.head_dim, d.ffn];
    if !widths.contains(&matrix.cols) {
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
