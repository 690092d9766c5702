//! Fuzzing: one [`Target`] for each kind of file that may come from an untrusted source.
//!
//! A body must return an answer or a refusal, within [`SECONDS_MAX`], within a multiple of its input's memory, and
//! without reading outside its folder. The same bodies run in `cargo test` for a few seconds on mutated valid files
//! (`tests/hostile.rs`), for any time there (`AMK_FUZZ_SECONDS`), and under libFuzzer with coverage (`tests/fuzz`).

pub mod guard;
pub mod memory;
mod models;
pub mod mutate;
mod programs;
mod records;

use std::cell::OnceCell;
use std::path::Path;
use std::time::Instant;

/// Longest time of one input, in seconds. It is generous because a test may wait for a busy core.
pub const SECONDS_MAX: f64 = 20.0;

/// One kind of input.
pub struct Target {
    /// Its name, in file names and on command lines.
    pub name: &'static str,
    /// Processes an input. Panics if our code is at fault.
    pub run: fn(&[u8]),
    /// Valid inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words that are meaningful to this target.
    pub words: &'static [&'static str],
    /// Bytes of memory that any input may use.
    pub memory: usize,
    /// Additional bytes of memory per byte of input.
    pub memory_per_byte: usize,
}

const MIB: usize = 1 << 20;

/// Words of every target's dictionary.
const JSON: &[&str] = &["null", "true", "{}", "[]", "\"\"", "-1", "1e999", "0.5", "\\u0000"];

/// Every target.
pub const TARGETS: &[Target] = &[
    Target {
        name: "safetensors",
        run: models::safetensors,
        seeds: models::safetensors_seeds,
        words: &[
            "\"data_offsets\":[0,1152921504606846976]",
            "\"shape\":[1152921504606846976]",
            "BF16",
            "F8_E4M3",
        ],
        memory: 16 * MIB,
        memory_per_byte: 256,
    },
    Target {
        name: "index",
        run: models::index,
        seeds: models::index_seeds,
        words: &[
            "\"../outside.safetensors\"",
            "\"/etc/passwd\"",
            "\"./a.safetensors\"",
            "weight_map",
        ],
        memory: 16 * MIB,
        memory_per_byte: 256,
    },
    Target {
        name: "config",
        run: models::config,
        seeds: models::config_seeds,
        words: &[
            "rope_scaling",
            "rope_type",
            "llama3",
            "hidden_size",
            "num_hidden_layers",
            "sliding_window",
        ],
        memory: 64 * MIB,
        memory_per_byte: 256,
    },
    Target {
        name: "quantised",
        run: models::quantised,
        seeds: models::quantised_seeds,
        words: &[
            "quantization_config",
            "weight_block_size",
            "config_groups",
            "\"group_size\":4294967295",
            "\"checkpoint_format\":\"gptq_v2\"",
            "\"desc_act\":true",
            "\"quant_method\":\"fp8\"",
            "\"weight_block_size\":null",
            "weight_zero_point",
            "F8_E4M3",
        ],
        memory: 64 * MIB,
        memory_per_byte: 256,
    },
    Target {
        name: "gguf",
        run: models::gguf,
        seeds: models::gguf_seeds,
        words: &[
            "general.alignment",
            "general.architecture",
            "llama.block_count",
            "blk.0.attn_q.weight",
            "rope_freqs.weight",
            "llama.rope.scale_linear",
            "llama.rope.scaling.factor",
            "\u{1}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}\u{0}",
        ],
        memory: 64 * MIB,
        memory_per_byte: 256,
    },
    Target {
        name: "tokenizer",
        run: models::tokenizer,
        seeds: models::tokenizer_seeds,
        words: &[
            "\"type\":\"BPE\"",
            "\"ByteLevel\"",
            "\"merges\"",
            "\"id\":4294967295",
            "\"Regex\":\"(a+)+$\"",
        ],
        memory: 64 * MIB,
        memory_per_byte: 1024,
    },
    Target {
        name: "chat_template",
        run: models::chat_template,
        seeds: models::chat_template_seeds,
        words: &[
            "{% for m in messages %}",
            "{% endfor %}",
            "{% set x = x ~ x %}",
            "{{ 'a' * 99999999 }}",
            "{% macro f() %}{{ f() }}{% endmacro %}",
            "range(99999)",
            "{% include '/etc/passwd' %}",
            "|tojson",
            "raise_exception('x')",
        ],
        memory: 512 * MIB,
        memory_per_byte: 256,
    },
    Target {
        name: "schedule",
        run: programs::schedule,
        seeds: programs::schedule_seeds,
        words: &[
            "\"pipeline\"",
            "\"stages\"",
            "\"tiling\"",
            "\"attention\"",
            "\"kv_split\"",
            "18446744073709551616",
        ],
        memory: 64 * MIB,
        memory_per_byte: 256,
    },
    Target {
        name: "amk_text",
        run: programs::amk_text,
        seeds: programs::amk_text_seeds,
        words: &[
            "counters 4294967295",
            "arena 18446744073709551615",
            "worker w1",
            "matvec",
            "wait",
            "signal",
            "flag_in_data",
        ],
        memory: 64 * MIB,
        memory_per_byte: 1024,
    },
    Target {
        name: "amkp",
        run: programs::amkp,
        seeds: programs::amkp_seeds,
        words: &["\u{7f}\u{7f}\u{7f}\u{7f}"],
        memory: 64 * MIB,
        memory_per_byte: 1024,
    },
    Target {
        name: "ring",
        run: programs::ring,
        seeds: programs::ring_seeds,
        words: &[],
        memory: MIB,
        memory_per_byte: 16,
    },
    Target {
        name: "bundle",
        run: records::bundle,
        seeds: records::bundle_seeds,
        words: &["\"rounds_us\"", "\"median_us\"", "1e308", "\"kv_capacity\":4294967295", "5e-324"],
        memory: 64 * MIB,
        memory_per_byte: 512,
    },
    Target {
        name: "ledger",
        run: records::ledger,
        seeds: records::ledger_seeds,
        words: &[
            "\"kind\":\"trial\"",
            "\"seq\":0",
            "\"prev\":\"",
            ",\"hash\":\"",
            "\"samples_us\"",
            "1e308",
        ],
        memory: 64 * MIB,
        memory_per_byte: 512,
    },
];

/// The target with this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

impl Target {
    /// Words to insert: the target's, and those of every JSON file.
    pub(crate) fn dictionary(&self) -> impl Iterator<Item = &'static str> {
        self.words.iter().chain(JSON).copied()
    }
}

/// Runs a target on an input.
///
/// # Panics
/// If the body panics, takes too long or takes too much memory.
pub fn execute(target: &Target, input: &[u8]) {
    let began = Instant::now();
    let ((), peak) = memory::peak(|| (target.run)(input));
    let seconds = began.elapsed().as_secs_f64();
    assert!(seconds <= SECONDS_MAX, "{} took {seconds:.1} s", target.name);
    let most = target.memory + target.memory_per_byte * input.len();
    assert!(
        peak <= most,
        "{} took {peak} bytes of memory for {} bytes of input, at most {most} are allowed",
        target.name,
        input.len()
    );
}

/// Runs with a folder of this thread's own, in memory if the system supports that.
fn in_scratch<R>(body: impl FnOnce(&Path) -> R) -> R {
    thread_local! {
        static SCRATCH: OnceCell<tempfile::TempDir> = const { OnceCell::new() };
    }
    SCRATCH.with(|scratch| {
        let shm = Path::new("/dev/shm");
        let make = || {
            let near = if shm.is_dir() { tempfile::tempdir_in(shm) } else { tempfile::tempdir() };
            near.or_else(|_| tempfile::tempdir()).expect("a folder for temporary files")
        };
        body(scratch.get_or_init(make).path())
    })
}

/// Writes a file of the scratch folder.
fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// The bytes of a file of the repository.
fn file(path: &str) -> Vec<u8> {
    let path = crate::root().join(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
