//! The store as Parquet, one file per table: for pandas, polars, DuckDB.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::column::writer::{ColumnWriter, ColumnWriterImpl};
use parquet::data_type::{ByteArray, DataType};
use parquet::errors::{ParquetError, Result};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{Type, TypePtr};
use rusqlite::types::Value as Cell;

use super::Store;
use super::schema::{Column, Kind, TABLES, Table};
use crate::error::{At, CorpusError};

/// Rows in memory at once.
const GROUP_ROWS: usize = 16_384;

/// Writes every table to a folder, which must exist; returns the rows.
///
/// # Errors
/// If the store cannot be read or the files cannot be written.
pub fn write(store: &Store, folder: &Path) -> std::result::Result<u64, CorpusError> {
    let mut rows = 0;
    for table in TABLES {
        let path = folder.join(format!("{}.parquet", table.name));
        rows += write_table(store, table, &path)?;
    }
    Ok(rows)
}

fn write_table(store: &Store, table: &Table, path: &Path) -> std::result::Result<u64, CorpusError> {
    let failed = |e: ParquetError| CorpusError::io("write", path, std::io::Error::other(e));
    let file = File::create(path).at("create", path)?;
    let schema = schema_of(table).map_err(failed)?;
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(file, schema, properties).map_err(failed)?;
    let mut group: Vec<Vec<Cell>> = Vec::new();
    let mut rows = 0;
    let all = format!("SELECT * FROM {} ORDER BY {}", table.name, table.key);
    store.for_each(&all, &[], |_, cells| {
        rows += 1;
        group.push(cells);
        if group.len() == GROUP_ROWS {
            write_group(&mut writer, table, &std::mem::take(&mut group)).map_err(failed)?;
        }
        Ok(())
    })?;
    if !group.is_empty() {
        write_group(&mut writer, table, &group).map_err(failed)?;
    }
    let file = writer.into_inner().map_err(failed)?;
    file.sync_all().at("sync", path)?;
    Ok(rows)
}

/// Every column may be null, as in SQLite.
fn schema_of(table: &Table) -> Result<TypePtr> {
    let field = |column: &Column| {
        let (physical, logical) = match column.kind {
            Kind::Text | Kind::Json => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
            Kind::Integer | Kind::Flag => (Physical::INT64, None),
            Kind::Real => (Physical::DOUBLE, None),
            Kind::Bytes => (Physical::BYTE_ARRAY, None),
        };
        let builder = Type::primitive_type_builder(column.name, physical);
        let builder = builder.with_repetition(Repetition::OPTIONAL).with_logical_type(logical);
        builder.build().map(Arc::new)
    };
    let fields: Result<Vec<TypePtr>> = table.columns.iter().map(field).collect();
    Type::group_type_builder(table.name).with_fields(fields?).build().map(Arc::new)
}

fn write_group(
    writer: &mut SerializedFileWriter<File>,
    table: &Table,
    rows: &[Vec<Cell>],
) -> Result<()> {
    let mut group = writer.next_row_group()?;
    for index in 0..table.columns.len() {
        let Some(mut column) = group.next_column()? else { break };
        let name = format!("{}.{}", table.name, table.columns[index].name);
        let cells: Vec<&Cell> = rows.iter().filter_map(|row| row.get(index)).collect();
        match column.untyped() {
            ColumnWriter::Int64ColumnWriter(column) => fill(column, &cells, integer, &name)?,
            ColumnWriter::DoubleColumnWriter(column) => fill(column, &cells, real, &name)?,
            ColumnWriter::ByteArrayColumnWriter(column) => fill(column, &cells, bytes, &name)?,
            ColumnWriter::BoolColumnWriter(_)
            | ColumnWriter::Int32ColumnWriter(_)
            | ColumnWriter::Int96ColumnWriter(_)
            | ColumnWriter::FloatColumnWriter(_)
            | ColumnWriter::FixedLenByteArrayColumnWriter(_) => {
                return Err(ParquetError::General("the schema has no such column".to_owned()));
            }
        }
        column.close()?;
    }
    group.close().map(drop)
}

/// Writes the cells of a column. A value of another type than the column's does not fit a typed file and is refused.
fn fill<T: DataType>(
    column: &mut ColumnWriterImpl<'_, T>,
    cells: &[&Cell],
    typed: fn(&Cell) -> Option<T::T>,
    name: &str,
) -> Result<()> {
    let levels: Vec<i16> = cells.iter().map(|&cell| i16::from(*cell != Cell::Null)).collect();
    let values: Vec<T::T> = cells.iter().filter_map(|&cell| typed(cell)).collect();
    if values.len() != levels.iter().filter(|&&level| level == 1).count() {
        return Err(ParquetError::General(format!("{name} holds a value of another type")));
    }
    column.write_batch(&values, Some(&levels), None).map(drop)
}

fn integer(cell: &Cell) -> Option<i64> {
    match cell {
        Cell::Integer(number) => Some(*number),
        Cell::Null | Cell::Real(_) | Cell::Text(_) | Cell::Blob(_) => None,
    }
}

fn real(cell: &Cell) -> Option<f64> {
    match cell {
        Cell::Real(number) => Some(*number),
        Cell::Integer(number) => Some(*number as f64),
        Cell::Null | Cell::Text(_) | Cell::Blob(_) => None,
    }
}

fn bytes(cell: &Cell) -> Option<ByteArray> {
    match cell {
        Cell::Text(text) => Some(text.as_str().into()),
        Cell::Blob(bytes) => Some(bytes.clone().into()),
        Cell::Null | Cell::Integer(_) | Cell::Real(_) => None,
    }
}
