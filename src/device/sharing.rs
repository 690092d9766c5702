//! Detects other users of the GPU. Times measured beside other work are meaningless, so measurements need the card alone.

use std::time::Duration;

use crate::failure::Failure;

/// How long a process that is being killed may still be listed.
const GRACE: Duration = Duration::from_secs(3);

/// Pause between two polls.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The number of other processes on a card, before this program opens it; refused if there are any, unless it may be
/// shared.
pub(super) fn count(uuid: &str, shared: bool) -> Result<Option<u32>, Failure> {
    let others = others(shared, || vm_host::compute_processes(uuid));
    judge(others.as_deref(), shared).map_err(Failure::missing)
}

/// The processes that `look` finds. If they would be a reason to refuse, waits for exiting ones.
fn others(shared: bool, look: impl FnMut() -> Option<Vec<u32>>) -> Option<Vec<u32>> {
    others_by(shared, look, std::thread::sleep)
}

/// The same with an injected wait, for tests.
fn others_by(
    shared: bool,
    mut look: impl FnMut() -> Option<Vec<u32>>,
    mut wait: impl FnMut(Duration),
) -> Option<Vec<u32>> {
    for _ in 0..GRACE.as_millis() / LOOK_EVERY.as_millis() {
        let found = look();
        if shared || found.as_ref().is_none_or(Vec::is_empty) {
            return found;
        }
        wait(LOOK_EVERY);
    }
    look()
}

/// Decides about a measurement from NVML's list before this program touches the device: the number of other processes,
/// as far as NVML knows it, or why nothing is measured.
fn judge(others: Option<&[u32]>, shared: bool) -> Result<Option<u32>, String> {
    let Some(others) = others else { return Ok(None) };
    if shared || others.is_empty() {
        return Ok(Some(others.len() as u32));
    }
    let numbers: Vec<String> = others.iter().map(ToString::to_string).collect();
    Err(format!(
        "the GPU is in use by {} other {} ({}): times would be theirs too; end them, or measure anyway with --shared-gpu",
        others.len(),
        if others.len() == 1 { "process" } else { "processes" },
        numbers.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_in_use_is_refused_unless_it_is_asked_for() {
        assert_eq!(judge(Some(&[]), false), Ok(Some(0)));
        assert_eq!(judge(Some(&[]), true), judge(Some(&[]), false), "asking changes nothing");
        let refused = judge(Some(&[71, 72]), false).unwrap_err();
        for part in ["2 other processes", "71, 72", "--shared-gpu"] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(judge(Some(&[71]), false).unwrap_err().contains("1 other process ("));
        assert_eq!(judge(Some(&[71, 72]), true), Ok(Some(2)));
    }

    #[test]
    fn a_process_on_its_way_out_is_waited_for() {
        let (mut looks, mut waited) = (0, Duration::ZERO);
        let leaving = || {
            looks += 1;
            Some(if looks < 3 { vec![71] } else { Vec::new() })
        };
        assert_eq!(others_by(false, leaving, |time| waited += time), Some(Vec::new()));
        assert_eq!(waited, LOOK_EVERY * 2);
        fn never(_: Duration) {
            panic!("nobody waits");
        }
        assert_eq!(others_by(true, || Some(vec![71]), never), Some(vec![71]), "it may share");
        assert_eq!(others_by(false, || None, never), None);
        let mut waited = Duration::ZERO;
        let stays = others_by(false, || Some(vec![71]), |time| waited += time);
        assert_eq!((stays, waited), (Some(vec![71]), GRACE));
    }

    #[test]
    fn what_is_not_known_is_no_reason_to_refuse_and_stays_unknown() {
        assert_eq!(judge(None, false), Ok(None));
    }
}
