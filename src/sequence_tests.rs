//! Sequences on a machine that samples and has windows, without a machine.

use super::*;

/// Samples by a function of the last tokens, and keeps what it has run.
#[derive(Default)]
struct Sampler {
    seed: u32,
    span: usize,
    ran: Vec<u32>,
    stop: Vec<u32>,
    windows: usize,
    penalty: bool,
    /// Of 8 tokens a text soon repeats, of many not.
    many: bool,
}

impl Sampler {
    fn next(&self) -> u32 {
        let last = &self.ran[self.ran.len().saturating_sub(self.span)..];
        let of = last.iter().fold(self.seed, |sum, t| sum.wrapping_mul(31).wrapping_add(*t));
        if self.many { of.wrapping_mul(2_654_435_761) >> 12 } else { of >> 7 & 7 }
    }

    /// Runs tokens, then samples until a stop token or `count`; all but the last are run.
    fn sample(&mut self, count: usize) -> (Vec<u32>, bool) {
        let mut chosen = Vec::new();
        while chosen.len() < count {
            self.ran.extend(chosen.last());
            chosen.push(self.next());
            if self.stop.contains(&chosen[chosen.len() - 1]) {
                return (chosen, true);
            }
        }
        (chosen, false)
    }
}

impl Engine for Sampler {
    fn begin(&mut self, _: usize, _: u64, _: &[u32]) -> Result<usize, Broken> {
        Ok(0)
    }

    fn feed(&mut self, _: usize, _: &[u32], _: bool) -> Result<Vec<f32>, Broken> {
        Err(Broken::Sequence("it samples".to_owned()))
    }

    fn end(&mut self, _: usize) {}

    fn rewind(&mut self, _: usize, positions: usize) -> Result<(), Broken> {
        self.ran.truncate(positions);
        Ok(())
    }

    fn choose_by(&mut self, _: usize, how: &How<'_>) -> Result<bool, Broken> {
        self.stop = how.stop.to_vec();
        self.penalty = how.sampling.repetition_penalty != 1.0;
        Ok(true)
    }

    fn advance(
        &mut self,
        _: usize,
        tokens: &[u32],
        generate: u32,
        _: &mut dyn Observer,
    ) -> Result<Advanced, Broken> {
        let before = self.ran.len();
        self.ran.extend(tokens);
        let (chosen, stopped) = self.sample(generate as usize);
        Ok(Advanced { chosen, ran: self.ran.len() - before, stopped })
    }

    fn window(&self) -> usize {
        8
    }

    fn speculate(
        &mut self,
        seqs: &[(usize, &[u32])],
        _: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        let &[(_, &[token, ref guesses @ ..])] = seqs else { panic!("{seqs:?}") };
        assert!(guesses.len() < 8 && !self.penalty);
        self.windows += 1;
        let before = self.ran.len();
        self.ran.push(token);
        let (mut chosen, mut stopped) = self.sample(1);
        for guess in guesses {
            if stopped || chosen.last() != Some(guess) {
                break;
            }
            self.ran.push(*guess);
            let (more, ends) = self.sample(1);
            chosen.extend(more);
            stopped = ends;
        }
        Ok(vec![Ok(Advanced { chosen, ran: self.ran.len() - before, stopped })])
    }
}

/// A text, and the number of windows that ran it.
fn text(machine: Sampler, speculate: u32, settings: (u32, u32, f32)) -> (Vec<u32>, Finish, usize) {
    let (told, finish, windows, _) = drafted(machine, None, speculate, settings);
    (told, finish, windows)
}

/// The same with a draft, and what its windows gave.
fn drafted(
    mut machine: Sampler,
    mut draft: Option<&mut Draft<'_>>,
    speculate: u32,
    (limit, stop, penalty): (u32, u32, f32),
) -> (Vec<u32>, Finish, usize, Tally) {
    let work = Work {
        prompt: vec![1, 2, 3, 1, 2],
        limit,
        sampling: Sampling { repetition_penalty: penalty, ..Sampling::default() },
        host: HostRules::default(),
        constraint: None,
        stop: vec![stop],
        logprobs: None,
        priority: Priority::Normal,
        speculate,
    };
    let mut sequence = Sequence::new(work);
    sequence.begin(&mut machine, 0).unwrap();
    let mut told = Vec::new();
    let finish = loop {
        let mut tell = |of| {
            if let Told::Token(token, _) = of {
                told.push(token)
            }
        };
        let draft = draft.as_deref_mut();
        let turn = sequence.turn(&mut machine, draft, (0, 16), &mut tell, &mut || false);
        let (ran, finish) = turn.unwrap();
        assert!(ran <= 16 && sequence.fed == machine.ran.len());
        if let Some(finish) = finish {
            break finish;
        }
    };
    assert_eq!(told, sequence.chosen);
    assert_eq!(sequence.fed + 1, 5 + told.len(), "the last token is not run");
    let tally = sequence.guesser.map_or_else(Tally::default, |guesser| guesser.tally);
    (told, finish, machine.windows, tally)
}

#[test]
fn a_machine_that_samples_gives_the_same_text_with_guesses() {
    let (mut windows, mut stops) = (0, 0);
    for seed in 0..60 {
        // Tokens are 0 to 7: some texts meet the stop token, some never.
        let settings = (3 + seed * 3, if seed % 2 == 0 { 5 } else { 9 }, 1.0);
        let machine = || Sampler { seed, span: 1 + seed as usize % 3, ..Sampler::default() };
        let (plain, finish, none) = text(machine(), 0, settings);
        assert_eq!(none, 0);
        for most in [1, 4, 7] {
            let (guessed, ended, ran) = text(machine(), most, settings);
            assert_eq!((&guessed, &ended), (&plain, &finish), "{seed} {most}");
            windows += ran;
        }
        stops += usize::from(finish == Finish::Stop);
    }
    assert!(windows > 300 && stops > 5, "{windows} windows, {stops} stops");
}

/// A draft that chooses as the machine does is always right, another one nearly never; it follows one text after the other.
#[test]
fn a_draft_changes_no_text_and_guesses_before_anything_repeats() {
    let machine = |seed, span| Sampler { seed, span, many: true, ..Sampler::default() };
    for right in [true, false] {
        let mut sum = Tally::default();
        for span in 1..4 {
            let engine = machine(if right { 3 } else { 4 }, span);
            let mut draft = Draft::new(Box::new(engine), 1000).unwrap();
            for limit in [2, 30, 60] {
                let settings = (limit, 9, 1.0);
                let (plain, ..) = text(machine(3, span), 0, settings);
                let model = machine(3, span);
                let (guessed, _, _, tally) = drafted(model, Some(&mut draft), 4, settings);
                assert_eq!(guessed, plain, "{right} {span} {limit}");
                sum.drafted += tally.drafted;
                sum.drafts_accepted += tally.drafts_accepted;
                sum.drafts_rejected += tally.drafts_rejected;
            }
        }
        assert!(sum.drafted > 10, "{right}: {sum:?}");
        assert_eq!(sum.drafts_rejected == 0, right, "{sum:?}");
    }
}

#[test]
fn a_penalty_on_the_machine_is_not_guessed() {
    let machine = || Sampler { seed: 3, span: 1, ..Sampler::default() };
    let (_, _, windows) = text(machine(), 7, (80, 9, 1.0));
    assert!(windows > 0);
    assert_eq!(text(machine(), 7, (80, 9, 1.2)).2, 0);
}

/// Gives rows, and says what was done in which order.
#[derive(Default)]
struct Rows {
    done: std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>,
}

impl Engine for Rows {
    fn begin(&mut self, _: usize, _: u64, _: &[u32]) -> Result<usize, Broken> {
        Ok(0)
    }

    fn feed(&mut self, _: usize, _: &[u32], _: bool) -> Result<Vec<f32>, Broken> {
        Ok(vec![0.0; 64])
    }

    fn feed_and(
        &mut self,
        _: usize,
        _: &[u32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Vec<f32>, Broken> {
        self.done.lock().unwrap().push("begun");
        meanwhile();
        self.done.lock().unwrap().push("ended");
        Ok(vec![0.0; 64])
    }

    fn end(&mut self, _: usize) {}
}

/// Allows one token after the other.
#[derive(Clone, Debug)]
struct Next(u32, std::sync::Arc<std::sync::Mutex<Vec<&'static str>>>);

impl Constraint for Next {
    fn allowed(&mut self, vocab: usize, _: &[u32]) -> Result<crate::constraint::Allowed, String> {
        self.1.lock().unwrap().push("allowed");
        let mut allowed = crate::constraint::Allowed::new(&[], vocab);
        allowed.set(self.0, true);
        Ok(allowed)
    }

    fn prepare(&mut self) {
        self.1.lock().unwrap().push("prepared");
    }

    fn take(&mut self, id: u32) -> Result<bool, String> {
        assert_eq!(id, self.0);
        self.0 += 1;
        Ok(false)
    }

    fn copied(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn a_rule_is_prepared_while_the_machine_runs() {
    let mut engine = Rows::default();
    let done = engine.done.clone();
    let mut sequence = Sequence::new(Work {
        prompt: vec![1, 2],
        limit: 3,
        sampling: Sampling { temperature: 1.0, ..Sampling::default() },
        host: HostRules::default(),
        constraint: Some(Box::new(Next(7, done.clone()))),
        stop: vec![0],
        logprobs: None,
        priority: Priority::Normal,
        speculate: 0,
    });
    sequence.begin(&mut engine, 0).unwrap();
    let finish = loop {
        let turn = sequence.turn(&mut engine, None, (0, 16), &mut |_| {}, &mut || false).unwrap();
        if let Some(finish) = turn.1 {
            break finish;
        }
    };
    assert_eq!((finish, &sequence.chosen[..]), (Finish::Length, &[7, 8, 9][..]));
    assert_eq!(*done.lock().unwrap(), ["begun", "prepared", "ended", "allowed"].repeat(3));
}
