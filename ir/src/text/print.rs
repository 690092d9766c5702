//! Prints the text form.

use std::fmt::Write as _;

use abi::{Activation, Epilogue, Field, Prologue, Scoring, StructLayout, WireType};

use crate::id::BufferId;
use crate::program::{Buffer, BufferSource, Matrix, Program, RowMap, Task, Topology};

use super::{FORMAT_VERSION, param_fields};

/// The program as text. Loses nothing: [`parse`](super::parse) gives the same program back.
#[must_use]
pub fn print(program: &Program) -> String {
    let structs = abi::structs();
    let mut out = String::new();
    header(&mut out, program);
    for (index, matrix) in program.matrices.iter().enumerate() {
        print_matrix(&mut out, index, matrix);
    }
    for (index, buffer) in program.buffers.iter().enumerate() {
        print_buffer(&mut out, index, buffer);
    }
    for (index, worker) in program.workers.iter().enumerate() {
        let _ = writeln!(out, "worker w{index}");
        for task in &worker.tasks {
            print_task(&mut out, task, &structs);
        }
    }
    out
}

fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out += "\\n",
            c if c.is_control() => {
                let _ = write!(out, "\\u{{{:x}}}", c as u32);
            }
            c => out.push(c),
        }
    }
    out + "\""
}

fn header(out: &mut String, program: &Program) {
    let (d, p) = (&program.dims, &program.pipeline);
    let _ = writeln!(out, "amk {FORMAT_VERSION}");
    let _ = writeln!(out, "model {}", quote(&program.model));
    let _ = writeln!(
        out,
        "dims hidden={} heads={} kv_heads={} head_dim={} ffn={} vocab={} layers={} dtype={}",
        d.hidden,
        d.heads,
        d.kv_heads,
        d.head_dim,
        d.ffn,
        d.vocab,
        d.layers,
        d.dtype.name()
    );
    let _ = writeln!(out, "kv_capacity {}", program.kv_capacity);
    let _ = writeln!(
        out,
        "pipeline stage_units={} stages={} in_flight={} in_flight_before_wait={}",
        p.stage_units, p.stages, p.in_flight, p.in_flight_before_wait
    );
    let _ = writeln!(out, "counters {}", program.counters);
    let _ = writeln!(out, "arena {}", program.arena_bytes);
    let Topology { devices, replicated } = &program.topology;
    if program.topology != Topology::default() {
        let buffers: String = replicated.iter().map(|buffer| format!(" {buffer}")).collect();
        let _ = writeln!(out, "devices {devices} replicated{buffers}");
    }
}

fn print_map(out: &mut String, map: &RowMap) {
    *out += if map.interleaved { " interleaved" } else { " rows" };
    for (tensor, rows) in &map.parts {
        let _ = match tensor {
            Some(tensor) => write!(out, " {tensor}:{rows}"),
            None => write!(out, " zero:{rows}"),
        };
    }
}

fn print_matrix(out: &mut String, index: usize, matrix: &Matrix) {
    let _ = write!(
        out,
        "matrix m{index} {} cols={} format={}",
        quote(&matrix.name),
        matrix.cols,
        matrix.format.name()
    );
    if matrix.experts != 1 {
        let _ = write!(out, " experts={}", matrix.experts);
    }
    print_map(out, &matrix.map);
    out.push('\n');
}

fn print_buffer(out: &mut String, index: usize, buffer: &Buffer) {
    let _ = write!(
        out,
        "buffer b{index} {} {} words={}",
        quote(&buffer.name),
        buffer.kind.name(),
        buffer.words
    );
    if buffer.offset != 0 || buffer.arena_bytes() > 0 {
        let _ = write!(out, " offset={}", buffer.offset);
    }
    match &buffer.source {
        BufferSource::Scratch => {}
        BufferSource::Vector(map) => print_map(out, map),
        BufferSource::Rotary(0) => *out += " inv_freq",
        BufferSource::Rotary(number) => {
            let _ = write!(out, " rotary {number}");
        }
        BufferSource::KvCache { layer } => {
            let _ = write!(out, " cache {layer}");
        }
        BufferSource::Embedding(matrix) => {
            let _ = write!(out, " embedding {matrix}");
        }
    }
    out.push('\n');
}

fn print_task(out: &mut String, task: &Task, structs: &[StructLayout]) {
    let _ = write!(out, "  {} layer={}", task.opcode.info().name, task.layer);
    for field in param_fields(task.opcode, structs) {
        print_param(out, field, &task.params);
    }
    print_buffers(out, " reads", &task.reads);
    print_buffers(out, " ->", &task.writes);
    if !task.waits.is_empty() {
        *out += " waits";
        for wait in &task.waits {
            let _ = write!(out, " {}>={}", wait.counter, wait.count);
        }
    }
    if let Some(counter) = task.signal {
        let _ = write!(out, " signal {counter}");
    }
    out.push('\n');
}

fn print_param(out: &mut String, field: &Field, params: &[u32; 16]) {
    let first = field.offset / 4;
    let words = &params[first..first + field.len.unwrap_or(1)];
    // `m0` is a matrix like any other, so a zero is printed.
    if words.iter().all(|&word| word == 0) && field.name != "matrix" {
        return;
    }
    if field.len.is_some() {
        let list: Vec<String> = words.iter().map(u32::to_string).collect();
        let _ = write!(out, " {}={}", field.name, list.join(","));
        return;
    }
    let word = words[0];
    let name = match field.name {
        "prologue" => Prologue::new(word).map(|v| v.name().to_owned()),
        "epilogue" => Epilogue::new(word).map(|v| v.name().to_owned()),
        "scoring" => Scoring::new(word).map(|v| v.name().to_owned()),
        "activation" => Activation::new(word).map(|v| v.name().to_owned()),
        "matrix" => Some(format!("m{word}")),
        _ => None,
    };
    let value = name
        .unwrap_or_else(|| if field.ty == WireType::F32 { float(word) } else { word.to_string() });
    let _ = write!(out, " {}={value}", field.name);
}

/// The shortest decimal with these bits, or the bits themselves.
fn float(bits: u32) -> String {
    let value = f32::from_bits(bits);
    let text = format!("{value:?}");
    if value.is_finite() && text.parse::<f32>().is_ok_and(|back| back.to_bits() == bits) {
        text
    } else {
        format!("{bits:#x}")
    }
}

fn print_buffers(out: &mut String, word: &str, buffers: &[Option<BufferId>]) {
    let used = buffers.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
    if used == 0 {
        return;
    }
    *out += word;
    for buffer in &buffers[..used] {
        let _ = match buffer {
            None => write!(out, " _"),
            Some(buffer) => write!(out, " {buffer}"),
        };
    }
}
