//! Buffer rules: kind and source agree, the word count is that of the source, arena bytes lie in the arena.

use abi::BufferKind;

use crate::id::BufferId;
use crate::program::{Buffer, BufferSource, Program};
use crate::violation::{At, Rule, Violations};

use super::buffer_name;
use super::matrix::map_rows;

/// Alignment of a buffer in the arena: one L2 line, so that two buffers never share one.
const BUFFER_ALIGN: u64 = 128;

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    for (index, buffer) in program.buffers.iter().enumerate() {
        let at = At::Buffer(BufferId(index as u32));
        for (rule, detail) in
            [source(program, buffer), arena(program, buffer)].into_iter().flatten()
        {
            found.push(rule, at.clone(), format!("{}: {detail}", buffer.name));
        }
    }
    apart(program, found);
}

/// Checks that buffers do not overlap where a word of one could be mistaken for a polled word of another.
fn apart(program: &Program, found: &mut Violations) {
    let buffers = program.buffers.iter().zip(0..).filter(|(buffer, _)| buffer.arena_bytes() > 0);
    let mut buffers: Vec<(u64, u64, BufferId)> = buffers
        .map(|(buffer, n)| {
            (buffer.offset, buffer.offset.saturating_add(buffer.arena_bytes()), BufferId(n))
        })
        .collect();
    buffers.sort_unstable();
    // The buffer with the greatest end so far.
    let mut reach: Option<(u64, BufferId)> = None;
    for (start, end, buffer) in buffers {
        if let Some((_, other)) = reach.filter(|&(far, _)| far > start) {
            let [name, other] = [buffer, other].map(|buffer| buffer_name(program, buffer));
            found.push(
                Rule::MArena,
                At::Buffer(buffer),
                format!("{name} shares bytes with {other}"),
            );
        }
        if reach.is_none_or(|(far, _)| far < end) {
            reach = Some((end, buffer));
        }
    }
}

type Finding = Option<(Rule, String)>;

fn source(program: &Program, buffer: &Buffer) -> Finding {
    let d = &program.dims;
    let words = |expected: u64| {
        (u64::from(buffer.words) != expected).then(|| {
            (Rule::PShape, format!("{} words, but its source has {expected}", buffer.words))
        })
    };
    let fits = match (&buffer.source, buffer.kind) {
        (
            BufferSource::Scratch,
            BufferKind::Plain | BufferKind::FlagInData | BufferKind::Logits,
        )
        | (BufferSource::Vector(_) | BufferSource::Rotary(_), BufferKind::Constant)
        | (BufferSource::KvCache { .. }, BufferKind::KvCache | BufferKind::KvCacheE4m3)
        | (BufferSource::Embedding(_), BufferKind::Embedding) => true,
        (
            BufferSource::Scratch
            | BufferSource::Vector(_)
            | BufferSource::Rotary(_)
            | BufferSource::KvCache { .. }
            | BufferSource::Embedding(_),
            _,
        ) => false,
    };
    if !fits {
        let detail = format!("a {} buffer cannot have this source", buffer.kind.name());
        return Some((Rule::PArity, detail));
    }
    match &buffer.source {
        BufferSource::Scratch => (buffer.words == 0).then(|| (Rule::PShape, "no words".into())),
        BufferSource::Vector(map) => match map_rows(map) {
            Ok(rows) => words(rows.into()),
            Err(detail) => Some((Rule::PShape, detail)),
        },
        // Frequencies, and perhaps as many factors.
        BufferSource::Rotary(_) if buffer.words == d.head_dim => None,
        BufferSource::Rotary(_) => words(u64::from(d.head_dim / 2)),
        BufferSource::KvCache { layer } => kv_cache(program, buffer, *layer),
        BufferSource::Embedding(matrix) => match program.matrices.get(matrix.index()) {
            None => Some((Rule::PArity, format!("there is no matrix {matrix}"))),
            Some(m) if m.format.is_scaled() => {
                let detail = "is of codes; an embedding is read without scales";
                Some((Rule::PShape, format!("{} {detail}", m.name)))
            }
            Some(m) => match map_rows(&m.map) {
                // A map without rows is reported at its matrix.
                Err(_) => None,
                Ok(rows) => (m.cols != d.hidden || rows != d.vocab).then(|| {
                    (
                        Rule::PShape,
                        format!("{} is {rows} by {}, not vocab by hidden", m.name, m.cols),
                    )
                }),
            },
        },
    }
}

fn kv_cache(program: &Program, buffer: &Buffer, layer: u32) -> Finding {
    let d = &program.dims;
    if layer >= d.layers {
        return Some((Rule::KCache, format!("layer {layer} of {}", d.layers)));
    }
    let words = 2 * u64::from(d.kv_heads) * u64::from(program.kv_capacity) * u64::from(d.head_dim);
    (u64::from(buffer.words) != words).then(|| {
        (
            Rule::KCache,
            format!(
                "{} words, but [2][{}][{}][{}] are {words}",
                buffer.words, d.kv_heads, program.kv_capacity, d.head_dim
            ),
        )
    })
}

fn arena(program: &Program, buffer: &Buffer) -> Finding {
    let bytes = buffer.arena_bytes();
    if bytes == 0 {
        return (buffer.offset != 0).then(|| {
            (Rule::MArena, format!("offset {} of a buffer outside the arena", buffer.offset))
        });
    }
    if !buffer.offset.is_multiple_of(BUFFER_ALIGN) {
        let detail = format!("offset {} is not a multiple of {BUFFER_ALIGN}", buffer.offset);
        return Some((Rule::MArena, detail));
    }
    let end = buffer.offset.checked_add(bytes);
    end.is_none_or(|end| end > program.arena_bytes).then(|| {
        (
            Rule::MArena,
            format!(
                "bytes {}..+{bytes} lie outside the arena of {}",
                buffer.offset, program.arena_bytes
            ),
        )
    })
}
