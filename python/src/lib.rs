//! The Python module `amk._amk`: arguments and answers are JSON texts, which `amk/__init__.py` makes of Python's objects.
//!
//! The work runs on a thread of its own while the caller's waits without the interpreter's lock, runs callbacks, and
//! looks for Ctrl-C.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use amk::{Exit, Failure, bindings};
use pyo3::create_exception;
use pyo3::exceptions::{PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;
use serde_json::Value;

create_exception!(_amk, AmkError, PyRuntimeError, "amk gave no answer.");
create_exception!(_amk, RefusedError, AmkError, "A gate said no.");
create_exception!(_amk, UsageError, AmkError, "Wrong usage, or input that cannot be read.");
create_exception!(_amk, CapabilityMissingError, AmkError, "This machine lacks something.");
create_exception!(_amk, IntegrityError, AmkError, "A file was tampered with or is corrupt.");
create_exception!(_amk, InconclusiveError, AmkError, "The samples do not decide.");
create_exception!(_amk, BugError, AmkError, "A bug in amk.");

/// How often the waiting thread looks for Ctrl-C.
const LOOK: Duration = Duration::from_millis(50);

/// How long a trial under way may go on after Ctrl-C or a callback's exception before the caller gets it. The trial then
/// ends in the background.
const GRACE: Duration = Duration::from_secs(5);

/// Stack of the thread that works: the size of the main thread's.
const STACK_BYTES: usize = 8 << 20;

/// What the working thread says.
enum Event {
    /// A trial; the search waits for whether to go on.
    Trial(Value, SyncSender<ControlFlow<()>>),
    /// The answer. The inner result's error is that of amk, the outer one's a panic.
    End(std::thread::Result<Result<Value, Failure>>),
}

/// The working thread's side.
struct Worker {
    events: SyncSender<Event>,
    stop: Arc<AtomicBool>,
}

impl Worker {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Hands a trial to the callback and waits for it. A caller that has gone ends the search.
    fn trial(&self, trial: Value) -> ControlFlow<()> {
        let (reply, answer) = sync_channel(1);
        match self.events.send(Event::Trial(trial, reply)) {
            Ok(()) => answer.recv().unwrap_or(ControlFlow::Break(())),
            Err(_) => ControlFlow::Break(()),
        }
    }
}

/// A failure as the exception of its exit code.
fn exception(py: Python<'_>, failure: &Failure) -> PyErr {
    let message = failure.message.clone();
    let error = match failure.exit {
        Exit::No => RefusedError::new_err(message),
        Exit::Usage => UsageError::new_err(message),
        Exit::Missing => CapabilityMissingError::new_err(message),
        Exit::Integrity => IntegrityError::new_err(message),
        Exit::Inconclusive => InconclusiveError::new_err(message),
        Exit::Interrupted => PyKeyboardInterrupt::new_err(message),
        Exit::Yes | Exit::Bug => BugError::new_err(message),
    };
    // A plain attribute: where it cannot be set, the class says the same.
    let _ = error.value(py).setattr("exit_code", failure.exit.code());
    error
}

/// Runs `work` on a thread and returns its answer as JSON.
fn run(
    py: Python<'_>,
    arguments: &str,
    on_trial: Option<&Bound<'_, PyAny>>,
    work: impl FnOnce(Value, &Worker) -> Result<Value, Failure> + Send + 'static,
) -> PyResult<String> {
    let arguments: Value =
        serde_json::from_str(arguments).map_err(|error| UsageError::new_err(error.to_string()))?;
    let (events, heard) = sync_channel(1);
    let stop = Arc::new(AtomicBool::new(false));
    let worker = Worker { events, stop: stop.clone() };
    let body = move || {
        let work = std::panic::AssertUnwindSafe(|| work(arguments, &worker));
        let end = std::panic::catch_unwind(work);
        // A caller that has gone does not want it.
        let _ = worker.events.send(Event::End(end));
    };
    let thread = std::thread::Builder::new().name("amk".to_owned()).stack_size(STACK_BYTES);
    thread.spawn(body).map_err(|error| BugError::new_err(format!("no thread: {error}")))?;
    let end = follow(py, &Mutex::new(heard), &stop, on_trial)?;
    let failure = match end {
        Ok(Ok(answer)) => return Ok(answer.to_string()),
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let what = panic.downcast_ref::<String>().map(String::as_str);
            let what = what.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            let message = format!("this is a bug in amk, please report it: {what}");
            Failure { exit: Exit::Bug, message }
        }
    };
    Err(exception(py, &failure))
}

/// Waits for the end of the work, runs the callback for its trials, and looks for signals. After an exception the work
/// is told to stop, and has [`GRACE`] for its trial; a second Ctrl-C does not wait.
fn follow(
    py: Python<'_>,
    heard: &Mutex<Receiver<Event>>,
    stop: &AtomicBool,
    on_trial: Option<&Bound<'_, PyAny>>,
) -> PyResult<std::thread::Result<Result<Value, Failure>>> {
    let mut raised: Option<(PyErr, Instant)> = None;
    loop {
        let event =
            py.detach(|| heard.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK));
        let asked = match event {
            Ok(Event::End(end)) => return raised.map_or(Ok(end), |(error, _)| Err(error)),
            Ok(Event::Trial(trial, reply)) => {
                // Without a receiver the search ends, as after an exception.
                call(py, on_trial, &trial).map(|flow| {
                    // A search that has ended needs no answer.
                    let _ = reply.send(flow);
                })
            }
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(BugError::new_err("the work was lost")),
        };
        let asked = asked.and_then(|()| py.check_signals());
        raised = match (raised, asked) {
            (None, Err(error)) => {
                stop.store(true, Ordering::SeqCst);
                Some((error, Instant::now()))
            }
            (Some(_), Err(again)) => return Err(again),
            (raised, Ok(())) => raised,
        };
        if let Some((error, _)) = raised.take_if(|(_, since)| since.elapsed() > GRACE) {
            return Err(error);
        }
    }
}

/// Calls back with a trial, as JSON; `False` ends the search.
fn call(
    py: Python<'_>,
    on_trial: Option<&Bound<'_, PyAny>>,
    trial: &Value,
) -> PyResult<ControlFlow<()>> {
    let Some(on_trial) = on_trial else { return Ok(ControlFlow::Continue(())) };
    let answer = on_trial.call1((trial.to_string(),))?;
    let ends = answer.is(pyo3::types::PyBool::new(py, false));
    Ok(if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
}

#[pyfunction]
fn propose(py: Python<'_>, arguments: &str) -> PyResult<String> {
    run(py, arguments, None, |arguments, _| bindings::propose(arguments))
}

#[pyfunction]
fn evaluate(py: Python<'_>, arguments: &str) -> PyResult<String> {
    run(py, arguments, None, |arguments, _| bindings::evaluate(arguments))
}

#[pyfunction]
#[pyo3(signature = (arguments, on_trial = None))]
fn search(
    py: Python<'_>,
    arguments: &str,
    on_trial: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    run(py, arguments, on_trial, |arguments, worker| {
        bindings::search(arguments, |trial| worker.trial(trial), || worker.stopped())
    })
}

#[pyfunction]
fn generate(py: Python<'_>, arguments: &str) -> PyResult<String> {
    run(py, arguments, None, |arguments, worker| {
        bindings::generate(arguments, |_| match worker.stopped() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
    })
}

/// Runs the command line; `program` is the command that starts it again.
#[pyfunction]
fn command_line(py: Python<'_>, program: Vec<String>, arguments: Vec<String>) -> i32 {
    amk::starts_as(program.into_iter().map(Into::into));
    py.detach(|| amk::command_line(arguments.into_iter().map(Into::into).collect()).code())
}

/// Names the command that starts `amk`: a search on a GPU drives it in a process of its own.
#[pyfunction]
fn starts_as(program: Vec<String>) {
    amk::starts_as(program.into_iter().map(Into::into));
}

/// What `amk/__init__.py` wraps.
#[pymodule]
fn _amk(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let classes = [
        ("RefusedError", py.get_type::<RefusedError>(), Exit::No),
        ("UsageError", py.get_type::<UsageError>(), Exit::Usage),
        ("CapabilityMissingError", py.get_type::<CapabilityMissingError>(), Exit::Missing),
        ("IntegrityError", py.get_type::<IntegrityError>(), Exit::Integrity),
        ("InconclusiveError", py.get_type::<InconclusiveError>(), Exit::Inconclusive),
        ("BugError", py.get_type::<BugError>(), Exit::Bug),
    ];
    module.add("AmkError", py.get_type::<AmkError>())?;
    for (name, class, exit) in classes {
        class.setattr("exit_code", exit.code())?;
        module.add(name, class)?;
    }
    module.add_function(wrap_pyfunction!(propose, module)?)?;
    module.add_function(wrap_pyfunction!(evaluate, module)?)?;
    module.add_function(wrap_pyfunction!(search, module)?)?;
    module.add_function(wrap_pyfunction!(generate, module)?)?;
    module.add_function(wrap_pyfunction!(command_line, module)?)?;
    module.add_function(wrap_pyfunction!(starts_as, module)?)
}
