//! Opening a draft model: on the first GPU that the model does not use, or beside it on the reference VM.

use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use remote::Served;

use super::{Megakernel, reference};
use crate::cli::{ConfigArgs, DeviceChoice, Gpus, PlaceArgs, PrefillChoice};
use crate::context::Context;
use crate::device::probe::look_at;
use crate::failure::Failure;
use crate::memory::{self, Use};
use crate::report;
use crate::schedule_choice::{Auto, choose};
use crate::speculate::Draft;

/// Tokens of the run that loads the kernels of prompts: enough to be run in chunks.
const WARM: u32 = 32;

/// A model that guesses for another one, and its program.
pub(crate) struct DraftModel {
    context: Context,
    config: ScheduleConfig,
    program: Arc<Verified<Program>>,
}

impl DraftModel {
    /// Loads the draft of this name, if there is one, for a model that runs on GPUs or on the reference VM, with the schedule
    /// for texts of `tokens`.
    pub(crate) fn of(
        name: Option<&str>,
        guesses: u32,
        (model, on_gpu): (&Context, bool),
        tokens: u32,
    ) -> Result<Option<Self>, Failure> {
        let Some(name) = name else { return Ok(None) };
        if guesses == 0 {
            let message = "--draft is a model that guesses, and --speculate 0 wants no guesses: give --speculate 1 to 7";
            return Err(Failure::usage(message));
        }
        if model.device == DeviceChoice::Eval {
            return Err(Self::no_windows());
        }
        let device = if on_gpu { DeviceChoice::Cuda } else { DeviceChoice::Cpu };
        let gpus = on_gpu.then(|| free_gpu(name, model)).transpose()?;
        let beside = gpus.map_or_else(String::new, |gpu| format!(" on GPU {}", gpu.cards()[0]));
        report::say(&format!("draft model: {name}{beside}"));
        let target = model.named_target.clone().filter(|_| model.target.devices == 1);
        let place = PlaceArgs { target, device, gpus, kv: model.kv(), ..PlaceArgs::default() };
        // Never more positions than the model: it guesses no further.
        let mut context = Context::with_room(name, &place, model.kv_capacity)?;
        context.kv_capacity = context.kv_capacity.min(model.kv_capacity);
        check_vocabulary(&context, model)?;
        let host = Use::Host { sequences: 1, positions: context.kv_capacity.into() };
        memory::check(&context.model, if on_gpu { Use::Device } else { host })?;
        let tokens = tokens.min(context.kv_capacity);
        let config = choose(&context, &ConfigArgs::default(), tokens, Auto::Fastest)?.config;
        let program = Arc::new(context.lowered(&config)?);
        Ok(Some(Self { context, config, program }))
    }

    /// The refusal of a draft beside the graph.
    pub(crate) fn no_windows() -> Failure {
        Failure::usage(
            "--draft: the graph has no steps of several positions; run it with --device cpu or cuda",
        )
    }

    /// The name of its graph.
    pub(crate) fn name(&self) -> &str {
        &self.context.graph().name
    }

    /// Bytes that a step of it reads, as part of those of a model.
    pub(crate) fn part_of(&self, model: &Context) -> f64 {
        self.context.graph().weight_bytes() as f64 / model.graph().weight_bytes() as f64
    }

    /// Opens its engine. On a GPU everything is allocated and loaded, and no kernel launched: that is done before the first
    /// launch of the model's kernel, which a driver call that allocates could wait for.
    pub(crate) fn open(&self) -> Result<Draft<'_>, Failure> {
        let Self { context, config, program } = self;
        let capacity = context.kv_capacity;
        let Some(mut gpu) = context.open_here(false)? else {
            return Draft::new(Box::new(reference(context, program, None)), capacity);
        };
        gpu.set_prefill(PrefillChoice::Auto)?;
        gpu.set_seqs(1);
        let handle = gpu.prepare(program, &config.kernel)?;
        gpu.boot(handle)?;
        gpu.await_prompt_kernels();
        let in_chunks = gpu.takes_chunks(WARM as usize) && capacity > WARM;
        let mut draft = Draft::new(Box::new(Megakernel::new(gpu, handle, 1)), capacity)?;
        if in_chunks {
            draft.warm(&[0; WARM as usize])?;
        }
        Ok(draft)
    }
}

/// The first GPU that a model does not use: its resident kernel has all multiprocessors of those that it does.
fn free_gpu(name: &str, model: &Context) -> Result<Gpus, Failure> {
    let free = first_free(&model.cards);
    look_at(&model.target, free).map_err(|error| {
        let needed = model.cards.len() + 1;
        Failure::missing(format!(
            "--draft {name} runs on a GPU of its own beside those of the model, so {needed} GPUs are needed, and GPU {free} is not usable: {error}; leave --draft out: guesses are then looked up in the text"
        ))
    })?;
    format!("cuda:{free}").parse().map_err(Failure::bug)
}

fn first_free(cards: &[u32]) -> u32 {
    (0..).find(|card| !cards.contains(card)).unwrap_or(0)
}

/// Refuses a draft whose tokens are not those of the model: its guesses would be others.
fn check_vocabulary(draft: &Context, model: &Context) -> Result<(), Failure> {
    let [of_draft, of_model] = [draft, model].map(|of| (&of.graph().name, of.graph().vocab));
    let refused = |why: String| {
        Err(Failure::usage(format!(
            "--draft {}: {why}; take a smaller model of the same family, or a quantised copy of the model (amk quantize)",
            of_draft.0
        )))
    };
    if of_draft.1 != of_model.1 {
        let ((_, own), (name, vocab)) = (of_draft, of_model);
        return refused(format!("its vocabulary has {own} tokens, that of {name} {vocab}"));
    }
    // Presets have no tokenizer.
    if let (Some(own), Some(other)) = (draft.model.tokenizer()?, model.model.tokenizer()?)
        && !own.has_tokens_of(&other)
    {
        return refused(format!("its tokenizer has other tokens than that of {}", of_model.0));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpu_of_a_draft_is_the_first_that_the_model_leaves() {
        let free = [&[0][..], &[0, 1], &[1], &[0, 2, 3]].map(first_free);
        assert_eq!(free, [1, 2, 0, 1]);
    }

    #[test]
    fn presets_of_a_family_guess_for_each_other() {
        let context = |name: &str| {
            let place = PlaceArgs { device: DeviceChoice::Cpu, ..PlaceArgs::default() };
            Context::open(name, &place).unwrap()
        };
        for (model, draft, fits) in [
            ("qwen3-8b", "qwen3-0.6b", true),
            ("llama-3.1-8b", "llama-3.2-1b", true),
            ("llama-3.1-8b", "qwen3-0.6b", false),
        ] {
            let checked = check_vocabulary(&context(draft), &context(model));
            assert_eq!(checked.is_ok(), fits, "{draft} for {model}");
        }
    }
}
