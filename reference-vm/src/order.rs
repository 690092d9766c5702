//! The order of ready tasks. A verified program gives the same bits in every order; these orders are the ones worth
//! testing.

/// The order in which ready tasks are fired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// All ready tasks at once: each reads before any of them writes. The only order that uses
    /// several threads well.
    Waves,
    /// One task at a time, of the first worker that is ready.
    Queue,
    /// One task at a time, of the last worker that is ready.
    Reverse,
    /// One task at a time, of the worker that the seed favours. A favour lasts for some tasks and then changes, so that
    /// some workers run far ahead and others starve.
    Seeded(u64),
}

/// Average number of tasks for which a seeded favour lasts.
const FAVOUR_TASKS: u64 = 24;

pub(crate) struct Picker {
    order: Order,
    state: u64,
    favours: u64,
}

impl Picker {
    /// The picker of one step; seeded orders differ from step to step.
    pub(crate) fn new(order: Order, epoch: u32) -> Self {
        let seed = match order {
            Order::Seeded(seed) => seed,
            Order::Waves | Order::Queue | Order::Reverse => 0,
        };
        let mut picker = Self { order, state: mix(seed) ^ mix(u64::from(epoch)), favours: 0 };
        picker.favours = picker.next();
        picker
    }

    /// Moves the workers to fire from `ready`, which is sorted and not empty, to the end of the
    /// list and returns their number.
    pub(crate) fn pick(&mut self, ready: &mut [usize]) -> usize {
        let chosen = match self.order {
            Order::Waves => return ready.len(),
            Order::Queue => 0,
            Order::Reverse => ready.len() - 1,
            Order::Seeded(_) => {
                if self.next().is_multiple_of(FAVOUR_TASKS) {
                    self.favours = self.next();
                }
                let favour = |&(_, &worker): &(usize, &usize)| mix(self.favours ^ worker as u64);
                ready.iter().enumerate().max_by_key(favour).map_or(0, |(index, _)| index)
            }
        };
        ready[chosen..].rotate_left(1);
        1
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }
}

/// Spreads a number over all bits (two multiply-xor-shift rounds).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z ^ (z >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picks(order: Order, epoch: u32) -> Vec<usize> {
        let mut picker = Picker::new(order, epoch);
        let pick = |_| {
            let mut ready = vec![2, 5, 7, 9];
            assert_eq!(picker.pick(&mut ready), 1);
            let chosen = ready.pop().unwrap();
            assert!(ready.is_sorted() && ready.len() == 3);
            chosen
        };
        (0..400).map(pick).collect()
    }

    #[test]
    fn plain_orders_take_an_end() {
        assert!(picks(Order::Queue, 1).iter().all(|&worker| worker == 2));
        assert!(picks(Order::Reverse, 1).iter().all(|&worker| worker == 9));
        assert_eq!(Picker::new(Order::Waves, 1).pick(&mut [1, 2, 3]), 3);
    }

    #[test]
    fn seeds_repeat_differ_and_change_their_favour() {
        let first = picks(Order::Seeded(1), 1);
        assert_eq!(first, picks(Order::Seeded(1), 1));
        assert_ne!(first, picks(Order::Seeded(2), 1));
        assert_ne!(first, picks(Order::Seeded(1), 2));
        let changes = first.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert!((3..40).contains(&changes), "{changes} changes");
        for worker in [2, 5, 7, 9] {
            assert!(first.contains(&worker), "worker {worker} never");
        }
    }
}
