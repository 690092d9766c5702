//! Prompts in chunks beside sequences that decode, on the clock of a scripted engine: figures of llama-3.1-8b on an H200.

use super::*;

/// Milliseconds of a step of a batch; of a stop and a launch; of a layer of a chunk of [`pieces::SLICE`] tokens.
const STEP: f64 = 4.3;
const STOP_AND_LAUNCH: f64 = 2.15;
const LAUNCH: std::time::Duration = std::time::Duration::from_millis(2);
const LAYER: f64 = 22.0 / LAYERS as f64;
const LAYERS: usize = 32;

/// The time of a machine, and what its sequences have at which time.
#[derive(Clone, Default)]
pub(super) struct Clock {
    ms: f64,
    /// Whether the kernel is resident.
    resident: bool,
    pub(super) pieces: pieces::Pieces,
    /// The place of a chunk, and how many of its layers have run.
    pub(super) begun: Option<(usize, usize)>,
    /// Place and time of each step.
    steps: Arc<Mutex<Vec<(usize, f64)>>>,
    /// Places of pieces of chunks.
    read: Arc<Mutex<Vec<usize>>>,
}

impl Clock {
    /// A step of sequences.
    pub(super) fn step(&mut self, places: &[usize]) {
        if !std::mem::replace(&mut self.resident, true) {
            self.ms += STOP_AND_LAUNCH;
        }
        self.ms += STEP;
        self.pieces.ran(1, STEP * 1e3);
        self.steps.lock().unwrap().extend(places.iter().map(|place| (*place, self.ms)));
    }

    /// Layers of a chunk; whether it has ended.
    pub(super) fn chunk(&mut self, place: usize, tokens: usize) -> bool {
        let layer = LAYER * tokens as f64 / pieces::SLICE as f64;
        let (of, ran) = self.begun.take().unwrap_or((place, 0));
        assert_eq!(of, place, "the memory of chunks is in use");
        let fits = |limit: std::time::Duration| (limit.as_secs_f64() * 1e3 / layer) as usize;
        let most = self.pieces.limit(LAUNCH).map_or(LAYERS, |limit| fits(limit).max(1));
        let now = most.min(LAYERS - ran);
        self.ms += now as f64 * layer;
        self.resident = false;
        self.read.lock().unwrap().push(place);
        self.begun = (ran + now < LAYERS).then_some((place, ran + now));
        self.begun.is_none()
    }

    pub(super) fn end(&mut self, place: usize) {
        self.begun.take_if(|(of, _)| *of == place);
    }

    /// The times of a place's steps.
    fn of(&self, place: usize) -> Vec<f64> {
        let steps = self.steps.lock().unwrap();
        steps.iter().filter(|(of, _)| *of == place).map(|(_, ms)| *ms).collect()
    }
}

/// The longest time between two tokens of the first request, and the time of each other's first token.
fn gap_and_first_tokens(asked: &[(Vec<u32>, u32)]) -> (f64, Vec<f64>) {
    let clock = Clock::default();
    let (chooses, chunks) = (true, true);
    let engine =
        Scripted { chooses, chunks, clock: Some(clock.clone()), width: 8, ..Scripted::default() };
    together::awaited(engine, asked);
    let stream = clock.of(0);
    let gaps = stream.windows(2).map(|pair| pair[1] - pair[0]);
    let firsts = (1..asked.len()).map(|place| clock.of(place)[0]);
    (gaps.fold(0.0, f64::max), firsts.collect())
}

/// Issue L: a stream waits at most two and a half steps while others send prompts of 2048 tokens.
#[test]
fn a_stream_waits_for_no_more_than_a_piece_of_a_prompt() {
    let prompt = |i: u32| ((0..2048).map(|k| (k + i) % 50).collect(), 20);
    for prompts in [1, 3, 7] {
        let mut asked = vec![(vec![1], 900)];
        asked.extend((0..prompts).map(prompt));
        let (gap, firsts) = gap_and_first_tokens(&asked);
        assert!(gap < 2.5 * STEP, "{prompts} prompts: {gap} ms");
        // They are read one after the other, each in the same time.
        let each = firsts.last().unwrap() / f64::from(prompts);
        assert!(each < 220.0, "{firsts:?} ms");
        eprintln!("{prompts} prompts: gap {gap:.2} ms, first tokens after {firsts:.0?} ms");
    }
}

/// Nobody waits: a chunk runs at once.
#[test]
fn prompts_without_streams_are_read_in_whole_chunks() {
    let clock = Clock::default();
    let (chooses, chunks) = (true, true);
    let engine =
        Scripted { chooses, chunks, clock: Some(clock.clone()), width: 8, ..Scripted::default() };
    let asked: Vec<_> = (0..3).map(|i| (vec![i; 2048], 5)).collect();
    together::awaited(engine, &asked);
    assert_eq!(*clock.read.lock().unwrap(), [0, 1, 2, 0, 1, 2]);
    let firsts: Vec<f64> = (0..3).map(|place| clock.of(place)[0]).collect();
    let chunks = 3.0 * 2.0 * LAYER * LAYERS as f64;
    assert!(firsts.iter().all(|ms| (ms - (chunks + STOP_AND_LAUNCH + STEP)).abs() < 1e-6));
}

/// A client leaves in the middle of its chunk: the next prompt is read, and has its own tokens.
#[test]
fn a_chunk_whose_client_leaves_is_forgotten() {
    let clock = Clock::default();
    let (chooses, chunks) = (true, true);
    let engine = Scripted { chooses, chunks, clock: Some(clock.clone()), ..Scripted::default() };
    let admission = Admission::new(3);
    let (stream, events) = job(&[1], 200, &admission);
    let (leaves, left) = job(&[3; 1000], 5, &admission);
    let (stays, answer) = job(&[2; 1000], 5, &admission);
    let (jobs, inbox) = channel();
    [stream, leaves, stays].into_iter().for_each(|job| jobs.send(job).unwrap());
    std::thread::scope(|scope| {
        let engine = Box::new(engine);
        let said = Sequences::default();
        let all = scope.spawn(move || EngineLoop::new(engine, 3, said).run(&inbox));
        while clock.read.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        drop(left);
        assert_eq!(heard(answer), (expected(&[2; 1000], 5), Some(Finish::Length)));
        assert_eq!(heard(events), (expected(&[1], 200), Some(Finish::Length)));
        drop(jobs);
        assert_eq!(all.join().unwrap(), Ok(()));
    });
}
