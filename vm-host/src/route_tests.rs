//! Routes on the device, compiled as host C++: which experts are chosen, and when the loader knows them.

use std::fmt::Write as _;

use abi::Scoring;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use crate::emulated::{compiler, run};

fn device_says(compiler: &str, spoil: Option<(&str, &str)>, asked: &str) -> String {
    let sources = ["amk_abi.h", "rank.cuh", "routed_stream.cuh", "route.cuh"];
    let define = format!("-DAMK_FEATURES={}u", 1 << abi::Feature::Route as u32);
    run(compiler, "routes", (&sources, &[define]), spoil, asked)
}

/// Logits of some experts, of which `slots` are chosen.
struct Choice {
    first: usize,
    slots: usize,
    scoring: Scoring,
    logits: Vec<f32>,
}

impl Choice {
    fn line(&self) -> String {
        let Self { first, slots, scoring, logits } = self;
        let bits: Vec<String> = logits.iter().map(|logit| logit.to_bits().to_string()).collect();
        let experts = logits.len() - first;
        format!("r {first} {experts} {slots} {} {}\n", *scoring as u32, bits.join(" "))
    }

    /// Whether the device's words are the numbers of the experts with the largest logits, and their weights.
    fn is(&self, said: &str) -> bool {
        let logits = &self.logits[self.first..];
        let order = ranked(logits);
        let among = if self.scoring == Scoring::All { logits.len() } else { self.slots };
        let above = |expert: &usize| f64::from(logits[*expert] - logits[order[0]]).exp();
        let total: f64 = order[..among].iter().map(above).sum();
        let words: Vec<u32> = said.split_whitespace().flat_map(str::parse).collect();
        let numbers = words.iter().zip(&order).take(self.slots);
        let weights = words.iter().skip(self.slots).map(|&bits| f64::from(f32::from_bits(bits)));
        words.len() == 2 * self.slots
            && numbers.clone().all(|(&word, &expert)| word as usize == expert)
            && weights.zip(&order).all(|(got, expert)| {
                let sigmoid = 1.0 / (1.0 + (-f64::from(logits[*expert])).exp());
                let scored = self.scoring == Scoring::Sigmoid;
                (got - if scored { sigmoid } else { above(expert) / total }).abs() < 1e-5
            })
    }
}

/// Every number of threads per expert, with equal logits, zeros of both signs and a last turn that is not full.
fn choices(random: &mut Xoshiro256PlusPlus) -> Vec<Choice> {
    let shapes = [
        (6, 2),
        (8, 8),
        (31, 4),
        (32, 4),
        (33, 3),
        (64, 6),
        (128, 8),
        (129, 8),
        (512, 10),
        (1000, 16),
    ];
    let of = |(index, (experts, slots)): (usize, (usize, usize))| {
        let scoring = [Scoring::All, Scoring::Chosen, Scoring::Sigmoid][index % 3];
        let first = 3 * (index % 2);
        // Of few values, so that many are equal.
        let logit = |_| (random.random_range(0..40) as f32 - 20.0) / 8.0;
        let mut logits: Vec<f32> = (0..first + experts).map(logit).collect();
        (logits[first], logits[first + 1]) = (0.0, -0.0);
        Choice { first, slots, scoring, logits }
    };
    shapes.into_iter().enumerate().map(of).collect()
}

/// Experts by rank.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order
}

/// Loaders that wait for logits, which arrive in any order: whether they go on after both loads of a layer, the looks at
/// which the last logit is there, none for the second load, the experts. Some are halted before.
fn waits(random: &mut Xoshiro256PlusPlus) -> (String, String) {
    let (mut asked, mut said) = (String::new(), String::new());
    let shapes =
        [(2, 1), (6, 2), (20, 16), (32, 4), (33, 3), (128, 8), (131, 9), (512, 10), (1024, 16)];
    for ((experts, slots), case) in
        shapes.into_iter().flat_map(|shape| (0..6).map(move |n| (shape, n)))
    {
        // Of few values, so that many are equal; cases 0 and 1 have zeros of both signs, and all equal.
        let value = |_| (random.random_range(0..40) as f32 - 30.0) / 8.0;
        let mut logits: Vec<f32> = (0..experts).map(value).collect();
        match case {
            0 => (logits[0], logits[experts - 1]) = (-0.0, 0.0),
            1 => logits.fill(-1.0),
            _ => {}
        }
        let mut places: Vec<usize> = (0..experts).collect();
        for i in (1..experts).rev() {
            places.swap(i, random.random_range(0..=i));
        }
        let last = [0, experts - 1, random.random_range(0..experts)][case % 3];
        places.retain(|&place| place != last);
        places.push(last);
        let every = experts.div_ceil(7);
        let looks = (experts - 1).div_ceil(every) + 1;
        let halted = if case == 5 { looks / 2 + 1 } else { 0 };
        let bits: Vec<String> = logits.iter().map(|logit| logit.to_bits().to_string()).collect();
        let order: Vec<String> = places.iter().map(usize::to_string).collect();
        let (bits, order) = (bits.join(" "), order.join(" "));
        let _ = writeln!(asked, "w {slots} {experts} {halted} {every} {bits} {order}");
        if halted > 0 {
            said.push_str("halted\n");
            continue;
        }
        let best: Vec<String> = ranked(&logits)[..slots].iter().map(usize::to_string).collect();
        let _ = writeln!(said, "1 {looks} 0 {}", best.join(" "));
    }
    (asked, said)
}

/// Mutations of the sources that the test must detect.
const MUTATIONS: &[(&str, &str)] = &[
    ("keys.x == most ? 0 : keys.y == most ? 1", "keys.y == most ? 1 : keys.x == most ? 0"),
    ("keys.z == most ? 2 : 3", "keys.z == most ? 3 : 2"),
    ("keys.w = taken & 8 ? 0 : keys.w", "keys.w = taken & 16 ? 0 : keys.w"),
    ("most > leader.key", "most >= leader.key"),
    ("(tied & upto) == own", "(tied & own) == own"),
    ("taken |= 1u << mine.at", "taken |= 1u"),
    ("taken >> i, i", "taken, i"),
    ("keys(i), taken >> i, i", "keys(i), taken >> i, 0"),
    ("i < each; i += 4", "i < 4; i += 4"),
    ("(experts + 127) / 128 * 4", "experts / 128 * 4"),
    ("word_wait(w, in, p.first + i)) : 0;", "word_wait(w, in, p.first + i)) : ~0u;"),
    ("(int32_t)~key >> 31", "(int32_t)key >> 31"),
    ("? key_value(keys[i])", "? __uint_as_float(keys[i])"),
    ("(int32_t)bits >> 31", "bits >> 31"),
    ("wanted > 2 ?", "wanted > 3 ?"),
    ("missing |= wanted > 3 ? words.w ^ tag : 0", ""),
    ("wanted > 1 ? key(words.y) : 0", "key(words.y)"),
    ("first < experts ? experts - first : 0", "each"),
    ("i = each; i > 0;", "i = 4; i > 0;"),
    ("words_keys(words, mine), keys", "words_keys(words, each), keys"),
    ("logits + i), mine - i) : make_uint4", "logits), mine - i) : make_uint4"),
    ("tail.y != 0 ||", ""),
    ("tail.y != 0 || experts_wait(sh, routed)", "true"),
    ("return flag_load(&sh->halt) == 0 &&", "return"),
    ("flag_load(&sh->epoch) * AMK_TAG_RUNS", "flag_load(&sh->epoch)"),
];

#[test]
fn the_device_chooses_the_experts_that_it_waits_for() {
    let Some(compiler) = compiler() else { return };
    let mut random = Xoshiro256PlusPlus::seed_from_u64(5);
    let choices = choices(&mut random);
    let (waits, rest) = waits(&mut random);
    let asked = choices.iter().map(Choice::line).collect::<String>() + &waits;
    let right = |said: &str| {
        let mut lines = said.lines();
        choices.iter().all(|choice| lines.next().is_some_and(|line| choice.is(line)))
            && lines.map(str::trim).eq(rest.lines().map(str::trim))
    };
    let said = device_says(&compiler, None, &asked);
    assert!(right(&said), "{said}\nfor\n{asked}\nnot\n{rest}");
    for &(from, to) in MUTATIONS {
        let said = device_says(&compiler, Some((from, to)), &asked);
        assert!(!right(&said), "nobody notices {to} for {from}");
    }
}
