//! The ring under an attention task: `tile_take`, `attend`, `write_partials` and the end of `op_attention`. Warps walk
//! the stages as in other ops, but they meet at a barrier in the middle. Stages that a warp has not passed by then
//! cannot be refilled.

use super::super::{Model, Op, Order, Source, Word};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// All remaining stages are passed after the meeting, even those beyond the ring's capacity.
    AllBehind,
    /// One stage too few beyond the ring's capacity is passed before the meeting.
    OneShort,
    /// Only warps with keys pass the stages beyond the ring's capacity.
    IdleWait,
    /// The ring is assumed to be one stage larger than it is.
    LargerRing,
    /// Everything is passed before the meeting, but the fence for the new value comes after it.
    AllInFront,
    /// No fence after the meeting.
    NotGivenBack,
    /// The warps do not meet before one reads the results of all.
    NoMeeting,
    /// They do not meet again before the scratch is overwritten.
    NoSecondMeeting,
}

/// A ring, and a task that is followed by the stages of a product.
#[derive(Clone, Copy)]
struct Shape {
    stages: usize,
    warps: usize,
    /// Tiles of keys; each warp takes one of every two blocks of `warps / 2`.
    tiles: usize,
    /// Tiles of keys or of values in a stage; 0 if one stage has a whole block with its values. A stage is one word here,
    /// so no two warps may have tiles in the stage that the new value goes to: on the device they have separate rows.
    of_stage: usize,
    /// Times that the task goes over its keys.
    rounds: usize,
    /// Stages of the product behind it.
    behind: usize,
}

const CAP: usize = 2;

impl Shape {
    fn block(self) -> usize {
        self.warps / 2
    }

    /// `stages_of_block`.
    fn stages_of(self, tiles: usize) -> usize {
        if self.of_stage == 0 { 1 } else { 2 * tiles.div_ceil(self.of_stage) }
    }

    fn of_task(self) -> usize {
        let last = self.tiles % self.block();
        self.tiles / self.block() * self.stages_of(self.block())
            + if last == 0 { 0 } else { self.stages_of(last) }
    }

    /// `tile_place`: the stages of a tile's keys and of its values.
    fn place(self, tile: usize) -> (usize, usize) {
        let (block, first) = (tile / self.block(), tile % self.block());
        let at = block * self.stages_of(self.block());
        if self.of_stage == 0 {
            return (at, at);
        }
        let tiles = self.block().min(self.tiles - block * self.block());
        let keys = at + first / self.of_stage;
        (keys, keys + tiles.div_ceil(self.of_stage))
    }
}

/// A warp's progress through the stages of the run.
struct Walk<'a> {
    stage: &'a [Word],
    full: &'a [usize],
    empty: &'a [usize],
    at: usize,
    ops: Vec<Op>,
}

impl Walk<'_> {
    /// The stage at the walk's position.
    fn here(&self) -> Word {
        self.stage[self.at % self.stage.len()]
    }

    /// `cursor_land`.
    fn land(&mut self) -> Word {
        let place = self.at % self.stage.len();
        self.ops.push(Op::Land(self.full[place], (self.at / self.stage.len()) as u8 % 2));
        self.here()
    }

    /// `cursor_pass`.
    fn pass(&mut self, to: usize) {
        while self.at < to {
            self.land();
            self.ops.push(Op::Arrive(self.empty[self.at % self.stage.len()]));
            self.at += 1;
        }
    }

    /// Reads the copied data of the stage at the walk's position.
    fn read(&mut self) -> Word {
        let word = self.land();
        self.ops.push(Op::Read(word, Order::Relaxed, self.at as u32 + 1));
        word
    }
}

/// A new value, which no copy produces.
const FRESH: u32 = 100;

/// One round of a warp over the keys, up to the meeting.
fn attend(s: Shape, bug: Bug, warp: usize, round: usize, walk: &mut Walk<'_>) {
    let base = round * s.of_task();
    for tile in (warp..s.tiles).step_by(s.warps) {
        let (keys, values) = s.place(tile);
        walk.pass(base + keys);
        walk.read();
        walk.pass(base + values);
        let word = if keys == values { walk.here() } else { walk.read() };
        if tile + 1 == s.tiles {
            let fresh = FRESH + round as u32;
            walk.ops.extend([
                Op::Write(word, Order::Relaxed, fresh),
                Op::Read(word, Order::Relaxed, fresh),
            ]);
        }
    }
    let ring = s.stages + usize::from(bug == Bug::LargerRing);
    let beyond = s.of_task().saturating_sub(ring);
    let in_front = match bug {
        Bug::AllBehind => 0,
        Bug::IdleWait if warp >= s.tiles => 0,
        Bug::OneShort => beyond.saturating_sub(1),
        Bug::AllInFront => s.of_task(),
        Bug::None
        | Bug::IdleWait
        | Bug::LargerRing
        | Bug::NotGivenBack
        | Bug::NoMeeting
        | Bug::NoSecondMeeting => beyond,
    };
    walk.pass(base + in_front);
}

fn warp_of(s: Shape, bug: Bug, warp: usize, scratch: &[Word], walk: &mut Walk<'_>) {
    for round in 0..s.rounds {
        let left = round as u32 + 1;
        attend(s, bug, warp, round, walk);
        walk.ops.push(Op::Write(scratch[warp], Order::Relaxed, left));
        walk.ops.unless(bug == Bug::NoMeeting, Op::Meet(2 * round as u8));
        walk.ops.extend(scratch.iter().map(|&word| Op::Read(word, Order::Relaxed, left)));
        walk.ops.unless(bug == Bug::NotGivenBack, Op::ProxyFence);
        walk.pass((round + 1) * s.of_task());
        let last = round + 1 == s.rounds;
        walk.ops.unless(last || bug == Bug::NoSecondMeeting, Op::Meet(2 * round as u8 + 1));
    }
    let end = s.rounds * s.of_task() + s.behind;
    while walk.at < end {
        walk.read();
        walk.pass(walk.at + 1);
    }
}

/// `loader_run`: it is independent of the meeting.
fn loader(s: Shape, stage: &[Word], full: &[usize], empty: &[usize]) -> Vec<Op> {
    let mut ops = Vec::new();
    for chunk in 0..s.rounds * s.of_task() + s.behind {
        let (at, wrap) = (chunk % s.stages, chunk / s.stages);
        if wrap > 0 {
            ops.push(Op::Land(empty[at], (wrap - 1) as u8 % 2));
        }
        if let Some(oldest) = chunk.checked_sub(CAP.min(s.stages)) {
            ops.push(Op::Land(full[oldest % s.stages], (oldest / s.stages) as u8 % 2));
        }
        let copy = Op::Copy(Source::Value(chunk as u32 + 1), stage[at], full[at]);
        ops.extend([Op::Expect(full[at]), copy]);
    }
    ops
}

fn task(s: Shape, bug: Bug) -> Model {
    let mut m = Model::default();
    let stage: Vec<_> = (0..s.stages).map(|i| m.word(format!("stage{i}"))).collect();
    let scratch: Vec<_> = (0..s.warps).map(|i| m.word(format!("scratch{i}"))).collect();
    let full: Vec<_> = (0..s.stages).map(|i| m.barrier(format!("full{i}"), 1)).collect();
    let empty: Vec<_> =
        (0..s.stages).map(|i| m.barrier(format!("empty{i}"), s.warps as u8)).collect();
    m.thread("loader", loader(s, &stage, &full, &empty));
    for warp in 0..s.warps {
        let (at, ops) = (0, Vec::new());
        let mut walk = Walk { stage: &stage, full: &full, empty: &empty, at, ops };
        warp_of(s, bug, warp, &scratch, &mut walk);
        m.thread(format!("warp{warp}"), walk.ops);
    }
    m
}

const HANGS: &str = "nobody goes on";
const READS: &str = "should read";

/// The correct protocol, for rings that hold all keys of a task and rings that do not.
fn as_it_is() -> Vec<Case> {
    let of = |stages, warps, tiles, of_stage, rounds, behind| Shape {
        stages,
        warps,
        tiles,
        of_stage,
        rounds,
        behind,
    };
    [
        of(2, 2, 2, 1, 1, 2),
        of(2, 2, 3, 1, 1, 1),
        of(2, 2, 1, 1, 1, 2),
        of(2, 2, 2, 1, 2, 1),
        of(3, 2, 3, 1, 1, 1),
        of(4, 2, 2, 1, 1, 2),
        of(2, 2, 4, 0, 1, 1),
        of(2, 4, 2, 1, 1, 0),
        of(4, 2, 2, 0, 2, 0),
    ]
    .into_iter()
    .map(|s| {
        let of_stage = match s.of_stage {
            0 => "a block".to_owned(),
            tiles => format!("{tiles} tile"),
        };
        let name = format!(
            "attend: {} stages of {of_stage}, {} warps, {} tiles in {} stages, {} rounds",
            s.stages,
            s.warps,
            s.tiles,
            s.of_task(),
            s.rounds
        );
        Case::holds(name, task(s, Bug::None))
    })
    .collect()
}

/// The protocol and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    // Two stages of 8 KB with heads of 128: a stage holds one tile of keys, and a task of two tiles has four.
    let small = Shape { stages: 2, warps: 2, tiles: 2, of_stage: 1, rounds: 1, behind: 2 };
    // Only a ring that holds both rounds lets one warp be a round ahead of another.
    let twice = Shape { stages: 4, of_stage: 0, rounds: 2, behind: 0, ..small };
    let large = Shape { stages: 4, ..small };
    let idle = Shape { warps: 4, tiles: 2, behind: 0, ..small };
    let fails =
        |name, shape, bug, what| Case::fails(format!("attend: {name}"), task(shape, bug), what);
    let mut cases = as_it_is();
    cases.extend([
        fails("a small ring, everything passed behind the meeting", small, Bug::AllBehind, HANGS),
        Case::holds(
            "attend: a ring that holds it all, everything passed behind the meeting",
            task(large, Bug::AllBehind),
        ),
        fails("one stage less than the ring cannot hold", small, Bug::OneShort, HANGS),
        fails("the ring is taken to be larger", small, Bug::LargerRing, HANGS),
        fails("warps without keys wait at the meeting", idle, Bug::IdleWait, HANGS),
        fails(
            "everything passed before the fence for the new value",
            small,
            Bug::AllInFront,
            READS,
        ),
        fails("the stage is not given back to the copies", small, Bug::NotGivenBack, READS),
        fails("the warps do not meet", small, Bug::NoMeeting, READS),
        fails("they do not meet before the next round", twice, Bug::NoSecondMeeting, READS),
    ]);
    cases
}
