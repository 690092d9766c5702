//! Errors of two kinds: a [`Trap`] is a result of the program, a [`MachineError`] is a fault of the caller or the
//! environment.

use abi::{BufferKind, Opcode};
use ir::{BufferId, CounterId, MatrixId, TensorId, WorkerId};

/// A violation by the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker {worker}, task {task} ({}), epoch {epoch}: {fault}", opcode.info().name)]
pub struct Trap {
    /// The worker.
    pub worker: WorkerId,
    /// Index of the task in the worker's queue.
    pub task: u32,
    /// The task's op.
    pub opcode: Opcode,
    /// The step, from 1.
    pub epoch: u32,
    /// The violation.
    pub fault: Fault,
}

/// A violation by a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A parameter outside its table, or parameters that contradict each other or the matrix.
    #[error("parameter {name} cannot be {value}")]
    Parameter {
        /// The parameter's field.
        name: &'static str,
        /// Its value.
        value: u32,
    },
    /// A required buffer is missing.
    #[error("{access} {index} is not given")]
    NoBuffer {
        /// `read` or `write`.
        access: &'static str,
        /// Its index among the task's reads or writes.
        index: usize,
    },
    /// A buffer outside the table.
    #[error("buffer {0} does not exist")]
    BadBuffer(BufferId),
    /// A buffer of a kind that this access cannot use.
    #[error("buffer {buffer} of kind {} cannot be used here", kind.name())]
    Kind {
        /// The buffer.
        buffer: BufferId,
        /// Its kind.
        kind: BufferKind,
    },
    /// Words outside a buffer.
    #[error("words {start}..{end} are outside buffer {buffer} of {words}")]
    Bounds {
        /// The buffer.
        buffer: BufferId,
        /// First word.
        start: u32,
        /// One past the last word.
        end: u64,
        /// Words of the buffer.
        words: u32,
    },
    /// A read of a word that was not written in this step.
    #[error("word {word} of buffer {buffer} is read before it is written")]
    Unwritten {
        /// The buffer.
        buffer: BufferId,
        /// The word.
        word: u32,
    },
    /// A flag-in-data word with the tag of another write.
    #[error("word {word} of buffer {buffer} has tag {have} instead of {need}")]
    Tag {
        /// The buffer.
        buffer: BufferId,
        /// The word.
        word: u32,
        /// Its tag.
        have: u32,
        /// The tag that the task expects.
        need: u32,
    },
    /// A key that is not in the cache.
    #[error("key {position} of head {kv_head} in buffer {buffer} is read before it is appended")]
    NoKey {
        /// The key/value cache.
        buffer: BufferId,
        /// Key/value head.
        kv_head: u32,
        /// Position of the key.
        position: u32,
    },
    /// A key that is in the cache already.
    #[error("key {position} of head {kv_head} in buffer {buffer} is appended twice")]
    KeyTwice {
        /// The key/value cache.
        buffer: BufferId,
        /// Key/value head.
        kv_head: u32,
        /// Position of the key.
        position: u32,
    },
    /// A counter outside the table.
    #[error("counter {0} does not exist")]
    BadCounter(CounterId),
    /// A matrix outside the table.
    #[error("matrix {0} does not exist")]
    BadMatrix(MatrixId),
    /// A route with a number that is no expert's.
    #[error("slot {slot} of the route holds {value}, which is none of {experts} experts")]
    NoExpert {
        /// The slot.
        slot: u32,
        /// Its word.
        value: u32,
        /// Experts of the matrix.
        experts: u32,
    },
    /// The step ended while tasks were left.
    #[error("the step ends while {0} other tasks are left")]
    EarlyEnd(u64),
    /// All tasks ended and none ended the step.
    #[error("no task ends the step")]
    NoEnd,
    /// The token chosen is not in the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    BadToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
}

/// The machine cannot be built, or cannot do what was requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineError {
    /// The program was lowered from a graph with other dimensions.
    #[error("the program's shapes are not the graph's")]
    Dims,
    /// The program has no workers, or does not have exactly one logits buffer.
    #[error("the program has {workers} workers and {logits} logits buffers")]
    Incomplete {
        /// Workers.
        workers: usize,
        /// Buffers of kind `logits`.
        logits: usize,
    },
    /// The arena is larger than the machine allows.
    #[error("an arena of {bytes} bytes exceeds {max}")]
    Arena {
        /// Bytes of the arena.
        bytes: u64,
        /// Bytes allowed.
        max: u64,
    },
    /// A buffer lies outside the arena, is not aligned, or its source does not fit its kind and
    /// words.
    #[error("buffer {0} cannot be placed")]
    Buffer(BufferId),
    /// A packed matrix or vector refers to a tensor that does not exist or has another shape or
    /// element type.
    #[error("tensor {0} does not fit where the program uses it")]
    Tensor(TensorId),
    /// A packed matrix has no parts, no rows or no columns.
    #[error("matrix {0} is empty")]
    Matrix(MatrixId),
    /// Invalid tokens, or an invalid cache to resume from.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The last run did not finish, so memory is in the middle of a step.
    #[error("the last run did not finish: reset the machine first")]
    Halted,
}

/// An invalid request to an evaluator or a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// A token is not in the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// The sequence would grow past the KV cache.
    #[error("{positions} positions do not fit a KV cache of {capacity}")]
    Capacity {
        /// Positions that the sequence would have.
        positions: usize,
        /// Positions that the KV cache may hold.
        capacity: usize,
    },
    /// The keys and values to resume from do not have this many positions in every layer.
    #[error("the keys and values to go on from are not those of {0} positions in every layer")]
    Cache(usize),
    /// A continuation was requested before any token was fed.
    #[error("there is nothing to continue: feed a token first")]
    NothingFed,
}

impl InputError {
    /// Refuses tokens outside the vocabulary, and more positions than the KV cache may hold.
    pub(crate) fn check(
        tokens: &[u32],
        vocab: u32,
        positions: usize,
        capacity: usize,
    ) -> Result<(), Self> {
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocab) {
            return Err(Self::Token { token, vocab });
        }
        let positions = positions + tokens.len();
        if positions > capacity { Err(Self::Capacity { positions, capacity }) } else { Ok(()) }
    }
}
