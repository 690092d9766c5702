//! The explorer's abstract machine: histories, views, barriers and copies, one step at a time.

use super::{Barrier, Model, Op, Order, Source, Word};

/// Most words of a model.
pub const WORDS_MAX: usize = 12;
/// Most stage barriers of a model.
pub const BARRIERS_MAX: usize = 8;

/// For each word, the place in its history before which nothing is visible.
type Places = [u8; WORDS_MAX];

/// The oldest values that may still be seen: by plain accesses, and by copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct View {
    plain: Places,
    proxy: Places,
}

fn raise(mine: &mut Places, theirs: &Places) {
    mine.iter_mut().zip(theirs).for_each(|(m, t)| *m = (*m).max(*t));
}

impl View {
    fn join(&mut self, other: &Self) {
        raise(&mut self.plain, &other.plain);
        raise(&mut self.proxy, &other.proxy);
    }

    /// Shifts the view because a value was inserted at or before the place that it saw.
    fn make_room(&mut self, word: Word, place: u8) {
        for seen in [&mut self.plain[word], &mut self.proxy[word]] {
            *seen += u8::from(*seen >= place);
        }
    }
}

/// One value of a word's history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Value {
    value: u32,
    /// The device of its writer, and the views that it was released with to threads of that device and to all.
    device: u8,
    near: View,
    view: View,
    /// Made from the value in front of it (read-modify-write), so that nothing comes between.
    chained: bool,
}

impl Value {
    /// A value that releases nothing.
    fn new(value: u32) -> Self {
        let view = View::default();
        Self { value, device: 0, near: view, view, chained: false }
    }

    /// Made from the value in front of it, whose releases it passes on.
    fn chain(&mut self, before: &Self) {
        self.chained = true;
        self.view.join(&before.view);
        self.near.join(&before.near);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct ThreadState {
    next: u8,
    /// The current view.
    now: View,
    /// The views of values read by relaxed loads, for a later fence: of its device's values, and of all.
    found_near: View,
    found: View,
    /// The view at the last fence, which relaxed stores release: to threads of its device, and to all.
    fenced_near: View,
    fenced: View,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Phase {
    /// Completed phases.
    over: u8,
    arrived: u8,
    /// Announced copies that have not completed.
    expected: u8,
    /// The view joined from arrivals at the current phase.
    gathered: View,
    /// The view joined from completed phases.
    view: View,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Underway {
    from: Source,
    to: Word,
    barrier: Barrier,
    view: View,
}

/// A state of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    words: Vec<Vec<Value>>,
    threads: Vec<ThreadState>,
    phases: Vec<Phase>,
    copies: Vec<Underway>,
    /// Values noted by each thread.
    pub(super) notes: Vec<Vec<u32>>,
}

/// A transition from a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The thread's next op, with the place in the word's history that it loads from or stores to.
    Op { thread: usize, place: u8 },
    /// A poll of two words finds the second one set and branches.
    Turn { thread: usize, place: u8 },
    /// A poll reads a value that does not match, and continues.
    Look { thread: usize, place: u8 },
    /// A copy completes: the place that it reads and the place where it stores.
    Land { copy: usize, source: u8, place: u8 },
}

impl State {
    pub(super) fn new(model: &Model) -> Self {
        let zero = Value::new(0);
        Self {
            words: vec![vec![zero]; model.words.len()],
            threads: vec![ThreadState::default(); model.threads.len()],
            phases: vec![Phase::default(); model.barriers.len()],
            copies: Vec::new(),
            notes: vec![Vec::new(); model.threads.len()],
        }
    }

    fn op(&self, model: &Model, thread: usize) -> Option<Op> {
        model.threads[thread].ops.get(self.threads[thread].next as usize).copied()
    }

    pub(super) fn finished(&self, model: &Model) -> bool {
        (0..self.threads.len()).all(|t| self.op(model, t).is_none()) && self.copies.is_empty()
    }

    /// Takes the steps that affect no other thread: fences change only their thread's view, so their timing makes no
    /// difference. A finished thread drops its views, which are not needed any more.
    pub(super) fn settle(&mut self, model: &Model) {
        for thread in 0..self.threads.len() {
            loop {
                let op = self.op(model, thread);
                let t = &mut self.threads[thread];
                match op {
                    Some(op @ (Op::Fence | Op::SystemFence)) => {
                        t.now.join(&t.found_near);
                        if op == Op::SystemFence {
                            t.now.join(&t.found);
                            t.fenced = t.now;
                        }
                        t.fenced_near = t.now;
                    }
                    Some(Op::ProxyFence) => raise(&mut t.now.proxy, &t.now.plain),
                    None => {
                        *t = ThreadState { next: t.next, ..ThreadState::default() };
                        break;
                    }
                    Some(_) => break,
                }
                t.next += 1;
            }
        }
    }

    /// Places behind the view at which a store may go: not between a value and the one made from it.
    fn gaps(&self, word: Word, seen: u8) -> impl Iterator<Item = u8> + '_ {
        let history = &self.words[word];
        (seen as usize + 1..=history.len())
            .filter(|&place| history.get(place).is_none_or(|value| !value.chained))
            .map(|place| place as u8)
    }

    /// All transitions.
    pub(super) fn steps(&self, model: &Model) -> Vec<Step> {
        let mut steps = Vec::new();
        for thread in 0..self.threads.len() {
            if let Some(op) = self.op(model, thread) {
                self.steps_of(model, thread, op, &mut steps);
            }
        }
        for (copy, job) in self.copies.iter().enumerate() {
            let sources = match job.from {
                Source::Value(_) => 0..=0,
                Source::Word(word) => job.view.proxy[word]..=self.words[word].len() as u8 - 1,
            };
            for source in sources {
                let places = self.gaps(job.to, job.view.proxy[job.to]);
                steps.extend(places.map(|place| Step::Land { copy, source, place }));
            }
        }
        steps
    }

    fn steps_of(&self, model: &Model, thread: usize, op: Op, steps: &mut Vec<Step>) {
        let seen = |word: Word| self.threads[thread].now.plain[word];
        let visible = |word: Word| seen(word)..self.words[word].len() as u8;
        let value = |word: Word, place: u8| self.words[word][place as usize].value;
        match op {
            Op::Read(word, ..) | Op::Note(word, _) | Op::Set(word, _) | Op::Like(word, _) => {
                steps.extend(visible(word).map(|place| Step::Op { thread, place }));
            }
            Op::Poll(word, _, until)
            | Op::PollFor(word, until, _)
            | Op::PollEither(word, until, ..) => {
                for place in visible(word) {
                    if until.holds(value(word, place)) {
                        steps.push(Step::Op { thread, place });
                    } else if place > seen(word) {
                        steps.push(Step::Look { thread, place });
                    }
                }
                if let Op::PollEither(_, _, other, ..) = op {
                    let set = visible(other).filter(|&place| value(other, place) != 0);
                    steps.extend(set.map(|place| Step::Turn { thread, place }));
                }
            }
            Op::Write(word, ..) => {
                steps.extend(self.gaps(word, seen(word)).map(|place| Step::Op { thread, place }));
            }
            Op::Add(word) | Op::Claim(word, _) => {
                // Behind any value at or after the view that nothing has been made from yet.
                let places = self.gaps(word, seen(word));
                steps.extend(places.map(|place| Step::Op { thread, place }));
            }
            Op::Meet(group) => {
                // The first of the group takes the step for all, once all are there.
                let members = || self.members(model, group);
                if members().all(|t| self.op(model, t) == Some(op))
                    && members().next() == Some(thread)
                {
                    steps.push(Step::Op { thread, place: 0 });
                }
            }
            Op::Land(barrier, parity) => {
                if self.phases[barrier].over % 2 != parity {
                    steps.push(Step::Op { thread, place: 0 });
                }
            }
            Op::Arrive(_) | Op::Expect(_) | Op::Copy(..) => {
                steps.push(Step::Op { thread, place: 0 });
            }
            Op::Fence | Op::SystemFence | Op::ProxyFence => unreachable!("settled"),
        }
    }

    fn members<'a>(&'a self, model: &'a Model, group: u8) -> impl Iterator<Item = usize> + 'a {
        (0..self.threads.len()).filter(move |&t| model.threads[t].ops.contains(&Op::Meet(group)))
    }

    /// Takes a step. `Err` describes the failure.
    pub(super) fn take(&mut self, model: &Model, step: Step) -> Result<(), String> {
        match step {
            Step::Land { copy, source, place } => self.land(model, copy, source, place),
            Step::Look { thread, place } => {
                if let Some(Op::Poll(word, order, _)) = self.op(model, thread) {
                    self.load(model, thread, word, order, place);
                } else if let Some(Op::PollFor(word, ..)) = self.op(model, thread) {
                    self.load(model, thread, word, Order::Relaxed, place);
                } else if let Some(Op::PollEither(word, _, _, order, _)) = self.op(model, thread) {
                    self.load(model, thread, word, order, place);
                }
                Ok(())
            }
            Step::Turn { thread, place } => {
                if let Some(Op::PollEither(_, _, other, order, further)) = self.op(model, thread) {
                    self.load(model, thread, other, order, place);
                    self.threads[thread].next += 1 + further;
                }
                Ok(())
            }
            Step::Op { thread, place } => {
                let op = self.op(model, thread).expect("only threads with an op take one");
                if let Op::Meet(group) = op {
                    self.meet(model, group);
                    return Ok(());
                }
                self.threads[thread].next += 1;
                self.run(model, thread, op, place)
            }
        }
    }

    fn run(&mut self, model: &Model, thread: usize, op: Op, place: u8) -> Result<(), String> {
        let name = &model.threads[thread].name;
        match op {
            Op::Read(word, order, wanted) => {
                let value = self.load(model, thread, word, order, place);
                self.expect(model, name, word, value, wanted)?;
            }
            Op::Note(word, order) => {
                let value = self.load(model, thread, word, order, place);
                self.notes[thread].push(value);
            }
            Op::Poll(word, order, _) | Op::PollEither(word, _, _, order, _) => {
                self.load(model, thread, word, order, place);
            }
            Op::Set(word, order) => {
                let value = self.load(model, thread, word, order, place);
                if value == 0 {
                    return Err(format!("{name} reads nothing from {}", model.words[word]));
                }
                self.notes[thread].push(value);
            }
            Op::Like(word, order) => {
                let value = self.load(model, thread, word, order, place);
                let wanted = self.notes[thread].last().copied().unwrap_or_default();
                self.expect(model, name, word, value, wanted)?;
            }
            Op::PollFor(word, _, wanted) => {
                let value = self.load(model, thread, word, Order::Relaxed, place);
                self.expect(model, name, word, value, wanted)?;
            }
            Op::Write(word, order, value) => self.store(model, thread, word, order, value, place),
            Op::Add(word) | Op::Claim(word, _) => {
                let before = self.words[word][place as usize - 1];
                if let Op::Claim(_, further) = op
                    && before.value != 0
                {
                    self.threads[thread].next += further;
                }
                self.store(model, thread, word, Order::Relaxed, before.value + 1, place);
                self.words[word][place as usize].chain(&before);
            }
            Op::Arrive(barrier) | Op::Expect(barrier) => {
                let phase = &mut self.phases[barrier];
                phase.gathered.join(&self.threads[thread].now);
                phase.arrived += 1;
                phase.expected += u8::from(matches!(op, Op::Expect(_)));
                if phase.arrived > model.barriers[barrier].1 {
                    return Err(format!(
                        "{name} arrives once too often at {}, whose phase is not over",
                        model.barriers[barrier].0
                    ));
                }
                self.turn(model, barrier);
            }
            Op::Land(barrier, _) => {
                let view = self.phases[barrier].view;
                self.threads[thread].now.join(&view);
            }
            Op::Copy(from, to, barrier) => {
                let view = self.threads[thread].now;
                self.copies.push(Underway { from, to, barrier, view });
            }
            Op::Meet(_) | Op::Fence | Op::SystemFence | Op::ProxyFence => {
                unreachable!("taken elsewhere")
            }
        }
        Ok(())
    }

    fn expect(
        &self,
        model: &Model,
        name: &str,
        word: Word,
        value: u32,
        wanted: u32,
    ) -> Result<(), String> {
        if value == wanted {
            return Ok(());
        }
        Err(format!("{name} reads {value} from {}, and should read {wanted}", model.words[word]))
    }

    fn load(&mut self, model: &Model, thread: usize, word: Word, order: Order, place: u8) -> u32 {
        let Value { value, device, near, view, .. } = self.words[word][place as usize];
        let t = &mut self.threads[thread];
        t.now.plain[word] = t.now.plain[word].max(place);
        let own = device == model.threads[thread].device;
        let released = if own { near } else { view };
        if own {
            t.found_near.join(&released);
        }
        t.found.join(&released);
        if order == Order::Acquire {
            t.now.join(&released);
        }
        value
    }

    /// Inserts a value into a history; views of later values are shifted.
    fn insert(&mut self, word: Word, place: u8, value: Value) {
        let threads = self.threads.iter_mut().flat_map(|t| {
            [&mut t.now, &mut t.found_near, &mut t.found, &mut t.fenced_near, &mut t.fenced]
        });
        let values = self.words.iter_mut().flatten();
        let values = values.flat_map(|value| [&mut value.near, &mut value.view]);
        let phases = self.phases.iter_mut().flat_map(|p| [&mut p.gathered, &mut p.view]);
        let copies = self.copies.iter_mut().map(|job| &mut job.view);
        threads
            .chain(values)
            .chain(phases)
            .chain(copies)
            .for_each(|view| view.make_room(word, place));
        self.words[word].insert(place as usize, value);
    }

    fn store(
        &mut self,
        model: &Model,
        thread: usize,
        word: Word,
        order: Order,
        value: u32,
        place: u8,
    ) {
        let device = model.threads[thread].device;
        self.insert(word, place, Value { device, ..Value::new(value) });
        let t = &mut self.threads[thread];
        t.now.plain[word] = place;
        let released = if order == Order::Release { [t.now; 2] } else { [t.fenced_near, t.fenced] };
        let [near, view] = released.map(|mut view| {
            view.plain[word] = view.plain[word].max(place);
            view
        });
        let stored = &mut self.words[word][place as usize];
        (stored.near, stored.view) = (near, view);
    }

    fn meet(&mut self, model: &Model, group: u8) {
        let members: Vec<usize> = self.members(model, group).collect();
        let mut all = View::default();
        members.iter().for_each(|&t| all.join(&self.threads[t].now));
        for t in members {
            self.threads[t].now = all;
            self.threads[t].next += 1;
        }
    }

    /// Completes the phase of a barrier if all its arrivals and copies are there.
    fn turn(&mut self, model: &Model, barrier: Barrier) {
        let phase = &mut self.phases[barrier];
        if phase.arrived == model.barriers[barrier].1 && phase.expected == 0 {
            phase.arrived = 0;
            phase.over += 1;
            phase.view.join(&phase.gathered);
        }
    }

    fn land(&mut self, model: &Model, copy: usize, source: u8, place: u8) -> Result<(), String> {
        let job = self.copies.remove(copy);
        let value = match job.from {
            Source::Value(value) => value,
            Source::Word(word) => self.words[word][source as usize].value,
        };
        self.insert(job.to, place, Value::new(value));
        let phase = &mut self.phases[job.barrier];
        let seen = &mut phase.gathered;
        seen.plain[job.to] = seen.plain[job.to].max(place);
        seen.proxy[job.to] = seen.proxy[job.to].max(place);
        if phase.expected == 0 {
            return Err(format!(
                "a copy completes on {}, which expects none",
                model.barriers[job.barrier].0
            ));
        }
        phase.expected -= 1;
        self.turn(model, job.barrier);
        Ok(())
    }

    /// A description of the deadlock.
    pub(super) fn stuck(&self, model: &Model) -> String {
        let waiting = (0..self.threads.len())
            .filter_map(|t| self.op(model, t).map(|op| (t, op)))
            .map(|(t, op)| format!("{} at `{}`", model.threads[t].name, describe(model, op)));
        format!("nobody goes on: {}", waiting.collect::<Vec<_>>().join(", "))
    }

    /// A description of a step.
    pub(super) fn tell(&self, model: &Model, step: Step) -> String {
        let age = |word: Word, place: u8| match self.words[word].len() - 1 - place as usize {
            0 => String::new(),
            stale => format!(" ({stale} stale)"),
        };
        match step {
            Step::Land { copy, place, .. } => {
                let job = self.copies[copy];
                let behind = self.words[job.to].len() as u8 - place;
                let lost = if behind > 0 { " and is lost under a later store" } else { "" };
                format!("copy: lands in {}{lost}", model.words[job.to])
            }
            Step::Look { thread, place }
            | Step::Op { thread, place }
            | Step::Turn { thread, place } => {
                let op = self.op(model, thread).expect("only threads with an op take one");
                if let (Step::Turn { .. }, Op::PollEither(_, _, other, ..)) = (step, op) {
                    let name = &model.threads[thread].name;
                    return format!("{name}: sees {} set", model.words[other]);
                }
                let what = format!("{}: {}", model.threads[thread].name, describe(model, op));
                let value = |word: Word| self.words[word][place as usize].value;
                if let Op::Read(word, ..)
                | Op::Note(word, _)
                | Op::Set(word, _)
                | Op::Like(word, _)
                | Op::PollEither(word, ..)
                | Op::Poll(word, ..)
                | Op::PollFor(word, ..) = op
                {
                    return format!("{what}: sees {}{}", value(word), age(word, place));
                }
                if let Op::Write(word, ..) = op
                    && (place as usize) < self.words[word].len()
                {
                    return format!("{what}: and is lost under a later store");
                }
                what
            }
        }
    }
}

fn describe(model: &Model, op: Op) -> String {
    let word = |w: Word| &model.words[w];
    let barrier = |b: Barrier| &model.barriers[b].0;
    match op {
        Op::Read(w, order, _) | Op::Note(w, order) | Op::Set(w, order) | Op::Like(w, order) => {
            format!("load {} {order:?}", word(w))
        }
        Op::Poll(w, order, until) => format!("poll {} {order:?} until {until:?}", word(w)),
        Op::PollFor(w, until, _) => format!("poll {} Relaxed until {until:?}", word(w)),
        Op::Write(w, order, value) => format!("store {value} to {} {order:?}", word(w)),
        Op::PollEither(w, until, other, order, _) => {
            format!("poll {} {order:?} until {until:?}, or until {} is set", word(w), word(other))
        }
        Op::Add(w) => format!("add 1 to {}", word(w)),
        Op::Claim(w, _) => format!("claim {}", word(w)),
        Op::Fence => "fence".into(),
        Op::SystemFence => "system fence".into(),
        Op::ProxyFence => "proxy fence".into(),
        Op::Meet(group) => format!("meet group {group}"),
        Op::Arrive(b) => format!("arrive at {}", barrier(b)),
        Op::Expect(b) => format!("expect a copy on {}", barrier(b)),
        Op::Land(b, parity) => format!("wait for {} parity {parity}", barrier(b)),
        Op::Copy(Source::Value(value), to, b) => {
            format!("copy {value} to {}, on {}", word(to), barrier(b))
        }
        Op::Copy(Source::Word(from), to, b) => {
            format!("copy {} to {}, on {}", word(from), word(to), barrier(b))
        }
    }
}
