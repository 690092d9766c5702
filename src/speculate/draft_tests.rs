//! A draft on a machine that samples, without a machine.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::engine::{Advanced, Observer};

/// What a machine has run, the tokens of each command, and whether it fails.
#[derive(Default)]
struct Ran {
    tokens: Vec<u32>,
    commands: Vec<usize>,
    fails: bool,
    rested: bool,
}

/// Chooses the successor of the last token; of more than `CHUNK` tokens it runs all but the last in a command of their own.
struct Counting(Rc<RefCell<Ran>>);

const CHUNK: usize = 4;

impl Engine for Counting {
    fn begin(&mut self, _: usize, _: u64, _: &[u32]) -> Result<usize, Broken> {
        Ok(0)
    }

    fn feed(&mut self, _: usize, _: &[u32], _: bool) -> Result<Vec<f32>, Broken> {
        Err(Broken::Sequence("it samples".to_owned()))
    }

    fn end(&mut self, _: usize) {}

    fn choose_by(&mut self, _: usize, how: &How<'_>) -> Result<bool, Broken> {
        assert!(how.sampling.is_plain_greedy() && how.stop.is_empty());
        Ok(true)
    }

    fn rewind(&mut self, _: usize, positions: usize) -> Result<(), Broken> {
        self.0.borrow_mut().tokens.truncate(positions);
        Ok(())
    }

    fn rest(&mut self) {
        self.0.borrow_mut().rested = true;
    }

    fn advance(
        &mut self,
        _: usize,
        tokens: &[u32],
        generate: u32,
        _: &mut dyn Observer,
    ) -> Result<Advanced, Broken> {
        let mut ran = self.0.borrow_mut();
        if ran.fails {
            return Err(Broken::All("the device is lost".to_owned()));
        }
        ran.commands.push(tokens.len());
        let head = if tokens.len() > CHUNK { tokens.len() - 1 } else { tokens.len() };
        ran.tokens.extend(&tokens[..head]);
        let count = if head < tokens.len() { 0 } else { generate };
        let chosen: Vec<u32> = (1..=count).map(|next| tokens[head - 1] + next).collect();
        let more = chosen.len().saturating_sub(1);
        ran.tokens.extend(&chosen[..more]);
        Ok(Advanced { chosen, ran: head + more, stopped: false })
    }
}

fn draft(capacity: u32) -> (Draft<'static>, Rc<RefCell<Ran>>) {
    let ran = Rc::<RefCell<Ran>>::default();
    (Draft::new(Box::new(Counting(ran.clone())), capacity).unwrap(), ran)
}

#[test]
fn it_goes_back_to_where_the_text_is_its_own_and_reads_the_rest() {
    let (mut draft, ran) = draft(100);
    let first = draft.guess(&[7, 7, 7, 7, 7, 1], 3);
    assert_eq!((first.tokens, first.read), (vec![2, 3, 4], 6));
    assert_eq!(ran.borrow().commands, [6, 1], "a long text in two commands");
    assert_eq!(ran.borrow().tokens, [7, 7, 7, 7, 7, 1, 2, 3], "the last guess is not run");
    // The second guess was wrong.
    let wrong = draft.guess(&[7, 7, 7, 7, 7, 1, 2, 9], 2);
    assert_eq!((wrong.tokens, wrong.read), (vec![10, 11], 1));
    // All were right.
    let right = draft.guess(&[7, 7, 7, 7, 7, 1, 2, 9, 10, 11, 12], 1);
    assert_eq!((right.tokens, right.read), (vec![13], 2));
    // Another text, and the same one again.
    assert_eq!(draft.guess(&[7, 8], 1).read, 1);
    let same = draft.guess(&[7, 8], 2);
    assert_eq!(
        (same.tokens, same.read),
        (vec![9, 10], 1),
        "what follows the last token is sampled anew"
    );
    assert_eq!(ran.borrow().tokens, [7, 8, 9]);
}

#[test]
fn it_guesses_no_further_than_its_cache_reaches() {
    let (mut draft, _) = draft(6);
    let text: Vec<u32> = (1..=7).collect();
    let counts = (3..=7).map(|len| draft.guess(&text[..len], 2).tokens.len());
    assert_eq!(counts.collect::<Vec<_>>(), [2, 2, 1, 0, 0]);
    assert!(draft.can_guess(5) && !draft.can_guess(6) && draft.guess(&[], 2).tokens.is_empty());
}

#[test]
fn one_that_fails_guesses_no_more_and_its_kernel_leaves_at_the_end() {
    let (mut draft, ran) = draft(100);
    assert_eq!(draft.guess(&[1], 2).tokens, [2, 3]);
    ran.borrow_mut().fails = true;
    assert!(draft.guess(&[1, 2], 2).tokens.is_empty() && !draft.can_guess(1));
    ran.borrow_mut().fails = false;
    assert!(draft.guess(&[1, 2], 2).tokens.is_empty(), "nobody tries again");
    assert!(!ran.borrow().rested);
    drop(draft);
    assert!(ran.borrow().rested);
}
