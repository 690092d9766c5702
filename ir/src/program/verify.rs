//! Proves that a program gives the same result in every order in which its workers can run it.
//!
//! **What is checked**, stage by stage; a stage runs only if the one before it found nothing, and reports everything
//! that it finds:
//!
//! 1. *limits and shapes*: sizes, ids, kinds of buffers, parameters, matrices, dimensions (`P-*`);
//! 2. *program*: counters (`C-*`), attention splits and caches (`K-*`), routes (`L-ROUTE`), every word written once
//!    (`R-WRITER`, `T-COVER`), heads and other words on the device that reads them (`D-*`);
//! 3. *order*: no cycle, and one `sample` at the end (`O-*`);
//! 4. *data*: every read is ordered after its write (`R-HAPPENS`).
//!
//! **What is not checked**: that the program computes the model. Two layers' weights may be swapped and an epsilon may
//! be wrong; the comparison with the graph's evaluator finds that.
//!
//! A program of several devices is checked as a whole, at the cost of its devices one by one: clocks never cross a
//! device, since what a device reads of another one is flag-in-data words, and cycles are searched for over all of them.
//!
//! The order in stage 3 is that of the memory model: queues and counters establish it, flag-in-data hand-offs do not;
//! see [`Order`](super::Order).

use crate::program::Program;
use crate::program::rules;
use crate::program::rules::order::Order;
use crate::program::rules::words::Unordered;
use crate::violation::Violations;

mod seal;
mod together;

pub use seal::{Seal, SealKey, Unsealed};
pub use together::{Together, check_seqs, window_reads};

/// A value that its checker accepted. Only three functions make one: [`verify`], [`SealKey::open`] from sealed bytes,
/// and [`Together`] for a sequence's program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified<T>(T);

impl<T> Verified<T> {
    /// The value, without the proof.
    #[must_use]
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> std::ops::Deref for Verified<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> AsRef<T> for Verified<T> {
    fn as_ref(&self) -> &T {
        &self.0
    }
}

/// Checks every program rule.
///
/// The cost is about `tasks * workers`, plus the accesses to each run of bytes that no task splits further.
///
/// # Errors
/// All violations of the first stage that has any, each with a witness.
pub fn verify(program: Program) -> Result<Verified<Program>, Violations> {
    check(&program).map(|()| Verified(program))
}

/// As [`verify`], for a borrowed program.
///
/// # Errors
/// As [`verify`].
pub fn check(program: &Program) -> Result<(), Violations> {
    parts(program)?;
    let mut order = None;
    stage(|found| order = rules::order::check(program, found))?;
    let order: Option<Order> = order;
    stage(|found| {
        if let Some(order) = &order {
            rules::words::check_order(program, order, found);
        }
    })
}

/// Tasks that read words with no happens-before between them and the task that writes these words: the only cause of
/// different results in repeats of a program on one machine. They are in the order in which a single worker would reach
/// the readers. A verified program has none.
///
/// # Errors Violations in parts of the program, or the reason why its tasks have no order at all.
pub fn unordered(program: &Program) -> Result<Vec<Unordered>, Violations> {
    parts(program)?;
    let mut order = None;
    // A `sample` that is not last is one more unordered pair, and no reason to fail.
    let mut found = Violations::default();
    if let Some(sorted) = rules::order::check(program, &mut found) {
        order = Some(rules::words::unordered(program, &sorted));
    }
    order.ok_or(found)
}

/// The stages that check each part by itself.
fn parts(program: &Program) -> Result<(), Violations> {
    stage(|found| rules::device::limits(program, found))?;
    stage(|found| rules::limit::check(program, found))?;
    stage(|found| {
        rules::device::replicas(program, found);
        rules::matrix::check(program, found);
        rules::buffer::check(program, found);
        if found.is_empty() {
            rules::task::check(program, found);
        }
    })?;
    stage(|found| {
        rules::counter::check(program, found);
        rules::attention::check(program, found);
        rules::route::check(program, found);
        rules::device::heads(program, found);
        rules::words::check(program, found);
    })
}

fn stage(check: impl FnOnce(&mut Violations)) -> Result<(), Violations> {
    let mut found = Violations::default();
    check(&mut found);
    if found.is_empty() { Ok(()) } else { Err(found) }
}
