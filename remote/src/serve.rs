//! The child's side: handles one request after another, with a thread that watches the parent.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ir::program::{Program, SealKey, Verified};
use ir::{BufferId, KernelConfig};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal};
use search::{Costs, DeviceError, DeviceInfo, Handle, Plan};

use crate::shared::{Board, Phase, Rows, Shared};
use crate::wire::{Answer, BUFFER_WORDS_MAX, Channel, Reply, Request};

/// Interval at which the watching thread polls the kernel.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// How long the device may take to end its work when the parent is gone. After that the process kills itself, and the
/// driver cleans up.
const LEAVE: Duration = Duration::from_secs(5);

/// The device of a device process. As [`search::Device`], errors included, except for the destination of logits and for
/// proofs of agreement, which the parent has.
pub trait Served {
    /// Describes the device.
    fn describe(&self) -> DeviceInfo;

    /// As [`search::Device::prepare`].
    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError>;

    /// As [`search::Device::run`]. Writes the logits of `tokens[first..]` to `logits`, one row after another, and
    /// returns the chosen tokens.
    fn run(
        &mut self,
        program: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError>;

    /// Times two programs in alternation. The parent holds the proofs that they agree, and only the parent may call
    /// this. Writes the last logits of both to `last`, one after the other; returns the times and the last chosen
    /// tokens.
    fn time(
        &mut self,
        programs: [Handle; 2],
        plan: &Plan<'_>,
        last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError>;

    /// As [`search::Device::hand_over`].
    fn hand_over(&mut self, _from: Handle, _to: Handle) -> Result<(), DeviceError> {
        Err(fault("this device keeps sequences apart"))
    }

    /// As [`search::Device::buffers`].
    fn buffers(
        &mut self,
        _program: Handle,
        _which: &[BufferId],
    ) -> Result<Option<Vec<Vec<f32>>>, DeviceError> {
        Ok(None)
    }

    /// As [`search::Device::foresee`].
    fn foresee(&mut self, _kernels: &[KernelConfig]) {}

    /// As [`search::Device::costs`].
    fn costs(&self) -> Costs {
        Costs::default()
    }

    /// As [`search::Device::release`].
    fn release(&mut self, program: Handle);

    /// Whether only a new process can use the device again.
    fn lost(&self) -> bool {
        false
    }
}

/// The watching thread's work beside the requests. It must not wait for the device.
pub trait Watch: Send {
    /// Records the state of the kernel. Called every 10 ms.
    fn look(&mut self, board: &Board);

    /// Asks the kernel to end, because the parent is gone.
    fn leave(&mut self);
}

/// The error of a process that was not started as a device process.
#[derive(Debug, thiserror::Error)]
#[error("a device process is started by `amk` itself, with a socket as its standard input ({0})")]
pub struct NotAChild(std::io::Error);

/// Serves the parent that started this process until the socket closes. `open` opens the device; if that fails, the
/// error is sent to the parent.
///
/// # Errors
/// If standard input is not the socket of a parent.
pub fn serve<D: Served>(
    watch: impl Watch + 'static,
    open: impl FnOnce(&Board) -> Result<D, DeviceError>,
) -> Result<(), NotAChild> {
    let (channel, socket, shared) = adopt().map_err(NotAChild)?;
    let board = Board::new(&shared);
    let over = Arc::new(AtomicBool::new(false));
    let watcher = {
        let (board, over) = (board.clone(), over.clone());
        std::thread::spawn(move || watch_parent(&socket, watch, &board, &over))
    };
    answer_all(channel, &shared, &board, open);
    over.store(true, Ordering::Release);
    let _ = watcher.join();
    Ok(())
}

/// Takes the parent's socket from standard input, and receives the shared memory through it.
fn adopt() -> std::io::Result<(Channel, UnixStream, Arc<Shared>)> {
    let socket = UnixStream::from(rustix::stdio::stdin().try_clone_to_owned()?);
    // If the parent died before this line, its socket is closed, which the next read detects.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let channel = Channel::new(socket.try_clone()?);
    let file = File::from(channel.receive_file()?);
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok((channel, socket, Arc::new(Shared::open(&file)?)))
}

/// Increments the heartbeat count, polls the kernel, and detects when the parent closes the socket. The system's
/// parent-death signal acts at once, but only for a parent that died.
fn watch_parent(socket: &UnixStream, mut watch: impl Watch, board: &Board, over: &AtomicBool) {
    loop {
        let mut files = [PollFd::new(socket, PollFlags::RDHUP)];
        let _ = rustix::event::poll(&mut files, Some(&LOOK_EVERY));
        let gone = files[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP);
        board.beat();
        watch.look(board);
        if over.load(Ordering::Acquire) {
            return;
        }
        if gone {
            break;
        }
    }
    watch.leave();
    let began = std::time::Instant::now();
    while began.elapsed() < LEAVE {
        if over.load(Ordering::Acquire) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = kill_process(getpid(), Signal::KILL);
}

/// Opens the device, then answers requests until the socket closes. The device is closed before this returns.
fn answer_all<D: Served>(
    mut channel: Channel,
    shared: &Arc<Shared>,
    board: &Board,
    open: impl FnOnce(&Board) -> Result<D, DeviceError>,
) {
    let Ok((number, Request::Open { key }, _)) = channel.receive() else { return };
    let key = SealKey::new(key);
    board.enter(Phase::Opening);
    let device = match open(board) {
        Ok(device) => device,
        Err(error) => {
            let answer = Answer { result: Err(error), lost: true, costs: Costs::default() };
            let _ = channel.send(number, &answer, &[]);
            return;
        }
    };
    let opened = Reply::Opened(device.describe());
    let (rows, board) = (Rows::new(shared), board.clone());
    let mut session = Session { device, key, handles: BTreeMap::new(), rows, board: board.clone() };
    let mut next = (number, Ok(opened));
    loop {
        let (number, result) = next;
        let (lost, costs) = (session.device.lost(), session.device.costs());
        board.enter(Phase::Waiting);
        if channel.send(number, &Answer { result, lost, costs }, &[]).is_err() {
            return;
        }
        next = match channel.receive() {
            Ok((number, request, bytes)) => (number, session.answer(request, &bytes)),
            Err(_) => return,
        };
    }
}

struct Session<D> {
    device: D,
    key: SealKey,
    /// The device's handle for each handle of the parent.
    handles: BTreeMap<u64, Handle>,
    rows: Rows,
    board: Board,
}

impl<D: Served> Session<D> {
    fn answer(&mut self, request: Request, bytes: &[u8]) -> Result<Reply, DeviceError> {
        match request {
            Request::Open { .. } => Ok(Reply::Opened(self.device.describe())),
            Request::Prepare { handle, kernel, seal } => {
                self.board.enter(Phase::Unsealing);
                let opened = self.key.open(bytes, &seal);
                let program = Arc::new(opened.map_err(|error| fault(&error.to_string()))?);
                let prepared = self.device.prepare(&program, &kernel)?;
                self.handles.insert(handle, prepared);
                Ok(Reply::Done)
            }
            Request::Run { handle, tokens, first } => {
                let handle = self.handle(handle)?;
                let first = index(first).filter(|&first| first <= tokens.len());
                let first = first.ok_or_else(|| fault("the first position is past the end"))?;
                self.board.enter(Phase::Running);
                let rows = self.rows.first_mut(tokens.len() - first);
                let rows = rows.ok_or_else(|| fault("more positions than rows are shared"))?;
                self.device.run(handle, &tokens, first, rows).map(Reply::Ran)
            }
            Request::Time { handles, tokens, first, rounds, warmup } => {
                let handles = [self.handle(handles[0])?, self.handle(handles[1])?];
                let (Some(first), Some(rounds), Some(warmup)) =
                    (index(first), index(rounds), index(warmup))
                else {
                    return Err(fault("a number is too large"));
                };
                self.board.enter(Phase::Timing);
                let plan = Plan { tokens: &tokens, first, rounds, warmup };
                let last = self.rows.first_mut(2).ok_or_else(|| fault("no rows are shared"))?;
                let timed = self.device.time(handles, &plan, last);
                timed.map(|(rounds, chosen)| Reply::Timed(rounds, chosen))
            }
            Request::HandOver { from, to } => {
                let (from, to) = (self.handle(from)?, self.handle(to)?);
                self.device.hand_over(from, to).map(|()| Reply::Done)
            }
            Request::Foresee { kernels } => {
                self.device.foresee(&kernels);
                Ok(Reply::Done)
            }
            Request::Buffers { handle, which } => {
                let handle = self.handle(handle)?;
                self.board.enter(Phase::Reading);
                let which: Vec<BufferId> = which.into_iter().map(BufferId).collect();
                let buffers = self.device.buffers(handle, &which)?;
                let words = |buffers: &Vec<Vec<f32>>| buffers.iter().map(Vec::len).sum::<usize>();
                Ok(Reply::Buffers(buffers.filter(|buffers| words(buffers) <= BUFFER_WORDS_MAX)))
            }
            Request::Release { handle } => {
                if let Some(handle) = self.handles.remove(&handle) {
                    self.device.release(handle);
                }
                Ok(Reply::Done)
            }
        }
    }

    fn handle(&self, handle: u64) -> Result<Handle, DeviceError> {
        let found = self.handles.get(&handle).copied();
        found.ok_or_else(|| fault(&format!("program {handle} is not loaded in this process")))
    }
}

fn index(number: u64) -> Option<usize> {
    usize::try_from(number).ok()
}

fn fault(what: &str) -> DeviceError {
    DeviceError::Fault { reason: format!("the device process refused a request: {what}") }
}

#[cfg(test)]
mod tests {
    use ir::program::Unsealed;

    use super::*;

    /// A kernel that ends when asked to.
    struct Kernel {
        looks: Arc<AtomicBool>,
        leaves: Arc<AtomicBool>,
    }

    impl Watch for Kernel {
        fn look(&mut self, _board: &Board) {
            self.looks.store(true, Ordering::Release);
        }

        fn leave(&mut self) {
            self.leaves.store(true, Ordering::Release);
        }
    }

    #[test]
    fn a_parent_that_hangs_up_makes_the_kernel_leave() {
        let (shared, _file) = Shared::create(1, 1).unwrap();
        let board = Board::new(&Arc::new(shared));
        let (parent, child) = UnixStream::pair().unwrap();
        let [over, looks, leaves] = std::array::from_fn(|_| Arc::new(AtomicBool::new(false)));
        let kernel = Kernel { looks: looks.clone(), leaves: leaves.clone() };
        let until = |flag: &AtomicBool| {
            let began = std::time::Instant::now();
            while !flag.load(Ordering::Acquire) {
                assert!(began.elapsed() < LEAVE / 2);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        std::thread::scope(|scope| {
            let (watched, over, board) = (&child, &over, &board);
            let watcher = scope.spawn(move || watch_parent(watched, kernel, board, over));
            until(&looks);
            assert!(!leaves.load(Ordering::Acquire));
            drop(parent);
            until(&leaves);
            // The requests have ended; otherwise the watcher would kill this process.
            over.store(true, Ordering::Release);
            watcher.join().unwrap();
        });
        assert!(board.last().beat > 0);
    }

    #[test]
    fn only_what_was_sealed_is_believed() {
        let model = model::preset("toy").unwrap();
        let target = ir::Target::by_name("h200").unwrap();
        let config = ir::schedule::neutral_config(&model.graph, &target);
        let valid = ir::schedule::validate(config, &model.graph, &target).unwrap();
        let options = lower::Options { kv_capacity: 24 };
        let program = lower::lower(&valid, &model.graph, &target, options).unwrap();
        let key = SealKey::new([3; 32]);
        let (bytes, seal) = key.seal(&program);
        assert_eq!(key.open(&bytes, &seal).unwrap(), program);
        for at in [0, 100, bytes.len() - 1] {
            let mut torn = bytes.clone();
            torn[at] ^= 1;
            assert_eq!(key.open(&torn, &seal).unwrap_err(), Unsealed::Broken);
        }
        assert_eq!(SealKey::new([4; 32]).open(&bytes, &seal).unwrap_err(), Unsealed::Broken);
        // A program that was never verified has no seal; a plain hash of its bytes is not a seal.
        let mut broken = program.into_inner();
        for worker in &mut broken.workers {
            for task in &mut worker.tasks {
                task.waits.clear();
            }
        }
        let bytes = ir::text::save(&broken);
        let hash = *blake3::hash(&bytes).as_bytes();
        assert_eq!(key.open(&bytes, &hash).unwrap_err(), Unsealed::Broken);
        assert_eq!(key.open(&bytes, &seal).unwrap_err(), Unsealed::Broken);
    }
}
