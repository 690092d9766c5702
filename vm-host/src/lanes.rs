//! What a kernel of several lanes asks of a program, beside the proof that its lanes do not disturb each other (`ir::program::Together`).

use abi::{AttentionMergeParams, AttentionParams, EmbedParams, Epilogue, MatvecParams, NopParams};
use abi::{OpVisitor, Prologue, SampleParams, SlotKind, visit};
use ir::program::{Access, Program, Task};

use crate::error::HostError;

/// Refuses a program that a kernel of so many lanes cannot run.
///
/// # Errors
/// `Request`, which says why and what to do.
pub fn check(program: &Program, lanes: u32) -> Result<(), HostError> {
    if program.dims.dtype == ir::DType::F32 {
        return Err(HostError::Request(format!(
            "the weights of {} are f32, and {lanes} sessions share the products of 16-bit weights only: convert the model, or boot for one \
             session at a time",
            program.model
        )));
    }
    let tasks = || program.workers.iter().flat_map(|worker| &worker.tasks);
    if tasks().flat_map(|t| t.reads.iter().chain(&t.writes)).flatten().any(|a| a.generation != 0) {
        return Err(HostError::Request(format!(
            "the program has generations, whose place in a tag is the lanes': boot for one lane instead of {lanes}"
        )));
    }
    let mut forms = vec![None; program.slots.len()];
    for (access, split) in tasks().flat_map(forms_of) {
        let slot = access.slot.index();
        if !matches!(program.slots[slot].kind, SlotKind::Plain | SlotKind::Tagged) {
            continue;
        }
        if *forms[slot].get_or_insert(split) != split {
            return Err(HostError::Request(format!(
                "the words of slot {} are values to one task and halves of 16 bits to another, as which a kernel of {lanes} lanes keeps what is \
                 multiplied as it is: boot for one lane",
                program.slots[slot].name
            )));
        }
    }
    Ok(())
}

/// The slots of a task, and whether it takes the words of each for halves (`input_write` in slot.cuh).
fn forms_of(task: &Task) -> Vec<(Access, bool)> {
    let (read, written) = visit(task.opcode, &task.params, &mut Halves);
    let reads = task.reads.iter().enumerate().map(|(i, a)| (a, i == 0 && read));
    let writes = task.writes.iter().enumerate().map(|(i, a)| (a, i == 0 && written));
    reads.chain(writes).filter_map(|(access, split)| Some(((*access)?, split))).collect()
}

/// Whether an op's first input and its first output are halves.
struct Halves;

impl OpVisitor for Halves {
    type Output = (bool, bool);

    fn nop(&mut self, _: &NopParams) -> (bool, bool) {
        (false, false)
    }

    fn embed(&mut self, _: &EmbedParams) -> (bool, bool) {
        (false, false)
    }

    fn matvec(&mut self, p: &MatvecParams) -> (bool, bool) {
        (p.prologue == Prologue::Copy as u32, p.epilogue == Epilogue::SiluMul as u32)
    }

    fn attention(&mut self, _: &AttentionParams) -> (bool, bool) {
        (false, false)
    }

    fn attention_merge(&mut self, _: &AttentionMergeParams) -> (bool, bool) {
        (false, true)
    }

    fn sample(&mut self, _: &SampleParams) -> (bool, bool) {
        (false, false)
    }
}

#[cfg(test)]
mod tests {
    use ir::Target;
    use ir::schedule::{neutral_config, read_config_over};

    use super::*;

    /// A program of 16-bit weights, its merge fused or not.
    fn program(merge: &str) -> Program {
        let mut graph = model::preset("toy-2l").expect("a preset").graph.clone();
        graph.dtype = ir::DType::Bf16;
        let target = Target { sms: 8, ..Target::by_name("h200").expect("a known target") };
        let config = format!(r#"{{"fusion_grouping": {{"merge": "{merge}"}}}}"#);
        let neutral = neutral_config(&graph, &target);
        let config = read_config_over(neutral, &config, &graph, &target);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        let options = lower::Options { kv_capacity: 64 };
        (*lower::lower(&config, &graph, &target, options).expect("it lowers")).clone()
    }

    /// The same program, the first matvec of it that `edit` takes being changed.
    fn edited(merge: &str, edit: impl Fn(&mut MatvecParams) -> bool) -> Program {
        let mut program = program(merge);
        let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
        let mut matvecs = tasks.filter(|task| task.opcode == abi::Opcode::Matvec);
        let found = matvecs.any(|task| {
            let mut p: MatvecParams = task.params();
            let found = edit(&mut p);
            task.params = bytemuck::cast(p);
            found
        });
        assert!(found, "there is such a task");
        program
    }

    #[test]
    fn lowered_programs_of_16_bit_weights_run_in_lanes() {
        for merge in ["o_proj", "separate"] {
            check(&program(merge), 8).unwrap_or_else(|e| panic!("{merge}: {e}"));
        }
    }

    #[test]
    fn what_the_lanes_would_read_wrong_is_refused() {
        let refused = |program: &Program, says: &str| {
            let error = check(program, 8).expect_err(says).to_string();
            assert!(error.contains(says), "{error} does not say {says:?}");
        };
        // Values, taken for halves; halves, taken for values; halves written where others write values.
        let copies = |from: Prologue| {
            move |p: &mut MatvecParams| {
                let found = p.prologue == from as u32;
                if found {
                    p.prologue =
                        if from == Prologue::Copy { Prologue::Rms } else { Prologue::Copy } as u32;
                }
                found
            }
        };
        refused(&edited("o_proj", copies(Prologue::Rms)), "halves of 16 bits");
        refused(&edited("separate", copies(Prologue::Copy)), "halves of 16 bits");
        let silu = |p: &mut MatvecParams| {
            let found = p.epilogue == Epilogue::SiluMul as u32;
            if found {
                p.epilogue = Epilogue::Store as u32;
            }
            found
        };
        refused(&edited("o_proj", silu), "halves of 16 bits");
        let mut f32 = program("o_proj");
        f32.dims.dtype = ir::DType::F32;
        refused(&f32, "are f32");
        let mut generations = program("o_proj");
        let written = generations.workers[0].tasks.iter_mut().find_map(|t| t.writes[0].as_mut());
        written.expect("it writes").generation = 1;
        refused(&generations, "generations");
    }
}
