//! A server whose machine is the reference VM with a clock that is made up: schedules take the time that their
//! programs' ids say. The values are real, so every gate is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use ir::sampling::Sampling;
use ir::schedule::KernelConfig;
use reference_vm::machine::{Machine as ReferenceVm, Run};
use reference_vm::{Order, argmax};
use remote::Served as Driver;
use search::{Costs, DeviceError, DeviceInfo, Handle, Outcome, Plan, Trial};
use serde_json::json;
use sessions::{Priority, Tenant};
use tokio::sync::mpsc::unbounded_channel;

use super::*;
use crate::cli::{DeviceChoice, ModelArgs, PlaceArgs};
use crate::engine::{Bench, Broken, Engine, reference_of};
use crate::host_rules::HostRules;
use crate::sequence::Finish;
use crate::serve::decode::{Event, Work};

/// What is made up about a machine.
#[derive(Default)]
struct Script {
    /// Programs that take less than this are wrong on tokens that the search did not have.
    wrong_below: f64,
    /// Whether what has served takes its time twice when it is confirmed.
    fades: bool,
    /// The program that the server begins with.
    first: String,
    /// The levers of `--tune-plant`: the slow one, and the one whose last gate fails.
    planted: Option<[String; 2]>,
}

/// The machine.
struct Clocked<'a> {
    engine: Box<dyn Engine + 'a>,
    context: &'a Context,
    script: Script,
    programs: Vec<Arc<Verified<Program>>>,
    /// The tokens of each program's sequence; a request takes them all.
    sequences: BTreeMap<u64, Vec<u32>>,
    /// The first tokens that a search ran.
    searched: Option<Vec<u32>>,
    known: BTreeMap<(String, Vec<u32>), Vec<Vec<f32>>>,
    led: BTreeSet<String>,
    preempt: Preempt,
    preempted: bool,
    /// Sequences of requests.
    open: BTreeSet<usize>,
    /// Calls that ended early, and the programs that were switched to.
    seen: Arc<Mutex<(usize, Vec<String>)>>,
}

/// Microseconds of a program: 60 to 100, and 100 of the first; of planted ones 150 and 60.
fn us(script: &Script, id: &str) -> f64 {
    let number = u64::from_str_radix(&id[..4], 16).unwrap();
    match &script.planted {
        _ if id == script.first => 100.0,
        Some([slow, _]) if id == slow => 150.0,
        Some([_, wrong]) if id == wrong => 60.0,
        Some(_) | None => 60.0 + (number % 40) as f64,
    }
}

impl Clocked<'_> {
    fn id(&self, program: Handle) -> String {
        self.programs[program.0 as usize].id()
    }

    fn check(&mut self) -> Result<(), DeviceError> {
        // So no gap between two tokens of a request has work of the search in it.
        assert!(self.open.is_empty(), "the search works beside open sequences");
        if !(self.preempt)() {
            return Ok(());
        }
        self.preempted = true;
        self.seen.lock().unwrap().0 += 1;
        Err(DeviceError::Unavailable { reason: "a request came".into() })
    }

    fn values(&mut self, program: Handle, tokens: &[u32]) -> Vec<Vec<f32>> {
        let searched = self.searched.get_or_insert_with(|| tokens[..4].to_vec()).clone();
        let id = self.id(program);
        let us = us(&self.script, &id);
        let key = (id, tokens.to_vec());
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let (graph, weights) = (self.context.graph(), &*self.context.model.weights);
        let mut vm = ReferenceVm::new(&self.programs[program.0 as usize], graph, weights).unwrap();
        let Run::Finished(mut outputs) = vm.run(tokens, Order::Waves).unwrap() else {
            panic!("it halted");
        };
        if us < self.script.wrong_below && !tokens.starts_with(&searched) {
            outputs.logits.iter_mut().flatten().for_each(|value| *value = 1.0 - *value);
        }
        self.known.insert(key, outputs.logits.clone());
        outputs.logits
    }
}

impl Driver for Clocked<'_> {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo { name: "clocked".into(), bandwidth: Some(1e15), ..DeviceInfo::default() }
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        _: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        self.programs.push(program.clone());
        Ok(Handle(self.programs.len() as u64 - 1))
    }

    fn run(
        &mut self,
        program: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError> {
        self.check()?;
        assert!(first == 0 || self.holds(program, &tokens[..first]), "it has the sequence");
        let rows = self.values(program, tokens);
        self.check()?;
        self.sequences.insert(program.0, tokens.to_vec());
        let vocab = self.context.graph().vocab as usize;
        for (place, row) in logits.chunks_mut(vocab).zip(&rows[first..]) {
            place.copy_from_slice(row);
        }
        Ok(rows[first..].iter().map(|row| argmax(row)).collect())
    }

    fn time(
        &mut self,
        programs: [Handle; 2],
        plan: &Plan<'_>,
        last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
        self.check()?;
        let ids = programs.map(|program| self.id(program));
        let mut times = ids.each_ref().map(|id| us(&self.script, id));
        // Only a confirmation times what has served against the first one.
        if self.script.fades && ids[0] == self.script.first && self.led.contains(&ids[1]) {
            times[1] *= 2.0;
        }
        let vocab = self.context.graph().vocab as usize;
        let mut chosen = [0; 2];
        for (index, program) in programs.into_iter().enumerate() {
            let rows = self.values(program, plan.tokens);
            let row = rows.last().unwrap();
            last[index * vocab..][..vocab].copy_from_slice(row);
            chosen[index] = argmax(row);
        }
        let [a, b] = times;
        Ok((vec![[a, b, b, a]; plan.rounds], chosen))
    }

    fn costs(&self) -> Costs {
        Costs::default()
    }

    fn release(&mut self, _: Handle) {}
}

impl Bench for Clocked<'_> {
    fn holds(&self, program: Handle, tokens: &[u32]) -> bool {
        self.sequences.get(&program.0).is_some_and(|fed| fed.starts_with(tokens))
    }

    fn take_preempted(&mut self) -> bool {
        std::mem::take(&mut self.preempted)
    }
}

impl Engine for Clocked<'_> {
    fn begin(&mut self, place: usize, positions: u64, prompt: &[u32]) -> Result<usize, Broken> {
        self.sequences.clear();
        self.open.insert(place);
        self.engine.begin(place, positions, prompt)
    }

    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken> {
        self.engine.feed(place, tokens, read)
    }

    fn end(&mut self, place: usize) {
        self.open.remove(&place);
        self.engine.end(place);
    }

    fn kernel(&self) -> usize {
        self.engine.kernel()
    }

    fn bench(&mut self) -> Option<&mut dyn Bench> {
        Some(self)
    }

    fn switch(
        &mut self,
        number: usize,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<(), String> {
        self.seen.lock().unwrap().1.push(program.id());
        self.led.insert(program.id());
        // A device knows programs by their allocation: the search would release what the server runs.
        let searched = self.programs.iter().any(|searched| Arc::ptr_eq(searched, program));
        assert!(!searched, "the server has a program of the search");
        self.engine.switch(number, program, kernel)
    }
}

/// Clients without a pause.
const CROWD: usize = 4;

/// What a server did while it tuned itself.
struct Done {
    state: String,
    figures: Arc<TuneFigures>,
    /// Calls of the search that requests ended early.
    preempted: usize,
    /// The programs that were switched to, with their times.
    served: Vec<(String, f64)>,
    /// Tokens and kernels of each answer; several kernels are a fault.
    answers: Vec<(Vec<u32>, String)>,
    /// The head of the telemetry page at the end.
    page: abi::Telemetry,
    /// The trials in the ledger.
    rows: Vec<Trial>,
}

/// The model, for steps of this many sequences.
fn context(seqs: u32) -> Arc<Context> {
    let place =
        PlaceArgs { device: DeviceChoice::Cpu, kv_capacity: Some(160), ..PlaceArgs::default() };
    let context = Context::load("toy", &place).and_then(|context| context.for_steps_of(seqs));
    Arc::new(context.unwrap_or_else(|f| panic!("{}", f.message)))
}

fn tune_args(folder: &std::path::Path, more: &[&str]) -> ServeArgs {
    use clap::Parser as _;
    let out = folder.join("search");
    let base = [
        "amk",
        "serve",
        "--model",
        "toy",
        "--device",
        "cpu",
        "--kv-capacity",
        "160",
        "--tune",
        "--out",
    ];
    let all = base.into_iter().chain([out.to_str().unwrap()]).chain(more.iter().copied());
    let parsed = crate::cli::Cli::try_parse_from(all).unwrap_or_else(|error| panic!("{error}"));
    let Some(crate::cli::Command::Serve(args)) = parsed.command else { panic!("not `serve`") };
    args
}

/// The tokens of a greedy request and the numbers of its kernels.
fn request(jobs: &mpsc::Sender<Job>, admission: &Admission, number: u32) -> (Vec<u32>, u32) {
    let work = Work {
        prompt: vec![5 + number % 7, 6, 7],
        limit: 6,
        sampling: Sampling::default(),
        host: HostRules::default(),
        constraint: None,
        stop: Vec::new(),
        logprobs: None,
        priority: Priority::Normal,
        speculate: 0,
    };
    let admitted = admission.enter().unwrap();
    let (to, mut events) = unbounded_channel();
    let tenant = Tenant::default();
    jobs.send(Job { work, tenant, to, admitted, arrived_ns: telemetry::now_ns() }).unwrap();
    let (mut tokens, mut kernel, mut kernels) = (Vec::new(), 0, 0);
    loop {
        match events.blocking_recv().unwrap() {
            Event::Kernel(next) => kernel = next,
            Event::Token { id, .. } => {
                tokens.push(id);
                kernels |= 1 << kernel;
            }
            Event::End(finish) => {
                assert_eq!(finish, Finish::Length);
                return (tokens, kernels);
            }
            Event::Begun | Event::Prompt(_) | Event::Reused(_) => {}
        }
    }
}

/// Clients that send the next request at once, until the search has ended.
fn crowd(
    jobs: &mpsc::Sender<Job>,
    admission: &Admission,
    figures: &TuneFigures,
) -> Vec<(Vec<u32>, u32)> {
    let (next, began) = (AtomicU32::new(0), Instant::now());
    let answers = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..CROWD {
            scope.spawn(|| {
                while !figures.has_ended() {
                    assert!(began.elapsed() < Duration::from_secs(120), "it does not end");
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let answer = request(jobs, admission, number);
                    answers.lock().unwrap().insert(number, answer);
                }
            });
        }
    });
    answers.into_inner().unwrap().into_values().collect()
}

/// Sends requests until the search has ended, with idle moments between.
fn clients(
    jobs: &mpsc::Sender<Job>,
    admission: &Admission,
    figures: &TuneFigures,
) -> Vec<(Vec<u32>, u32)> {
    let (mut answers, began) = (Vec::new(), Instant::now());
    while !figures.has_ended() {
        assert!(began.elapsed() < Duration::from_secs(120), "it does not end");
        answers.push(request(jobs, admission, answers.len() as u32));
        std::thread::sleep(Duration::from_millis(40));
    }
    answers.push(request(jobs, admission, answers.len() as u32));
    answers
}

/// Runs a server from the neutral schedule with requests until its search has ended.
fn served(script: Script, more: &[&str]) -> Done {
    served_by(1, script, more, false)
}

/// The same with one kernel, for this many sequences, and whether clients leave no time between requests.
fn served_by(seqs: u32, script: Script, more: &[&str], busy: bool) -> Done {
    let folder = tempfile::tempdir().unwrap();
    let (context, args) = (context(seqs), tune_args(folder.path(), more));
    let config = context.neutral_config();
    let program = Arc::new(context.lowered(&config).unwrap_or_else(|f| panic!("{}", f.message)));
    let planted = args.tune.tune_plant.then(|| planted(&context, &config));
    let script = Script { first: program.id(), planted, ..script };
    let table = Arc::new(KernelTable::default());
    table.add(seqs, &program);
    let source = crate::schedule_choice::ScheduleSource::default();
    let lowered = Lowered { config, program: program.clone(), seqs, source, lone: None };
    let at = telemetry::Folder::at(folder.path());
    let (page, _) = telemetry::Publisher::new(&at, |_| {}).unwrap();
    let (admission, said) = (Admission::new(8), Sequences::new(&page, true));
    let tuner = tuner(&args, ("cpu", Some(&lowered)), (&table, &said), &admission);
    let mut tuner = tuner.unwrap_or_else(|f| panic!("{}", f.message)).unwrap();
    if busy {
        tuner = tuner.patient_for(Duration::from_millis(5));
    }
    let figures = tuner.tuned.figures.clone();
    let seen: Arc<Mutex<(usize, Vec<String>)>> = Arc::default();
    let programs = |number| table.program(number).unwrap();
    let engine = Clocked {
        engine: Box::new(reference_of(&context, programs, None)),
        context: &context,
        script,
        programs: Vec::new(),
        sequences: BTreeMap::new(),
        searched: None,
        known: BTreeMap::new(),
        led: BTreeSet::new(),
        preempt: tuner.preempt(),
        preempted: false,
        open: BTreeSet::new(),
        seen: seen.clone(),
    };
    let (first, planted) = (engine.script.first.clone(), engine.script.planted.clone());
    let engine_loop = EngineLoop::new(Box::new(engine), 8, said);
    let (jobs, inbox) = mpsc::channel();
    let answers = std::thread::scope(|scope| {
        let (admission, figures) = (&admission, &figures);
        let clients = scope.spawn(move || match busy {
            true => crowd(&jobs, admission, figures),
            false => clients(&jobs, admission, figures),
        });
        assert_eq!(tuner.beside(&context, engine_loop, &inbox), Ok(()));
        clients.join().unwrap()
    });
    let (preempted, switched) = seen.lock().unwrap().clone();
    let script = Script { first, planted, ..Script::default() };
    let served = switched
        .into_iter()
        .map(|id| {
            let us = us(&script, &id);
            (id, us)
        })
        .collect();
    let answers = answers.into_iter().map(|(tokens, kernels)| (tokens, table.names_of(kernels)));
    Done {
        state: figures.state_now(),
        figures,
        preempted,
        served,
        answers: answers.collect(),
        page: crate::observe::snapshot(&page.reader()).unwrap().head,
        rows: trials(&folder.path().join("search/ledger.jsonl")),
    }
}

/// The programs of the levers of `--tune-plant`.
fn planted(context: &Context, config: &ScheduleConfig) -> [String; 2] {
    let Plant { slow, wrong } = Plant::of(context, config);
    [slow, wrong]
        .map(|config| context.lowered(&config).unwrap_or_else(|f| panic!("{}", f.message)).id())
}

/// The trials of a ledger.
fn trials(ledger: &std::path::Path) -> Vec<Trial> {
    let rows = corpus::read(ledger).unwrap().records.into_iter();
    rows.filter(|row| row["kind"] == "trial")
        .map(|row| serde_json::from_value(row).unwrap())
        .collect()
}

impl Done {
    /// Each answer is by one schedule, and has the tokens of the first one.
    fn check(&self) {
        let program = |name: &str| name.split_once('-').unwrap().1.to_owned();
        for (number, (tokens, kernel)) in self.answers.iter().enumerate() {
            assert_eq!(
                (tokens.len(), tokens),
                (6, &self.answers[number % 7].0),
                "request {number}"
            );
            let known = self.served.iter().any(|(id, _)| id.starts_with(&program(kernel)));
            assert!(known || *kernel == self.answers[0].1, "{kernel} never served");
        }
        // From one answer to the next the kernel changes as often as the server was switched, at most.
        let changes = self.answers.windows(2).filter(|two| two[0].1 != two[1].1).count();
        assert!(changes <= self.served.len(), "{changes} changes, {:?}", self.served);
    }
}

#[test]
fn from_a_slow_start_the_goal_is_reached_beside_requests() {
    let done = served(Script::default(), &["--goal", "20%"]);
    done.check();
    assert_eq!(done.state, "goal");
    let (id, us) = done.served.last().expect("a switch");
    assert!(*us <= 80.0, "{:?}", done.served);
    assert!(done.answers.last().unwrap().1.ends_with(&id[..8]));
    assert!(done.figures.gain_now() >= 0.2);
    assert!(done.preempted > 0, "a request came while the machine was the search's");
}

/// A server whose kernel for batches is pinned tunes that one.
#[test]
fn a_kernel_for_batches_is_tuned_where_it_is_the_only_one() {
    let done = served_by(8, Script::default(), &["--goal", "20%"], false);
    done.check();
    assert_eq!(done.state, "goal");
    assert!(done.figures.gain_now() >= 0.2);
    for (_, kernel) in &done.answers {
        assert!(kernel.starts_with("b8-"), "{kernel}");
    }
}

#[test]
fn what_fails_the_gate_before_a_switch_never_serves() {
    let script = Script { wrong_below: 80.0, ..Script::default() };
    let done = served(script, &["--budget", "40"]);
    done.check();
    assert!(done.figures.refused_now() > 0, "the fastest are wrong");
    assert!(done.served.iter().all(|(_, us)| *us >= 80.0), "{:?}", done.served);
    assert_eq!(done.state, "trials");
    // Nor does the search go on from it: each kept trial has served.
    assert_eq!(done.page.tune_rolled_back, done.page.tune_refused);
    for row in &done.rows {
        let id = row.verdict.program_id.as_deref().unwrap();
        let served = done.served.iter().any(|(served, _)| served == id);
        assert!(served || row.outcome != Outcome::Kept, "trial {}: {}", row.trial, row.why);
        assert!(!served || row.outcome != Outcome::Disagreed, "trial {}: {}", row.trial, row.why);
    }
}

#[test]
fn what_the_confirmation_reverts_leaves_the_server() {
    let script = Script { fades: true, ..Script::default() };
    let done = served(script, &["--goal", "10%"]);
    done.check();
    let served: Vec<f64> = done.served.iter().map(|(_, us)| *us).collect();
    assert!(served.len() > 1 && served[0] < 100.0, "{served:?}");
    assert_eq!(served.last(), Some(&100.0), "back to the first");
    assert_eq!((done.figures.rolled_back_now(), done.figures.gain_now()), (1, 0.0));
    assert_eq!((done.page.tune_rolled_back, done.page.tune_gain_high), (1, 0));
    assert_eq!(done.answers.last().unwrap().1, done.answers[0].1);
}

/// No request ends the search's work: it works in turns.
#[test]
fn beside_clients_without_a_pause_the_search_has_turns() {
    let done = served_by(8, Script::default(), &["--goal", "20%"], true);
    assert_eq!(done.state, "goal");
    assert!(done.figures.gain_now() >= 0.2 && !done.served.is_empty());
    assert!(done.answers.len() > 8 * CROWD, "{} answers", done.answers.len());
    let mut texts = BTreeMap::new();
    for (number, (tokens, kernel)) in done.answers.iter().enumerate() {
        let text = texts.entry(number % 7).or_insert_with(|| tokens.clone());
        assert_eq!((tokens.len(), tokens), (6, &*text), "request {number}");
        assert!(!kernel.contains('+'), "two schedules in an answer: {kernel}");
    }
    let (_, last) = done.answers.last().unwrap();
    assert!(last.ends_with(&done.served.last().unwrap().0[..8]), "{last}");
}

/// Beside clients without a pause a slow lever is reverted, one whose last gate fails is taken back, and the goal is reached
/// by others: what `amk top` says, and what `amk generate` gives again.
#[test]
fn planted_levers_are_not_kept_and_every_answer_is_repeated() {
    let done = served_by(1, Script::default(), &["--goal", "20%", "--tune-plant"], true);
    let tuning = crate::top::document::tuning(&done.page).unwrap();
    assert_eq!(
        [&tuning["stopped"], &tuning["rolled_back"]],
        [&json!("goal"), &json!(1)],
        "{tuning}"
    );
    assert!(tuning["kept"].as_u64() >= Some(1), "{tuning}");
    assert!(tuning["gain_ci"]["low"].as_f64() >= Some(0.2), "{tuning}");
    let [slow, wrong] = [&done.rows[1], &done.rows[2]];
    assert_eq!(
        (slow.outcome, wrong.outcome),
        (Outcome::Reverted, Outcome::Disagreed),
        "{}",
        wrong.why
    );
    assert!(
        slow.gain.unwrap().high < -0.4 && wrong.gain.is_none(),
        "{:?} {:?}",
        slow.gain,
        wrong.gain
    );
    assert!(wrong.why.starts_with("before it was to lead: device disagrees"), "{}", wrong.why);
    let mut again = BTreeMap::new();
    for (number, (tokens, kernel)) in done.answers.iter().enumerate() {
        let repeated =
            again.entry((number % 7, kernel)).or_insert_with(|| done.repeated(number, kernel));
        assert_eq!(repeated, tokens, "request {number} by {kernel}");
    }
    assert!(again.keys().any(|(_, kernel)| **kernel != done.answers[0].1), "a switch");
}

impl Done {
    /// What `amk generate` gives to a request with the schedule of a kernel.
    fn repeated(&self, number: usize, kernel: &str) -> Vec<u32> {
        let id = kernel.strip_prefix("b1-").unwrap();
        let of = |row: &&Trial| {
            row.verdict.program_id.as_ref().is_some_and(|program| program.starts_with(id))
        };
        let row = self.rows.iter().find(of).unwrap_or_else(|| panic!("{kernel} has no trial"));
        let place =
            PlaceArgs { device: DeviceChoice::Cpu, kv_capacity: Some(160), ..PlaceArgs::default() };
        let mut engine = crate::Engine::of(&ModelArgs { model: "toy".to_owned(), place })
            .unwrap_or_else(|f| panic!("{}", f.message));
        engine.config.config = Some(serde_json::from_value(json!(row.config)).unwrap());
        let prompt = crate::Prompt::Tokens(vec![5 + number as u32 % 7, 6, 7]);
        let request = crate::Request { max_new_tokens: 6, ..crate::Request::new(prompt) };
        engine.generate(&request).unwrap_or_else(|f| panic!("{}", f.message)).tokens
    }
}

/// The page has a state for each end of a search.
#[test]
fn every_end_has_a_name_on_the_page() {
    use search::StoppedBy::{Bound, Exhausted, Goal, Interrupted, Time, Trials};
    let ends = [Bound, Exhausted, Goal, Interrupted, Time, Trials].map(search::StoppedBy::name);
    for name in ends.into_iter().chain(["waiting", "tuning", "failed"]) {
        assert!(abi::TuneState::ALL.iter().any(|state| state.name() == name), "{name}");
    }
}
