//! Traps of the device: `trap`, `watchdog_check`, `fault`, the poller's waits and `RingHost::wait_completion`.
//!
//! Two workers miss their deadline at the same time; a third one waits for a signal that never comes. One of the two
//! writes the report, all workers leave, and the host reads a complete report of one worker, however it learns of the
//! trap.

use super::super::{Model, Op, Order, Until, Word};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// `valid` is stored before the report.
    FlagFirst,
    /// `valid` is stored relaxed.
    RelaxedFlag,
    /// The host loads `valid` relaxed.
    RelaxedLook,
    /// Every trapping worker writes a report.
    NoClaim,
    /// The host takes the report as soon as the command has completed.
    ReportNotAwaited,
    /// A trapping worker signals only its own threads.
    NoAbort,
    /// A watchdog that does not check the abort word.
    DeafWatchdog,
    /// A wait that does not check its worker's `dead`.
    DeafWait,
    /// A poller that waits only for the end of the command.
    DeafPoller,
}

/// Polls until `word` is set, or, unless `deaf`, until `other` is.
fn until(word: Word, other: Word, deaf: bool) -> Op {
    if deaf {
        Op::Poll(word, Order::Relaxed, Until::AtLeast(1))
    } else {
        Op::PollEither(word, Until::AtLeast(1), other, Order::Relaxed, 0)
    }
}

/// Words of the report and of the exit protocol.
struct Words {
    reporter: Word,
    code: Word,
    object: Word,
    valid: Word,
    abort: Word,
    completed: Word,
    left: Word,
}

impl Words {
    fn new(m: &mut Model) -> Self {
        let mut word = |name: &str| m.word(name);
        Self {
            reporter: word("reporter"),
            code: word("report's code"),
            object: word("report's object"),
            valid: word("valid"),
            abort: word("abort"),
            completed: word("completed"),
            left: word("left"),
        }
    }

    /// `trap`: the first reporter writes its report, here its own number; all abort.
    fn trap(&self, number: u32, bug: Bug) -> Vec<Op> {
        let order = if bug == Bug::RelaxedFlag { Order::Relaxed } else { Order::Release };
        let flag = Op::Write(self.valid, order, 1);
        let mut report = vec![
            Op::Write(self.code, Order::Relaxed, number),
            Op::Write(self.object, Order::Relaxed, number),
        ];
        report.insert(if bug == Bug::FlagFirst { 0 } else { 2 }, flag);
        let mut ops = Vec::new();
        ops.unless(bug == Bug::NoClaim, Op::Claim(self.reporter, report.len() as u8));
        ops.extend(report);
        ops.unless(bug == Bug::NoAbort, Op::Write(self.abort, Order::Release, 1));
        ops
    }

    /// `wait_completion` and its sequel: receives a completion with a trap, or the report itself; then reads the
    /// complete report, and ends.
    fn host(&self, workers: u32, bug: Bug) -> Vec<Op> {
        let order = if bug == Bug::RelaxedLook { Order::Relaxed } else { Order::Acquire };
        let report = if bug == Bug::ReportNotAwaited {
            Op::Read(self.valid, order, 1)
        } else {
            Op::Poll(self.valid, order, Until::AtLeast(1))
        };
        vec![
            Op::PollEither(self.completed, Until::AtLeast(1), self.valid, order, 1),
            report,
            Op::Set(self.code, Order::Relaxed),
            Op::Like(self.object, Order::Relaxed),
            Op::Poll(self.left, Order::Relaxed, Until::AtLeast(workers)),
        ]
    }

    /// A worker that waits for a signal which never comes: its consumer, and its watchdog.
    fn waiting(&self, m: &mut Model, bug: Bug) {
        let (signal, dead) = (m.word("signal"), m.word("dead"));
        let wait = until(signal, dead, bug == Bug::DeafWait);
        m.thread("waiting.consumer", vec![wait, Op::Add(self.left)]);
        let mut watchdog = Vec::new();
        watchdog.unless(
            bug == Bug::DeafWatchdog,
            Op::Poll(self.abort, Order::Relaxed, Until::AtLeast(1)),
        );
        watchdog.unless(bug == Bug::DeafWatchdog, Op::Write(dead, Order::Relaxed, 1));
        m.thread("waiting.watchdog", watchdog);
    }
}

/// Two deadlines expire at once.
fn deadlines(bug: Bug) -> Model {
    let mut m = Model::default();
    let words = Words::new(&mut m);
    for number in 1..=2 {
        let mut ops = words.trap(number, bug);
        ops.push(Op::Add(words.left));
        m.thread(format!("overdue{number}"), ops);
    }
    words.waiting(&mut m, bug);
    let done = m.word("done");
    // poller_wait, then post_completion: no fence lies between the abort word and the completion.
    let over = until(done, words.abort, bug == Bug::DeafPoller);
    m.thread("poller", vec![over, Op::Write(words.completed, Order::Release, 1)]);
    m.thread("host", words.host(3, bug));
    m
}

/// The host aborts: the poller sees it, traps for all, and the host receives the trap.
fn given_up(bug: Bug) -> Model {
    let mut m = Model::default();
    let words = Words::new(&mut m);
    words.waiting(&mut m, bug);
    let (done, enough) = (m.word("done"), m.word("host's abort"));
    let mut poller = vec![until(done, enough, bug == Bug::DeafPoller)];
    poller.extend(words.trap(3, bug));
    poller.push(Op::Write(words.completed, Order::Release, 1));
    m.thread("poller", poller);
    let mut host = vec![Op::Write(enough, Order::Release, 1)];
    host.extend(words.host(1, bug));
    m.thread("host", host);
    m
}

/// `fault`: a consumer reports its fault to its watchdog. `[first, second]`: missing fences; `early`: the code comes
/// first.
fn fault([first, second]: [bool; 2], early: bool) -> Model {
    let mut m = Model::default();
    let (object, code) = (m.word("fault's object"), m.word("fault's code"));
    let mut consumer = vec![Op::Write(object, Order::Relaxed, 7)];
    consumer.unless(first, Op::Fence);
    consumer.insert(if early { 0 } else { consumer.len() }, Op::Write(code, Order::Relaxed, 1));
    m.thread("consumer", consumer);
    let mut watchdog = vec![Op::Poll(code, Order::Relaxed, Until::AtLeast(1))];
    watchdog.unless(second, Op::Fence);
    watchdog.push(Op::Read(object, Order::Relaxed, 7));
    m.thread("watchdog", watchdog);
    m
}

/// The protocol and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    let (nothing, hangs) = ("reads nothing from report's", "nobody goes on");
    let deadline =
        |what: &str, bug, fails| Case::fails(format!("trap: {what}"), deadlines(bug), fails);
    let missing = "from fault's object";
    vec![
        Case::holds("trap: two deadlines at once", deadlines(Bug::None)),
        Case::holds("trap: the host gives up", given_up(Bug::None)),
        Case::holds("trap: a fault", fault([false; 2], false)),
        deadline("the flag before the report", Bug::FlagFirst, nothing),
        deadline("the flag is stored relaxed", Bug::RelaxedFlag, nothing),
        deadline("the host looks relaxed", Bug::RelaxedLook, nothing),
        deadline("two reports in one place", Bug::NoClaim, "from report's object"),
        deadline("a completion taken for a report", Bug::ReportNotAwaited, "from valid"),
        deadline("who traps tells nobody", Bug::NoAbort, hangs),
        deadline("a watchdog that does not look at abort", Bug::DeafWatchdog, hangs),
        deadline("a wait that does not look at dead", Bug::DeafWait, hangs),
        deadline("a poller that does not look at abort", Bug::DeafPoller, hangs),
        Case::fails("trap: a poller that does not hear the host", given_up(Bug::DeafPoller), hangs),
        Case::fails("trap: a fault without the first fence", fault([true, false], false), missing),
        Case::fails("trap: a fault without the second fence", fault([false, true], false), missing),
        Case::fails("trap: a fault whose code comes first", fault([false; 2], true), missing),
    ]
}
