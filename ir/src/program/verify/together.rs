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

use abi::{AttentionParams, BufferKind, Epilogue, Opcode, Params, Prologue};

use super::Verified;
use crate::format::Format;
use crate::id::{BufferId, MatrixId};
use crate::program::stream::uncounted;
use crate::program::{Program, Task};
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
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
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
