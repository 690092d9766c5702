//! Compares sampling with published vectors, another implementation, and the plain definition in f64, and checks
//! properties that hold for any row.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::philox::philox;
use super::weight::{ONE, weight};
use super::{Sampling, Seen, logprobs};

/// Settings that draw at random.
fn at(temperature: f32) -> Sampling {
    Sampling { temperature, ..Sampling::default() }
}

/// A row with many ties, which a second implementation can reproduce.
fn row() -> Vec<f32> {
    (0..48).map(|i| ((i * 37) % 101) as f32 / 16.0 - 3.0).collect()
}

fn seen(tokens: &[u32]) -> Seen {
    let mut seen = Seen::default();
    seen.extend(tokens.iter().copied());
    seen
}

/// The probability of each token that can be drawn.
fn chances(sampling: &Sampling, logits: &[f32], seen: &Seen) -> BTreeMap<u32, f64> {
    let adjusted = sampling.adjusted(logits, seen);
    let best = super::highest(&adjusted).expect("a token");
    let kept = sampling.kept(&adjusted, best);
    let total: u64 = kept.iter().map(|(_, weight)| weight).sum();
    kept.into_iter().map(|(token, w)| (token, w as f64 / total as f64)).collect()
}

/// The same by the plain definition: softmax in f64, the filters one after the other on sorted probabilities.
fn plain(sampling: &Sampling, logits: &[f32], seen: &Seen) -> BTreeMap<u32, f64> {
    let logit = |(token, &logit): (u32, &f32)| {
        let (logit, penalty) = (f64::from(logit), f64::from(sampling.repetition_penalty));
        let penalised = match (seen.has(token), logit > 0.0) {
            (false, _) => logit,
            (true, true) => logit / penalty,
            (true, false) => logit * penalty,
        };
        penalised + f64::from(sampling.bias.get(&token).copied().unwrap_or(0.0))
    };
    let scaled: Vec<f64> =
        (0..).zip(logits).map(|pair| logit(pair) / f64::from(sampling.temperature)).collect();
    let greatest = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut ranked: Vec<(u32, f64)> =
        (0..).zip(scaled.iter().map(|logit| (logit - greatest).exp())).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if sampling.top_k > 0 {
        ranked.truncate(sampling.top_k as usize);
    }
    let total: f64 = ranked.iter().map(|(_, p)| p).sum();
    let mut before = 0.0;
    ranked.retain(|(_, p)| {
        let keep = sampling.top_p >= 1.0 || before < f64::from(sampling.top_p) * total;
        before += p;
        keep && *p >= f64::from(sampling.min_p)
    });
    let total: f64 = ranked.iter().map(|(_, p)| p).sum();
    ranked.into_iter().map(|(token, p)| (token, p / total)).collect()
}

/// Random123's known answers: https://github.com/DEShawResearch/random123, tests/kat_vectors, lines `philox4x32 10`.
#[test]
fn philox_gives_the_published_answers() {
    let cases = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (counter, key, expected) in cases {
        assert_eq!(philox(counter, key), expected, "{counter:x?} {key:x?}");
    }
}

/// Weights and tokens from a second implementation: exact rational arithmetic, rounded to f32 after every step (Python,
/// from the text of decision 015). A device must give the same.
#[test]
fn draws_are_those_of_another_implementation() {
    let weights = [
        (0.0, 1_099_511_627_776),
        (-0.25, 924_575_399_936),
        (-1.0, 549_755_813_888),
        (-1.5, 388_736_057_344),
        (-std::f32::consts::PI, 124_590_858_240),
        (-12.7, 165_241_424),
        (-39.9, 1),
        (-40.5, 0),
    ];
    for (t, expected) in weights {
        assert_eq!(weight(t), expected, "{t}");
    }
    let bias = BTreeMap::from([(5, 2.5), (11, -1.5)]);
    let all =
        Sampling { top_k: 20, top_p: 0.9, min_p: 0.05, repetition_penalty: 1.2, bias, ..at(0.9) };
    let cases: [(Sampling, [u32; 24]); 5] = [
        (
            at(1.0),
            [
                24, 19, 10, 19, 38, 32, 5, 27, 2, 16, 8, 30, 24, 8, 37, 8, 27, 8, 16, 5, 43, 5, 23,
                30,
            ],
        ),
        (
            Sampling { top_k: 12, ..at(0.7) },
            [
                27, 19, 13, 19, 38, 30, 8, 27, 5, 19, 8, 30, 27, 8, 35, 8, 27, 8, 19, 8, 43, 5, 24,
                30,
            ],
        ),
        (
            Sampling { top_p: 0.8, ..at(1.3) },
            [
                24, 19, 10, 19, 38, 32, 5, 27, 2, 16, 8, 30, 24, 8, 35, 8, 27, 8, 16, 5, 43, 5, 21,
                30,
            ],
        ),
        (
            Sampling { min_p: 0.1, ..at(2.0) },
            [
                23, 19, 10, 19, 38, 35, 5, 26, 2, 16, 7, 29, 24, 8, 37, 5, 27, 7, 15, 5, 43, 2, 21,
                31,
            ],
        ),
        (all, [5, 5, 5, 5, 30, 19, 5, 5, 5, 5, 5, 8, 5, 5, 27, 5, 5, 5, 5, 5, 38, 5, 5, 16]),
    ];
    let (row, seen) = (row(), seen(&[3, 17, 19, 30]));
    for (sampling, expected) in cases {
        let sampling = Sampling { seed: 0x1234_5678_9abc_def0, ..sampling };
        let drawn: Vec<u32> =
            (0..24).map(|position| sampling.choose(&row, &seen, position).unwrap()).collect();
        assert_eq!(drawn, expected, "{sampling:?}");
    }
}

/// A hash of the bits of a million weights detects any change of the arithmetic.
#[test]
fn weights_are_accurate_and_never_change() {
    let mut bits = Vec::new();
    let mut last = u64::MAX;
    for step in 0..(1 << 20) {
        let t = -(step as f32) / 24_576.0;
        let got = weight(t);
        bits.extend(got.to_le_bytes());
        let exact = f64::from(t).exp2() * ONE as f64;
        // Rounded down, and within three roundings of f32 of the truth.
        let bound = exact * 2.5 * f64::from(f32::EPSILON) / 2.0;
        let error = got as f64 - exact;
        assert!((-bound - 1.0..=bound).contains(&error), "2^{t}: {got} instead of {exact}");
        assert!(got <= last.saturating_add(last >> 22), "2^{t} is above its neighbour");
        last = got;
    }
    assert_eq!((weight(0.0), weight(f32::NAN), weight(f32::NEG_INFINITY)), (ONE, 0, 0));
    assert_eq!((weight(-0.0), weight(-1e-40), weight(f32::MIN)), (ONE, ONE, 0));
    let digest = blake3::hash(&bits).to_hex();
    assert_eq!(&digest[..16], "fa964c7ef7efeef2");
}

/// Pearson's statistic of counts against chances.
fn chi_square(counts: &BTreeMap<u32, u32>, chances: &BTreeMap<u32, f64>, draws: u32) -> f64 {
    let missing = |token: &u32| !chances.contains_key(token);
    assert!(!counts.keys().any(missing), "{counts:?} has what has no chance: {chances:?}");
    let term = |(token, chance): (&u32, &f64)| {
        let expected = chance * f64::from(draws);
        let count = f64::from(counts.get(token).copied().unwrap_or(0));
        (count - expected).powi(2) / expected
    };
    chances.iter().map(term).sum()
}

#[test]
fn draws_follow_the_plain_distribution() {
    const DRAWS: u32 = 20_000;
    let logits = [1.2, -0.4, 0.3, 2.1, 0.0, 1.9, -1.0, 0.9, 1.0, -0.2, 0.6, 1.5];
    let bias = BTreeMap::from([(1, 1.5), (3, -0.7), (6, f32::NEG_INFINITY)]);
    let settings = [
        at(1.0),
        at(0.5),
        Sampling { top_k: 5, ..at(1.5) },
        Sampling { top_p: 0.85, ..at(1.0) },
        Sampling { min_p: 0.3, ..at(1.0) },
        Sampling { repetition_penalty: 1.4, bias, top_p: 0.95, top_k: 10, ..at(0.8) },
    ];
    let before = seen(&[0, 6, 11]);
    for (setting, seed) in settings.into_iter().zip(1..) {
        let sampling = Sampling { seed, ..setting };
        let mut expected = plain(&sampling, &logits, &before);
        expected.retain(|_, chance| *chance > 0.0);
        let mut counts = BTreeMap::new();
        for position in 0..DRAWS {
            *counts.entry(sampling.choose(&logits, &before, position).unwrap()).or_insert(0) += 1;
        }
        // Beyond mean and five deviations (and some, for the skew): one honest run in a million.
        let freedom = expected.len() as f64 - 1.0;
        let limit = freedom + 5.0 * (2.0 * freedom).sqrt() + 10.0;
        let statistic = chi_square(&counts, &expected, DRAWS);
        assert!(statistic < limit, "{statistic} of {limit}: {sampling:?}");
        // The check can fail: it detects the neighbouring temperature.
        let other = Sampling { temperature: sampling.temperature * 1.15, ..sampling.clone() };
        let other = plain(&other, &logits, &before);
        let wrong: BTreeMap<u32, f64> =
            expected.keys().map(|t| (*t, other.get(t).copied().unwrap_or(1e-9))).collect();
        assert!(chi_square(&counts, &wrong, DRAWS) > limit, "{sampling:?}");
    }
}

/// Draws at neighbouring positions, and with neighbouring seeds, are independent.
#[test]
fn neighbours_are_independent() {
    const DRAWS: u32 = 20_000;
    let logits = [0.0_f32; 4];
    let pairs: BTreeMap<u32, f64> = (0..16).map(|pair| (pair, 1.0 / 16.0)).collect();
    let draw = |seed: u64, position| {
        Sampling { seed, ..at(1.0) }.choose(&logits, &Seen::default(), position).unwrap()
    };
    let count = |of: &dyn Fn(u32) -> (u32, u32)| {
        let mut counts = BTreeMap::new();
        for i in 0..DRAWS {
            let (a, b) = of(i);
            *counts.entry(a * 4 + b).or_insert(0) += 1;
        }
        chi_square(&counts, &pairs, DRAWS)
    };
    let limit = 15.0 + 5.0 * 30.0_f64.sqrt() + 10.0;
    let positions = count(&|i| (draw(7, 2 * i), draw(7, 2 * i + 1)));
    let seeds = count(&|i| (draw(2 * u64::from(i), 3), draw(2 * u64::from(i) + 1, 3)));
    let high = count(&|i| (draw(u64::from(i), 3), draw(u64::from(i) + (1 << 32), 3)));
    assert!(positions < limit && seeds < limit && high < limit, "{positions} {seeds} {high}");
    assert!(count(&|i| (draw(7, i), draw(7, i))) > limit);
}

#[test]
fn log_probabilities_are_of_the_row_as_it_came() {
    let got = logprobs(&[0.0, 1.0, f32::NAN, 1.0], 0, 3);
    let total = 1.0 + 2.0 * std::f64::consts::E;
    assert!((got.chosen - (1.0 / total).ln()).abs() < 1e-12);
    assert_eq!(got.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [1, 3, 0]);
    assert!((got.top[0].1 - (1.0 - total.ln())).abs() < 1e-12);
    assert_eq!(logprobs(&[0.5], 0, 20).top.len(), 1);
    assert_eq!(logprobs(&[0.5], 9, 0).chosen, f64::NEG_INFINITY);
}

#[test]
fn every_setting_without_meaning_is_named() {
    let bias = BTreeMap::from([(1, f32::NAN), (9, 0.0), (2, f32::NEG_INFINITY)]);
    let wrong = Sampling {
        temperature: -1.0,
        top_k: 3,
        top_p: 1.1,
        min_p: f32::NAN,
        repetition_penalty: 0.0,
        bias,
        seed: 1,
    };
    let problems = wrong.problems(9);
    let fields: Vec<&str> = problems.iter().map(|problem| problem.field).collect();
    let all = ["temperature", "top_p", "min_p", "repetition_penalty", "logit_bias", "logit_bias"];
    assert_eq!(fields, all);
    assert_eq!(
        problems[5].to_string(),
        "logit_bias is 0 for token 9; legal: numbers or -inf, for tokens 0 to 8"
    );
    assert_eq!(Sampling::default().problems(1), []);
}

#[test]
fn rows_without_a_choice() {
    let banned = Sampling { bias: (0..3).map(|t| (t, f32::NEG_INFINITY)).collect(), ..at(1.0) };
    assert_eq!(banned.choose(&[1.0, 2.0, 3.0], &Seen::default(), 0), None);
    assert_eq!(at(1.0).choose(&[], &Seen::default(), 0), None);
    assert_eq!(at(1.0).choose(&[f32::NAN; 4], &Seen::default(), 0), None);
    // Infinite logits tie at the greatest finite number.
    let row = [f32::INFINITY, 3.0, f32::INFINITY];
    let drawn: BTreeSet<_> =
        (0..64).map(|p| at(1e-30).choose(&row, &Seen::default(), p).unwrap()).collect();
    assert_eq!(drawn, BTreeSet::from([0, 2]));
    assert_eq!(Sampling::default().choose(&row, &Seen::default(), 0), Some(0));
}

fn rows() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![8 => -8.0_f32..8.0, 1 => Just(0.5_f32), 1 => Just(f32::NAN)];
    prop::collection::vec(logit, 1..40)
        .prop_filter("a number", |row| row.iter().any(|l| !l.is_nan()))
}

fn settings() -> impl Strategy<Value = Sampling> {
    (0.05_f32..4.0, 0..20_u32, 0.0..1.0_f32, 0.0..1.0_f32, 0.5..2.0_f32, any::<u64>()).prop_map(
        |(temperature, top_k, top_p, min_p, repetition_penalty, seed)| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            bias: BTreeMap::new(),
            seed,
        },
    )
}

fn finite(row: &[f32]) -> Vec<f32> {
    row.iter().map(|&logit| if logit.is_nan() { f32::NEG_INFINITY } else { logit }).collect()
}

/// The candidates by the definition: all tokens sorted, then the filters one after the other.
fn kept_by_sorting(sampling: &Sampling, adjusted: &[f32], best: u32) -> Vec<(u32, u64)> {
    let fixed = sampling.fixed();
    let weigh = |logit: &f32| weight((logit - adjusted[best as usize]) * fixed.scale);
    let mut kept: Vec<(u32, u64)> =
        (0..).zip(adjusted.iter().map(weigh)).filter(|(_, weight)| *weight > 0).collect();
    kept.sort_by(|a, b| {
        let [a_logit, b_logit] = [a, b].map(|(token, _)| adjusted[*token as usize]);
        b_logit.partial_cmp(&a_logit).unwrap().then(a.0.cmp(&b.0))
    });
    if sampling.top_k > 0 {
        kept.truncate(sampling.top_k as usize);
    }
    if sampling.top_p < 1.0 {
        let total: u128 = kept.iter().map(|(_, weight)| u128::from(*weight)).sum();
        let (needed, mut sum) = ((total * u128::from(fixed.share)).div_ceil(1 << 32), 0);
        let enough = kept.iter().position(|(_, weight)| {
            sum += u128::from(*weight);
            sum >= needed
        });
        kept.truncate(enough.map_or(kept.len(), |last| last + 1));
    }
    kept.retain(|(_, weight)| *weight >= fixed.least);
    kept.sort_unstable();
    kept
}

/// A row of several blocks with ties, from a seed: flat, or with few likely tokens.
fn wide(seed: u32, len: u32, steep: f32) -> Vec<f32> {
    let mut state = u64::from(seed) << 1 | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as f32 / 256.0
    };
    (0..len).map(|_| 12.0 - steep * next() - (1.0 / (next() + 0.01)).min(steep)).collect()
}

proptest! {
    #[test]
    fn what_is_left_out_before_sorting_would_not_have_been_kept(
        seed: u32, len in 1..3000_u32, steep in 0.0..40.0_f32, base in settings(), top_k in prop_oneof![Just(0_u32), 0..600_u32]
    ) {
        let row = wide(seed, len, steep);
        for (top_k, top_p, min_p) in [(top_k, base.top_p, 0.0), (top_k, 1.0, base.min_p), (0, base.top_p, 0.0), (0, 1.0, 0.0)] {
            let sampling = Sampling { top_k, top_p, min_p, ..base.clone() };
            let best = super::highest(&row).unwrap();
            let kept = kept_by_sorting(&sampling, &row, best);
            prop_assert_eq!(&sampling.kept(&row, best), &kept);
            let bits = super::philox::bits(sampling.seed, 7);
            prop_assert_eq!(sampling.choose(&row, &Seen::default(), 7), Some(super::pick(&kept, bits)));
        }
    }

    #[test]
    fn a_choice_among_some_is_that_of_a_row_without_the_others(
        seed: u32, len in 1..700_u32, base in settings(), step in 1..90_usize, position: u32
    ) {
        let base = Sampling { bias: BTreeMap::from([(0, 3.0), (5, f32::NEG_INFINITY)]), ..base };
        let before = seen(&[0, 3, 5, 64, 200, 100_000]);
        let mut row = wide(seed, len, 9.0);
        row[len as usize / 2] = f32::NAN;
        let some: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).step_by(step).collect();
        (0..row.len()).filter(|at| at % step != 0).for_each(|at| row[at] = f32::NEG_INFINITY);
        for sampling in [base.clone(), Sampling { temperature: 0.0, ..base.clone() }, Sampling { top_k: 0, top_p: 1.0, min_p: 0.0, ..base }] {
            let all = sampling.choose(&row, &before, position);
            prop_assert_eq!(sampling.choose_among(&some, &before, position), all);
        }
    }

    /// With fused multiply-adds as instructions or as calls.
    #[test]
    fn weights_are_the_same_by_vectors(seed: u32, len in 1..600_u32, steep in 0.0..60.0_f32, scale in 0.1..9.0_f32) {
        let mut row = wide(seed, len, steep);
        row[0] = f32::NEG_INFINITY;
        let greatest = super::greatest(&row);
        let each: Vec<u64> = row.iter().map(|logit| weight((logit - greatest) * scale)).collect();
        let mut all = Vec::new();
        super::weights(&row, (greatest, scale), |first, weights| {
            assert_eq!(first, all.len());
            all.extend_from_slice(weights);
        });
        prop_assert_eq!(all, each);
    }

    #[test]
    fn one_candidate_or_no_temperature_is_greedy(row in rows(), base in settings(), position: u32) {
        let before = seen(&[0, 3, 5]);
        let greedy = Sampling { temperature: 0.0, ..base.clone() };
        let best = super::highest(&greedy.adjusted(&row, &before));
        prop_assert_eq!(greedy.choose(&row, &before, position), best);
        let one = Sampling { top_k: 1, ..base.clone() };
        prop_assert_eq!(one.choose(&row, &before, position), best);
        // The shortcut gives the same result as one candidate.
        let adjusted = one.adjusted(&row, &before);
        let kept = one.kept(&adjusted, best.unwrap());
        prop_assert_eq!(kept, vec![(best.unwrap(), ONE)]);
        for tight in [Sampling { top_p: 0.0, ..base.clone() }, Sampling { top_k: 0, top_p: 1.0, min_p: 0.0, temperature: 1e-30, ..base }] {
            let chosen = tight.choose(&row, &before, position).unwrap();
            prop_assert_eq!(adjusted[chosen as usize], adjusted[best.unwrap() as usize]);
        }
    }

    #[test]
    fn chances_are_those_of_the_plain_definition(row in rows(), base in settings()) {
        let before = seen(&[0, 3, 5]);
        let (got, want) = (chances(&base, &row, &before), plain(&base, &finite(&row), &before));
        // Tokens on the edge of a filter may fall on either side; everything else agrees.
        let differ = |t: &u32| got.contains_key(t) != want.get(t).is_some_and(|&p| p > 2e-12);
        let edge: f64 = got.keys().chain(want.keys()).filter(|t| differ(t)).map(|t| want.get(t).copied().unwrap_or(0.0)).sum();
        if edge < 1e-9 {
            for (token, chance) in &got {
                prop_assert!((chance - want[token]).abs() < 2e-6, "{token}: {chance} instead of {}", want[token]);
            }
        }
    }

    #[test]
    fn filters_keep_what_they_say(row in rows(), base in settings()) {
        let empty = Seen::default();
        let all = chances(&Sampling { top_k: 0, top_p: 1.0, min_p: 0.0, ..base.clone() }, &row, &empty);
        let greatest = all.values().copied().fold(0.0, f64::max);
        let min_p = chances(&Sampling { top_k: 0, top_p: 1.0, ..base.clone() }, &row, &empty);
        for (token, chance) in &all {
            let share = chance / greatest - f64::from(base.min_p);
            prop_assert!(share.abs() < 1e-6 || (share > 0.0) == min_p.contains_key(token));
        }
        let top_p = chances(&Sampling { top_k: 0, min_p: 0.0, ..base.clone() }, &row, &empty);
        let kept: f64 = top_p.keys().map(|token| all[token]).sum();
        let least = top_p.keys().map(|token| all[token]).fold(1.0, f64::min);
        prop_assert!(kept >= f64::from(base.top_p) - 1e-9, "{kept} of {}", base.top_p);
        prop_assert!(top_p.len() == 1 || kept - least < f64::from(base.top_p) + 1e-9);
        let top_k = chances(&Sampling { top_p: 1.0, min_p: 0.0, ..base.clone() }, &row, &empty);
        let most = if base.top_k == 0 { all.len() } else { all.len().min(base.top_k as usize) };
        prop_assert_eq!(top_k.len(), most);
    }

    #[test]
    fn chances_follow_their_tokens_under_permutation(base in settings(), shuffled in Just((0..24_u32).collect::<Vec<_>>()).prop_shuffle()) {
        // No ties, since those go by id.
        let row: Vec<f32> = (0..24).map(|i| ((i * 7) % 24) as f32 * 0.37 - 4.0).collect();
        let permuted: Vec<f32> = shuffled.iter().map(|&from| row[from as usize]).collect();
        let back: BTreeMap<u32, f64> = chances(&base, &permuted, &Seen::default())
            .into_iter().map(|(token, chance)| (shuffled[token as usize], chance)).collect();
        prop_assert_eq!(back, chances(&base, &row, &Seen::default()));
    }

    #[test]
    fn the_banned_are_never_drawn(row in rows(), base in settings(), position: u32, ban in 0..40_u32) {
        let bias = BTreeMap::from([(ban, f32::NEG_INFINITY)]);
        let banned = Sampling { bias, ..base };
        match banned.choose(&row, &Seen::default(), position) {
            Some(chosen) => prop_assert!(chosen != ban && !row[chosen as usize].is_nan()),
            None => prop_assert!((0..).zip(&row).all(|(t, l): (u32, _)| l.is_nan() || t == ban)),
        }
    }
}
