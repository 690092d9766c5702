//! Programs that sessions may run side by side, each in a sequence of its own.
//!
//! Every task does the work of all sequences, sequence after sequence, before it signals. Sequences share queues, counters and weights, and nothing that is
//! written: each has activations, logits and a session of its own. So that short contexts do not queue up on the few workers of split 0, sequence
//! `l` runs, in the task of split `s` of `n`, split `(s + l) % n`: the rotated program.
//!
//! **Why a verified program verifies in every rotation.** Queues and counters are shared. Of the hand-offs only those of attention change
//! their writers, within a head; every word is still written once, and whoever reads a head's partials reads those of all its splits
//! (`K-SPLIT`), so it waits for the same tasks whichever sequence it is in. For the same reason all sequences come to an end when one does. What is
//! left to check is what the kernel of several sequences asks beside the proof: [`Together::new`].

use abi::{AttentionParams, BufferKind, Epilogue, Opcode, Params, Prologue};

use super::Verified;
use crate::graph::DType;
use crate::id::{BufferId, MatrixId};
use crate::program::stream::uncountable;
use crate::program::{Program, Task};
use crate::violation::{At, Rule, Violations};

/// What sequence `seq` of a batch runs: the program with the splits of each head's keys dealt to its tasks anew.
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

/// A program that so many sequences may share. Only [`Together::new`] makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    program: Verified<Program>,
    seqs: u32,
}

impl Together {
    /// Checks what a kernel of so many sequences asks of a program.
    ///
    /// # Errors
    /// All violations.
    pub fn new(program: Verified<Program>, seqs: u32) -> Result<Self, Violations> {
        check_seqs(&program, seqs)?;
        Ok(Self { program, seqs })
    }

    /// Sequences that may share it.
    #[must_use]
    pub fn seqs(&self) -> u32 {
        self.seqs
    }

    /// The program of sequence 0.
    #[must_use]
    pub fn program(&self) -> &Verified<Program> {
        &self.program
    }

    /// The program of a sequence, if there is such a sequence.
    #[must_use]
    pub fn seq(&self, seq: u32) -> Option<Verified<Program>> {
        (seq < self.seqs).then(|| Verified(rotated(&self.program, seq)))
    }
}

/// What a kernel of so many sequences asks of a verified program.
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
        if program.dims.dtype == DType::F32 {
            let detail = "several sequences share the products of 16-bit weights only, and these are f32: convert the model, or run one sequence";
            found.push(Rule::PShape, At::Whole, detail.to_owned());
        }
        for matrix in (0..program.matrices.len() as u32).map(MatrixId) {
            if let Some(detail) = uncountable(program, matrix, seqs) {
                found.push(Rule::PLimit, At::Matrix(matrix), detail);
            }
        }
        one_form(program, &mut found);
    }
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// A kernel of several sequences keeps what is multiplied as it is in halves of 16 bits: every task takes the words of a buffer for the same.
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

/// The buffers of a task, and whether it takes the words of each for halves (`input_write` in buffer.cuh).
fn forms_of(task: &Task) -> Vec<(BufferId, bool)> {
    // Of the first input and of the first output.
    let (read, written) = match task.op() {
        Params::Matvec(p) => {
            (p.prologue == Prologue::Copy as u32, p.epilogue == Epilogue::SiluMul as u32)
        }
        Params::AttentionMerge(_) => (false, true),
        Params::Nop(_) | Params::Embed(_) | Params::Attention(_) | Params::Sample(_) => {
            (false, false)
        }
    };
    let reads = task.reads.iter().enumerate().map(|(i, a)| (a, i == 0 && read));
    let writes = task.writes.iter().enumerate().map(|(i, a)| (a, i == 0 && written));
    reads.chain(writes).filter_map(|(buffer, split)| Some(((*buffer)?, split))).collect()
}
