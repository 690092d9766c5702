//! Attention rules: every split of every head exactly once for each part of its group, one cache per layer, and merges
//! that match the splits.
//!
//! Relies on sound tasks.

use std::collections::BTreeMap;

use abi::{AttentionMergeParams, AttentionParams, MatvecParams, Opcode, Prologue};
use rustc_hash::FxHashMap;

use crate::id::BufferId;
use crate::kv::KvDtype;
use crate::program::{BufferSource, Dims, Program, Task, group_parts};
use crate::violation::{At, Rule, Violations};

use super::{buffer_name, tasks};

/// Parameters that all attention tasks of a layer must have in common.
#[derive(Clone, Copy, PartialEq)]
struct Shape {
    splits: u32,
    kv_block: u32,
    window: u32,
    scale: u32,
    eps: u32,
    cap: u32,
    reads: [Option<BufferId>; abi::READS_MAX],
    partials: Option<BufferId>,
}

/// The attention tasks of one cache.
struct Group {
    shape: Shape,
    first: At,
    /// Key/value head, part of its group, split.
    parts: Vec<(u32, u32, u32)>,
}

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    let groups = groups(program, found);
    for (&cache, group) in &groups {
        splits(program, cache, group, found);
    }
    caches(program, found);
    merges(program, &groups, found);
}

fn groups(program: &Program, found: &mut Violations) -> BTreeMap<BufferId, Group> {
    let mut groups: BTreeMap<BufferId, Group> = BTreeMap::new();
    for (at, task) in tasks(program).filter(|(_, task)| task.opcode == Opcode::Attention) {
        let p: AttentionParams = task.params();
        let Some(cache) = task.writes[1] else { continue };
        let shape = Shape {
            splits: p.splits,
            kv_block: p.kv_block,
            window: p.window,
            scale: p.scale.to_bits(),
            eps: p.eps.to_bits(),
            cap: p.cap.to_bits(),
            reads: task.reads,
            partials: task.writes[0],
        };
        let group = groups.entry(cache).or_insert_with(|| Group {
            shape,
            first: at.clone(),
            parts: Vec::new(),
        });
        group.parts.push((p.kv_head, p.part, p.split));
        if group.shape != shape {
            let name = buffer_name(program, cache);
            let first = &group.first;
            let detail = format!(
                "parameters or buffers differ from those of {first}, which uses {name} too"
            );
            found.push(Rule::KSplit, at.clone(), detail);
        }
        if let BufferSource::KvCache { layer } = program.buffers[cache.index()].source
            && layer != u32::from(task.layer)
        {
            let detail = format!("layer {} uses the cache of layer {layer}", task.layer);
            found.push(Rule::KCache, at, detail);
        }
    }
    groups
}

/// Checks that every (head, part, split) occurs exactly once.
fn splits(program: &Program, cache: BufferId, group: &Group, found: &mut Violations) {
    let mut parts = group.parts.clone();
    parts.sort_unstable();
    let name = buffer_name(program, cache);
    for pair in parts.windows(2).filter(|pair| pair[0] == pair[1]) {
        let (head, part, split) = pair[0];
        let detail =
            format!("split {split} of head {head} (part {part}) of {name} is attended twice");
        found.push(Rule::KSplit, group.first.clone(), detail);
    }
    parts.dedup();
    let Dims { heads, kv_heads, .. } = program.dims;
    let of_head = group_parts(heads / kv_heads.max(1));
    let expected = u64::from(kv_heads) * u64::from(of_head) * u64::from(group.shape.splits);
    let missing = expected.saturating_sub(parts.len() as u64);
    if missing > 0 {
        // Parts are in range, so the first gap is where the sorted list departs from the full one.
        let parts_of = |head| (0..of_head).map(move |part| (head, part));
        let full = (0..kv_heads)
            .flat_map(parts_of)
            .flat_map(|(head, part)| (0..group.shape.splits).map(move |split| (head, part, split)));
        let hole = full
            .zip(parts.iter().map(Some).chain(std::iter::repeat(None)))
            .find(|(all, part)| Some(all) != *part);
        let (head, part, split) = hole.map_or((0, 0, 0), |(all, _)| all);
        let detail = format!(
            "split {split} of head {head} (part {part}) of {name} is attended by no task ({missing} are missing)"
        );
        found.push(Rule::KSplit, group.first.clone(), detail);
    }
}

/// Checks that there is one cache per layer, and that all have the element type of the first.
fn caches(program: &Program, found: &mut Violations) {
    let of_program = program.kv_dtype();
    let mut seen: FxHashMap<u32, BufferId> = FxHashMap::default();
    for (index, buffer) in program.buffers.iter().enumerate() {
        let BufferSource::KvCache { layer } = buffer.source else { continue };
        let id = BufferId(index as u32);
        if let Some(own) = KvDtype::of_buffer(buffer.kind).filter(|&own| own != of_program) {
            let detail = format!("a cache of {} beside one of {}", own.name(), of_program.name());
            found.push(Rule::KCache, At::Buffer(id), detail);
        }
        if let Some(other) = seen.insert(layer, id) {
            let other = buffer_name(program, other);
            found.push(
                Rule::KCache,
                At::Buffer(id),
                format!("{other} is the cache of layer {layer} too"),
            );
        }
    }
}

/// The split parameters of a merge; `None` if the task does not merge.
fn merged(task: &Task) -> Option<(u32, u32, u32)> {
    match task.opcode {
        Opcode::Matvec => {
            let p: MatvecParams = task.params();
            (p.prologue == Prologue::Merge as u32).then_some((p.splits, p.kv_block, p.window))
        }
        Opcode::AttentionMerge => {
            let p: AttentionMergeParams = task.params();
            Some((p.splits, p.kv_block, p.window))
        }
        Opcode::Nop
        | Opcode::Embed
        | Opcode::Attention
        | Opcode::Sample
        | Opcode::Norm
        | Opcode::Route => None,
    }
}

/// Checks that partials are written by the attention of one layer and read by merges that compute the same active
/// splits.
fn merges(program: &Program, groups: &BTreeMap<BufferId, Group>, found: &mut Violations) {
    let mut wrong = |at: &At, detail| found.push(Rule::KSplit, at.clone(), detail);
    let mut partials: FxHashMap<BufferId, (BufferId, &Shape)> = FxHashMap::default();
    for (&cache, group) in groups {
        let Some(buffer) = group.shape.partials else { continue };
        if let Some((other, _)) = partials.insert(buffer, (cache, &group.shape)) {
            let (a, b) = (buffer_name(program, cache), buffer_name(program, other));
            wrong(
                &group.first,
                format!("the attention over {a} and over {b} write the same partials"),
            );
        }
    }
    for (at, task) in tasks(program).filter(|(_, task)| task.opcode != Opcode::Attention) {
        if let Some(buffer) =
            task.writes.iter().flatten().find(|buffer| partials.contains_key(buffer))
        {
            wrong(&at, format!("writes {}, which holds partials", buffer_name(program, *buffer)));
        }
        let merged = merged(task);
        for (index, buffer) in task.reads.iter().enumerate() {
            let Some(buffer) = buffer else { continue };
            let name = || buffer_name(program, *buffer);
            match (partials.get(buffer), merged.filter(|_| index == 0)) {
                (None, None) => {}
                (Some(_), None) => {
                    wrong(&at, format!("reads the partials {} without merging them", name()))
                }
                (None, Some(_)) => {
                    wrong(&at, format!("merges {}, which no attention writes", name()))
                }
                (Some((_, shape)), Some(mine)) => {
                    let theirs = (shape.splits, shape.kv_block, shape.window);
                    if mine != theirs {
                        let detail = format!(
                            "merges (splits, kv_block, window) {mine:?} of {}, attended with {theirs:?}",
                            name()
                        );
                        wrong(&at, detail);
                    }
                }
            }
        }
    }
    for (at, task) in tasks(program).filter(|(_, task)| task.opcode == Opcode::Attention) {
        if let Some(buffer) =
            task.reads.iter().flatten().find(|buffer| partials.contains_key(buffer))
        {
            wrong(
                &at,
                format!("attends to {}, which holds partials", buffer_name(program, *buffer)),
            );
        }
    }
}
