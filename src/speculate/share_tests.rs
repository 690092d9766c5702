use super::*;
use proptest::prelude::*;

fn offer(acceptance: f64, guesses: usize) -> Offer {
    Offer { acceptance, guesses: vec![7; guesses] }
}

/// The example of the batch: three sessions of which two guess.
#[test]
fn who_was_right_more_often_has_more_guesses() {
    let mut sharing = Sharing::default();
    let shared = sharing.next(&[offer(0.8, 7), offer(0.6, 7), offer(0.0, 0)], 8);
    assert_eq!(shared, Some(vec![4, 1, 0]), "0.8, 0.64, 0.6, 0.512 and 0.41");
    assert_eq!(sharing.next(&[offer(0.7, 7), offer(0.7, 7)], 8), Some(vec![3, 3]));
    let few = sharing.next(&[offer(0.9, 1), offer(0.7, 7)], 8);
    assert_eq!(few, Some(vec![1, 5]), "a sequence has no more than it found");
}

#[test]
fn a_full_batch_and_one_without_guesses_have_none() {
    let mut sharing = Sharing::default();
    assert_eq!(sharing.next(&vec![offer(0.9, 7); 8], 8), None);
    assert_eq!(sharing.next(&[offer(0.9, 0), offer(0.0, 0)], 8), None);
    assert_eq!(sharing.next(&[offer(0.05, 7), offer(0.0, 0)], 8), None, "not worth it");
    assert_eq!(sharing.slice(), LOOKED);
}

/// A step that was measured to be slow has fewer guesses while somebody has none, and as many as pay once all have some.
#[test]
fn nobody_waits_for_the_guesses_of_others() {
    let mut sharing = Sharing::default();
    for (positions, us) in [(2, 1000.0), (3, 1040.0), (4, 1080.0), (5, 1120.0), (8, 1240.0)] {
        sharing.ran(positions, us);
    }
    sharing.stepped(2, 1000.0);
    assert_eq!(sharing.next(&[offer(0.9, 7), offer(0.0, 0)], 8), Some(vec![2, 0]));
    assert_eq!(sharing.next(&[offer(0.9, 7), offer(0.9, 7)], 8), Some(vec![3, 3]));
}

/// Windows that turn out to take too long end, and begin again when more is right.
#[test]
fn what_steps_take_decides() {
    let mut sharing = Sharing::default();
    let offers = [offer(0.5, 7), offer(0.5, 7)];
    assert!(sharing.next(&offers, 8).is_some());
    assert_eq!(sharing.slice(), LOOKED_OFTEN);
    (0..9).for_each(|_| sharing.stepped(2, 1000.0));
    (2..=8).for_each(|positions| sharing.ran(positions, 3000.0));
    assert_eq!(sharing.next(&offers, 8), None);
    assert_eq!(sharing.next(&[offer(0.5, 0), offer(0.5, 0)], 8), None);
    assert_eq!(sharing.slice(), LOOKED, "no guesses are no reason to begin");
    assert_eq!(sharing.next(&[offer(0.99, 7), offer(0.99, 7)], 8), Some(vec![3, 3]));
}

proptest! {
    /// Whatever was measured: no more positions than there are, no more guesses than were offered, and a sequence without
    /// any waits for no step that is known to be slow.
    #[test]
    fn shares_stay_within_their_bounds(
        of in proptest::collection::vec((0.0..1.0f64, 0..8usize), 1..9),
        timed in proptest::collection::vec((1..9usize, 1.0..1e4f64, any::<bool>()), 0..20),
        most in 1..9usize,
    ) {
        let offers: Vec<Offer> = of.iter().map(|(right, count)| offer(*right, *count)).collect();
        let mut sharing = Sharing::default();
        for (positions, us, plain) in timed {
            if plain { sharing.stepped(positions, us) } else { sharing.ran(positions, us) }
        }
        if let Some(counts) = sharing.next(&offers, most) {
            let guesses: usize = counts.iter().sum();
            prop_assert!(guesses > 0 && offers.len() + guesses <= most);
            prop_assert!(counts.iter().zip(&offers).all(|(count, of)| *count <= of.guesses.len()));
            let (wide, plain) = (sharing.wide(offers.len() + guesses), sharing.plain(offers.len()));
            prop_assert!(!counts.contains(&0) || wide <= SLOWER * plain);
        }
    }
}
