//! Device sources compiled as host C++, so that their arithmetic is tested where there is no card.

use std::path::Path;
use std::process::{Command, Stdio};

/// The C++ compiler, or `None` if the environment excuses its absence.
pub(crate) fn compiler() -> Option<String> {
    let name = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    let asked = Command::new(&name).arg("--version").stdout(Stdio::null()).status();
    if asked.is_ok_and(|status| status.success()) {
        return Some(name);
    }
    assert!(std::env::var_os("AMK_NO_CXX").is_some(), "no C++ compiler `{name}` (AMK_NO_CXX=1)");
    eprintln!("skipped: no C++ compiler `{name}`, and AMK_NO_CXX is set");
    None
}

/// Whether the CPU converts f16, which the compiler otherwise does by calls that take most of a program's time.
fn converts_f16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("f16c");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Output of `tests/emulated/<program>.cpp`, compiled after these device sources, given `input` as a file. `spoil` replaces a text of the
/// sources by another: a mutation that the test must detect.
pub(crate) fn run(
    compiler: &str,
    program: &str,
    (sources, defines): (&[&str], &[String]),
    spoil: Option<(&str, &str)>,
    input: &str,
) -> String {
    run_text(compiler, program, (&source_text(sources), defines), spoil, input)
}

/// These device sources, one behind the other.
pub(crate) fn source_text(sources: &[&str]) -> String {
    let all = vm_device::SOURCES.iter().chain(vm_device::PREFILL_SOURCES);
    let found = all
        .filter(|source| sources.iter().any(|name| source.name.rsplit('/').next() == Some(name)));
    found.map(|source| source.text).collect()
}

/// The same of a text of device sources.
pub(crate) fn run_text(
    compiler: &str,
    program: &str,
    (text, defines): (&str, &[String]),
    spoil: Option<(&str, &str)>,
    input: &str,
) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let mut text = text.to_owned();
    if let Some((from, to)) = spoil {
        assert!(text.contains(from), "there is no {from}");
        text = text.replace(from, to);
    }
    let header = folder.path().join("device.hpp");
    std::fs::write(header, text.replace("#pragma once", "")).expect("a file");
    let main = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/emulated/{program}.cpp"));
    let (built, file) = (folder.path().join(program), folder.path().join("input"));
    // Most programs take longer to compile than to run; those of attention do not.
    let level = if ["attention", "chunks", "windows"].contains(&program) { "-O1" } else { "-O0" };
    let output = Command::new(compiler)
        .args(["-std=c++17", level, "-w"])
        .args(converts_f16().then_some("-mf16c"))
        .arg("-I")
        .arg(folder.path())
        .args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/../vm-device/include")])
        .args(defines)
        .args([&main, Path::new("-o"), &built])
        .output()
        .expect("the compiler starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::write(&file, input).expect("a file");
    let ran = Command::new(built).arg(file).output().expect("it starts");
    match ran.status.success() {
        true => String::from_utf8(ran.stdout).expect("text"),
        false => ran.status.to_string(), // a check of the program itself failed
    }
}

/// Runs tasks whose numbers start at `first`.
#[test]
fn the_task_prefetcher_never_overruns_its_consumers_where_the_numbers_wrap() {
    let Some(compiler) = compiler() else { return };
    let says = |first: u32, spoil| {
        let define = format!("-DAMK_FIRST_TASK={first}u");
        run(&compiler, "tasks", (&["tasks.cuh"], &[define]), spoil, "")
    };
    for first in [0, 1, u32::MAX, 0_u32.wrapping_sub(4), 0_u32.wrapping_sub(32), 1 << 31] {
        assert_eq!(says(first, None), "right\n", "from {first} on");
    }
    let near_wrap = 0_u32.wrapping_sub(32);
    for (from, to) in [
        // The former guard: open for the first six tasks, and again after the wrap.
        ("next - done <= STAGED - 3", "next - done <= STAGED - 3 || next < STAGED - 2"),
        ("(int32_t)(staged - number) > 0", "staged > number"),
        ("next - done <= STAGED - 3", "next <= done + STAGED - 3"),
    ] {
        let spoiled = says(near_wrap, Some((from, to)));
        assert_ne!(spoiled, "right\n", "nobody notices {to}");
    }
}

/// Steps of several devices end on all with the same token, greedy or sampled by the first, in any order of their accesses; and a device that
/// is told to leave does.
#[test]
fn devices_end_each_step_with_one_token() {
    let Some(compiler) = compiler() else { return };
    let says = |devices: u32, spoil| {
        let defines = ["-DAMK_SEQS=1".to_owned(), format!("-DAMK_DEVICES={devices}")];
        run(&compiler, "exchange", (&["exchange.cuh"], &defines), spoil, "")
    };
    for devices in [2, 3, 4, 8] {
        assert_eq!(says(devices, None), "right\n", "{devices} devices");
    }
    for (from, to) in [
        ("go % AMK_EXCHANGE_STEPS", "0 * go"),
        ("first.y == go << 1 && ", ""),
        ("exchange_take(w, go, best, preempted);\n    devices_fence", "devices_fence"),
        ("sh->step.go = e.second, ", ""),
        (", preempted = e.control", ""),
        ("exchange_slot(w, go, i + 1), sh->peers[i]", "exchange_slot(w, go, 0), sh->peers[i]"),
        ("if (is_dead(w.shared)) {\n      return false;", "if (false) {\n      return false;"),
    ] {
        let spoiled = says(4, Some((from, to)));
        assert_ne!(spoiled, "right\n", "nobody notices {to} for {from}");
    }
}

/// A step waits for its mask, and ends without a token if that does not come in time, or the command or the device is to end.
#[test]
fn a_step_waits_for_its_mask_and_no_longer_than_it_may() {
    let Some(compiler) = compiler() else { return };
    let text = source_text(&["op_sample.cuh"]);
    let begin = text.find("// One thread: waits for the mask").expect("mask_wait");
    let end = begin + text[begin..].find("#endif").expect("its end");
    // When the mask comes, the command is to end and the device is leaving, and the deadline; the time is 1000 at first.
    let cases = [
        ([500, 0, 0, 4000], "1 1000 1"),
        ([1500, 0, 0, 4000], "1 1500 1"),
        ([0, 0, 0, 4000], "0 2010 0"),
        ([1500, 1200, 0, 4000], "0 1200 0"),
        ([1500, 0, 1300, 4000], "0 1300 0"),
        ([500, 500, 0, 4000], "1 1000 1"),
        ([1, 500, 500, 4000], "1 1000 0"),
    ];
    let input: Vec<String> = cases.map(|(at, _)| at.map(|at: u32| at.to_string()).join(" ")).into();
    let says = |spoil| {
        let defines = ["-DAMK_MASKS=1".to_owned()];
        run_text(&compiler, "masks", (&text[begin..end], &defines), spoil, &input.join("\n"))
    };
    assert_eq!(says(None).lines().collect::<Vec<_>>(), cases.map(|(_, expected)| expected));
    for (from, to) in [
        ("(mask) != position", "(mask) != position + 1"),
        ("preempted || ", ""),
        ("is_dead(w.shared) || ", ""),
        ("/ AMK_MASK_DEADLINE_PART", ""),
        ("host_fence();", ""),
        ("& AMK_SAMPLING_MASKED", "& ~0u"),
    ] {
        let said = says(Some((from, to)));
        assert_ne!(said.lines().collect::<Vec<_>>(), cases.map(|(_, e)| e), "nobody notices {to}");
    }
}

/// A sequence of an emulated batch: its session, its position, and the tokens in its buffer from there on.
type Known = (u32, u32, Vec<u32>);

const VOCAB: u32 = 50;

/// What a batch leaves, by a model that shares nothing with the device: it picks the same tokens from what a sequence has been fed.
/// `sample`: the sequences that sample, a bit each.
fn batch_says((steps, stop, sample): (u32, u32, u32), seqs: &[Known]) -> String {
    let mut all: Vec<Vec<u32>> = seqs.iter().map(|(.., known)| known.clone()).collect();
    let (mut ran, mut stopped) = (0, vec![false; seqs.len()]);
    while ran < steps as usize && !stopped.contains(&true) {
        let runs = all.iter_mut().zip(&mut stopped).zip(seqs).zip(0..);
        for (((known, stopped), (_, first, _)), seq) in runs {
            let mut sum = first + ran as u32;
            known[..=ran].iter().for_each(|token| sum = sum.wrapping_mul(5).wrapping_add(*token));
            sum = sum % VOCAB + (sample >> seq & 1);
            if known.len() == ran + 1 {
                known.push(sum % VOCAB);
                *stopped = sum % VOCAB == stop;
            }
        }
        ran += 1;
    }
    let code = |(seq, stopped): (usize, &bool)| (*stopped as u32) << (4 * seq);
    let endings: u32 = stopped.iter().enumerate().map(code).sum();
    let (ending, endings) = if seqs.len() == 1 { (endings, 0) } else { (0, endings) };
    let mut text = format!("0 {ran} {ending} {endings} 0\n");
    for known in all {
        let words = |tokens: &[u32]| tokens.iter().map(|t| format!("{t} ")).collect::<String>();
        let mut buffer = known.clone();
        buffer.resize(steps as usize + 1, 0);
        text += format!("{}| {}", words(&known[..ran]), words(&buffer)).trim_end();
        text.push('\n');
    }
    text
}

/// Commands of a kernel of 8 sequences with heads of this width.
fn batches(compiler: &str, head_dim: u32, spoil: Option<(&str, &str)>, asked: &str) -> String {
    batches_on(compiler, (8, 1, head_dim), spoil, asked)
}

/// What commands of batches print in a kernel for this number of sequences and of devices, with heads of this width.
fn batches_on(
    compiler: &str,
    (seqs, devices, head_dim): (u32, u32, u32),
    spoil: Option<(&str, &str)>,
    asked: &str,
) -> String {
    let of = [("SEQS", seqs), ("WARPS", seqs), ("DEVICES", devices), ("HEAD_DIM", head_dim)];
    let mut defines: Vec<String> =
        of.iter().map(|(name, value)| format!("-DAMK_{name}={value}")).collect();
    defines.push("-DAMK_BATCH_TILES=1".to_owned());
    let sources = ["devices.cuh", "batch.cuh", "exchange.cuh", "sample_batch.cuh", "poller.cuh"];
    run(compiler, "batches", (&sources, &defines), spoil, asked)
}

/// Windows: neighbours of one session, each at the position behind the last one's, alone or beside others; and sequences that
/// only look alike.
#[test]
fn neighbours_of_one_session_in_a_command_of_one_step_are_a_window() {
    let Some(compiler) = compiler() else { return };
    // Steps, sequences (session, position), and the windows' word; `None`: the command is refused.
    type Case = (u32, &'static [(u32, u32)], Option<&'static str>);
    const CASES: [Case; 9] = [
        (1, &[(3, 9), (3, 10), (3, 11), (3, 12)], Some("3210")),
        (1, &[(3, 0), (3, 1), (3, 2), (3, 3), (3, 4), (3, 5), (3, 6), (3, 7)], Some("76543210")),
        (1, &[(1, 4), (3, 9), (3, 10), (2, 0), (5, 1), (5, 2)], Some("100100")),
        (
            1,
            &[(6, 9), (6, 10), (6, 11), (6, 12), (2, 13), (2, 14), (2, 15), (5, 16)],
            Some("2103210"),
        ),
        (1, &[(1, 4), (3, 4), (2, 5)], Some("0")),
        (2, &[(3, 9), (3, 10)], None),
        (1, &[(3, 9), (3, 11)], None),
        (1, &[(3, 10), (3, 9)], None),
        (1, &[(3, 9), (2, 4), (3, 10)], None),
    ];
    let token = |seq: usize, position: u32| (position * 3 + seq as u32) % VOCAB;
    let (mut asked, mut expected) = (String::new(), String::new());
    for (steps, seqs, windows) in CASES {
        asked += &format!("{VOCAB} {} {steps} 99 0\n", seqs.len());
        for (seq, (session, position)) in seqs.iter().enumerate() {
            asked += &format!("{session} {position} 1 {}\n", token(seq, *position));
        }
        let Some(windows) = windows else { continue };
        expected += &format!("0 1 0 0 {windows}\n");
        let chosen = |seq: usize| (seqs[seq].1 * 5 + token(seq, seqs[seq].1)) % VOCAB;
        for (seq, &(session, position)) in seqs.iter().enumerate() {
            // What the sequence before it chose is where its own token was.
            let before = seq
                .checked_sub(1)
                .filter(|&other| seqs[other] == (session, position.wrapping_sub(1)));
            let (fed, next) = (token(seq, position), chosen(seq));
            expected += &format!("{fed} | {} {next}\n", before.map_or(fed, chosen));
        }
    }
    // Refused ones end with the trap, and give no token.
    let says = |head_dim, spoil| batches(&compiler, head_dim, spoil, &asked);
    let good = |text: &str| {
        let mut lines = text.lines();
        let kept: Vec<&str> = (&mut lines).take(expected.lines().count()).collect();
        let refused = lines.filter(|line| line.split(' ').count() == 5 && !line.contains('|'));
        let traps =
            refused.filter(|line| line.starts_with(&(abi::Trap::BadCommand as u32).to_string()));
        kept == expected.lines().collect::<Vec<_>>() && traps.count() == 4
    };
    let said = says(64, None);
    assert!(good(&said), "{said}\ninstead of\n{expected}");
    for (from, to) in [
        ("before = steps == 1 && of", "before = of"),
        ("of == last_session &&", ""),
        ("== last_position + 1 ?", ">= 0 ?"),
        ("? before + 1 : 0", "? 1 : 0"),
        ("step_store(p, &to->windows, windows);", ""),
    ] {
        assert!(!good(&says(64, Some((from, to)))), "nobody notices {to} for {from}");
    }
    // Wide heads have room for four.
    assert_ne!(says(256, None), said);
    assert_eq!(says(256, Some(("bad |= windows != 0 && seqs > FRESH_ROWS;", ""))), said);
}

/// Random batches of every size, whose sequences decode, are in their prompts, or stay there; with `samples` some of them sample. What
/// they ask, what they must leave, the number of those that stop, and the tokens of prompts.
fn random_batches(cases: u32, most: u32, samples: bool) -> (String, String, usize, usize) {
    let (mut asked, mut expected) = (String::new(), String::new());
    let mut random = 7_u32;
    let mut below = |most: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 16) % most
    };
    let (mut stops, mut forced) = (0, 0);
    for case in 0..cases {
        let (count, steps, stop) = (1 + case % most, 1 + below(12), below(VOCAB));
        let sample = if samples { below(1 << count) * below(2) } else { 0 };
        let mut seq = |index: u32| {
            let known = (0..1 + below(steps + 1)).map(|_| below(VOCAB)).collect();
            ((index * 5 + 3) % 16, below(100), known)
        };
        let seqs: Vec<Known> = (0..count).map(&mut seq).collect();
        asked += &format!("{VOCAB} {count} {steps} {stop} {sample}\n");
        for (session, position, known) in &seqs {
            let known: Vec<String> = known.iter().map(u32::to_string).collect();
            asked += &format!("{session} {position} {} {}\n", known.len(), known.join(" "));
            forced += known.len() - 1;
        }
        let says = batch_says((steps, stop, sample), &seqs);
        stops += usize::from(says.lines().next().is_some_and(|head| !head.ends_with(" 0 0 0")));
        expected += &says;
    }
    (asked, expected, stops, forced)
}

#[test]
fn a_sequence_of_a_batch_is_fed_its_prompt_and_then_what_it_says() {
    let Some(compiler) = compiler() else { return };
    let (asked, expected, stops, forced) = random_batches(200, 8, false);
    assert!(stops > 10 && forced > 1000, "{stops} stops, {forced} tokens of prompts");
    let says = |spoil| batches(&compiler, 64, spoil, &asked);
    assert_eq!(says(None), expected);
    for (from, to) in [
        // As it was: none but a plain decode.
        ("next < seq_forced(w)", "next < w.shared->step.forced"),
        ("position[j] + 1 + (forced", "position[j] + (forced"),
        ("seq_forced[i / 4]) >> i % 4 * 8", "seq_forced[i / 4])"),
    ] {
        assert_ne!(says(Some((from, to))), expected, "nobody notices {to}");
    }
}

/// The same on several devices, which exchange the tokens of all sequences: greedy ones and sampled ones, with delays, and a second command
/// that a device may be late for.
#[test]
fn a_batch_on_several_devices_is_fed_on_all_what_it_says() {
    let Some(compiler) = compiler() else { return };
    let (asked, expected, stops, _) = random_batches(16, 4, true);
    assert!(stops > 1, "{stops} stops");
    let says = |devices, spoil| batches_on(&compiler, (4, devices, 64), spoil, &asked);
    for devices in [2, 4] {
        assert_eq!(says(devices, None), expected, "{devices} devices");
    }
    for (from, to) in [
        // What the poller tells its own device only.
        ("step_store(p, &to->token[i + j]", "store_relaxed(&to->token[i + j]"),
        ("step_store(p, &to->seqs", "store_relaxed(&to->seqs"),
        ("step_store(p, &to->sample, host_load", "store_relaxed(&to->sample, host_load"),
        // A late device writes into the next command.
        ("if (seq < seqs && !over)", "if (seq < seqs)"),
        // One slot, or one candidate, for all sequences; all devices sample; the first one does before it has all logits; a greedy sequence has
        // a hop less than the others.
        ("[seq_of(w)].slots", "[0].slots"),
        ("seq = own < seqs_running(w) ? own : 0", "seq = 0"),
        ("is_sampled(w) && !left(w) && device_of(w.shared) == 0", "is_sampled(w) && !left(w)"),
        ("exchange_collect(in_seq(w, w.thread), best);", ""),
        ("sampled ? exchange_token(of", "is_sampled(of) ? exchange_token(of"),
        // The steps behind the first begin with the tokens that it began with.
        (
            "step_store(p, &to->token[i], host_load",
            "step_store(p, &to->token[i], i < seqs ? to->token[i] : host_load",
        ),
        // A step begins when the first device has its embedding.
        (
            "devices_watermark(p.worker->shared) < need",
            "load_relaxed(&weight_stream->watermark) < need",
        ),
    ] {
        assert_ne!(says(2, Some((from, to))), expected, "nobody notices {to} for {from}");
    }
}
