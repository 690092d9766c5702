//! Slots: kind and source agree, words are those of the source, arena bytes lie in the arena.

use abi::SlotKind;

use crate::id::SlotId;
use crate::program::{Program, Slot, SlotSource};
use crate::violation::{At, Rule, Violations};

use super::matrix::map_rows;
use super::slot_name;

/// Alignment of a slot in the arena: one L2 line, so that two slots never share one.
const SLOT_ALIGN: u64 = 128;

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    for (index, slot) in program.slots.iter().enumerate() {
        let at = At::Slot(SlotId(index as u32));
        for (rule, detail) in [source(program, slot), arena(program, slot)].into_iter().flatten() {
            found.push(rule, at.clone(), format!("{}: {detail}", slot.name));
        }
    }
    apart(program, found);
}

/// A word of one slot must not look like a word of another that somebody waits for.
fn apart(program: &Program, found: &mut Violations) {
    let slots = program.slots.iter().zip(0..).filter(|(slot, _)| slot.arena_bytes() > 0);
    let mut slots: Vec<(u64, u64, SlotId)> = slots
        .map(|(slot, n)| (slot.offset, slot.offset.saturating_add(slot.arena_bytes()), SlotId(n)))
        .collect();
    slots.sort_unstable();
    // The slot that reaches farthest so far.
    let mut reach: Option<(u64, SlotId)> = None;
    for (start, end, slot) in slots {
        if let Some((_, other)) = reach.filter(|&(far, _)| far > start) {
            let [name, other] = [slot, other].map(|slot| slot_name(program, slot));
            found.push(Rule::MArena, At::Slot(slot), format!("{name} shares bytes with {other}"));
        }
        if reach.is_none_or(|(far, _)| far < end) {
            reach = Some((end, slot));
        }
    }
}

type Finding = Option<(Rule, String)>;

fn source(program: &Program, slot: &Slot) -> Finding {
    let d = &program.dims;
    let words = |expected: u64| {
        (u64::from(slot.words) != expected)
            .then(|| (Rule::PShape, format!("{} words, but its source has {expected}", slot.words)))
    };
    let fits = match (&slot.source, slot.kind) {
        (SlotSource::Scratch, SlotKind::Plain | SlotKind::Tagged | SlotKind::Logits)
        | (SlotSource::Vector(_) | SlotSource::InvFreq, SlotKind::Constant)
        | (SlotSource::KvCache { .. }, SlotKind::KvCache)
        | (SlotSource::Embedding(_), SlotKind::Embedding) => true,
        (
            SlotSource::Scratch
            | SlotSource::Vector(_)
            | SlotSource::InvFreq
            | SlotSource::KvCache { .. }
            | SlotSource::Embedding(_),
            _,
        ) => false,
    };
    if !fits {
        let detail = format!("a {} slot cannot have this source", slot.kind.name());
        return Some((Rule::PArity, detail));
    }
    match &slot.source {
        SlotSource::Scratch => (slot.words == 0).then(|| (Rule::PShape, "no words".into())),
        SlotSource::Vector(map) => match map_rows(map) {
            Ok(rows) => words(rows.into()),
            Err(detail) => Some((Rule::PShape, detail)),
        },
        SlotSource::InvFreq => words(u64::from(d.head_dim / 2)),
        SlotSource::KvCache { layer } => kv_cache(program, slot, *layer),
        SlotSource::Embedding(matrix) => match program.matrices.get(matrix.index()) {
            None => Some((Rule::PArity, format!("there is no matrix {matrix}"))),
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

fn kv_cache(program: &Program, slot: &Slot, layer: u32) -> Finding {
    let d = &program.dims;
    if layer >= d.layers {
        return Some((Rule::KCache, format!("layer {layer} of {}", d.layers)));
    }
    let words = 2 * u64::from(d.kv_heads) * u64::from(program.kv_capacity) * u64::from(d.head_dim);
    (u64::from(slot.words) != words).then(|| {
        (
            Rule::KCache,
            format!(
                "{} words, but [2][{}][{}][{}] are {words}",
                slot.words, d.kv_heads, program.kv_capacity, d.head_dim
            ),
        )
    })
}

fn arena(program: &Program, slot: &Slot) -> Finding {
    let bytes = slot.arena_bytes();
    if bytes == 0 {
        return (slot.offset != 0).then(|| {
            (Rule::MArena, format!("offset {} of a slot outside the arena", slot.offset))
        });
    }
    if !slot.offset.is_multiple_of(SLOT_ALIGN) {
        let detail = format!("offset {} is not a multiple of {SLOT_ALIGN}", slot.offset);
        return Some((Rule::MArena, detail));
    }
    let end = slot.offset.checked_add(bytes);
    end.is_none_or(|end| end > program.arena_bytes).then(|| {
        (
            Rule::MArena,
            format!(
                "bytes {}..+{bytes} lie outside the arena of {}",
                slot.offset, program.arena_bytes
            ),
        )
    })
}
