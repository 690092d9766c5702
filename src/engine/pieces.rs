//! How long a piece of a prompt in chunks keeps other sequences from their next tokens.
//!
//! Chunks run while no kernel is resident. So a sequence that decodes waits for a stop, the piece and a launch, and
//! then has its step. A piece is a chunk of [`SLICE`] tokens, or beside sequences that decode as many layers of it as
//! take three quarters of their step: with 2 ms for stop and launch beside steps of 4.3 ms they wait for 2.3 steps.
//! A piece takes as long as a launch all the same, or most of the time would go there. The tokens of a chunk, and so its bits, do not depend on this.

use std::time::Duration;

/// Prompt tokens per turn in chunks: as long as some tens of steps, if all layers run at once.
pub(crate) const SLICE: u64 = 1024;
/// A piece takes this part of a step.
const OF_A_STEP: f64 = 0.75;

/// What the time of a piece follows from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pieces {
    /// Whether other sequences wait for their next tokens.
    pub(crate) streams: bool,
    /// The time of a step of the last command; beside sequences that decode the shortest one, since the first step after a
    /// launch takes longer.
    step: Duration,
}

impl Pieces {
    /// The limit of the next piece, by what the last launch took; `None` for a whole chunk.
    pub(crate) fn limit(self, launch: Duration) -> Option<Duration> {
        self.streams.then(|| self.step.mul_f64(OF_A_STEP).max(launch))
    }

    /// Notes a command of these steps and microseconds. Prompts in chunks have none.
    pub(crate) fn ran(&mut self, steps: u32, us: f64) {
        if steps == 0 || us <= 0.0 {
            return;
        }
        let step = Duration::from_secs_f64(us / 1e6 / f64::from(steps));
        let shorter = self.streams && !self.step.is_zero();
        self.step = if shorter { step.min(self.step) } else { step };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAUNCH: Duration = Duration::from_millis(2);

    #[test]
    fn a_piece_takes_part_of_a_step_or_as_long_as_stop_and_launch() {
        let mut pieces = Pieces::default();
        pieces.ran(8, 8.0 * 4300.0);
        assert_eq!(pieces.limit(LAUNCH), None, "nobody waits");
        pieces.streams = true;
        assert_eq!(pieces.limit(LAUNCH), Some(Duration::from_micros(3225)));
        pieces.ran(1024, 0.0); // a chunk
        assert_eq!(pieces.limit(LAUNCH), Some(Duration::from_micros(3225)));
        pieces.ran(2, 2.0 * 5500.0);
        assert_eq!(pieces.limit(LAUNCH), Some(Duration::from_micros(3225)), "after a launch");
        pieces.ran(1, 850.0);
        assert_eq!(pieces.limit(LAUNCH), Some(LAUNCH));
        pieces.streams = false;
        pieces.ran(1, 4000.0);
        pieces.streams = true;
        assert_eq!(pieces.limit(LAUNCH), Some(Duration::from_millis(3)));
    }

    /// Issue L's bound, from times measured with llama-3.1-8b: a step of a batch, stop and launch, a layer of a chunk.
    #[test]
    fn streams_of_an_8b_wait_for_less_than_two_and_a_half_steps() {
        let (step, stop_and_launch, layer) = (4.3, 2.15, 22.0 / 32.0);
        let mut pieces = Pieces { streams: true, ..Pieces::default() };
        pieces.ran(2, 2.0 * step * 1e3);
        let limit = pieces.limit(LAUNCH).unwrap().as_secs_f64() * 1e3;
        let gap = stop_and_launch + (limit / layer).floor() * layer + step;
        assert!(gap < 2.5 * step, "{gap} ms");
    }
}
