//! Which of two kernels runs a sequence: the one for batches, or the one for a lone sequence, which is faster with one.
//!
//! A switch stops one kernel and launches the other, some 2 ms. It costs nothing where no kernel is resident, as after a
//! prompt in chunks.

/// A kernel of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// For as many sequences as a command decodes at once.
    Batch = 0,
    /// For one.
    Lone = 1,
}

/// Positions that a sequence runs alone before its kernel is worth a switch: others often come at once. Its commands on the
/// other kernel are no longer than this.
pub(crate) const ALONE: u32 = 48;
/// Positions that a sequence may still run for the switch to be worth it: some 100 us are saved with each.
const LEFT: u64 = 64;

/// The choice, from the load.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KernelChoice {
    /// Positions since there was more than one sequence.
    alone: u32,
}

impl KernelChoice {
    /// Of a process with one sequence: no other will come.
    pub(crate) fn alone() -> Self {
        Self { alone: ALONE }
    }

    /// The kernel of the next command of one sequence that may run `left` more positions, among `sequences`.
    pub(crate) fn next(self, resident: Option<Kernel>, sequences: usize, left: u64) -> Kernel {
        let stays = sequences == 1 && self.alone >= ALONE;
        match resident {
            None if sequences > 1 => Kernel::Batch,
            None => Kernel::Lone,
            Some(Kernel::Batch) if stays && left >= LEFT => Kernel::Lone,
            Some(kernel) => kernel,
        }
    }

    /// Notes a command that ran while this many sequences were open, in a batch or alone.
    pub(crate) fn ran(&mut self, sequences: usize, positions: u32) {
        self.alone = if sequences > 1 { 0 } else { self.alone.saturating_add(positions) };
    }
}

#[cfg(test)]
mod tests {
    use super::Kernel::{Batch, Lone};
    use super::*;

    #[test]
    fn a_launch_that_has_to_be_made_is_of_the_kernel_for_the_load() {
        let choice = KernelChoice::default();
        assert_eq!(choice.next(None, 1, 1), Lone);
        assert_eq!(choice.next(None, 2, 1000), Batch);
    }

    #[test]
    fn a_resident_kernel_is_left_only_by_a_sequence_that_stays_alone_and_has_some_way_to_go() {
        let mut choice = KernelChoice::default();
        let mut next = |sequences, left| {
            let kernel = choice.next(Some(Batch), sequences, left);
            choice.ran(sequences, ALONE / 2);
            kernel
        };
        assert_eq!([next(1, 500), next(1, 500), next(2, 500)], [Batch; 3], "another came");
        assert_eq!([next(1, 500), next(1, 500), next(1, 500)], [Batch, Batch, Lone]);
        assert_eq!(next(1, LEFT - 1), Batch, "nearly done");
        let choice = KernelChoice::default();
        // A batch switches by itself; a prompt beside others does not.
        assert_eq!([1, 2, 9].map(|sequences| choice.next(Some(Lone), sequences, 1)), [Lone; 3]);
    }

    /// What it ran in a batch, or in chunks beside others, is no sign that it stays alone.
    #[test]
    fn one_that_is_left_of_a_batch_waits_like_one_that_came() {
        let mut choice = KernelChoice::default();
        choice.ran(8, 1024);
        assert_eq!(choice.next(Some(Batch), 1, 500), Batch);
        choice.ran(1, ALONE);
        assert_eq!(choice.next(Some(Batch), 1, 500), Lone);
    }

    #[test]
    fn a_process_with_one_sequence_does_not_wait_for_others() {
        assert_eq!(KernelChoice::alone().next(Some(Batch), 1, LEFT), Lone);
        assert_eq!(KernelChoice::alone().next(Some(Batch), 1, LEFT - 1), Batch);
    }

    #[test]
    fn a_lone_client_switches_once_and_eight_never() {
        let (mut choice, mut resident, mut switches) = (KernelChoice::default(), Batch, 0);
        for command in 0..1000 {
            let next = choice.next(Some(resident), 1, 5000 - command);
            choice.ran(1, 1);
            switches += u32::from(next != resident);
            resident = next;
        }
        assert_eq!((switches, resident), (1, Lone));
        let choice = KernelChoice::default();
        assert!((0..1000).all(|_| choice.next(Some(Batch), 8, 5000) == Batch));
    }
}
