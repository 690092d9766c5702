//! Serialized programs: the text form `.amk` for people and tests, the binary form `.amkp` for machines.
//!
//! **Promises.** `parse(&print(p)) == p` and `load(&save(p)) == p` for every program, valid or not: a program that was
//! read need not [verify](crate::program::verify). Memory use is bounded by the size of the input, and no input panics.
//!
//! # The text form
//!
//! One item per line; `;` begins a comment. Fields that are not printed are zero.
//!
//! ```text
//! amk 2
//! model "toy"
//! dims hidden=48 heads=4 kv_heads=2 head_dim=8 ffn=56 vocab=100 layers=1 dtype=f32
//! kv_capacity 16
//! pipeline stage_units=32 stages=8 in_flight=4 in_flight_before_wait=2
//! counters 1
//! arena 384
//! matrix m0 "layers.0.o" cols=32 format=f32 rows %7:48
//! buffer b0 "layers.0.attn" plain words=32 offset=0
//! buffer b1 "layers.0.x_mid" flag-in-data words=48 offset=128
//! worker w0
//!   matvec layer=0 matrix=m0 tiles=2 units=2 k_len=32 rows=48 reads b0 -> b1 waits c0>=4 signal c0
//! ```
//!
//! A program of several devices has the line `devices 2 replicated b1` before its matrices: the number of devices, and
//! the buffers whose stores go to all of them.
//!
//! A task's parameters have the names of the ABI's table. `reads` and `->` list buffers by place: `_` is none. A row
//! map is `rows` or `interleaved`, then `%tensor:rows` or `zero:rows` for each part.

mod lex;
mod parse;
mod print;
mod store;
#[cfg(test)]
mod tests;

pub use parse::{ParseError, parse};
pub use print::print;
pub use store::{LoadError, load, save};

/// Version of both forms; other versions are refused.
pub const FORMAT_VERSION: u32 = 2;

/// The parameters of an op in the ABI's table.
fn param_fields(opcode: abi::Opcode, structs: &[abi::StructLayout]) -> &'static [abi::Field] {
    let name = format!("amk_{}_params", opcode.info().name);
    structs.iter().find(|layout| layout.c_name == name).map_or(&[], |layout| layout.fields)
}
