//! The devices of a search: several of one host, each opened and driven by a thread of its own, or one or none, driven
//! by the caller's thread. They judge candidates and decide nothing: the search ([`run`](crate::run)) chooses the trials
//! and decides on their results.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use crate::device::{Device, DeviceError, DeviceInfo};
use crate::device_worker::{DeviceWorker, Job, LastJob};
use crate::gate::Gate;
use crate::settings::{Clock, Settings};
use crate::trial::{Confirmation, Trial};

/// Opens a device, on the thread that drives it from then on.
pub type Opener<'a> = Box<dyn FnOnce() -> Result<Box<dyn Device + 'a>, DeviceError> + Send + 'a>;

/// The error of a device whose thread ended by itself.
fn ended() -> DeviceError {
    DeviceError::Unavailable { reason: "the thread that drove it ended".to_owned() }
}

/// A job of a device's thread, which returns the event to report.
type Work<'a> = Box<dyn for<'d> FnOnce(&mut DeviceWorker<'d, 'a>) -> Option<Event> + Send + 'a>;

/// A message to a device's thread.
enum Order<'a> {
    Begin(Box<Start<'a>>),
    Do(Work<'a>),
}

struct Start<'a> {
    gate: Gate<'a>,
    settings: Arc<Settings>,
    clock: Clock,
    /// Threads of its pool for the reference VM.
    threads: usize,
}

/// A message from a device's thread.
pub(crate) enum Event {
    Opened(DeviceInfo),
    Tried(u64, Box<Trial>),
    Confirmed(Box<Confirmation>),
    /// The last message of a device.
    Lost(DeviceError),
}

/// A device's slot in the pool.
struct PoolSlot<'a> {
    orders: Option<Sender<Order<'a>>>,
    info: Result<DeviceInfo, DeviceError>,
}

/// One device, or none, that the caller's thread drives while it waits for the next event.
struct Here<'a> {
    device: Option<&'a mut (dyn Device + 'a)>,
    /// The worker, once it has begun.
    worker: Option<DeviceWorker<'a, 'a>>,
    work: VecDeque<Work<'a>>,
}

/// The devices of a search, numbered in the order of their openers.
pub struct WorkerPool<'a> {
    slots: Vec<PoolSlot<'a>>,
    reports: Receiver<(u32, Event)>,
    /// The only device, instead of `slots`.
    here: Option<Here<'a>>,
    cache_bytes: u64,
    started: bool,
}

impl<'a> WorkerPool<'a> {
    /// One device, or none, without a thread.
    #[must_use]
    pub(crate) fn here(device: Option<&'a mut (dyn Device + 'a)>) -> Self {
        let cache_bytes = device.as_deref().map_or(0, |device| device.describe().cache_bytes);
        let here = Some(Here { device, worker: None, work: VecDeque::new() });
        Self { slots: Vec::new(), reports: channel().1, here, cache_bytes, started: false }
    }

    /// Opens the devices in parallel, and waits until each is open or has failed.
    #[must_use]
    pub fn open<'scope>(scope: &'scope Scope<'scope, '_>, openers: Vec<Opener<'a>>) -> Self
    where
        'a: 'scope,
    {
        let (say, reports) = channel();
        let mut slots = Vec::new();
        for (card, open) in openers.into_iter().enumerate() {
            let (orders, taken) = channel();
            let line = Line { card: card as u32, say: say.clone() };
            scope.spawn(move || drive(open, &taken, &line));
            slots.push(PoolSlot { orders: Some(orders), info: Err(ended()) });
        }
        let mut pool = Self { slots, reports, here: None, cache_bytes: 0, started: false };
        // Every thread sends one of the two, even one that panics. Only the first counts.
        let mut waiting: BTreeSet<u32> = (0..pool.slots.len() as u32).collect();
        while !waiting.is_empty() {
            let Ok((card, said)) = pool.reports.recv() else { break };
            let info = match said {
                Event::Opened(info) => Ok(info),
                Event::Lost(error) => Err(error),
                Event::Tried(..) | Event::Confirmed(_) => continue,
            };
            if waiting.remove(&card) {
                pool.slots[card as usize].info = info;
            }
        }
        for slot in &mut pool.slots {
            if slot.info.is_err() {
                slot.orders = None;
            }
        }
        let info = pool.slots.iter().find_map(|slot| slot.info.as_ref().ok());
        pool.cache_bytes = info.map_or(0, |info| info.cache_bytes);
        pool
    }

    /// The description of each device, or why it could not be opened.
    #[must_use]
    pub fn infos(&self) -> Vec<Result<&DeviceInfo, &DeviceError>> {
        self.slots.iter().map(|slot| slot.info.as_ref()).collect()
    }

    /// Bytes of the devices' cache.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.cache_bytes
    }

    /// Sends the gate and the settings to the devices, once.
    pub(crate) fn begin(&mut self, gate: &Gate<'a>, settings: &Arc<Settings>, clock: Clock) {
        if std::mem::replace(&mut self.started, true) {
            return;
        }
        if let Some(here) = &mut self.here {
            let (device, settings) = (here.device.take(), settings.clone());
            here.worker = Some(DeviceWorker::new(gate.beside(), device, settings, clock));
            return;
        }
        let cards = self.cards();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / cards.len().max(1)).max(1);
        for card in cards {
            let start = Start { gate: gate.beside(), settings: settings.clone(), clock, threads };
            self.order(card, Order::Begin(Box::new(start)));
        }
    }

    /// The numbers of the remaining devices.
    pub(crate) fn cards(&self) -> Vec<u32> {
        let there = self.slots.iter().enumerate().filter(|(_, slot)| slot.orders.is_some());
        let there = there.map(|(card, _)| card as u32);
        self.here.iter().map(|_| 0).chain(there).collect()
    }

    /// A card's number in rows; `None` in a search that has one device or none.
    pub(crate) fn number(&self, card: u32) -> Option<u32> {
        (!self.slots.is_empty()).then_some(card)
    }

    /// The device of a trial: devices take turns by the trial's number, even if another one is idle. `None` if there is
    /// no device.
    pub(crate) fn card_of(&self, index: u64) -> Option<u32> {
        let cards = self.cards();
        let turn = index.checked_rem(cards.len() as u64)?;
        cards.get(usize::try_from(turn).ok()?).copied()
    }

    /// Sends a trial to one device. The device skips it if it is cancelled before it starts.
    pub(crate) fn try_out(&mut self, card: u32, number: u64, job: Job, cancelled: Arc<AtomicBool>) {
        let work = move |card: &mut DeviceWorker<'_, 'a>| {
            let tried = (!cancelled.load(Ordering::Relaxed)).then(|| card.try_out(job))?;
            let tried = tried.map(|trial| Event::Tried(number, Box::new(trial)));
            Some(tried.unwrap_or_else(Event::Lost))
        };
        self.work(card, Box::new(work));
    }

    pub(crate) fn confirm(&mut self, card: u32, job: LastJob) {
        let work = move |card: &mut DeviceWorker<'_, 'a>| {
            let confirmed = card.confirm(job).map(|done| Event::Confirmed(Box::new(done)));
            Some(confirmed.unwrap_or_else(Event::Lost))
        };
        self.work(card, Box::new(work));
    }

    fn order(&self, card: u32, order: Order<'a>) {
        if let Some(orders) = &self.slots[card as usize].orders {
            // A thread that has ended has already sent its `Lost` event.
            let _ = orders.send(order);
        }
    }

    fn work(&mut self, card: u32, work: Work<'a>) {
        match &mut self.here {
            Some(here) => here.work.push_back(work),
            None => self.order(card, Order::Do(work)),
        }
    }

    /// The next event of any device. Every device answers within its own limits.
    pub(crate) fn recv(&mut self) -> Option<(u32, Event)> {
        while let Some(Here { worker: Some(worker), work, .. }) = &mut self.here {
            if let Some(said) = work.pop_front()?(worker) {
                return Some((0, said));
            }
        }
        self.reports.recv().ok()
    }

    /// Removes a device; returns whether it was there.
    pub(crate) fn leave_out(&mut self, card: u32) -> bool {
        if self.here.take().is_some() {
            return true;
        }
        self.slots[card as usize].orders.take().is_some()
    }
}

/// The sending side of a device's thread. It reports the end of the thread, however it ends.
struct Line {
    card: u32,
    say: Sender<(u32, Event)>,
}

impl Line {
    fn say(&self, said: Event) {
        // The receiver may be gone.
        let _ = self.say.send((self.card, said));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.say(Event::Lost(ended()));
    }
}

/// The main function of a device's thread.
fn drive<'a>(open: Opener<'a>, orders: &Receiver<Order<'a>>, line: &Line) {
    let mut device = match open() {
        Ok(device) => device,
        Err(error) => return line.say(Event::Lost(error)),
    };
    line.say(Event::Opened(device.describe()));
    let Ok(Order::Begin(start)) = orders.recv() else { return };
    let Start { gate, settings, clock, threads } = *start;
    let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads).build() else { return };
    let mut card = DeviceWorker::new(gate.with_pool(pool), Some(&mut *device), settings, clock);
    for order in orders {
        if let Order::Do(work) = order
            && let Some(said) = work(&mut card)
        {
            line.say(said);
        }
    }
}
