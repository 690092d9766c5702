//! Text from a program: a model that is opened once and continues prompts.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use ir::program::{Program, Verified};
use ir::sampling::{Logprobs, Sampling};
use ir::schedule::ScheduleConfig;
use model::{Chat, Message, Tokenizer};
use remote::Served;
use serde_json::{Value, json};
use sessions::Priority;
use vm_host::{KvPool, RingTap, Streaming};

use crate::cli::{
    CommandLogArgs, ConfigArgs, DeviceChoice, ModelArgs, PlaceArgs, PrefillArgs, PrefillChoice,
};
use crate::command_log::{CommandLog, Ended, Head, Kernel, Logged};
use crate::context::Context;
use crate::engine::{self, DraftModel, Engine as Machine, Megakernel, Windows};
use crate::failure::Failure;
use crate::host_rules::HostRules;
use crate::memory::{self, Use};
use crate::observe::{Command, Observer, Sequences, TurnEnd};
use crate::schedule_choice::{Auto, Chosen, ScheduleSource, choose};
use crate::sequence::{SLICE, Sequence, Told, Work};
use crate::speculate::{self, Draft, Tally};

/// A model that continues prompts: `amk generate`, called from a program.
///
/// On a GPU each [`generate`](Self::generate) loads the weights and launches the kernel; `amk serve` keeps it resident.
///
/// ```
/// let engine = amk::Engine::open("toy", amk::DeviceChoice::Cpu)?;
/// let request = amk::Request { max_new_tokens: 4, ..amk::Request::new(amk::Prompt::Tokens(vec![1, 2, 3])) };
/// let generated = engine.generate(&request)?;
/// assert_eq!(generated.tokens.len(), 4);
///
/// // The lowered program says what the graph says.
/// let graph = amk::Engine::open("toy", amk::DeviceChoice::Eval)?;
/// assert_eq!(graph.generate(&request)?.tokens, generated.tokens);
/// # Ok::<(), amk::Failure>(())
/// ```
pub struct Engine {
    context: Context,
    tokenizer: Option<Tokenizer>,
    began: Instant,
    pub(crate) config: ConfigArgs,
    pub(crate) prefill: PrefillArgs,
    /// How weights are streamed while the kernel runs; `None`: they are loaded first.
    pub(crate) streaming: Option<Streaming>,
    /// Whether every tensor on the GPU is compared with its file at the end.
    pub(crate) check_weights: bool,
    /// Where its commands are logged.
    pub(crate) log: CommandLogArgs,
    /// What guesses beside the text.
    pub(crate) draft: Option<DraftModel>,
}

/// What to continue.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Token ids. Generation does not stop at the model's end tokens.
    Tokens(Vec<u32>),
    /// A text; needs the model's tokenizer.
    Text(String),
    /// A conversation in the model's chat template.
    Chat(Vec<Message>),
}

/// A prompt and how it is continued. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What to continue.
    pub prompt: Prompt,
    /// The most tokens to generate.
    pub max_new_tokens: usize,
    /// Token ids that end the generation, beside the model's own.
    pub stop: Vec<u32>,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// The number of likeliest tokens to report at each position, with the log probability of the sampled one.
    pub logprobs: Option<usize>,
    /// Whether to keep the logits of every position that was run.
    pub keep_logits: bool,
    /// The most tokens that are guessed and checked in one step, 7 at most; 0 for none. They change no token.
    pub speculate: u32,
}

impl Request {
    /// At most 32 tokens, greedily.
    #[must_use]
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            max_new_tokens: 32,
            stop: Vec::new(),
            sampling: Sampling::default(),
            logprobs: None,
            keep_logits: false,
            speculate: 0,
        }
    }
}

/// The tokens that were fed and generated.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Generated {
    /// The new token ids.
    pub tokens: Vec<u32>,
    /// Their text; `None` if the model has no tokenizer.
    pub text: Option<String>,
    /// The prompt's token ids.
    pub prompt_tokens: Vec<u32>,
    /// Logits of every position that was run, each a row of the vocabulary's size, if they were kept.
    pub logits: Vec<Vec<f32>>,
    /// Log probabilities of each new token; `None` if they were not requested.
    pub logprobs: Option<Vec<Logprobs>>,
    /// Where tokens were sampled: on the host or on the device.
    chosen_on: &'static str,
    /// How the weights were loaded, and the result of comparing them; on the device.
    weights: Value,
    weights_check: Value,
    /// The source of the schedule; the graph runs without one.
    schedule: Option<ScheduleSource>,
    model: String,
    command_log: Option<Ended>,
    /// What windows gave, if tokens were guessed.
    speculation: Option<Tally>,
    /// Microseconds per guess of a draft.
    draft_us: Option<f64>,
}

impl Generated {
    /// The document that `amk generate` prints.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut document = json!({
            "schema": "amk.generate.v1",
            "tokens": self.tokens,
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "model": self.model,
            "sampling": self.chosen_on,
            "schedule_source": self.schedule,
        });
        for (name, value) in [("weights", &self.weights), ("weights_check", &self.weights_check)] {
            if !value.is_null() {
                document[name] = value.clone();
            }
        }
        if let Some(tally) = &self.speculation {
            document["speculation"] = tally.to_json();
            document["speculation"]["draft_us_per_guess"] = json!(self.draft_us);
        }
        if let Some(ended) = &self.command_log {
            document["command_log"] = json!(ended);
        }
        if let Some(logprobs) = &self.logprobs {
            document["logprobs"] = self.tokens.iter().zip(logprobs).map(scored).collect();
        }
        document
    }
}

/// A token with its log probability and the likeliest alternatives. JSON has no infinity; it becomes null.
fn scored((token, logprobs): (&u32, &Logprobs)) -> Value {
    let top = logprobs.top.iter();
    let top = top.map(|(token, logprob)| json!({"token": token, "logprob": logprob}));
    json!({"token": token, "logprob": logprobs.chosen, "top": top.collect::<Vec<Value>>()})
}

/// A callback for each new token.
type OnToken<'a> = &'a mut dyn FnMut(u32) -> ControlFlow<()>;

impl Engine {
    /// Opens a model: a Hugging Face folder, a GGUF file, a model of the Hub (ORG/NAME) or a preset. `Auto` and `Cpu` run
    /// the lowered program on the reference VM, `Eval` the graph, `Cuda` the megakernel.
    ///
    /// # Errors
    /// If there is no such model, or it cannot be read.
    pub fn open(model: &str, device: DeviceChoice) -> Result<Self, Failure> {
        let place = PlaceArgs { device, ..PlaceArgs::default() };
        Self::of(&ModelArgs { model: model.to_owned(), place })
    }

    /// The engine that these arguments describe.
    pub(crate) fn of(args: &ModelArgs) -> Result<Self, Failure> {
        let began = Instant::now();
        let context = Context::new(args)?;
        let tokenizer = context.model.tokenizer()?;
        Ok(Self {
            context,
            tokenizer,
            began,
            config: ConfigArgs::default(),
            prefill: PrefillArgs::default(),
            streaming: None,
            check_weights: false,
            log: CommandLogArgs::default(),
            draft: None,
        })
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Continues a prompt.
    ///
    /// # Errors
    /// If the request does not fit the model or its key/value cache, the schedule is refused, or the device is missing or
    /// fails.
    pub fn generate(&self, request: &Request) -> Result<Generated, Failure> {
        self.generate_with(request, |_| ControlFlow::Continue(()))
    }

    /// The same, and calls `on_token` with each new token. On `Break` the generation ends; on a GPU up to 15 further
    /// tokens may come, without a call.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn generate_with(
        &self,
        request: &Request,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, Failure> {
        let work = self.work(request)?;
        let observer = Observer::start(&self.context, ("generate", self.device()), 1, None)?;
        let prompt = work.prompt.clone();
        let mut generated = self.execute((work, request.keep_logits), &observer, &mut on_token)?;
        let text = |tokenizer: &Tokenizer| tokenizer.decode(&generated.tokens, true);
        generated.text = self.tokenizer.as_ref().map(text).transpose()?;
        generated.prompt_tokens = prompt;
        generated.model.clone_from(&self.context.graph().name);
        Ok(generated)
    }

    fn device(&self) -> &'static str {
        match self.context.device {
            DeviceChoice::Eval => "eval",
            DeviceChoice::Cuda => "cuda",
            DeviceChoice::Auto | DeviceChoice::Cpu => "cpu",
        }
    }

    pub(crate) fn on_gpu(&self) -> bool {
        self.context.device == DeviceChoice::Cuda
    }

    /// The work of a request, which is refused before anything runs if it could not be finished.
    fn work(&self, request: &Request) -> Result<Work, Failure> {
        let prompt = self.prompt(&request.prompt)?;
        self.check(request, &prompt)?;
        let mut stop = request.stop.clone();
        // Text stops at the model's end tokens; raw tokens only at those of the caller.
        if !matches!(request.prompt, Prompt::Tokens(_)) {
            stop.extend(&self.context.graph().eos);
        }
        Ok(Work {
            prompt,
            limit: u32::try_from(request.max_new_tokens).unwrap_or(u32::MAX),
            sampling: request.sampling.clone(),
            host: HostRules::default(),
            constraint: None,
            stop,
            logprobs: request.logprobs,
            priority: Priority::Normal,
            speculate: request.speculate,
        })
    }

    pub(crate) fn prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, Failure> {
        let tokenizer = || {
            self.tokenizer().ok_or_else(|| {
                Failure::usage(format!(
                    "{} has no tokenizer.json, so --prompt cannot be read; give --tokens",
                    self.context.graph().name
                ))
            })
        };
        match prompt {
            Prompt::Tokens(tokens) => Ok(tokens.clone()),
            Prompt::Text(text) => Ok(tokenizer()?.encode(text, true)?),
            Prompt::Chat(messages) => {
                let now = std::time::SystemTime::now();
                let chat = Chat { messages, add_generation_prompt: true, extra: None, now };
                Ok(tokenizer()?.encode(&tokenizer()?.chat(&chat)?, false)?)
            }
        }
    }

    /// Refuses, before anything runs, a generation that could not be finished.
    fn check(&self, request: &Request, prompt: &[u32]) -> Result<(), Failure> {
        let context = &self.context;
        let (vocab, capacity) = (context.graph().vocab, context.kv_capacity as usize);
        let name = &context.graph().name;
        if (self.streaming.is_some() || self.check_weights) && !self.on_gpu() {
            let message =
                "--stream-weights and --check-weights are about the GPU; add --device cuda";
            return Err(Failure::usage(message));
        }
        if request.speculate > speculate::GUESSES_MAX {
            let (got, most) = (request.speculate, speculate::GUESSES_MAX);
            return Err(Failure::usage(format!("--speculate {got}: 0 to {most} are possible")));
        }
        if request.speculate > 0 && context.device == DeviceChoice::Eval {
            let message = "--speculate: the graph has no steps of several positions; run it with --device cpu or cuda";
            return Err(Failure::usage(message));
        }
        if prompt.is_empty() {
            return Err(Failure::usage("the prompt has no tokens; give at least one"));
        }
        if let Some(token) = prompt.iter().chain(&request.stop).find(|&&token| token >= vocab) {
            return Err(Failure::usage(format!(
                "token {token} is out of range: the vocabulary of {name} is 0 to {}",
                vocab - 1
            )));
        }
        let new = request.max_new_tokens;
        let needed = prompt.len().saturating_add(new.saturating_sub(1));
        if prompt.len() > capacity || needed > capacity {
            return Err(Failure::usage(format!(
                "a prompt of {} tokens and {new} new ones need {needed} positions, and the key/value cache holds {capacity}; \
                 shorten the prompt, lower --max-new-tokens or raise --kv-capacity (at most {})",
                prompt.len(),
                context.model.shape.farthest()
            )));
        }
        let problems = request.sampling.problems(vocab);
        let problems: Vec<String> = problems.iter().take(8).map(ToString::to_string).collect();
        if problems.is_empty() { Ok(()) } else { Err(Failure::usage(problems.join(" | "))) }
    }

    fn execute(
        &self,
        (work, keep): (Work, bool),
        observer: &Observer,
        on_token: OnToken<'_>,
    ) -> Result<Generated, Failure> {
        let context = &self.context;
        // A kernel counts its own commands.
        let on_gpu = self.on_gpu();
        let mut said = Sequences::new(observer.publisher(), !on_gpu);
        said.sole(work.positions());
        self.prefill.check(on_gpu)?;
        let host = Use::Host { sequences: 1, positions: work.positions() };
        memory::check(&context.model, if on_gpu { Use::Device } else { host })?;
        if context.device == DeviceChoice::Eval {
            let mut graph = engine::graph(context, None);
            let log = self.begin_log(None)?;
            return logged(log, &mut graph, context, (work, keep, None), (&mut said, on_token));
        }
        // For the end of the generation, where steps are slowest.
        let tokens = u32::try_from(work.positions()).unwrap_or(u32::MAX);
        if on_gpu && keep && self.prefill.prefill == PrefillChoice::Chunks {
            let message = "--prefill chunks: chunks give the logits of the last position alone, and --logits wants those of all";
            return Err(Failure::usage(message));
        }
        let Chosen { config, source } = choose(context, &self.config, tokens, Auto::Fastest)?;
        let program = Arc::new(context.lowered(&config)?);
        said.program(0, &program);
        let log = self.begin_log(Some((&program, &config)))?;
        let draft = self.draft.as_ref().map(DraftModel::open).transpose()?;
        let work = (work, keep, draft);
        let generated = if on_gpu {
            let (prompt, tap) = (work.0.prompt.len(), log.as_ref().map(CommandLog::tap));
            let windows = Windows::of(context, &config, work.0.speculate)?;
            let built = (&program, &config, windows.as_ref());
            let mut kernel = self.kernel(built, (prompt, keep), (observer, tap))?;
            let mut generated = logged(log, &mut kernel, context, work, (&mut said, on_token))?;
            generated.weights = kernel.gpu().weights_report(self.began)?;
            if self.check_weights {
                generated.weights_check = kernel.gpu().check_weights()?;
            }
            generated
        } else {
            let mut machine = engine::reference(context, &program, None);
            logged(log, &mut machine, context, work, (&mut said, on_token))?
        };
        Ok(Generated { schedule: Some(source), ..generated })
    }

    /// Begins the log of the commands, if there is to be one.
    fn begin_log(
        &self,
        of: Option<(&Arc<Verified<Program>>, &ScheduleConfig)>,
    ) -> Result<Option<CommandLog>, Failure> {
        let context = &self.context;
        self.log.begin(|| Head {
            prefill: self.prefill.prefill.name(),
            kernels: of
                .into_iter()
                .map(|(program, config)| Kernel::new(context, (program, config), 1, self.on_gpu()))
                .collect(),
            ..Head::new(context, "generate", self.device())
        })
    }

    /// The megakernel, which decodes, samples and feeds back. The host samples from its logits if log probabilities are
    /// requested or the device's limits are exceeded.
    fn kernel(
        &self,
        (program, config, windows): (&Arc<Verified<Program>>, &ScheduleConfig, Option<&Windows>),
        (prompt, keep): (usize, bool),
        (observer, tap): (&Observer, Option<RingTap>),
    ) -> Result<Megakernel<'_>, Failure> {
        let Some(mut device) = self.context.open_here(false)? else {
            return Err(Failure::missing("capability missing: no CUDA device"));
        };
        observer.observe(&mut device);
        tap.into_iter().for_each(|tap| device.show_ring(tap));
        device.set_prefill(self.prefill.prefill)?;
        if let Some(streaming) = self.streaming {
            device.stream_weights(streaming);
        }
        let handle = device.prepare(program, &config.kernel)?;
        if let Some(windows) = windows {
            return Ok(windows.boot(device, handle)?);
        }
        // Chunks are run before the first launch.
        if keep || !device.takes_chunks(prompt.saturating_sub(1)) {
            device.serve(handle, 1, KvPool::Full)?;
        }
        Ok(Megakernel::new(device, handle, 1))
    }
}

/// A text, whether its logits are kept, and what guesses beside it.
type Job<'d> = (Work, bool, Option<Draft<'d>>);

/// Generates, with a log of the machine's commands if there is one.
fn logged(
    log: Option<CommandLog>,
    machine: &mut dyn Machine,
    context: &Context,
    work: Job<'_>,
    told: (&mut Sequences, OnToken<'_>),
) -> Result<Generated, Failure> {
    let Some(log) = log else { return continued(machine, context, work, told) };
    let generated = continued(&mut Logged::new(machine, log.clone()), context, work, told);
    let ended = log.close();
    Ok(Generated { command_log: Some(ended), ..generated? })
}

/// Runs the prompt and generates until the text ends or the callback ends it. The draft's kernel has left afterwards.
fn continued(
    machine: &mut dyn Machine,
    context: &Context,
    (work, keep, mut draft): Job<'_>,
    (said, on_token): (&mut Sequences, OnToken<'_>),
) -> Result<Generated, Failure> {
    let scored = work.logprobs.is_some();
    let mut sequence = Sequence::new(work);
    sequence.rows = keep.then(Vec::new);
    sequence.begin(machine, 0).map_err(|broken| context.unevaluated(broken))?;
    let mut scores = Vec::new();
    let stopped = Cell::new(false);
    let mut finish = None;
    while finish.is_none() && !stopped.get() {
        // The first token alone, to measure its latency.
        let most = match sequence.chosen.len() {
            0 => sequence.work.prompt.len() - sequence.fed,
            _ => SLICE,
        };
        let (first, before) = (sequence.fed, sequence.chosen.len());
        said.begin(&[(0, first)], sequence.next(most as u64).len());
        let began = Instant::now();
        let mut tell = |told| match told {
            Told::Token(token, logprobs) => {
                scores.extend(logprobs);
                if !stopped.get() {
                    stopped.set(on_token(token).is_break());
                }
            }
            Told::Prompt(_) | Told::Kernel(_) => {}
        };
        let place = (0, most as u64);
        let turn = sequence.turn(machine, draft.as_mut(), place, &mut tell, &mut || stopped.get());
        let (ran, ended) = turn.map_err(|broken| match machine.lost() {
            Some(why) => Failure::missing(why),
            None => Failure::from(broken),
        })?;
        let (took, tokens) = (began.elapsed(), sequence.chosen.len() - before);
        let command = Command { place: 0, first, sequences: 1, positions: ran, tokens, took };
        said.ran(&command, &machine.account());
        let guesses = sequence.unpublished();
        said.chosen(&TurnEnd { place: 0, first, positions: ran, tokens, guesses });
        finish = ended;
    }
    Ok(Generated {
        chosen_on: if sequence.chosen_there { "device" } else { "host" },
        tokens: sequence.chosen,
        logits: sequence.rows.unwrap_or_default(),
        logprobs: scored.then_some(scores),
        speculation: sequence.guesser.map(|guesser| guesser.tally),
        draft_us: draft.as_ref().and_then(Draft::us_per_guess),
        ..Generated::default()
    })
}
