//! Attribution: the critical path of a recorded step, with a cause on every piece of it.
//!
//! The path is walked backwards from the end of the step. At each task it takes the task's own work, then either what
//! it waited for (the producer that finished last) or the task before it in its worker's queue. Pieces neither overlap
//! nor leave gaps, so their sum is the span: [`Path::new`] asserts it in every build.

use rustc_hash::FxHashMap;

use crate::timeline::Timeline;

/// Why a piece of the critical path took its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// Products, with the weights at hand.
    Products,
    /// Products that waited for weights or keys: the stream.
    Starved,
    /// The input vector on its way from L2 into shared memory and registers.
    Staging,
    /// Sums over warps, epilogue, stores and the signal.
    Output,
    /// From the producer's last store until the consumer saw all of its input.
    HandOff,
    /// The first look at an input that had arrived before the worker was free.
    Look,
    /// Between two tasks of a worker.
    Issue,
    /// Before the first task of a worker, and after the last.
    StepBoundary,
}

impl Cause {
    /// Its name, as in documents.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Products => "products",
            Self::Starved => "starved",
            Self::Staging => "staging",
            Self::Output => "output",
            Self::HandOff => "hand_off",
            Self::Look => "look",
            Self::Issue => "issue",
            Self::StepBoundary => "step_boundary",
        }
    }
}

/// One piece of the critical path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The task that it belongs to; for a hand-off, the one that waited.
    pub task: usize,
    /// Its cause.
    pub cause: Cause,
    /// Begin and end in nanoseconds.
    pub from: u64,
    /// The end.
    pub to: u64,
}

/// The critical path, last piece first.
#[derive(Clone, Debug)]
pub struct Path {
    /// Its pieces; none is empty.
    pub pieces: Vec<Piece>,
}

impl Path {
    /// Walks back from the task that ended last.
    ///
    /// # Panics
    /// If the pieces do not add up to the span.
    #[must_use]
    pub fn new(timeline: &Timeline) -> Self {
        let mut path = Self { pieces: Vec::new() };
        let ends = |&index: &usize| (timeline.tasks[index].end, index);
        let mut next = (0..timeline.tasks.len()).max_by_key(ends);
        let mut at = timeline.end;
        while let Some(index) = next {
            let task = &timeline.tasks[index];
            let starved = task.starved.min(task.multiplied - task.staged);
            path.push(index, Cause::StepBoundary, task.end, at);
            path.push(index, Cause::Output, task.multiplied, task.end);
            path.push(index, Cause::Products, task.staged + starved, task.multiplied);
            path.push(index, Cause::Starved, task.staged, task.staged + starved);
            path.push(index, Cause::Staging, task.arrived, task.staged);
            if let Some(hand_off) = timeline.hand_off(index) {
                at = task.arrived - hand_off;
                path.push(index, Cause::HandOff, at, task.arrived);
                next = task.producer;
                continue;
            }
            path.push(index, Cause::Look, task.begin, task.arrived);
            next = timeline.previous(index);
            at = timeline.free(index);
            let cause = if next.is_some() { Cause::Issue } else { Cause::StepBoundary };
            path.push(index, cause, at, task.begin);
        }
        let sum: u64 = path.pieces.iter().map(|piece| piece.to - piece.from).sum();
        assert_eq!(sum, timeline.span(), "the pieces of the critical path add up to the span");
        path
    }

    /// Nanoseconds by cause and op, longest first. They add up to the span.
    #[must_use]
    pub fn table(&self, timeline: &Timeline) -> Vec<(Cause, usize, u64)> {
        let mut sums = FxHashMap::<(Cause, usize), u64>::default();
        for piece in &self.pieces {
            let op = timeline.tasks[piece.task].name;
            *sums.entry((piece.cause, op)).or_default() += piece.to - piece.from;
        }
        let mut rows: Vec<_> = sums.into_iter().map(|((cause, op), ns)| (cause, op, ns)).collect();
        rows.sort_by_key(|&(cause, op, ns)| (std::cmp::Reverse(ns), cause, op));
        rows
    }

    fn push(&mut self, task: usize, cause: Cause, from: u64, to: u64) {
        assert!(from <= to, "a piece of the path ends before it begins: {cause:?} {from} {to}");
        if from < to {
            self.pieces.push(Piece { task, cause, from, to });
        }
    }
}
