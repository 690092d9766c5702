//! Programs that sessions may run as a batch, one sequence per session.
//!
//! Every task does the work of all sequences, one after the other, before it signals. Sequences share queues, counters
//! and weights, but nothing that is written: each has its own activations, logits and session. In the task of split `s`
//! of `n`, sequence `l` runs split `(s + l) % n`: the rotated program. So short contexts do not all queue up on the few
//! workers of split 0.
//!
//! **Why a verified program verifies in every rotation.** Queues and counters are shared. Only the hand-offs of
//! attention change their writers, within a head. Every word is still written once, and a reader of a head's partials
//! reads those of all its splits (`K-SPLIT`), so it waits for the same tasks in every sequence. For the same reason all
//! sequences end when one does. The kernel of several sequences has requirements besides the proof; [`Together::new`]
//! checks these.
//!
//! **Windows.** Neighbouring sequences of a step may run consecutive positions of one session: a window. A step may have
//! windows of several sessions, and single positions of others. Attention at a position needs the keys and values of the
//! positions before it. Those of the same window are made in the same step, so they are not in the cache yet, and are read
//! where the step hands them over ([`window_reads`]). Why that is safe in a verified program:
//!
//! - A task of attention may read the key and value of its head whatever its split is, so the order was proven for these
//!   words in every rotation. The words of another sequence are at the same place in its copy of the buffer, and the same
//!   task writes them: a counter is signalled when a task has done all sequences, and flag-in-data words have the tag of
//!   their own sequence. No task waits for another one than before, so there is no new deadlock.
//! - A row of the cache is stored once, by the task that has the newest key of the row's own sequence, and no sequence
//!   reads the row in that step. What the copies bring of it is replaced, or is behind the newest key.
//! - The step ends after all tasks (`O-STEP`), so that the next one may store over the words, and over rows of positions
//!   whose token was guessed wrongly: attention reads no row behind its own position.

use abi::{AttentionParams, BufferKind, Epilogue, Opcode, Params, Prologue};

use super::Verified;
use crate::format::Format;
use crate::id::{BufferId, MatrixId};
use crate::program::rules::{buffer_name, tasks};
use crate::program::stream::uncounted;
use crate::program::{Program, Region, Task, accesses, smem};
use crate::violation::{At, Rule, Violations};

/// The program of sequence `seq` of a batch: the splits of each head's keys are rotated among its tasks.
#[must_use]
fn rotated(program: &Program, seq: u32) -> Program {
    let mut program = program.clone();
    let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
    for task in tasks.filter(|task| task.opcode == Opcode::Attention) {
        let p: AttentionParams = task.params();
        let split = (p.split + seq) % p.splits.max(1);
        task.params = bytemuck::cast(AttentionParams { split, ..p });
    }
    program
}

/// A program that this many sequences may share. Only [`Together::new`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    program: Verified<Program>,
    seqs: u32,
}

impl Together {
    /// Checks the requirements of a kernel with this many sequences.
    ///
    /// # Errors
    /// All violations.
    pub fn new(program: Verified<Program>, seqs: u32) -> Result<Self, Violations> {
        check_seqs(&program, seqs)?;
        Ok(Self { program, seqs })
    }

    /// Number of sequences that may share it.
    #[must_use]
    pub fn seqs(&self) -> u32 {
        self.seqs
    }

    /// Most sequences of a command that has a window: their new keys and values lie in shared memory together.
    #[must_use]
    pub fn window_seqs(&self) -> u32 {
        self.seqs.min(smem::fresh_rows(self.program.dims.head_dim))
    }

    /// The program of sequence 0.
    #[must_use]
    pub fn program(&self) -> &Verified<Program> {
        &self.program
    }

    /// The program of a sequence, if the sequence exists.
    #[must_use]
    pub fn seq(&self, seq: u32) -> Option<Verified<Program>> {
        (seq < self.seqs).then(|| Verified(rotated(&self.program, seq)))
    }
}

/// Checks what a kernel with this many sequences requires of a verified program.
///
/// # Errors
/// All violations.
pub fn check_seqs(program: &Program, seqs: u32) -> Result<(), Violations> {
    let mut found = Violations::default();
    let most = abi::SEQS_MAX as u32;
    if !(1..=most).contains(&seqs) {
        found.push(Rule::PLimit, At::Whole, format!("{seqs} sequences, not within 1..={most}"));
    }
    if seqs > 1 {
        if let Some(matrix) = program.matrices.iter().find(|matrix| matrix.format == Format::F32) {
            let detail = format!(
                "several sequences share the products of 16-bit weights and of codes only, and {} is f32: run one sequence, or convert the model",
                matrix.name
            );
            found.push(Rule::PShape, At::Whole, detail);
        }
        if let Some(matrix) = program.matrices.iter().find(|matrix| matrix.experts > 1) {
            let detail = format!("{} has experts: run one sequence", matrix.name);
            found.push(Rule::PShape, At::Whole, detail);
        }
        let stagings = program.stagings(seqs);
        for (matrix, id) in program.matrices.iter().zip(0..) {
            let tile = matrix.units_per_tile();
            if let Some(detail) = uncounted(tile, stagings.of(tile, matrix.format)) {
                found.push(Rule::PLimit, At::Matrix(MatrixId(id)), detail);
            }
        }
        one_form(program, &mut found);
        windows(program, &mut found);
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// The words that an attention task reads of each sequence of its window whose position is one of its keys: the key and
/// the value of its head, behind all queries. `None` for other tasks.
#[must_use]
pub fn window_reads(program: &Program, task: &Task) -> Option<[Region; 2]> {
    let Params::Attention(p) = task.op() else { return None };
    let buffer = task.reads[0]?;
    let dims = program.dims;
    let row = |row: u32| {
        let start = row.saturating_mul(dims.head_dim);
        Region { buffer, start, end: start.saturating_add(dims.head_dim) }
    };
    Some([row(dims.heads + p.kv_head), row(dims.heads + dims.kv_heads + p.kv_head)])
}

/// Checks that the order of a verified program covers what windows read: each of these words is one that the task reads
/// in every rotation, from scratch memory, of which each sequence has its own.
fn windows(program: &Program, found: &mut Violations) {
    for (at, task) in tasks(program) {
        let Some(reads) = window_reads(program, task) else { continue };
        let proven = accesses(program, task).reads;
        for region in reads {
            let scratch = program.buffers.get(region.buffer.index()).is_some_and(|buffer| {
                matches!(buffer.kind, BufferKind::Plain | BufferKind::FlagInData)
            });
            if !scratch || !proven.contains(&region) {
                let (Region { start, end, buffer }, name) =
                    (region, buffer_name(program, region.buffer));
                let detail = format!(
                    "a window reads words {start}..{end} of {name} of other sequences, and {} in {buffer} is not proven to wait for them",
                    task.opcode.info().name
                );
                found.push(Rule::RHappens, at.clone(), detail);
            }
        }
    }
}

/// Checks that all tasks use one form for the words of a buffer. A kernel of several sequences stores unmodified inputs
/// of products as 16-bit halves.
fn one_form(program: &Program, found: &mut Violations) {
    let mut forms = vec![None; program.buffers.len()];
    let tasks = program.workers.iter().flat_map(|worker| &worker.tasks);
    for (buffer, split) in tasks.flat_map(forms_of) {
        let scratch = matches!(
            program.buffers[buffer.index()].kind,
            BufferKind::Plain | BufferKind::FlagInData
        );
        if scratch && *forms[buffer.index()].get_or_insert(split) != split {
            let detail = "its words are values to one task and halves of 16 bits to another: run one sequence";
            found.push(Rule::PShape, At::Buffer(buffer), detail.to_owned());
        }
    }
}

/// The buffers of a task, and whether it reads or writes each as halves (`input_write` in buffer.cuh).
fn forms_of(task: &Task) -> Vec<(BufferId, bool)> {
    // Whether the first input and the first output are halves.
    let (read, written) = match task.op() {
        Params::Matvec(p) => {
            (p.prologue == Prologue::Copy as u32, p.epilogue == Epilogue::SiluMul as u32)
        }
        Params::AttentionMerge(_) => (false, true),
        Params::Nop(_)
        | Params::Embed(_)
        | Params::Attention(_)
        | Params::Sample(_)
        | Params::Norm(_)
        | Params::Route(_) => (false, false),
    };
    let reads = task.reads.iter().enumerate().map(|(i, a)| (a, i == 0 && read));
    let writes = task.writes.iter().enumerate().map(|(i, a)| (a, i == 0 && written));
    reads.chain(writes).filter_map(|(buffer, split)| Some(((*buffer)?, split))).collect()
}
