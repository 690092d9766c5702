//! What each task of a program depends on, and an order in which nothing depends on what follows.

use std::sync::Arc;

use abi::BufferKind;
use ir::CounterId;
use ir::program::{Program, Region, Task, accesses, read_late};
use rustc_hash::FxHashMap;

use crate::timeline;

/// Flag-in-data regions of a list.
fn polled<'a>(program: &'a Program, regions: &'a [Region]) -> impl Iterator<Item = &'a Region> {
    let kind = |region: &&Region| program.buffers[region.buffer.index()].kind;
    regions.iter().filter(move |region| kind(region) == BufferKind::FlagInData)
}

/// Whether a task polls flag-in-data words.
pub(crate) fn polls(program: &Program, task: &Task) -> bool {
    polled(program, &accesses(program, task).reads).next().is_some()
}

/// What a task waits for.
type Inputs = (Vec<CounterId>, Vec<Region>);

/// For each task, those that it waits for: by counter, or by the words that they write. Tasks that wait for the same share
/// one list: of several GPUs they would be gigabytes.
pub(crate) fn dependencies(program: &Program) -> Vec<Arc<[u32]>> {
    let all = || program.workers.iter().flat_map(|worker| &worker.tasks).zip(0..);
    let mut signalled: Vec<Vec<u32>> = vec![Vec::new(); program.counters as usize];
    let mut writers: FxHashMap<_, Vec<(Region, u32)>> = FxHashMap::default();
    for (task, index) in all() {
        if let Some(counter) = task.signal {
            signalled[counter.index()].push(index);
        }
        for region in polled(program, &accesses(program, task).writes) {
            writers.entry(region.buffer).or_default().push((*region, index));
        }
    }
    // Many tasks read the same words.
    let mut known: FxHashMap<Region, Vec<u32>> = FxHashMap::default();
    let mut lists: FxHashMap<Inputs, Arc<[u32]>> = FxHashMap::default();
    let mut found = Vec::new();
    for (task, _) in all() {
        let waits: Vec<CounterId> = task.waits.iter().map(|wait| wait.counter).collect();
        let (reads, late) = (accesses(program, task).reads, read_late(task));
        let before = polled(program, &reads).filter(|region| late != Some(region.buffer));
        let reads: Vec<Region> = before.copied().collect();
        let key = (waits, reads);
        if let Some(list) = lists.get(&key) {
            found.push(list.clone());
            continue;
        }
        let mut of: Vec<u32> =
            key.0.iter().flat_map(|counter| &signalled[counter.index()]).copied().collect();
        for region in &key.1 {
            let writing = known.entry(*region).or_insert_with(|| {
                let overlaps =
                    |(w, _): &&(Region, u32)| w.start < region.end && region.start < w.end;
                let of_buffer = writers.get(&region.buffer).into_iter().flatten();
                of_buffer.filter(overlaps).map(|(_, index)| *index).collect()
            });
            of.extend_from_slice(writing);
        }
        of.sort_unstable();
        of.dedup();
        let list: Arc<[u32]> = of.into();
        found.push(list.clone());
        lists.insert(key, list);
    }
    found
}

/// Tasks in an order in which dependencies and queues point backwards. A verified program has one.
pub(crate) fn topological(tasks: &[timeline::Task], previous: &[Option<u32>]) -> Vec<u32> {
    let len = tasks.len();
    let mut missing = vec![0_u32; len];
    let mut followers: Vec<Vec<u32>> = vec![Vec::new(); len];
    for (index, task) in tasks.iter().enumerate() {
        for &before in task.dependencies.iter().chain(previous[index].iter()) {
            missing[index] += 1;
            followers[before as usize].push(index as u32);
        }
    }
    let mut order: Vec<u32> = (0..len as u32).filter(|&t| missing[t as usize] == 0).collect();
    let mut at = 0;
    while at < order.len() {
        for &next in &followers[order[at] as usize] {
            missing[next as usize] -= 1;
            if missing[next as usize] == 0 {
                order.push(next);
            }
        }
        at += 1;
    }
    assert_eq!(order.len(), len, "a verified program has no cycle");
    order
}
