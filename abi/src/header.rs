//! Prints the C header. It includes nothing: NVRTC has no system headers.

use std::fmt::Write as _;

use crate::layout::{StructLayout, structs};
use crate::limits::{LIMITS, NONE};
use crate::op::{Activation, Epilogue, Feature, Opcode, Prologue, Scoring};
use crate::ring::{Command, Ending};
use crate::status::Trap;
use crate::task::{Action, BufferKind, DType, LoadKind, Unpack};

/// FNV-1a, 64 bits: enough to notice a change, and the same everywhere.
const fn fnv1a(hash: u64, byte: u8) -> u64 {
    (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
}

/// A hash over everything that both sides must agree on. The compiled kernel reports the hash that it was built with.
#[must_use]
pub fn abi_hash() -> u64 {
    body().bytes().fold(0xcbf2_9ce4_8422_2325, fnv1a)
}

/// A hash over the encoding of a stored program: ops with their parameters, buffers, the layout of weights. A program keeps its id when
/// the ring, the launch or a comment changes.
#[must_use]
pub fn program_hash() -> u64 {
    language().bytes().fold(0xcbf2_9ce4_8422_2325, fnv1a)
}

fn language() -> String {
    let mut out = String::new();
    for (name, value) in LIMITS.iter().filter(|(name, _)| MEANINGS.contains(name)) {
        let _ = writeln!(out, "{name} {value}");
    }
    enumeration(&mut out, "OP", Opcode::ALL.iter().map(|op| (op.info().name, *op as u32)));
    // Appended later: it changes no program that does not have it, and a build without it refuses those that have.
    let prologues = Prologue::ALL.iter().filter(|v| **v != Prologue::PostNorm);
    enumeration(&mut out, "PROLOGUE", prologues.map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "EPILOGUE", Epilogue::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "ACTIVATION", Activation::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "SCORING", Scoring::ALL.iter().map(|v| (v.name(), *v as u32)));
    let buffers = BufferKind::ALL.iter().filter(|v| **v != BufferKind::KvCacheE4m3); // likewise
    enumeration(&mut out, "BUFFER", buffers.map(|v| (v.name(), *v as u32)));
    for layout in crate::op::param_layouts() {
        let _ = writeln!(out, "{} {}", layout.c_name, layout.size);
        for field in layout.fields {
            let (len, ty) = (field.len.unwrap_or(1), field.ty.c_name());
            let _ = writeln!(out, " {} {ty} {len} {}", field.name, field.offset);
        }
    }
    out
}

/// Limits that change the meaning of a program, rather than its maximum size.
const MEANINGS: [&str; 9] = [
    "ABI_VERSION",
    "UNIT_BYTES",
    "UNIT_ROWS",
    "UNIT_ROW_BYTES",
    "KV_ELEMENT_BYTES",
    "TAG_RUNS",
    "TAG_BITS",
    "PARTIAL_HEADER",
    "NONE",
];

/// The generated header, complete.
#[must_use]
pub fn c_header() -> String {
    let mut out = String::from(PREAMBLE);
    let _ = writeln!(out, "#define AMK_ABI_HASH {:#018x}ull\n", abi_hash());
    out += &body();
    out
}

const PREAMBLE: &str = "\
// Generated from the `abi` crate by its tests (BLESS=1 cargo test -p abi); edits are overwritten.
#pragma once
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;
#define AMK_OFFSETOF(type, field) (uint64_t) __INTADDR__(&(((type*)0)->field))
#else
#include <stdint.h>
#define AMK_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif
";

fn body() -> String {
    let mut out = String::new();
    for (name, value) in LIMITS {
        if *value == u64::from(NONE) {
            let _ = writeln!(out, "#define AMK_{name} 0xffffffffu");
        } else {
            let _ = writeln!(out, "#define AMK_{name} {value}u");
        }
    }
    enumeration(&mut out, "OP", Opcode::ALL.iter().map(|op| (op.info().name, *op as u32)));
    enumeration(&mut out, "PROLOGUE", Prologue::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "EPILOGUE", Epilogue::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "ACTIVATION", Activation::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "SCORING", Scoring::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "FEATURE", Feature::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "BUFFER", BufferKind::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "COMMAND", Command::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "ENDING", Ending::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "ACTION", Action::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "LOAD", LoadKind::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "DTYPE", DType::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "UNPACK", Unpack::ALL.iter().map(|v| (v.name(), *v as u32)));
    enumeration(&mut out, "TRAP", Trap::ALL.iter().map(|v| (v.name(), *v as u32)));
    out += "\n#define AMK_FOR_EACH_OP(X)";
    for op in Opcode::ALL {
        let _ = write!(out, " X({}, {})", op.info().name, *op as u16);
    }
    out += "\n";
    for layout in structs() {
        print_struct(&mut out, &layout);
    }
    out
}

fn enumeration<'a>(out: &mut String, prefix: &str, values: impl Iterator<Item = (&'a str, u32)>) {
    out.push('\n');
    for (name, number) in values {
        let _ = writeln!(out, "#define AMK_{prefix}_{} {number}u", name.to_uppercase());
    }
}

fn print_struct(out: &mut String, layout: &StructLayout) {
    let name = layout.c_name;
    let _ = writeln!(out, "\nstruct alignas({}) {name} {{", layout.align);
    for field in layout.fields {
        let array = field.len.map_or(String::new(), |n| format!("[{n}]"));
        let _ = writeln!(out, "  {} {}{array}; //{}", field.ty.c_name(), field.name, field.doc);
    }
    let _ = writeln!(out, "}};");
    let (size, align) = (layout.size, layout.align);
    let same = format!("sizeof({name}) == {size} && alignof({name}) == {align}");
    let _ = writeln!(out, "static_assert({same}, \"layout of {name}\");");
}

/// Assertions that every field is at the same offset as in Rust, for a compiler that has read the header. They are not part of the header:
/// its text is generated from the same table, and each kernel would check them again.
#[must_use]
pub fn c_field_asserts() -> String {
    let mut out = String::new();
    for StructLayout { c_name, fields, .. } in structs() {
        for field in fields {
            let (name, offset) = (field.name, field.offset);
            let same = format!("AMK_OFFSETOF({c_name}, {name}) == {offset}");
            let _ = writeln!(out, "static_assert({same}, \"offset of {c_name}.{name}\");");
        }
    }
    out
}
