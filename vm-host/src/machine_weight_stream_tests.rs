//! Weights that arrive while the kernel is resident, on a real device: the same bytes and tokens as when loaded before, and every failure.
//! Without a device these tests print `skipped`; with `AMK_REQUIRE_DEVICE=1` that is a failure.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use ir::schedule::{neutral_config, validate};
use ir::{KernelConfig, Target};
use model::Model;

use super::*;
use crate::weight_stream::scripted::{Mishap, Scripted};
use crate::weight_stream::{ReadBy, Streaming};

const DEADLINE: Duration = Duration::from_millis(300);
const LIMIT: Duration = Duration::from_millis(1000);
/// Delay per piece: longer than a step, so that every layer is waited for.
const SLOW: Duration = Duration::from_millis(60);
const PROMPT: [u32; 5] = [1, 2, 3, 4, 5];
const TOKENS: u32 = 8;

/// A golden model in its folder, and its program.
struct Subject {
    model: Model,
    program: Verified<Program>,
    variant: Variant,
}

fn golden_dir(name: &str) -> PathBuf {
    let here = Path::new("corpus/golden").join(name);
    if here.is_dir() {
        here
    } else {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden").join(name)
    }
}

fn subject(dir: &Path) -> Option<Subject> {
    let info = match crate::Card::default().info() {
        Ok(info) => info,
        Err(error) => {
            let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
            assert!(!required, "a device is required: {error}");
            eprintln!("skipped: {error}");
            return None;
        }
    };
    let model = model::import(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let target = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    let config = validate(neutral_config(&model.graph, &target), &model.graph, &target)
        .expect("the default is legal");
    let options = lower::Options { kv_capacity: 64 };
    let program = lower::lower(&config, &model.graph, &target, options).expect("it lowers");
    let variant = crate::compile::variant(&KernelConfig::default(), &model.graph);
    Some(Subject { model, program, variant })
}

fn copied(name: &str, to: &Path) {
    for entry in std::fs::read_dir(golden_dir(name)).expect("the model") {
        let path = entry.expect("an entry").path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
}

impl Subject {
    fn resident(&self, streaming: Option<ReadBy>, through: Through<'_>) -> Resident {
        let streaming = streaming.map(|read_by| Streaming { read_by, limit: LIMIT });
        let options = BootOptions { deadline: DEADLINE, streaming, ..BootOptions::default() };
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        let idle =
            Idle::boot_through(graph, weights, &self.program, &self.variant, options, through)
                .expect("it boots");
        idle.launch(self.variant, &self.program).unwrap_or_else(|e| panic!("{}", e.1))
    }

    /// Bytes of all matrices on the device.
    fn packed(&self, machine: &mut Resident) -> Vec<Vec<u8>> {
        let idle = machine.idle();
        let residents = &idle.memory.residents;
        let of = |index| idle.memory.packed(index).expect("a copy");
        (0..residents.matrix_table.len()).map(of).collect()
    }

    fn decode(machine: &mut Resident) -> Result<Decoded, HostError> {
        machine.decode(0, 0, &PROMPT, TOKENS, &[], true)
    }

    /// The answer of a machine whose weights are all loaded before the launch.
    fn expected(&self) -> (Vec<u32>, Vec<Vec<f32>>, Vec<Vec<u8>>) {
        let mut machine = self.resident(None, &|source| source);
        let tokens = Self::decode(&mut machine).expect("it decodes").tokens;
        let logits = machine.logits(PROMPT.len() as u32).expect("rows");
        let packed = self.packed(&mut machine);
        machine.stop().expect("it stops");
        (tokens, logits, packed)
    }
}

fn slow(inner: Box<dyn crate::weight_stream::Source>) -> Box<dyn crate::weight_stream::Source> {
    Box::new(Scripted { inner, asked: Duration::ZERO, delay: SLOW, mishap: None })
}

#[test]
fn decoding_begins_before_the_weights_are_there_and_answers_the_same() {
    for name in ["llama-tied-f32", "llama3-rope-bf16"] {
        let Some(subject) = subject(&golden_dir(name)) else { return };
        let (tokens, logits, packed) = subject.expected();
        for read_by in [ReadBy::Auto, ReadBy::IoUring, ReadBy::Pread] {
            let mut machine = subject.resident(Some(read_by), &slow);
            let monitor = machine.monitor();
            let start = Instant::now();
            let (first, (waited, monitor)) = std::thread::scope(|scope| {
                let watch = scope.spawn(move || {
                    let end = Instant::now() + Duration::from_secs(5);
                    let mut seen = 0;
                    while Instant::now() < end && seen < 10 {
                        seen += u32::from(monitor.waits_for_weights());
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    (seen, monitor)
                });
                (Subject::decode(&mut machine), watch.join().expect("it looks"))
            });
            let first = first.unwrap_or_else(|e| panic!("{name}, {read_by:?}: {e}"));
            let report = machine.weight_stream_report().expect("a report");
            eprintln!(
                "{name}, {read_by:?}: {:?}, seen waiting {waited} times, {report:?}",
                start.elapsed()
            );
            assert_eq!(first.tokens, tokens, "{name}, {read_by:?}");
            assert_eq!(machine.logits(PROMPT.len() as u32).expect("rows"), logits);
            assert!(report.waits > 0 && report.waited_s > 0.0 && waited > 0, "somebody waited");
            assert!(subject.packed(&mut machine) == packed, "{name}, {read_by:?}: packed bytes");
            let (graph, weights) = (&subject.model.graph, &*subject.model.weights);
            let checks = machine.check_weights(graph, weights).expect("a comparison");
            assert!(checks.iter().all(TensorCheck::equal) && checks.len() > 10, "{checks:?}");
            // Once everything has arrived there are no waits.
            let second = Subject::decode(&mut machine).expect("it decodes");
            assert_eq!(second.tokens, tokens);
            assert_eq!(machine.weight_stream_report().expect("a report").waits, report.waits);
            assert!(!monitor.waits_for_weights());
            machine.stop().expect("it stops");
        }
    }
}

#[test]
fn a_byte_that_differs_is_found() {
    let Some(subject) = subject(&golden_dir("llama3-rope-bf16")) else { return };
    let mut machine = subject.resident(Some(ReadBy::Auto), &|source| source);
    Subject::decode(&mut machine).expect("it decodes");
    let idle = machine.idle();
    let at = idle.memory.residents.devices[0].matrices[2].address + 77;
    let mut byte = [0];
    idle.memory.copier.download(at, &mut byte).expect("a byte");
    idle.memory.copier.upload(at, &[byte[0] ^ 1]).expect("another");
    let (graph, weights) = (&subject.model.graph, &*subject.model.weights);
    let checks = machine.check_weights(graph, weights).expect("a comparison");
    let wrong: Vec<_> = checks.iter().filter(|check| !check.equal()).collect();
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    machine.stop().expect("it stops");
}

#[test]
fn a_disk_that_fails_faults_the_command_and_the_kernel_goes_on() {
    let Some(subject) = subject(&golden_dir("llama3-rope-bf16")) else { return };
    let cases = [
        (Mishap::Eio, 3, "Input/output error", LIMIT),
        (Mishap::Silent, 3, "does not answer", LIMIT * 2),
        (Mishap::Hangs, 3, "whoever reads them hangs", LIMIT * 3),
        (Mishap::Eio, 0, "Input/output error", LIMIT),
        (Mishap::Silent, 6, "does not answer", LIMIT * 2),
    ];
    for (mishap, from, words, at_most) in cases {
        let through = |inner| -> Box<dyn crate::weight_stream::Source> {
            Box::new(Scripted {
                inner,
                asked: Duration::ZERO,
                delay: SLOW,
                mishap: Some((from, mishap)),
            })
        };
        let mut machine = subject.resident(Some(ReadBy::Pread), &through);
        let start = Instant::now();
        let error = Subject::decode(&mut machine).expect_err("its weights do not come");
        let waited = start.elapsed();
        eprintln!("{mishap:?} from piece {from}: after {waited:?}: {error}");
        assert!(matches!(error, HostError::Weights { .. }), "{error}");
        assert!(error.to_string().contains(words), "{error}");
        assert!(waited < at_most + SLOW * 12, "{waited:?}");
        machine.ping().expect("the kernel is there");
        let again = Subject::decode(&mut machine).expect_err("they still do not come");
        assert!(again.to_string().contains(words), "{again}");
        let loaded = machine.load(&subject.program).expect("a program loads");
        machine.switch(loaded).expect("and is switched to");
        machine.stop().expect("it stops");
    }
}

#[test]
fn a_file_that_changes_faults_the_command_and_another_boot_runs() {
    let name = "llama3-rope-bf16";
    let Some(whole) = subject(&golden_dir(name)) else { return };
    let (tokens, ..) = whole.expected();
    for cut in [false, true] {
        let folder = tempfile::tempdir().expect("a folder");
        copied(name, folder.path());
        let Some(subject) = subject(folder.path()) else { return };
        // Asked for late: what is read before the file changes is the file as it was.
        let through = |inner| -> Box<dyn crate::weight_stream::Source> {
            Box::new(Scripted {
                inner,
                asked: SLOW + SLOW / 2,
                delay: Duration::ZERO,
                mishap: None,
            })
        };
        let mut machine = subject.resident(Some(ReadBy::Pread), &through);
        let file = folder.path().join("model.safetensors");
        let open = std::fs::OpenOptions::new().write(true).open(&file).expect("the file");
        let bytes = open.metadata().expect("its length").len();
        if cut {
            open.set_len(bytes / 3).expect("a shorter file");
        } else {
            std::os::unix::fs::FileExt::write_all_at(&open, &[7], bytes - 1).expect("a byte");
        }
        let start = Instant::now();
        let result = Subject::decode(&mut machine);
        eprintln!("cut {cut}: after {:?}: {:?}", start.elapsed(), result.as_ref().err());
        let error = result.expect_err("the file changed before it was read");
        assert!(matches!(error, HostError::Weights { .. }), "{error}");
        machine.ping().expect("the kernel is there");
        machine.stop().expect("it stops");
        let mut machine = whole.resident(Some(ReadBy::Auto), &|source| source);
        assert_eq!(Subject::decode(&mut machine).expect("it decodes").tokens, tokens);
        machine.stop().expect("it stops");
    }
}

#[test]
fn a_kernel_may_stop_while_weights_stream() {
    let Some(subject) = subject(&golden_dir("llama3-rope-bf16")) else { return };
    let (tokens, ..) = subject.expected();
    let machine = subject.resident(Some(ReadBy::Pread), &slow);
    let start = Instant::now();
    let idle = machine.stop().expect("it stops");
    assert!(start.elapsed() < DEADLINE * 4, "{:?}", start.elapsed());
    let mut machine =
        idle.launch(subject.variant, &subject.program).unwrap_or_else(|e| panic!("{}", e.1));
    assert_eq!(Subject::decode(&mut machine).expect("it decodes").tokens, tokens);
    machine.stop().expect("it stops");
    let machine = subject.resident(Some(ReadBy::Pread), &slow);
    drop(machine);
}
