//! Assigns the blocks of each phase to the workers.
//!
//! A worker's part of a phase is one contiguous range of its device's items, in worker order. Every worker gets
//! `blocks / workers` blocks; the policy decides which workers get one more.

use std::ops::Range;

use ir::schedule::SmAssignment;

use crate::devices::{Device, pieces};
use crate::flow::{Flow, Op, Phase};

/// Bytes that a worker reads in the time by which workers that ran attention are late for the next phase: about a
/// microsecond.
const LATE_BYTES: u64 = 32 * 1024;

/// The work partition of one phase on one device: the ranges of items of each worker, one task each. On one device
/// there is at most one.
pub(crate) type Shares = Vec<Vec<Range<u32>>>;

pub(crate) fn assign(
    flow: &Flow,
    policy: SmAssignment,
    workers: u32,
    device: Device,
) -> Vec<Shares> {
    let bytes = vec![0; workers as usize];
    let mut dealer = Dealer { policy, device, cursor: 0, bytes, late: vec![] };
    let mut all: Vec<Shares> = Vec::with_capacity(flow.phases.len());
    let attending = if policy == SmAssignment::AroundAttention {
        attending(flow, workers, device)
    } else {
        vec![0; flow.phases.len()]
    };
    for (phase, attending) in flow.phases.iter().zip(attending) {
        let attends = |&w: &usize| matches!(flow.phases[w].op, Op::Attention(_) | Op::Merge(_));
        let attended = flow.writer(phase.input).filter(attends).map(|writer| &all[writer]);
        dealer.late = match attended {
            Some(shares) => shares.iter().map(|share| !share.is_empty()).collect(),
            None => vec![false; workers as usize],
        };
        all.push(dealer.deal(phase, attending));
    }
    all
}

/// For each phase, the number of workers that run the attention which it is, feeds or follows: 0 if there is none, or if
/// all workers run it.
fn attending(flow: &Flow, workers: u32, device: Device) -> Vec<u32> {
    let mut attending = vec![0; flow.phases.len()];
    for (index, phase) in flow.phases.iter().enumerate() {
        let tasks = blocks(phase, device);
        if !matches!(phase.op, Op::Attention(_)) || tasks >= workers {
            continue;
        }
        attending[index] = tasks;
        if let Some(before) = flow.writer(phase.input) {
            attending[before] = tasks;
        }
        for (after, reader) in flow.phases.iter().enumerate().skip(index + 1) {
            if flow.writer(reader.input) == Some(index) {
                attending[after] = tasks;
            }
        }
    }
    attending
}

/// Blocks of a phase on a device.
fn blocks(phase: &Phase, device: Device) -> u32 {
    let runs = phase.split.runs(phase.items, device);
    runs.iter().map(|run| run.end - run.start).sum::<u32>().div_ceil(phase.block)
}

struct Dealer {
    policy: SmAssignment,
    device: Device,
    /// The worker at which the last remainder ended.
    cursor: usize,
    /// Bytes assigned to each worker so far.
    bytes: Vec<u64>,
    /// Workers that ran the attention which produced the phase's input: they start the phase later than all others.
    late: Vec<bool>,
}

impl Dealer {
    fn deal(&mut self, phase: &Phase, attending: u32) -> Shares {
        let workers = self.bytes.len();
        let runs = phase.split.runs(phase.items, self.device);
        let items: u32 = runs.iter().map(|run| run.end - run.start).sum();
        let blocks = items.div_ceil(phase.block);
        let counts = if attending > 0 {
            around(blocks, attending, workers as u32, matches!(phase.op, Op::Attention(_)))
        } else {
            self.counts(blocks as usize, u64::from(phase.block) * phase.item_bytes)
        };
        let mut next = 0_u32;
        let mut shares = Vec::with_capacity(workers);
        for (worker, count) in counts.into_iter().enumerate() {
            let start = next;
            next = next.saturating_add(count * phase.block).min(items);
            self.bytes[worker] += u64::from(next - start) * phase.item_bytes;
            shares.push(pieces(&runs, &(start..next)));
        }
        debug_assert_eq!(next, items, "every item is dealt");
        shares
    }

    /// Blocks of each worker. Under byte balance, a worker that ran attention counts as already having one block. This
    /// applies if there is a block for every other worker, and if a block takes no longer than the worker is late:
    /// otherwise the whole phase would wait for it.
    fn counts(&mut self, blocks: usize, block_bytes: u64) -> Vec<u32> {
        let workers = self.bytes.len();
        let late = self.late.iter().filter(|&&late| late).count();
        let ahead = self.policy == SmAssignment::ByteBalance
            && blocks + late >= workers
            && block_bytes <= LATE_BYTES;
        let all = if ahead { blocks + late } else { blocks };
        let mut counts = vec![(all / workers) as u32; workers];
        for worker in self.extra(all % workers) {
            counts[worker] += 1;
        }
        for (count, _) in counts.iter_mut().zip(&self.late).filter(|&(_, &late)| ahead && late) {
            *count -= 1;
        }
        counts
    }

    /// The workers that get one more block.
    fn extra(&mut self, remainder: usize) -> Vec<usize> {
        let workers = self.bytes.len();
        match self.policy {
            SmAssignment::RoundRobin => (0..remainder).collect(),
            SmAssignment::Carry => {
                let first = self.cursor;
                self.cursor = (first + remainder) % workers;
                (first..first + remainder).map(|worker| worker % workers).collect()
            }
            SmAssignment::ByteBalance | SmAssignment::AroundAttention => {
                let mut order: Vec<usize> = (0..workers).collect();
                order.sort_by_key(|&worker| (self.late[worker], self.bytes[worker], worker));
                order.truncate(remainder);
                order
            }
        }
    }
}

/// Blocks of each worker, in an attention or in the phase before or after it. The last `attending` workers run the
/// attention. They wait for the phase before it and start the one after it later than the others do, so of these two
/// phases the other workers take as many blocks as they can, up to the largest share that some worker must have
/// anyway; the last workers share the rest.
fn around(blocks: u32, attending: u32, workers: u32, is_attention: bool) -> Vec<u32> {
    let others = workers - attending;
    let largest_share = blocks.div_ceil(workers);
    let rest = if is_attention { blocks } else { blocks.saturating_sub(largest_share * others) };
    let even = |blocks: u32, among: u32| {
        (0..among).map(move |worker| blocks / among + u32::from(worker < blocks % among))
    };
    even(blocks - rest, others).chain(even(rest, attending)).collect()
}

#[cfg(test)]
mod tests {
    use ir::PhaseClass;

    use super::*;
    use crate::devices::Split;
    use crate::flow::{Value, ValueId};

    fn phase(items: u32, block: u32) -> Phase {
        let (class, handoff, input) = (PhaseClass::Embed, None, ValueId(0));
        let op = Op::Embed(abi::EmbedParams::default());
        let (reads, writes) = ([None; abi::READS_MAX], [None; abi::WRITES_MAX]);
        let (layer, residual, route, output, item_bytes) = (0, None, None, None, 10);
        Phase {
            class,
            layer,
            op,
            handoff,
            input,
            residual,
            stream: None,
            route,
            logits: None,
            output,
            reads,
            writes,
            items,
            block,
            item_bytes,
            split: Split::Even { granule: 1, sections: 1 },
        }
    }

    fn on_one(flow: &Flow, policy: SmAssignment, workers: u32) -> Vec<Shares> {
        assign(flow, policy, workers, Device::ALONE)
    }

    /// A flow in which each phase reads the output of the one before it.
    fn chain(phases: &[Phase]) -> Flow {
        let input = |(n, phase): (usize, &Phase)| Phase { input: ValueId(n), ..phase.clone() };
        let value = |n: usize| Value { writer: n.checked_sub(1), ..Value::default() };
        let phases: Vec<Phase> = phases.iter().enumerate().map(input).collect();
        Flow { values: (0..=phases.len()).map(value).collect(), phases, ..Flow::default() }
    }

    fn lens(shares: &Shares) -> Vec<u32> {
        shares.iter().map(|part| part.iter().map(|range| range.end - range.start).sum()).collect()
    }

    #[test]
    fn remainders_go_where_the_policy_says() {
        let phases = [phase(6, 1), phase(6, 1), phase(9, 2)];
        let deal = |policy| on_one(&chain(&phases), policy, 4).iter().map(lens).collect::<Vec<_>>();
        let round_robin = vec![vec![2, 2, 1, 1], vec![2, 2, 1, 1], vec![4, 2, 2, 1]];
        assert_eq!(deal(SmAssignment::RoundRobin), round_robin);
        let carry = vec![vec![2, 2, 1, 1], vec![1, 1, 2, 2], vec![4, 2, 2, 1]];
        assert_eq!(deal(SmAssignment::Carry), carry);
        assert_eq!(deal(SmAssignment::ByteBalance), carry);
    }

    #[test]
    fn who_attended_gets_a_block_less_of_the_next_phase() {
        let params = abi::AttentionParams::default();
        let attention = Phase { op: Op::Attention(params), item_bytes: 0, ..phase(2, 1) };
        let phases = [attention, phase(6, 1), phase(6, 1)];
        let shares = on_one(&chain(&phases), SmAssignment::ByteBalance, 4);
        let dealt: Vec<_> = shares.iter().map(lens).collect();
        assert_eq!(dealt, [vec![1, 1, 0, 0], vec![1, 1, 2, 2], vec![2, 2, 1, 1]]);
        let three = [phases[0].clone(), phase(3, 1), phase(1, 1)];
        let shares = on_one(&chain(&three), SmAssignment::ByteBalance, 4);
        let dealt: Vec<_> = shares.iter().map(lens).collect();
        assert_eq!(dealt, [vec![1, 1, 0, 0], vec![0, 0, 2, 1], vec![1, 0, 0, 0]]);
        let carry =
            on_one(&chain(&phases), SmAssignment::Carry, 4).iter().map(lens).collect::<Vec<_>>();
        assert_eq!(carry[1], [1, 1, 2, 2], "carry goes on where attention stopped");
    }

    #[test]
    fn workers_of_an_attention_have_small_shares_of_the_phases_around_it() {
        let params = abi::AttentionParams::default();
        let attention =
            |tasks| Phase { op: Op::Attention(params), item_bytes: 0, ..phase(tasks, 1) };
        let deal = |tasks: u32, before: u32, after: u32| {
            let phases = [phase(before, 1), attention(tasks), phase(after, 1), phase(6, 1)];
            let shares = on_one(&chain(&phases), SmAssignment::AroundAttention, 4);
            shares.iter().map(lens).collect::<Vec<_>>()
        };
        let one = deal(1, 10, 9);
        assert_eq!(one[..3], [vec![3, 3, 3, 1], vec![0, 0, 0, 1], vec![3, 3, 3, 0]]);
        assert_eq!(one[3], [2, 1, 1, 2], "the workers with the fewest bytes so far have two");
        assert_eq!(deal(2, 5, 12)[..3], [vec![2, 2, 1, 0], vec![0, 0, 1, 1], vec![3, 3, 3, 3]]);
        assert_eq!(deal(4, 6, 6)[0], [2, 2, 1, 1], "all attend");
    }

    #[test]
    fn every_item_is_dealt_once_in_worker_order() {
        for policy in SmAssignment::ALL {
            for (items, block, workers) in [(1, 8, 132), (1000, 3, 7), (132, 1, 132), (5, 2, 256)] {
                let shares = &on_one(&chain(&[phase(items, block)]), *policy, workers)[0];
                let mut next = 0;
                for share in shares.iter().flatten() {
                    assert_eq!(share.start, next);
                    next = share.end;
                }
                assert_eq!((next, shares.len()), (items, workers as usize));
            }
        }
    }
}
