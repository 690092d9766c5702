//! Sequences whose weights are still on their way to the machine: their commands are in `wait_io`. Meanwhile the loop
//! admits requests and notices clients that leave.

use abi::{Activity, EntryState, SequenceEnd};
use sessions::{Outcome, SessionId, Turn};

use super::{EngineLoop, Finish, TurnEnd};
use crate::engine::WeightsAt;

impl EngineLoop<'_> {
    /// Gives a turn back until the weights have arrived.
    pub(super) fn wait_io(&mut self, turn: Turn) {
        let place = turn.session().place();
        let waiting = self.scheduler.give_back(turn, 0, Outcome::WaitIo);
        debug_assert!(waiting.is_ok(), "the turn is the scheduler's: {waiting:?}");
        let end = TurnEnd { place, ..TurnEnd::default() };
        self.said.turn(&end, self.scheduler.ring());
        self.said.enter(Activity::Loading);
    }

    /// Looks whether the weights have arrived, and tells the sequences that wait for them.
    pub(super) fn weights(&mut self) {
        if !self.streams {
            return;
        }
        let weights = self.engine.weights();
        let ring = self.scheduler.ring();
        let waits = |session: &SessionId| ring.state(session.place()) == EntryState::WaitIo;
        let waiting: Vec<SessionId> = self.running.keys().copied().filter(waits).collect();
        for session in waiting {
            if self.running.get(&session).is_some_and(|running| running.to.is_closed()) {
                let _ = self.scheduler.cancel(session);
                drop(self.forget(session, SequenceEnd::Cancelled));
                continue;
            }
            match &weights {
                WeightsAt::Coming => {}
                WeightsAt::Here => {
                    let returned = self.scheduler.returned(session);
                    debug_assert_eq!(returned, Ok(()), "it waits");
                }
                WeightsAt::Lost(why) => {
                    let _ = self.scheduler.lost(session);
                    self.end(session, Finish::Failed(why.clone()));
                }
            }
        }
        if weights != WeightsAt::Coming {
            // Of lost weights the machine says so itself, to every later command.
            self.streams = false;
            self.said.enter(Activity::Between);
        }
    }
}
