//! The device's sampling against `ir::sampling`: the same token from the same row, settings, tokens, seed and position.
//!
//! `sampling.cuh` and `cooperative_sampler.cuh` are compiled as host C++ and run on emulated threads (`emulated/`), so that their logic is
//! tested without a card. A missing compiler fails these tests; `AMK_NO_CXX=1` declares that it is missing. With a card and nvcc, the same
//! cases run there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use abi::SessionSampling;
use ir::sampling::{Sampling, Seen};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

mod device;
use device::device;

/// A token to sample.
struct Case {
    row: Vec<f32>,
    tokens: Vec<u32>,
    sampling: Sampling,
    position: u32,
    /// Bytes of the activation buffer, in which the list begins.
    x_bytes: u32,
    /// A bit for each token that a mask bans, if there is one: then the sampling has no biases.
    mask: Option<Vec<u32>>,
}

impl Case {
    fn expected(&self) -> u32 {
        let mut seen = Seen::default();
        seen.extend(self.tokens.iter().copied());
        // As the host samples under a grammar: what is banned has no weight, before the settings are applied.
        let mut row = self.row.clone();
        for (token, logit) in row.iter_mut().enumerate() {
            let banned =
                self.mask.as_ref().is_some_and(|mask| mask[token / 32] >> (token % 32) & 1 != 0);
            *logit = if banned { f32::NEG_INFINITY } else { *logit };
        }
        self.sampling.choose(&row, &seen, self.position).unwrap_or(abi::NONE)
    }

    /// As `Case` of sampling.cpp reads it.
    fn bytes(&self, repeats: u32) -> Vec<u8> {
        let fixed = self.sampling.fixed();
        let settings = SessionSampling {
            seed: self.sampling.seed,
            share: fixed.share,
            least: fixed.least,
            scale: fixed.scale,
            penalty: self.sampling.repetition_penalty,
            top_k: self.sampling.top_k,
            bias_len: self.biases().len() as u32,
            greedy: u32::from(self.sampling.is_greedy())
                | if self.mask.is_some() { abi::SAMPLING_MASKED } else { 0 },
            ..SessionSampling::default()
        };
        // Output of the preceding tasks: the highest logit that is a number, and the first token that has it.
        let candidate = self.row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let first = self.row.iter().position(|logit| *logit == candidate);
        let first = first.map_or(abi::NONE, |token| token as u32);
        let mut out = bytemuck::bytes_of(&settings).to_vec();
        out.extend(candidate.to_le_bytes());
        let (biases, tokens) = (self.biases(), self.tokens.len() as u32);
        let row = [first, self.row.len() as u32, self.position, self.x_bytes];
        let masked = [u32::from(self.mask.is_some()), 0, 0, 0];
        let lengths = [biases.len() as u32, tokens, repeats];
        for word in row.into_iter().chain(lengths).chain(masked) {
            out.extend(word.to_le_bytes());
        }
        self.row.iter().for_each(|logit| out.extend(logit.to_le_bytes()));
        self.tokens.iter().for_each(|token| out.extend(token.to_le_bytes()));
        for (token, bias) in biases {
            out.extend(token.to_le_bytes());
            out.extend(bias.to_le_bytes());
        }
        self.mask.iter().flatten().for_each(|word| out.extend(word.to_le_bytes()));
        out
    }

    /// The biases as `vm-host/src/sampling.rs` gives them to the device: of a mask one for all tokens.
    fn biases(&self) -> BTreeMap<u32, f32> {
        match self.mask {
            Some(_) => BTreeMap::from([(0, f32::NEG_INFINITY)]),
            None => self.sampling.bias.clone(),
        }
    }

    fn describe(&self) -> String {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty, bias, seed } =
            &self.sampling;
        format!(
            "{} logits, {} tokens, mask {}, position {}: temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}, penalty {repetition_penalty}, {} biases, seed {seed}",
            self.row.len(),
            self.tokens.len(),
            self.mask.is_some(),
            self.position,
            bias.len(),
        )
    }
}

/// A row of some shape: steep, flat, of few values, with NaN, with infinities.
fn row(random: &mut Xoshiro256PlusPlus, vocab: usize) -> Vec<f32> {
    let steep = [0.0, 0.02, 0.5, 3.0, 12.0, 200.0][random.random_range(0..6)];
    let shape = random.random_range(0..8);
    let mut logit = || {
        // The sum of a few uniform numbers approximates a normal distribution.
        let bell = (0..4).map(|_| random.random_range(-1.0_f32..1.0)).sum::<f32>() * steep;
        match (shape, random.random_range(0..16)) {
            (1, 0) => f32::NAN,
            (1, 1) => f32::NEG_INFINITY,
            (2, _) => (bell * 2.0).round() / 2.0,
            (3, 0) if random.random_range(0..vocab) == 0 => f32::INFINITY,
            (4, _) => bell * 1e-39,
            (5, 0) => -0.0,
            (5, 1) => 0.0,
            _ => bell,
        }
    };
    (0..vocab).map(|_| logit()).collect()
}

fn case(random: &mut Xoshiro256PlusPlus, vocab: usize) -> Case {
    let chance = |random: &mut Xoshiro256PlusPlus| random.random_bool(0.5);
    let row = row(random, vocab);
    let tokens =
        (0..random.random_range(0..40)).map(|_| random.random_range(0..vocab as u32)).collect();
    let mut bias = BTreeMap::new();
    if chance(random) {
        for _ in 0..random.random_range(0..12) {
            let value =
                [f32::NEG_INFINITY, -100.0, 0.0, 0.3, 7.5, 100.0][random.random_range(0..6)];
            bias.insert(random.random_range(0..vocab as u32), value);
        }
    }
    let sampling = Sampling {
        temperature: [0.0, 1e-30, 0.05, 0.7, 1.0, 1.5, 40.0, 1e20][random.random_range(0..8)],
        top_k: if chance(random) { 0 } else { random.random_range(1..2 * vocab as u32) },
        top_p: if chance(random) { 1.0 } else { random.random_range(0.0..1.0) },
        min_p: if chance(random) { 0.0 } else { random.random_range(0.0_f32..1.0).powi(4) },
        repetition_penalty: if chance(random) { 1.0 } else { random.random_range(0.3..3.0) },
        bias,
        seed: random.random(),
    };
    let x_bytes = [0, 160, 8192, 1 << 16][random.random_range(0..4)];
    Case { row, tokens, sampling, position: random.random_range(0..1 << 20), x_bytes, mask: None }
}

/// Bans none, few, half, most or all tokens of each case.
fn masked(seed: u64, mut cases: Vec<Case>) -> Vec<Case> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    for case in &mut cases {
        let banned = [0.0, 0.02, 0.5, 0.98, 0.999, 1.0][random.random_range(0..6)];
        let mut word =
            || (0..32).fold(0, |w, bit| w | u32::from(random.random_bool(banned)) << bit);
        case.mask = Some((0..case.row.len().div_ceil(32)).map(|_| word()).collect());
        case.sampling.bias.clear();
    }
    cases
}

/// Small rows of every shape, and some as large as those of real models.
fn cases(seed: u64, small: usize, large: usize) -> Vec<Case> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let sizes = [1, 2, 3, 31, 64, 263, 511, 512, 513, 1000, 1026, 5000];
    let mut all: Vec<Case> = (0..small)
        .map(|_| {
            let size = sizes[random.random_range(0..sizes.len())];
            case(&mut random, size)
        })
        .collect();
    all.extend((0..large).map(|_| case(&mut random, 49_152)));
    all
}

/// Files of the test program, besides the device's source and the wire format. On a card there is no repository.
const FILES: [(&str, &str); 3] = [
    ("simt.hpp", include_str!("emulated/simt.hpp")),
    ("card.hpp", include_str!("emulated/card.hpp")),
    ("sampling.cpp", include_str!("emulated/sampling.cpp")),
];

/// A compiler, or `None` if its absence is excused.
fn compiler(name: &str, excuse: bool) -> Option<String> {
    let works = Command::new(name)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !works {
        assert!(
            excuse,
            "no compiler `{name}`: the device's sampling is NOT checked; AMK_NO_CXX=1 accepts that"
        );
        eprintln!("skipped: no compiler `{name}`");
    }
    works.then(|| name.to_owned())
}

fn cxx() -> Option<String> {
    let name = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    compiler(&name, std::env::var_os("AMK_NO_CXX").is_some())
}

/// A folder that is deleted when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("amk-sampling-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder can be made");
        Self(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The device's sampling files, and those that they need.
type Sources = [(&'static str, String); 2];

/// Builds the test program from these sources of the device.
fn build(scratch: &Scratch, compiler: &str, flags: &[&str], sources: &Sources) -> PathBuf {
    let header = abi::c_header();
    let of_device = sources.iter().map(|(name, text)| (*name, &**text));
    for (name, text) in FILES.into_iter().chain(of_device).chain([("amk_abi.h", &*header)]) {
        std::fs::write(scratch.0.join(name), text).expect("a file can be written");
    }
    let binary = scratch.0.join("choose");
    let output = Command::new(compiler)
        .args(["-std=c++17", "-O1"])
        .args(flags)
        .arg("-I")
        .arg(&scratch.0)
        .arg(scratch.0.join("sampling.cpp"))
        .arg("-o")
        .arg(&binary)
        .output()
        .expect("the compiler starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    binary
}

const HOST_FLAGS: [&str; 3] = ["-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"];

/// The program's output for a file of cases: a number per line.
fn answers(scratch: &Scratch, binary: &Path, input: &[u8]) -> Vec<u64> {
    let file = scratch.0.join("cases");
    std::fs::write(&file, input).expect("the cases can be written");
    let output = Command::new(binary).arg(&file).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    eprint!("{errors}");
    said.lines().map(|line| line.parse().unwrap_or_else(|_| panic!("{line}"))).collect()
}

/// The cases in which the two tokens differ.
fn wrong(scratch: &Scratch, binary: &Path, cases: &[Case], repeats: u32) -> Vec<String> {
    let input: Vec<u8> = cases.iter().flat_map(|case| case.bytes(repeats)).collect();
    let got = answers(scratch, binary, &input);
    assert_eq!(got.len(), cases.len());
    cases
        .iter()
        .zip(got)
        .filter(|(case, got)| u64::from(case.expected()) != *got)
        .map(|(case, got)| format!("{got} instead of {}: {}", case.expected(), case.describe()))
        .collect()
}

fn sources() -> Sources {
    ["sampling.cuh", "cooperative_sampler.cuh"].map(|name| {
        let path = format!("cuda/{name}");
        let found = vm_device::SOURCES.iter().find(|source| source.name == path);
        (name, found.expect("it is a source").text.to_owned())
    })
}

/// The same, with a list so short that even small rows exceed it: the tokens that pass are weighed in the row.
fn sources_of_long_rows() -> Sources {
    let (is, short) = ("LIST_WISH = 2048", "LIST_WISH = 16");
    let sources = sources();
    assert!(sources.iter().any(|(_, text)| text.contains(is)), "the sources have changed");
    sources.map(|(name, text)| (name, text.replace(is, short)))
}

/// Builds the device's sources for this many workers and warps, and returns the cases in which the two tokens differ.
fn emulated(
    cxx: &str,
    name: &str,
    (workers, warps): (u32, u32),
    sources: &Sources,
    cases: &[Case],
) -> Vec<String> {
    let scratch = Scratch::new(name);
    let masks = cases.iter().any(|case| case.mask.is_some());
    let defines = [
        format!("-DAMK_WARPS={warps}"),
        format!("-DWORKERS={workers}"),
        format!("-DAMK_MASKS={}", u32::from(masks)),
    ];
    let flags: Vec<&str> = HOST_FLAGS.into_iter().chain(defines.iter().map(|d| &**d)).collect();
    let binary = build(&scratch, cxx, &flags, sources);
    wrong(&scratch, &binary, cases, 0)
}

/// The token does not depend on the number of workers and threads.
#[test]
fn emulated_threads_choose_what_the_definition_chooses() {
    let Some(cxx) = cxx() else { return };
    let (short, long) = (sources(), sources_of_long_rows());
    for (workers, warps, sources, seed, small, large) in [
        (2, 8, &short, 1, 40, 1),
        (5, 3, &long, 3, 60, 0),
        (31, 1, &short, 4, 20, 1),
        (3, 1, &long, 6, 120, 1),
    ] {
        let name = format!("{workers}x{warps}-{seed}");
        let cases = cases(seed, small, large);
        let found = emulated(&cxx, &name, (workers, warps), sources, &cases);
        assert!(found.is_empty(), "{name}: {} wrong\n{}", found.len(), found.join("\n"));
    }
}

/// Under a mask as without one; and a kernel with masks has the tokens of one without where there is no mask.
#[test]
fn emulated_threads_choose_under_masks_what_the_host_chooses() {
    let Some(cxx) = cxx() else { return };
    let (short, long) = (sources(), sources_of_long_rows());
    for (workers, warps, sources, seed, small, large) in
        [(2, 8, &short, 11, 40, 1), (5, 3, &long, 12, 60, 0), (3, 1, &long, 13, 120, 0)]
    {
        let name = format!("masks-{workers}x{warps}");
        let mut cases = masked(seed, cases(seed, small, large));
        cases.extend(self::cases(seed + 10, 20, 0));
        let found = emulated(&cxx, &name, (workers, warps), sources, &cases);
        assert!(found.is_empty(), "{name}: {} wrong\n{}", found.len(), found.join("\n"));
    }
}

/// Mutations of the device's arithmetic are detected by these cases.
#[test]
fn deliberate_mistakes_are_found() {
    let Some(cxx) = cxx() else { return };
    let mistakes = [
        ("penalty", "x > 0.f ? __fdiv_rn(x, c.penalty)", "x > 9.f ? __fdiv_rn(x, c.penalty)"),
        ("whole part", "__fadd_ru(t, base)", "__fadd_rn(t, base)"),
        ("carry", " + (old + low < old)", ""),
        ("share of all", "share_of(kept.weight, share)", "share_of(kept.weight * 2, share)"),
        ("last bucket", "bucket <= to)", "bucket < to)"),
        ("tokens before", "kept.listed ? 0 : b.before", "0"),
        (
            "the last that counts",
            "<= limit && weight >= least ? weight",
            "< limit && weight >= least ? weight",
        ),
        ("parts before", "sought.need -= found.before", "sought.need -= 0"),
        ("an old histogram", "buckets_forget(w, a.choice);", ""),
        ("zeros", "__float_as_uint(__fadd_rn(x, 0.f))", "__float_as_uint(x)"),
        ("lightest", "LIGHTEST = -41.f", "LIGHTEST = -2.f"),
    ];
    let cases = cases(5, 150, 0);
    std::thread::scope(|scope| {
        for (name, from, to) in mistakes {
            let (cxx, cases) = (&cxx, &cases);
            scope.spawn(move || {
                let sources = sources_of_long_rows();
                let there = sources.iter().any(|(_, text)| text.contains(from));
                assert!(there, "{name}: the sources have changed");
                let spoiled = sources.map(|(file, text)| (file, text.replace(from, to)));
                let found = emulated(cxx, &name.replace(' ', "-"), (3, 1), &spoiled, cases);
                assert!(!found.is_empty(), "{name} is not noticed");
            });
        }
    });
    let spoiled =
        sources().map(|(file, text)| (file, text.replace("(s.greedy & 1) != 0", "s.greedy != 0")));
    let found =
        emulated(&cxx, "masked-is-greedy", (3, 1), &spoiled, &masked(6, self::cases(6, 60, 0)));
    assert!(!found.is_empty(), "greedy is a bit beside that of masks");
}

/// The same cases on a card, by a separate kernel; and the time of sampling from the largest vocabularies.
#[test]
fn a_card_chooses_what_the_definition_chooses() {
    let Some(_) = device() else { return };
    let nvcc = std::env::var("NVCC").unwrap_or_else(|_| "nvcc".into());
    let Some(nvcc) = compiler(&nvcc, std::env::var_os("AMK_REQUIRE_DEVICE").is_none()) else {
        return;
    };
    let scratch = Scratch::new("card");
    let binary = build(&scratch, &nvcc, &["-x", "cu", "-arch=sm_90a"], &sources());
    let found = wrong(&scratch, &binary, &cases(9, 600, 60), 0);
    assert!(found.is_empty(), "{} wrong\n{}", found.len(), found.join("\n"));
    let timed = timed_cases();
    let found = wrong(&scratch, &binary, &timed, 200);
    assert!(found.is_empty(), "{} wrong\n{}", found.len(), found.join("\n"));
    let flags = ["-x", "cu", "-arch=sm_90a", "-DAMK_MASKS=1"];
    let binary = build(&Scratch::new("card-masks"), &nvcc, &flags, &sources());
    let masks = [(masked(10, cases(10, 600, 20)), 0), (masked(18, timed_cases()), 200)];
    for (cases, repeats) in masks {
        let found = wrong(&scratch, &binary, &cases, repeats);
        assert!(found.is_empty(), "{} wrong\n{}", found.len(), found.join("\n"));
    }
}

/// Rows of 128 256 logits, similar to those of language models: a few likely tokens and a long tail.
fn timed_cases() -> Vec<Case> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(17);
    let vocab = 128_256;
    let mut rows = [3.0_f32, 0.2].map(|steep| {
        let bell = |random: &mut Xoshiro256PlusPlus| -> f32 {
            (0..6).map(|_| random.random_range(-1.0_f32..1.0)).sum::<f32>() * steep
        };
        (0..vocab).map(|_| bell(&mut random)).collect::<Vec<f32>>()
    });
    for _ in 0..40 {
        let token = random.random_range(0..vocab);
        rows[0][token] += random.random_range(2.0_f32..14.0);
    }
    let tokens: Vec<u32> = (0..500).map(|_| random.random_range(0..vocab as u32)).collect();
    let bias: BTreeMap<u32, f32> =
        (0..64).map(|_| (random.random_range(0..vocab as u32), -3.0)).collect();
    let at = Sampling { temperature: 0.8, seed: 5, ..Sampling::default() };
    let penalised = Sampling { repetition_penalty: 1.1, ..at.clone() };
    let all = Sampling { top_k: 50, top_p: 0.9, min_p: 0.02, bias, ..penalised.clone() };
    let settings = [
        at.clone(),
        Sampling { top_k: 50, ..at.clone() },
        Sampling { top_p: 0.9, ..at.clone() },
        Sampling { min_p: 0.05, ..at },
        Sampling { temperature: 0.0, ..penalised.clone() },
        Sampling { top_p: 0.9, ..penalised.clone() },
        penalised,
        all,
    ];
    let mut cases = Vec::new();
    for row in &rows {
        for sampling in &settings {
            let (row, tokens, sampling) = (row.clone(), tokens.clone(), sampling.clone());
            cases.push(Case {
                row,
                tokens,
                sampling,
                position: 501,
                x_bytes: 32 << 10,
                mask: None,
            });
        }
    }
    cases
}
