use super::*;

const MS: Duration = Duration::from_millis(1);

/// Requests are held back for a tenth of the time at most, however long the open sequences take to end.
#[test]
fn requests_have_nine_tenths_of_the_time() {
    for takes in [3, 130, 1_900, 60_000] {
        let (mut pace, began) = (Pace::new(PATIENCE), Instant::now());
        let (mut held, mut turns, mut since) = (0, 0, None);
        for at in 0..300_000_u32 {
            let now = began + at * MS;
            if !pace.holds(now) {
                since = None;
                continue;
            }
            held += 1;
            // The sequences end, and the turn is over at once.
            if at - *since.get_or_insert(at) >= takes {
                turns += 1;
                pace.ended(now);
                since = None;
            }
        }
        assert!(held <= 30_000 + 2_000, "{takes}: {held} of 300 000 ms");
        assert_eq!(turns > 0, takes < 2_000, "{takes}: {turns} turns");
        assert!(held >= 800, "{takes}: {held} ms");
    }
}

/// A turn waits for the search's next task for as long as it took to begin.
#[test]
fn a_turn_that_was_dear_waits_longer_for_a_task() {
    let (mut pace, now) = (Pace::new(PATIENCE), Instant::now());
    assert!(!pace.holds(now) && pace.holds(now + PATIENCE));
    let begun = now + PATIENCE;
    assert_eq!(pace.linger(begun + MS), LINGER);
    assert_eq!(pace.linger(begun + 300 * MS), 300 * MS);
    pace.ended(begun + 300 * MS);
    assert_eq!(pace.linger(begun + 400 * MS), LINGER);
}

/// It has waited for a second in vain before requests are held back.
#[test]
fn an_idle_moment_comes_first() {
    let (mut pace, now) = (Pace::new(PATIENCE), Instant::now());
    assert!(!pace.holds(now) && !pace.holds(now + PATIENCE - MS));
    assert!(pace.holds(now + PATIENCE));
    assert_eq!(pace.ended(now + PATIENCE + 100 * MS), 100 * MS);
    assert!(!pace.holds(now + PATIENCE + 100 * MS));
}
