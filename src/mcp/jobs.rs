//! Long-running calls: one schedule is judged at a time, since two would share a device and two cores, and disturb each other's timing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use search::Trial;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, SemaphorePermit, watch};

use crate::commands::search_loop::{Found, Progress, Watch};
use crate::failure::Failure;

/// The most evaluations that wait for their turn.
const WAITING_MAX: usize = 8;

/// The most concurrent calls, of all tools together.
const CALLS_MAX: usize = 32;

/// Threads for the quick tools.
const QUICK_MAX: usize = 4;

/// How long shutdown waits for the current trial. A trial that it does not wait for was either on the disk or never acknowledged.
const GRACE: Duration = Duration::from_secs(10);

/// How long the client has to read the last answers.
const LAST_WORDS: Duration = Duration::from_secs(7);

/// Stack of a thread that judges: the size of the main thread's.
pub(super) const STACK_BYTES: usize = 8 << 20;

pub(super) struct Jobs {
    /// Held by the call that judges.
    turn: Arc<Semaphore>,
    quick: Arc<Semaphore>,
    waiting: Semaphore,
    calls: Semaphore,
    ending: Arc<AtomicBool>,
    ended: Notify,
    search: Mutex<Option<Arc<Follow>>>,
}

impl Default for Jobs {
    fn default() -> Self {
        Self {
            turn: Arc::new(Semaphore::new(1)),
            quick: Arc::new(Semaphore::new(QUICK_MAX)),
            waiting: Semaphore::new(WAITING_MAX),
            calls: Semaphore::new(CALLS_MAX),
            ending: Arc::default(),
            ended: Notify::new(),
            search: Mutex::default(),
        }
    }
}

impl Jobs {
    /// Admits a call, or refuses it.
    pub(super) fn call(&self) -> Result<SemaphorePermit<'_>, Failure> {
        self.calls
            .try_acquire()
            .map_err(|_| busy(&format!("{CALLS_MAX} calls are under way; wait for one of them")))
    }

    /// A thread for a quick tool.
    pub(super) async fn quick(&self) -> Result<OwnedSemaphorePermit, Failure> {
        self.quick.clone().acquire_owned().await.map_err(|_| busy("the server is ending"))
    }

    /// Waits for the turn of an evaluation, in order of arrival. Does not wait for a search: it is refused.
    pub(super) async fn turn(&self) -> Result<OwnedSemaphorePermit, Failure> {
        if let Some(search) = self.search().filter(|search| search.is_running()) {
            return Err(busy(&search.busy()));
        }
        let Ok(_waiting) = self.waiting.try_acquire() else {
            return Err(busy(&format!("{WAITING_MAX} evaluations wait already; send it again")));
        };
        self.turn.clone().acquire_owned().await.map_err(|_| busy("the server is ending"))
    }

    /// Begins a search, unless a schedule is being judged.
    pub(super) fn begin(&self) -> Result<(Arc<Follow>, OwnedSemaphorePermit), Failure> {
        let mut search = lock(&self.search);
        if let Some(running) = search.as_ref().filter(|search| search.is_running()) {
            return Err(busy(&running.busy()));
        }
        let turn = self.turn.clone().try_acquire_owned();
        let turn = turn.map_err(|_| busy("an evaluation is under way; send it again"))?;
        let follow = Arc::new(Follow::new(self.ending.clone()));
        *search = Some(follow.clone());
        Ok((follow, turn))
    }

    pub(super) fn search(&self) -> Option<Arc<Follow>> {
        lock(&self.search).clone()
    }

    pub(super) fn is_judging(&self) -> bool {
        self.turn.available_permits() == 0
    }

    pub(super) fn waiting(&self) -> usize {
        WAITING_MAX - self.waiting.available_permits()
    }

    /// Ends a search after its trial, and refuses everything new.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.quick.close();
        self.turn.close();
        self.ended.notify_one();
    }

    /// Returns some time after the end.
    pub(super) async fn long_ended(&self) {
        self.ended.notified().await;
        tokio::time::sleep(LAST_WORDS).await;
    }

    /// Waits for the running evaluation or search, with a time limit.
    pub(super) fn wait(&self) {
        let began = Instant::now();
        while self.is_judging() && began.elapsed() < GRACE {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn busy(why: &str) -> Failure {
    Failure::refused(format!("busy: {why}"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` on its own thread, which holds the permit until it is done. A panic is reported as a bug of amk.
pub(super) async fn on_thread<T: Send + 'static>(
    permit: OwnedSemaphorePermit,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let run = move || {
        let _permit = permit;
        work()
    };
    let done = tokio::task::spawn_blocking(run).await;
    done.unwrap_or_else(|_| Err(Failure::bug(crate::bug::last_panic())))
}

pub(super) type End = Result<Found, Failure>;

/// A search and its observers.
pub(super) struct Follow {
    stop: AtomicBool,
    ending: Arc<AtomicBool>,
    progress: watch::Sender<Option<Progress>>,
    end: Mutex<Option<Arc<End>>>,
}

impl Follow {
    fn new(ending: Arc<AtomicBool>) -> Self {
        let progress = watch::Sender::new(None);
        Self { stop: AtomicBool::new(false), ending, progress, end: Mutex::new(None) }
    }

    /// Requests the end after the current trial.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Records the result, and wakes the observers.
    pub(super) fn ended(&self, end: Arc<End>) {
        *lock(&self.end) = Some(end);
        self.progress.send_modify(|_| {});
    }

    pub(super) fn end(&self) -> Option<Arc<End>> {
        lock(&self.end).clone()
    }

    pub(super) fn is_running(&self) -> bool {
        self.end().is_none()
    }

    pub(super) fn progress(&self) -> Option<Progress> {
        self.progress.borrow().clone()
    }

    /// A receiver that wakes at every later progress, of which it sees the newest, and at the end.
    pub(super) fn subscribe(&self) -> watch::Receiver<Option<Progress>> {
        self.progress.subscribe()
    }

    /// Why nothing else can be judged now.
    fn busy(&self) -> String {
        let at = |p: Progress| Some(format!(" (trial {} of {})", p.trials, p.budget?));
        let at = self.progress().and_then(at).unwrap_or_default();
        format!(
            "a search is under way{at}; `status` follows it, cancelling its call ends it after the trial"
        )
    }
}

impl Watch for Follow {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.ending.load(Ordering::SeqCst)
    }

    fn begins(&self, progress: &Progress) {
        self.progress.send_replace(Some(progress.clone()));
    }

    fn trial(&self, progress: &Progress, _: &Trial) {
        self.progress.send_replace(Some(progress.clone()));
    }
}
