//! Routes on the device, compiled as host C++: which experts are chosen, and when the loader knows them.

use std::fmt::Write as _;

use abi::Scoring;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use crate::emulated::{compiler, run};

fn device_says(compiler: &str, spoil: Option<(&str, &str)>, asked: &str) -> String {
    let sources = ["amk_abi.h", "routed_stream.cuh", "route.cuh"];
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
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
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

/// Waits for routes whose words arrive in any order, each number last once: the looks at which the last number is
/// there, none for the second load, the experts.
fn waits(random: &mut Xoshiro256PlusPlus) -> (String, String) {
    let (mut asked, mut said) = (String::new(), String::new());
    let experts = 20;
    let all = 1..=abi::SLOTS_MAX as usize;
    for (slots, last) in all.flat_map(|slots| (0..slots).map(move |last| (slots, last))) {
        // The number of experts is none of theirs.
        let numbers: Vec<u32> = (0..slots).map(|_| random.random_range(0..=experts)).collect();
        let mut places: Vec<usize> = (0..2 * slots).filter(|&place| place != last).collect();
        for i in (1..places.len()).rev() {
            places.swap(i, random.random_range(0..=i));
        }
        let before = random.random_range(0..=slots); // weights that arrive after it
        let end = places.len();
        places.sort_by_key(|&place| place >= slots + before); // stable
        let looks = end - (slots - before);
        places.insert(looks, last);
        let numbers_text: Vec<String> = numbers.iter().map(u32::to_string).collect();
        let places_text: Vec<String> = places.iter().map(usize::to_string).collect();
        let (numbers_text, places_text) = (numbers_text.join(" "), places_text.join(" "));
        let _ = writeln!(asked, "w {slots} {experts} {numbers_text} {places_text}");
        let kept: Vec<String> = numbers.iter().map(|&n| n.min(experts - 1).to_string()).collect();
        let _ = writeln!(said, "{} 0 {}", looks + 1, kept.join(" "));
    }
    (asked, said)
}

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
    // Mutations that it must detect.
    for (from, to) in [
        ("(uint32_t)(j < i)", "(uint32_t)(j > i)"),
        ("(uint32_t)(other > key)", "(uint32_t)(other >= key)"),
        ("(keys + j + n * 4 * step)", "(keys + j + n * 4)"),
        ("word_wait(w, in, p.first + i)) : 0;", "word_wait(w, in, p.first + i)) : ~0u;"),
        ("o < sharing; o *= 2", "2 * o < sharing; o *= 2"),
        ("(int32_t)~key >> 31", "(int32_t)key >> 31"),
        ("? key_value(keys[i])", "? __uint_as_float(keys[i])"),
        ("wanted > 2 ?", "wanted > 3 ?"),
        ("left > 4 ? 4 : 0", "left > 5 ? 4 : 0"),
        ("left - second, tag", "left, tag"),
        ("slot < AMK_SLOTS_MAX; slot += 8", "slot < 8; slot += 8"),
        ("read.wrap != wrap ||", ""),
        ("read.wrap = wrap,", ""),
        ("number < last ? number : last", "number"),
    ] {
        let said = device_says(&compiler, Some((from, to)), &asked);
        assert!(!right(&said), "nobody notices {to} for {from}");
    }
}
