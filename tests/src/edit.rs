//! Single edits of a valid program, most of which make it invalid.

use abi::{AttentionMergeParams, AttentionParams, BufferKind, MatvecParams, Opcode};
use ir::program::{Program, Task};
use ir::{BufferId, CounterId};

use crate::rng::Rng;

macro_rules! edits {
    ($($variant:ident $name:literal)+) => {
        /// A class of edits.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Edit { $(#[doc = concat!("To ", $name, ".")] $variant),+ }

        impl Edit {
            /// Every class.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// A description of the edit.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }
    };
}

edits! {
    DropWait "drop a wait"
    LowerThreshold "lower a threshold"
    RaiseThreshold "raise a threshold"
    RedirectWait "wait for another counter"
    DropSignal "drop a signal"
    RedirectSignal "signal another counter"
    SwapTasks "swap two tasks of a queue"
    MoveTask "move a task to another worker"
    DropTask "drop a task"
    DuplicateTask "duplicate a task"
    ShiftTile "shift a tile"
    DuplicateTile "compute a tile twice"
    CutTile "leave out a tile"
    CorruptRing "change the ring of stages"
    MoveWait "move a wait to another task of the queue"
    CorruptSplit "change a split of attention"
    AliasBuffer "put a buffer on the bytes of another"
    ShiftBuffer "move a buffer in the arena"
    FlipKind "make a buffer flag-in-data, or plain"
    CorruptRead "read another buffer"
    CorruptWrite "write another buffer"
    CorruptParam "change a parameter"
}

impl Edit {
    /// Whether a program that is still accepted after the edit must give the same results as before. The other edits
    /// may change what is computed, but must not make it depend on the order.
    #[must_use]
    pub const fn keeps_meaning(self) -> bool {
        match self {
            Self::CorruptRead
            | Self::CorruptWrite
            | Self::CorruptParam
            | Self::CorruptSplit
            | Self::ShiftTile => false,
            Self::DropWait
            | Self::LowerThreshold
            | Self::RaiseThreshold
            | Self::RedirectWait
            | Self::DropSignal
            | Self::RedirectSignal
            | Self::SwapTasks
            | Self::MoveTask
            | Self::DropTask
            | Self::DuplicateTask
            | Self::DuplicateTile
            | Self::CutTile
            | Self::CorruptRing
            | Self::MoveWait
            | Self::AliasBuffer
            | Self::ShiftBuffer
            | Self::FlipKind => true,
        }
    }

    /// Edits the program at a place that the generator chooses. There may be nothing to edit.
    pub fn apply(self, program: &mut Program, rng: &mut Rng) {
        match self {
            Self::DropWait | Self::LowerThreshold | Self::RaiseThreshold | Self::RedirectWait => {
                self.edit_wait(program, rng)
            }
            Self::DropSignal | Self::RedirectSignal => self.edit_signal(program, rng),
            Self::SwapTasks
            | Self::MoveTask
            | Self::DropTask
            | Self::DuplicateTask
            | Self::ShiftTile
            | Self::DuplicateTile
            | Self::CutTile => self.edit_queue(program, rng),
            Self::CorruptRing => {
                let ring = &mut program.pipeline;
                let field = match rng.below(4) {
                    0 => &mut ring.stage_units,
                    1 => &mut ring.stages,
                    2 => &mut ring.in_flight,
                    _ => &mut ring.in_flight_before_wait,
                };
                *field = rng.pick(&[0, 1, 2, 3, field.wrapping_sub(1), *field + 1, *field * 2]);
            }
            Self::MoveWait => self.move_wait(program, rng),
            Self::CorruptSplit => corrupt_split(program, rng),
            Self::AliasBuffer | Self::ShiftBuffer | Self::FlipKind => {
                self.edit_buffer(program, rng)
            }
            Self::CorruptRead | Self::CorruptWrite => self.edit_access(program, rng),
            Self::CorruptParam => {
                if let Some(task) = any_task(program, rng, |_| true) {
                    let word = rng.below(14);
                    let value = task.params[word];
                    task.params[word] = match rng.below(4) {
                        0 => value.wrapping_add(1),
                        1 => value.wrapping_sub(1),
                        2 => value ^ (1 << rng.below(32)),
                        _ => rng.pick(&[0, 1, 2, 8, u32::MAX]),
                    };
                }
            }
        }
    }

    fn edit_wait(self, program: &mut Program, rng: &mut Rng) {
        let counters = program.counters as usize;
        let Some(task) = any_task(program, rng, |task| !task.waits.is_empty()) else { return };
        let index = rng.below(task.waits.len());
        let wait = &mut task.waits[index];
        if self == Self::DropWait {
            task.waits.remove(index);
        } else if self == Self::RedirectWait {
            wait.counter = CounterId(rng.below(counters) as u32);
        } else if self == Self::LowerThreshold {
            wait.count -= 1;
        } else {
            wait.count += 1;
        }
    }

    fn move_wait(self, program: &mut Program, rng: &mut Rng) {
        let worker = rng.below(program.workers.len());
        let tasks = &mut program.workers[worker].tasks;
        let waiting: Vec<usize> =
            (0..tasks.len()).filter(|&i| !tasks[i].waits.is_empty()).collect();
        if waiting.is_empty() {
            return;
        }
        let from = rng.pick(&waiting);
        let to = if rng.flip() { (from + 1) % tasks.len() } else { rng.below(tasks.len()) };
        let wait = tasks[from].waits.remove(0);
        tasks[to].waits.push(wait);
    }

    fn edit_signal(self, program: &mut Program, rng: &mut Rng) {
        let counters = program.counters as usize;
        if let Some(task) = any_task(program, rng, |task| task.signal.is_some()) {
            task.signal =
                (self == Self::RedirectSignal).then(|| CounterId(rng.below(counters) as u32));
        }
    }

    fn edit_queue(self, program: &mut Program, rng: &mut Rng) {
        let from = rng.below(program.workers.len());
        let to = rng.below(program.workers.len());
        let len = program.workers[from].tasks.len();
        if len == 0 {
            return;
        }
        let index = rng.below(len);
        let task = program.workers[from].tasks[index].clone();
        let place = rng.below(program.workers[to].tasks.len() + 1);
        if self == Self::SwapTasks {
            let other = if rng.flip() { (index + 1) % len } else { rng.below(len) };
            program.workers[from].tasks.swap(index, other);
        } else if self == Self::DropTask {
            program.workers[from].tasks.remove(index);
        } else if self == Self::DuplicateTask {
            program.workers[to].tasks.insert(place, task);
        } else if matches!(self, Self::ShiftTile | Self::DuplicateTile | Self::CutTile) {
            if let Some(task) = any_task(program, rng, |task| task.opcode == Opcode::Matvec) {
                let mut p: MatvecParams = task.params();
                let tiles = rng.pick(&[1, 2]);
                if self == Self::ShiftTile {
                    p.tile0 = p.tile0.wrapping_add(rng.pick(&[1, 2, u32::MAX]));
                } else if self == Self::DuplicateTile {
                    p.tiles += tiles;
                } else {
                    p.tiles = p.tiles.saturating_sub(tiles);
                }
                task.params = bytemuck::cast(p);
            }
        } else {
            program.workers[from].tasks.remove(index);
            let place = place.min(program.workers[to].tasks.len());
            program.workers[to].tasks.insert(place, task);
        }
    }

    fn edit_buffer(self, program: &mut Program, rng: &mut Rng) {
        let arena: Vec<usize> =
            (0..program.buffers.len()).filter(|&i| program.buffers[i].arena_bytes() > 0).collect();
        let (a, b) = (rng.pick(&arena), rng.pick(&arena));
        if self == Self::AliasBuffer {
            program.buffers[a].offset = program.buffers[b].offset;
            return;
        }
        if self == Self::ShiftBuffer {
            let by = rng.pick(&[128, 256, u64::MAX - 127, 4]);
            program.buffers[a].offset = program.buffers[a].offset.wrapping_add(by);
            return;
        }
        // Moved away from other buffers, so that only the kind changes.
        let buffer = &mut program.buffers[a];
        buffer.kind = if buffer.kind == BufferKind::FlagInData {
            BufferKind::Plain
        } else {
            BufferKind::FlagInData
        };
        buffer.offset = program.arena_bytes;
        program.arena_bytes += buffer.arena_bytes().next_multiple_of(128);
    }

    fn edit_access(self, program: &mut Program, rng: &mut Rng) {
        let buffers = program.buffers.len();
        let buffer = BufferId(rng.below(buffers) as u32);
        let near = rng.flip();
        let Some(task) = any_task(program, rng, |task| {
            task.reads.iter().chain(&task.writes).any(Option::is_some)
        }) else {
            return;
        };
        let places: &mut [_] =
            if self == Self::CorruptWrite { &mut task.writes } else { &mut task.reads };
        let used: Vec<usize> = (0..places.len()).filter(|&i| places[i].is_some()).collect();
        if used.is_empty() {
            return;
        }
        if let Some(place) = &mut places[rng.pick(&used)] {
            // A neighbour is more often of the right kind.
            *place = if near { BufferId((place.0 + 1) % buffers as u32) } else { buffer };
        }
    }
}

/// Changes which keys a task attends to or merges.
fn corrupt_split(program: &mut Program, rng: &mut Rng) {
    let attends = |task: &Task| matches!(task.opcode, Opcode::Attention | Opcode::AttentionMerge);
    let Some(task) = any_task(program, rng, attends) else { return };
    let change = |value: u32, rng: &mut Rng| rng.pick(&[0, 1, value.wrapping_sub(1), value + 1]);
    if task.opcode == Opcode::Attention {
        let mut p: AttentionParams = task.params();
        match rng.below(6) {
            0 => p.split = change(p.split, rng),
            1 => p.splits = change(p.splits, rng),
            2 => p.kv_block = change(p.kv_block, rng),
            3 => p.window = change(p.window, rng),
            4 => p.part = change(p.part, rng),
            _ => p.kv_head = change(p.kv_head, rng),
        }
        task.params = bytemuck::cast(p);
    } else {
        let mut p: AttentionMergeParams = task.params();
        match rng.below(5) {
            0 => p.head0 = change(p.head0, rng),
            1 => p.splits = change(p.splits, rng),
            2 => p.kv_block = change(p.kv_block, rng),
            3 => p.window = change(p.window, rng),
            _ => p.heads = change(p.heads, rng),
        }
        task.params = bytemuck::cast(p);
    }
}

/// A random matching task.
fn any_task<'a>(
    program: &'a mut Program,
    rng: &mut Rng,
    fits: impl Fn(&Task) -> bool,
) -> Option<&'a mut Task> {
    let mut tasks: Vec<&mut Task> = program
        .workers
        .iter_mut()
        .flat_map(|worker| &mut worker.tasks)
        .filter(|task| fits(task))
        .collect();
    if tasks.is_empty() {
        return None;
    }
    let index = rng.below(tasks.len());
    Some(tasks.swap_remove(index))
}
