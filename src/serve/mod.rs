//! `amk serve`: the HTTP server, in the shape of OpenAI's and Anthropic's APIs. The main thread owns the model, on which requests take turns; another thread runs HTTP.

mod access;
mod answer;
mod answering;
mod body;
mod connections;
mod decode;
mod fields;
mod figures;
mod grammar;
mod http;
mod messages;
mod messages_answer;
mod metrics;
mod origin;
mod otlp;
mod page;
mod prompt;
mod record;
mod refusal;
mod request;
mod responses_answer;
mod tenants;
mod text;
mod tokens;
mod tool_calls;
mod tools;
mod tune;

use std::hash::{BuildHasher, Hasher};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ir::program::{Program, Together, Verified};
use ir::schedule::ScheduleConfig;
use model::Tokenizer;
use serde_json::json;
use telemetry::Reader;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, watch};
use vm_host::KvPool;

use crate::cli::{DeviceChoice, GuessArgs, ServeArgs, widest};
use crate::command_log::{CommandLog, Head, Kernel, Logged};
use crate::constraint::Constraint;
use crate::context::Context;
use crate::device::Gpu;
use crate::engine::{self, Built, DraftModel, Engine, KernelTable, Kernels, Opening, Preempt};
use crate::failure::{Exit, Failure, Outcome};
use crate::memory::{self, Use};
use crate::observe::{MetricsFile, Observer, Sequences, snapshot};
use crate::report;
use crate::schedule_choice::{Auto, Chosen, ScheduleSource, choose, for_batch};
use crate::speculate::Draft;

use access::Keys;
use answer::Heading;
use decode::{Admission, EngineLoop, Job};
use figures::Figures;
use grammar::{Grammars, Wanted};
use origin::Allowed;
use otlp::{Exporter, Spans};
use refusal::Refusal;
use request::{Api, Request};
use tenants::{Caller, Tenants};

/// The time limit of current requests after Ctrl-C or SIGTERM.
const GRACE: Duration = Duration::from_secs(10);

/// A schedule, its program, and the batch size of its commands.
struct Lowered {
    config: ScheduleConfig,
    program: Arc<Verified<Program>>,
    seqs: u32,
    source: ScheduleSource,
    /// The same for a lone sequence, if kernels are switched by load.
    lone: Option<Box<Self>>,
}

impl Lowered {
    fn built(&self) -> Built<'_> {
        Built { program: &self.program, config: &self.config, seqs: self.seqs }
    }

    /// This one, and that of a lone sequence.
    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.lone.as_deref())
    }
}

/// The state shared with the routes.
pub(crate) struct Served {
    /// The names of the model; the first is that of answers.
    names: Vec<String>,
    device: &'static str,
    /// What it is scheduled for.
    target: String,
    /// The source of the schedule; the graph runs without one.
    schedule: Option<ScheduleSource>,
    /// The beginning of fingerprints, and the kernels.
    fingerprint: String,
    kernels: Arc<KernelTable>,
    vocab: u32,
    /// The most positions of a sequence.
    capacity: u32,
    /// The batch size of a command.
    seqs: u32,
    /// Whether sequences with equal beginnings share pages of the cache.
    shares: bool,
    /// The most guesses of a step of a sequence, for requests that do not say.
    speculate: u32,
    /// The model that guesses for it, as it was named.
    draft: Option<String>,
    eos: Vec<u32>,
    tokenizer: Option<Arc<Tokenizer>>,
    /// Made for the first request with a grammar; why there is none otherwise.
    grammars: OnceLock<Result<Grammars, String>>,
    admission: Admission,
    jobs: mpsc::Sender<Job>,
    began: u64,
    answers: AtomicU64,
    taking: Taking,
    page: Reader,
    figures: Arc<Figures>,
    /// Where the spans of requests go, if there is a collector.
    spans: Option<Spans>,
    /// The file of the log of commands.
    command_log: Option<PathBuf>,
}

/// Whether new requests are taken.
#[derive(Debug)]
struct Taking {
    /// True from when the model is loaded.
    loaded: watch::Receiver<bool>,
    /// Whether the server is shutting down.
    leaving: AtomicBool,
}

impl Taking {
    fn check(&self) -> Result<(), Refusal> {
        if self.leaving.load(Ordering::Relaxed) {
            return Err(Refusal::leaving());
        }
        if *self.loaded.borrow() { Ok(()) } else { Err(Refusal::loading()) }
    }
}

impl Served {
    fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    /// A place in the queue.
    fn enter(&self) -> Result<Arc<OwnedSemaphorePermit>, Refusal> {
        self.taking.check()?;
        self.admission.enter().ok_or_else(|| Refusal::full(self.admission.limit()))
    }

    fn tokenizer(&self, field: &str) -> Result<&Tokenizer, Refusal> {
        self.tokenizer.as_deref().ok_or_else(|| {
            let name = self.name();
            let message = format!(
                "{name} has no tokenizer.json, so `{field}` cannot be text; send `prompt` as token ids to /v1/completions"
            );
            Refusal::field(field, message)
        })
    }

    fn encode(&self, text: &str, special: bool, field: &str) -> Result<Vec<u32>, Refusal> {
        let ids = self.tokenizer(field)?.encode(text, special);
        ids.map_err(|error| Refusal::field(field, error.to_string()))
    }

    /// The rule of a text under a grammar.
    fn constraint(&self, Wanted { source, field }: Wanted) -> Result<Box<dyn Constraint>, Refusal> {
        let tokenizer = self.tokenizer(&field)?;
        let grammars = self.grammars.get_or_init(|| Grammars::new(tokenizer, self.vocab));
        let made = grammars.as_ref().map_err(|why| format!("of the model's tokenizer: {why}"));
        let made = made.and_then(|grammars| grammars.constraint(source));
        made.map_err(|why| {
            let message = format!("`{field}` is not supported: {why}");
            Refusal::field(field, message).coded("unsupported_value")
        })
    }

    /// The fingerprint of an answer by these kernels, a bit each; before there is a token, of the first.
    fn fingerprint(&self, kernels: u32) -> String {
        let whole = [&self.fingerprint, "-", &self.kernels.names_of(kernels)].concat();
        whole.trim_end_matches('-').to_owned()
    }

    fn no_model(&self, name: &str) -> Refusal {
        let message =
            format!("there is no model {name:?}; this server has {}", self.names.join(", "));
        let refusal = Refusal::field("model", message).coded("model_not_found");
        Refusal { status: axum::http::StatusCode::NOT_FOUND, ..refusal }
    }

    fn heading(&self, api: Api, request: &Request) -> Heading {
        let number = self.answers.fetch_add(1, Ordering::Relaxed);
        let kind = match api {
            Api::Completions => "cmpl-",
            Api::Chat => "chatcmpl-",
            Api::Messages => "msg_",
            Api::Responses => "resp_",
        };
        Heading {
            api,
            id: format!("{kind}{:x}-{number}", self.began),
            created: seconds(),
            model: self.name().to_owned(),
            fingerprint: self.fingerprint(0),
            scored: request.scored,
            include_usage: request.include_usage,
            tier: request.tier,
            settings: request.settings.clone(),
        }
    }
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// A random seed for a request without one.
fn fresh_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

/// Runs the server until Ctrl-C or SIGTERM.
pub(crate) fn run(args: &ServeArgs) -> Outcome {
    let context = Arc::new(context(args)?);
    let (device, mut gpu) = match args.model.place.device {
        DeviceChoice::Eval => ("eval", None),
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Cuda => {
            let gpu = context.open_here(true)?;
            (if gpu.is_some() { "cuda" } else { "cpu" }, gpu)
        }
    };
    let draft = draft(args, &context, gpu.is_some())?;
    args.prefill.check(gpu.is_some())?;
    gpu.as_ref().map_or_else(|| check_without_gpu(args), |_| Ok(()))?;
    let kv_pool = kv_pool(args, device)?;
    let places = places(args, &context, gpu.is_some())?;
    let lowered = match device {
        "eval" => None,
        _ => Some(lowered(&context, args, places, gpu.is_some())?),
    };
    let file = metrics_file(args);
    let observer = Observer::start(&context, ("serve", device), places as u32, file)?;
    if let Some(gpu) = &mut gpu {
        observer.observe(gpu);
        args.stream.streaming().into_iter().for_each(|streaming| gpu.stream_weights(streaming));
    }
    let said = Sequences::new(observer.publisher(), gpu.is_none());
    let table = kernel_table(lowered.as_ref(), &said);
    let (jobs, inbox) = mpsc::channel();
    let admission = Admission::new(args.queue);
    let of = (device, lowered.as_ref());
    let tuner = tune::tuner(args, of, (&table, &said), &admission)?;
    let (loaded, loading) = watch::channel(false);
    let (tenants, keys) = access(args)?;
    let access = (keys, args.cors.clone());
    let figures = Figures::new(&names(&context, args)[0], tenants);
    let figures = Arc::new(figures.with_tuning(tuner.as_ref().map(tune::Tuner::figures)));
    let drafted = figures.draft.clone();
    let (exporter, spans) = exporter(&figures, observer.publisher().reader())?;
    let with = (jobs, observer.publisher().reader(), loading, (figures, spans));
    let served = Arc::new(serving(&context, args, of, (table.clone(), admission), with)?);
    let metrics = args.metrics.map(|addr| (addr, observer.publisher().reader()));
    // Before the model is loaded, which can take minutes.
    let listener = bind(args.address())?;
    let log = args.log.begin(|| head(&context, args, (device, places), lowered.as_ref()))?;
    std::thread::scope(|scope| {
        // Dropped when this thread no longer uses the model, however it ends.
        let (alive, gone) = watch::channel(());
        let http = std::thread::Builder::new().name("http".to_owned());
        let http = http.spawn_scoped(scope, || listen(listener, metrics, (served, access), gone));
        let http = http.map_err(|error| Failure::usage(format!("no thread: {error}")))?;
        let preempt = tuner.as_ref().map(tune::Tuner::preempt);
        let of = (gpu, lowered.as_ref(), &*table, log.as_ref());
        let opened =
            opened(draft.as_ref(), || engine(&context, args, of, (places, kv_pool, preempt)));
        let worked = opened.and_then(|(engine, draft)| {
            let engine_loop = EngineLoop::new(engine, places, said).with_draft(draft, drafted);
            loaded.send_replace(true);
            match tuner {
                Some(tuner) => tuner.beside(&context, engine_loop, &inbox),
                None => engine_loop.run(&inbox),
            }
            .map_err(|why| lost(&why))
        });
        log.iter().for_each(|log| drop(log.close()));
        drop(alive);
        let listened = http.join().unwrap_or_else(|_| Err(Failure::bug(crate::bug::last_panic())));
        exporter.into_iter().for_each(Exporter::finish);
        worked.and(listened)
    })
}

/// The model and its device. A search for a kernel that is pinned is about steps of its sequences.
fn context(args: &ServeArgs) -> Result<Context, Failure> {
    let context = Context::new(&args.model)?;
    match args.seqs.filter(|_| args.tune.tune) {
        Some(seqs) => context.for_steps_of(seqs),
        None => Ok(context),
    }
}

/// The kernels of the start, and their programs on the telemetry page.
fn kernel_table(lowered: Option<&Lowered>, said: &Sequences) -> Arc<KernelTable> {
    let table = KernelTable::default();
    for (number, of) in lowered.into_iter().flat_map(Lowered::all).enumerate() {
        said.program(number, &of.program);
        let added = table.add(of.seqs, &of.program);
        debug_assert_eq!(added, Some(number), "they differ in their sequences");
    }
    Arc::new(table)
}

/// The number of sequences that decode at the same time, if the model fits so.
fn places(args: &ServeArgs, context: &Context, on_gpu: bool) -> Result<usize, Failure> {
    let most = abi::SESSIONS_MAX as usize;
    let places = args.sessions.unwrap_or(8);
    if !(1..=most).contains(&places) {
        let message = format!("--sessions {places} is out of range: 1 to {most}");
        return Err(Failure::usage(message));
    }
    // The pages that sequences share are beside their own caches.
    let copies = if shares(args) { 2 } else { 1 };
    let (sequences, positions) = (copies * places as u64, u64::from(context.kv_capacity));
    let host = Use::Host { sequences, positions };
    memory::check(&context.model, if on_gpu { Use::Device } else { host })?;
    Ok(places)
}

/// The head of a log of the server's commands.
fn head(
    context: &Context,
    args: &ServeArgs,
    (device, places): (&str, usize),
    lowered: Option<&Lowered>,
) -> Head {
    let on_gpu = device == "cuda";
    let of = |of: &Lowered| Kernel::new(context, (&of.program, &of.config), of.seqs, on_gpu);
    Head {
        places,
        shares: shares(args),
        kv_pool: args.kv_pool,
        prefill: args.prefill.prefill.name(),
        kernels: lowered.into_iter().flat_map(Lowered::all).map(of).collect(),
        ..Head::new(context, "serve", device)
    }
}

/// The draft that the arguments name. What makes or loads kernels between requests could wait for its kernel.
fn draft(args: &ServeArgs, context: &Context, on_gpu: bool) -> Result<Option<DraftModel>, Failure> {
    let GuessArgs { speculate, draft } = &args.guesses;
    let other = [("--tune", args.tune.tune), ("--stream-weights", args.stream.stream_weights)];
    if let Some((flag, _)) = other.into_iter().find(|(_, given)| draft.is_some() && *given) {
        return Err(Failure::usage(format!("{flag} is for one model: leave it or --draft out")));
    }
    DraftModel::of(draft.as_deref(), *speculate, (context, on_gpu), context.kv_capacity)
}

/// Refuses what only a GPU can do.
fn check_without_gpu(args: &ServeArgs) -> Result<(), Failure> {
    if args.stream.stream_weights {
        return Err(Failure::usage("--stream-weights is about the GPU; add --device cuda"));
    }
    if args.seqs.is_some_and(|seqs| seqs > 1) {
        let message = "--batch is for --device cuda: on the CPU sequences take turns; leave it out";
        return Err(Failure::usage(message));
    }
    Ok(())
}

/// What an engine is made of: the GPU, the schedules, the kernels that it may be switched to, the log of its commands.
type Parts<'a, 'l> =
    (Option<Gpu<'a>>, Option<&'a Lowered>, &'a KernelTable, Option<&'l CommandLog>);

/// Loads the model, and logs the commands if there is a log.
fn engine<'a>(
    context: &'a Context,
    args: &ServeArgs,
    (mut gpu, lowered, table, log): Parts<'a, '_>,
    (places, kv_pool, preempt): (usize, KvPool, Option<Preempt>),
) -> Result<Box<dyn Engine + 'a>, Failure> {
    log.into_iter().zip(&mut gpu).for_each(|(log, gpu)| gpu.show_ring(log.tap()));
    preempt.into_iter().zip(&mut gpu).for_each(|(preempt, gpu)| gpu.preempted_by(preempt));
    let kernels = lowered.map(|of| Kernels {
        batch: of.built(),
        lone: of.lone.as_deref().map(Lowered::built),
        table: Some(table),
    });
    let prefill = args.prefill.prefill;
    // A search measures kernels as they are shipped, and a log has no masks: then the host samples under a grammar.
    let masks = log.is_none() && !args.tune.tune;
    let opening = Opening { places, kv_pool, prefill, shares: shares(args), masks };
    let engine = engine::open(context, gpu, kernels, &opening)?;
    Ok(match log {
        Some(log) => Box::new(Logged::new(engine, log.clone())),
        None => engine,
    })
}

/// Opens the draft, if there is one, before the kernel of the model is launched.
fn opened<'a, E>(
    draft: Option<&'a DraftModel>,
    engine: impl FnOnce() -> Result<E, Failure>,
) -> Result<(E, Option<Draft<'a>>), Failure> {
    let draft = draft.map(DraftModel::open).transpose()?;
    Ok((engine()?, draft))
}

/// The file of the metrics, if there is one.
fn metrics_file(args: &ServeArgs) -> Option<MetricsFile> {
    let every = Duration::from_secs(u64::from(args.metrics_every));
    args.metrics_file.clone().map(|path| MetricsFile { path, every })
}

/// Whether sequences with equal beginnings share pages of the cache.
fn shares(args: &ServeArgs) -> bool {
    // On a GPU keys and values of a prompt in chunks have other bits than those of steps, and those of one schedule
    // other bits than those of the next.
    !args.no_prefix_cache && !args.deterministic && !args.tune.tune
}

/// The failure of a server whose device is lost.
fn lost(why: &str) -> Failure {
    Failure::missing(format!("{why}; every request was told, and the server ends: start it again"))
}

/// The pool of key/value pages.
fn kv_pool(args: &ServeArgs, device: &str) -> Result<KvPool, Failure> {
    let Some(positions) = args.kv_pool else { return Ok(KvPool::Fitting) };
    if device != "cuda" {
        let message = format!(
            "--kv-pool is of the caches on a GPU, and --device {device} has none: leave it out, or use --device cuda"
        );
        return Err(Failure::usage(message));
    }
    Ok(KvPool::Positions(positions))
}

/// The schedule for the end of a full cache, where steps are slowest, or that of a batch, and its program. On GPUs the
/// batch size is the largest that the places fill and the kernel supports, unless weights are codes or an argument sets it.
fn lowered(
    context: &Context,
    args: &ServeArgs,
    places: usize,
    on_gpu: bool,
) -> Result<Lowered, Failure> {
    let full = choose(context, &args.config, context.kv_capacity, Auto::Fastest)?;
    let lower = |seqs: u32| {
        let Chosen { config, source } = match (&args.config.config, seqs) {
            (Some(_), _) | (None, 1) => full.clone(),
            (None, seqs) => for_batch(context, &args.config, &full, seqs)?,
        };
        let program = Arc::new(context.lowered(&config)?);
        Ok::<_, Failure>(Lowered { config, program, seqs, source, lone: None })
    };
    match args.seqs {
        Some(seqs) => return lower(seqs),
        None if !on_gpu => return lower(1),
        // Steps of several sequences with quantised weights are timed for one model, and kernels of them have not been
        // switched by load on a GPU, so they are opt-in.
        None if context.graph().codes().is_some() => {
            report::say(
                "note: sequences take turns, since the weights are quantised; --batch 8 asks for steps of eight sequences",
            );
            return lower(1);
        }
        None => {}
    }
    let several = lower(widest(places))?;
    match shared(&several) {
        Ok(()) if several.seqs == 1 || args.deterministic => Ok(several),
        Ok(()) => Ok(Lowered { lone: Some(Box::new(lower(1)?)), ..several }),
        Err(why) => {
            report::say(&format!("note: sequences take turns, a command for each: {why}"));
            lower(1)
        }
    }
}

/// Whether several sequences can share a program in one command; if not, why.
fn shared(lowered: &Lowered) -> Result<(), String> {
    let Lowered { program, seqs, .. } = lowered;
    if *seqs == 1 {
        return Ok(());
    }
    let proven = Together::new(Verified::clone(program), *seqs);
    proven.map(|_| ()).map_err(|violations| violations.to_string())
}

/// The names of the model.
fn names(context: &Context, args: &ServeArgs) -> Vec<String> {
    let mut names = args.served_model_name.clone();
    if names.is_empty() {
        names.push(context.graph().name.clone());
    }
    names
}

/// What the routes reach: the decode thread, the telemetry page, whether the model is loaded, metrics and spans.
type With = (mpsc::Sender<Job>, Reader, watch::Receiver<bool>, (Arc<Figures>, Option<Spans>));

/// Sends metrics and spans to a collector, if the environment names one.
fn exporter(
    figures: &Arc<Figures>,
    page: Reader,
) -> Result<(Option<Exporter>, Option<Spans>), Failure> {
    let figures = figures.clone();
    let text = move || {
        let page = snapshot(&page)?;
        let began_ns = page.head.started_ns;
        Some((figures.text(page, true), began_ns))
    };
    Ok(Exporter::start(Box::new(text))?.unzip())
}

fn serving(
    context: &Context,
    args: &ServeArgs,
    (device, lowered): (&'static str, Option<&Lowered>),
    (kernels, admission): (Arc<KernelTable>, Admission),
    (jobs, page, loaded, (figures, spans)): With,
) -> Result<Served, Failure> {
    let graph = context.graph();
    Ok(Served {
        names: names(context, args),
        device,
        target: context.target.name.clone(),
        schedule: lowered.map(|lowered| lowered.source.clone()),
        fingerprint: format!("amk-{}-{device}", env!("CARGO_PKG_VERSION")),
        kernels,
        vocab: graph.vocab,
        capacity: context.kv_capacity,
        seqs: lowered.map_or(1, |lowered| lowered.seqs),
        shares: shares(args),
        speculate: args.guesses.speculate,
        draft: args.guesses.draft.clone(),
        eos: graph.eos.clone(),
        tokenizer: context.model.tokenizer()?.map(Arc::new),
        grammars: OnceLock::new(),
        admission,
        jobs,
        began: seconds(),
        answers: AtomicU64::new(0),
        taking: Taking { loaded, leaving: AtomicBool::new(false) },
        page,
        figures,
        spans,
        command_log: args.log.command_log.clone(),
    })
}

/// The variable of the API key: other users of a machine can read the arguments of a process, but not its environment.
const KEY: &str = "AMK_API_KEY";

/// The tenants, and the keys that open the server, if there are any. Checks the origins of pages, too.
fn access(args: &ServeArgs) -> Result<(Arc<Tenants>, Keys), Failure> {
    let key = args.api_key.clone().or_else(|| std::env::var(KEY).ok());
    if key.as_ref().is_some_and(|key| key.trim().is_empty()) {
        let message =
            format!("the API key is empty: give --api-key or {KEY} a text, or leave both out");
        return Err(Failure::usage(message));
    }
    for origin in &args.cors {
        let scheme =
            origin.split_once("://").filter(|(_, host)| !host.is_empty() && !host.contains('/'));
        if origin != "*" && scheme.is_none() {
            let message = format!(
                "--cors {origin:?} is no origin; legal: SCHEME://HOST[:PORT], or * for any"
            );
            return Err(Failure::usage(message));
        }
    }
    let tenants = args.tenants.as_deref().map(Tenants::open).transpose()?.unwrap_or_default();
    let own = key.as_deref().map(|key| (key.trim(), Caller::default()));
    let keys = Keys::new(own.into_iter().chain(tenants.keys()));
    Ok((Arc::new(tenants), keys))
}

fn bind(addr: SocketAddr) -> Result<(Runtime, TcpListener), Failure> {
    let failed = |what: &str, error: std::io::Error| Failure::usage(format!("{what}: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| failed("no runtime", error))?;
    let listener = runtime.block_on(TcpListener::bind(addr)).map_err(|error| {
        failed(&format!("cannot listen on {addr}; --addr takes another address"), error)
    })?;
    Ok((runtime, listener))
}

/// Serves HTTP until Ctrl-C or SIGTERM, or until the decode thread ends.
fn listen(
    (runtime, listener): (Runtime, TcpListener),
    metrics: Option<(SocketAddr, Reader)>,
    (served, (keys, origins)): (Arc<Served>, (Keys, Vec<String>)),
    gone: watch::Receiver<()>,
) -> Outcome {
    let failed = |what: &str, error: std::io::Error| Failure::usage(format!("{what}: {error}"));
    let answer = runtime.block_on(async {
        let (stop, stopped) = watch::channel(0_u32);
        let bound = listener.local_addr().map_err(|error| failed("no address", error))?;
        let metrics = match metrics {
            Some((addr, reader)) => Some(metrics::listen(addr, reader).await?),
            None => None,
        };
        let begin = begin(&served, stop, (bound, !keys.is_empty()), metrics);
        let leave = async {
            after(1, stopped.clone(), gone.clone()).await;
            served.taking.leaving.store(true, Ordering::Relaxed);
        };
        let most = connections::most(served.admission.limit());
        let allowed = Allowed { loopback: bound.ip().is_loopback(), origins };
        let app = http::router(served.clone(), allowed, keys);
        tokio::select! {
            () = connections::serve(listener, app, most, leave) => {}
            () = deadline(stopped.clone(), gone.clone()) => {
                report::say("requests that were under way are broken off");
            }
            failure = begin => return Err(failure),
        }
        Ok(Exit::Yes)
    });
    // Drops the connections and their senders: the decode thread ends when the last sender is dropped.
    runtime.shutdown_timeout(Duration::from_secs(1));
    answer
}

/// Takes requests once the model is loaded, and says so. Completes with a failure only.
async fn begin(
    served: &Served,
    stop: watch::Sender<u32>,
    bound: (SocketAddr, bool),
    metrics: Option<SocketAddr>,
) -> Failure {
    let mut loaded = served.taking.loaded.clone();
    if loaded.wait_for(|loaded| *loaded).await.is_ok() {
        // Until now a signal ends the process at once: there is nothing to finish.
        signals(stop);
        if let Err(failure) = announce(bound, metrics, served) {
            return failure;
        }
    }
    std::future::pending().await
}

/// Counts Ctrl-C and SIGTERM signals.
fn signals(stop: watch::Sender<u32>) {
    let caught = [SignalKind::interrupt(), SignalKind::terminate()].map(|kind| {
        let mut caught = signal(kind)?;
        let stop = stop.clone();
        Ok::<_, std::io::Error>(tokio::spawn(async move {
            while caught.recv().await.is_some() {
                stop.send_modify(|times| *times += 1);
            }
        }))
    });
    if caught.iter().any(Result::is_err) {
        report::say("note: Ctrl-C or SIGTERM cannot be caught here; it ends the server at once");
    }
}

fn announce(
    (bound, keyed): (SocketAddr, bool),
    metrics: Option<SocketAddr>,
    served: &Served,
) -> Result<(), Failure> {
    for addr in [Some(bound).filter(|_| !keyed), metrics].into_iter().flatten() {
        if !addr.ip().is_loopback() {
            report::say(&format!(
                "warning: {addr} can be reached from other machines, and there is no authentication"
            ));
        }
    }
    report::say(&format!(
        "serving {} on http://{bound}/v1 ({}); Ctrl-C ends it",
        served.name(),
        served.device
    ));
    report::document(&json!({
        "schema": "amk.serve.v2",
        "url": format!("http://{bound}/v1"),
        "model": served.name(),
        "names": served.names,
        "device": served.device,
        "target": served.target,
        // Where tokens are sampled, unless a request needs log probabilities.
        "sampling": if served.device == "cuda" { "device" } else { "host" },
        "kv_capacity": served.capacity,
        "batch": served.seqs,
        "kernels": served.kernels.names().collect::<Vec<_>>(),
        "prefix_cache": served.shares,
        "draft": served.draft,
        "schedule_source": served.schedule,
        "tokenizer": served.tokenizer.is_some(),
        "metrics": metrics.map(|addr| format!("http://{addr}/metrics")),
        "command_log": served.command_log,
        "pid": std::process::id(),
    }))
}

/// Completes after this many signals, or when the decode thread has ended.
async fn after(times: u32, mut stopped: watch::Receiver<u32>, mut gone: watch::Receiver<()>) {
    tokio::select! {
        () = async {
            // An error: there is no handler, and so no signal.
            if stopped.wait_for(|seen| *seen >= times).await.is_err() {
                std::future::pending::<()>().await;
            }
        } => {}
        // The sender never sends; it is dropped.
        _ = gone.changed() => {}
    }
}

/// Completes after the grace period, or with the second signal.
async fn deadline(stopped: watch::Receiver<u32>, gone: watch::Receiver<()>) {
    after(1, stopped.clone(), gone.clone()).await;
    if gone.has_changed().is_err() {
        // The decode thread has ended; current answers have received their end.
        return tokio::time::sleep(Duration::from_secs(1)).await;
    }
    report::say("finishing requests that are under way; Ctrl-C again breaks them off");
    tokio::select! {
        () = tokio::time::sleep(GRACE) => {}
        () = after(2, stopped, gone) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_taken_from_the_load_to_the_end() {
        let (loaded, loading) = watch::channel(false);
        let taking = Taking { loaded: loading, leaving: AtomicBool::new(false) };
        assert_eq!(taking.check().unwrap_err().code, Some("loading"));
        loaded.send_replace(true);
        assert_eq!(taking.check(), Ok(()));
        taking.leaving.store(true, Ordering::Relaxed);
        assert_eq!(taking.check().unwrap_err().code, Some("leaving"));
    }
}
