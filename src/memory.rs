//! Memory is known before it is taken: what a run needs on the host and on the GPU, what is free, and a refusal with both
//! numbers.

use std::fmt;
use std::path::{Path, PathBuf};

use ir::{Graph, TensorId};
use model::Model;
use rustix::process::{Resource, getrlimit};

use crate::failure::Failure;

/// Bytes of activations, tables and threads, whatever the model.
const WORKSPACE: u64 = 64 << 20;
/// Bytes of a key or value on the host: f32.
const HOST_BYTES: u64 = 4;
/// Device memory for programs and for the rest of what is set aside (docs/guide/your-own-model.md).
const DEVICE_WORKSPACE: u64 = (384 + 256) << 20;
/// Tensors that a loader to a GPU holds at once: a pair of rows' halves, and the next.
const LOADED_AT_ONCE: u64 = 3;
/// Most bytes of the gate's copies of a far context, and how many of them there are at once.
const FAR_BYTES: u64 = 4 * (64 << 20);

/// What runs a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Sequences on the host, each of this many positions: the graph or the reference VM.
    Host { sequences: u64, positions: u64 },
    /// The gate of a search: some positions on the reference VM beside the evaluator, which keep all weights, and if
    /// there is a GPU its process, which does not.
    Gate { on_gpu: bool },
    /// The resident kernel: weights that are made pass through the host, a few tensors at once.
    Device,
}

/// What a run needs on the host, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Weights that are made in memory: random or dequantised ones. Others stay in their files.
    pub(crate) weights: u64,
    /// Keys and values.
    pub(crate) cache: u64,
    pub(crate) workspace: u64,
}

impl Needs {
    /// Of the model in this use; `made`: the bytes of weights that are made in memory, and those of the largest tensor.
    pub(crate) fn new(graph: &Graph, made: [u64; 2], of: Use) -> Self {
        let [made, largest] = made;
        let loaded = made.min(LOADED_AT_ONCE * largest);
        let weights = match of {
            Use::Host { .. } | Use::Gate { on_gpu: false } => made,
            Use::Gate { on_gpu: true } => made + loaded,
            Use::Device => loaded,
        };
        let token = token_bytes(graph);
        let cache = match of {
            Use::Host { sequences, positions } => {
                sequences.saturating_mul(positions).saturating_mul(token)
            }
            Use::Gate { .. } => (u64::from(graph.max_positions) * token).min(FAR_BYTES),
            Use::Device => 0,
        };
        // A row of logits for each position of a pass, and the vectors of a layer.
        let rows = 64 * 4 * (u64::from(graph.vocab) + 8 * u64::from(graph.hidden));
        let rows = if of == Use::Device { 0 } else { rows };
        Self { weights, cache, workspace: WORKSPACE + rows }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.workspace)
    }
}

/// What a model needs on a GPU, in bytes, with one session of this capacity.
pub(crate) fn on_device(graph: &Graph, capacity: u32) -> u64 {
    graph.weight_bytes() as u64 + u64::from(capacity) * graph.kv_token_bytes() + DEVICE_WORKSPACE
}

/// Bytes of the keys and values of a token in all layers on the host.
fn token_bytes(graph: &Graph) -> u64 {
    2 * graph.layers.len() as u64 * u64::from(graph.kv_width()) * HOST_BYTES
}

/// The bytes that a process can still get, and by what they are limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Free {
    pub(crate) bytes: u64,
    pub(crate) by: &'static str,
}

/// Free memory of this process; `None` if the system does not say.
pub(crate) fn free() -> Option<Free> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok();
    let machine = machine.and_then(|text| kilobytes(&text, "MemAvailable:"));
    let machine = machine.map(|bytes| Free { bytes, by: "of this machine" });
    let group = in_group().map(|bytes| Free { bytes, by: "of this process's cgroup" });
    let limit = getrlimit(Resource::As).current.map(|limit| {
        let used = std::fs::read_to_string("/proc/self/status").ok();
        let used = used.and_then(|text| kilobytes(&text, "VmSize:")).unwrap_or(0);
        Free { bytes: limit.saturating_sub(used), by: "under this process's limit (ulimit -v)" }
    });
    [machine, group, limit].into_iter().flatten().min_by_key(|free| free.bytes)
}

/// Bytes of the weights that are in no file, so that they are made in memory: of all, and of the largest.
fn made(model: &Model) -> [u64; 2] {
    let ids = (0..model.graph.tensors.len()).map(|index| TensorId(index as u32));
    let made = ids.filter(|&id| model.weights.file_range(id).is_none());
    let bytes = made.map(|id| model.graph.tensor(id).bytes() as u64);
    bytes.fold([0, 0], |[all, largest], bytes| [all + bytes, largest.max(bytes)])
}

/// Refuses a run that does not fit into what is free.
pub(crate) fn check(model: &Model, of: Use) -> Result<(), Failure> {
    let needs = Needs::new(&model.graph, made(model), of);
    let free = free();
    tracing::info!(
        weights = needs.weights,
        kv_cache = needs.cache,
        kv_bytes_per_token = token_bytes(&model.graph),
        workspace = needs.workspace,
        needed = needs.bytes(),
        free = free.map(|free| free.bytes),
        "host memory"
    );
    fits(&model.graph, needs, of, free)
}

/// As [`check`], with what is free.
fn fits(graph: &Graph, needs: Needs, of: Use, free: Option<Free>) -> Result<(), Failure> {
    let Some(free) = free.filter(|free| free.bytes < needs.bytes()) else { return Ok(()) };
    let remedy = match of {
        Use::Host { sequences: 2.., .. } => {
            "lower --kv-capacity or --sessions, take a smaller model, or run it on a GPU with --device cuda"
        }
        Use::Host { .. } => {
            "lower --kv-capacity or --max-new-tokens, take a smaller model, or run it on a GPU with --device cuda"
        }
        Use::Gate { .. } | Use::Device => {
            "take a smaller model or a machine with more memory; weights of a folder stay in their files, those of a preset do not"
        }
    };
    Err(Failure::missing(format!(
        "{} needs {} of memory on the host ({} weights, {} keys and values, {} workspace), and {} {} are free: {remedy}",
        graph.name,
        Bytes(needs.bytes()),
        Bytes(needs.weights),
        Bytes(needs.cache),
        Bytes(needs.workspace),
        Bytes(free.bytes),
        free.by,
    )))
}

/// A number of bytes for people.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.0 as f64 / (1 << 20) as f64;
        if mib < 1000.0 { write!(f, "{mib:.0} MiB") } else { write!(f, "{:.1} GiB", mib / 1024.0) }
    }
}

/// A field of `/proc/meminfo` or `/proc/self/status`, in bytes.
fn kilobytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

/// What the cgroups of this process leave, the tightest of them.
fn in_group() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let root = Path::new("/sys/fs/cgroup");
    let mut folder: PathBuf = root.join(path.trim_start_matches('/'));
    let mut least = left_in(root);
    while folder.starts_with(root) && folder != root {
        least = [least, left_in(&folder)].into_iter().flatten().min();
        folder.pop();
    }
    least
}

/// What one cgroup leaves; `None` without a limit. Pages of files count as free: the kernel takes them back.
fn left_in(folder: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let (most, used) = (number("memory.max")?, number("memory.current")?);
    let files = read("memory.stat").and_then(|text| {
        text.lines().find_map(|line| line.strip_prefix("file ")?.trim().parse::<u64>().ok())
    });
    Some(most.saturating_sub(used.saturating_sub(files.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph() -> Graph {
        model::preset("llama-3.1-8b").unwrap().graph
    }

    #[test]
    fn needs_are_weights_and_keys_and_values_of_every_sequence() {
        let of = Use::Host { sequences: 2, positions: 4096 };
        let made = [graph().weight_bytes() as u64, 2 * 128_256 * 4096];
        let needs = Needs::new(&graph(), made, of);
        assert_eq!(needs.weights, made[0]);
        assert_eq!(
            Needs::new(&graph(), made, Use::Device).weights,
            3 * made[1],
            "they pass through"
        );
        let gate = |on_gpu| Needs::new(&graph(), made, Use::Gate { on_gpu }).weights;
        assert_eq!([gate(false), gate(true)], [made[0], made[0] + 3 * made[1]]);
        // 32 layers of 8 heads of 128, keys and values, f32.
        assert_eq!(needs.cache, 2 * 4096 * 32 * 1024 * 2 * 4);
        assert_eq!(Needs::new(&graph(), [0, 0], of).weights, 0, "they stay in their files");
        assert_eq!(Needs::new(&graph(), [0, 0], Use::Device).bytes(), WORKSPACE);
        // The guide's figure: 128 KB per token on a GPU.
        assert_eq!(graph().kv_token_bytes(), 128 << 10);
        // Of codes 144 bytes for the 256 of a head.
        let coded = Graph { kv_dtype: ir::KvDtype::E4m3, ..graph() };
        assert_eq!(coded.kv_token_bytes(), 72 << 10);
        assert_eq!(on_device(&graph(), 4096) - on_device(&coded, 4096), 4096 * (56 << 10));
        assert!(on_device(&graph(), 4096) > 16 << 30);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        let of = Use::Host { sequences: 1, positions: 4096 };
        let needs = Needs { weights: 0, cache: 3 << 30, workspace: 1 << 30 };
        let fits = |bytes| fits(&graph(), needs, of, Some(Free { bytes, by: "of this machine" }));
        assert!(fits(4 << 30).is_ok());
        let failure = fits((4 << 30) - 1).unwrap_err();
        assert_eq!(failure.exit, crate::failure::Exit::Missing);
        for word in ["llama-3.1-8b needs 4.0 GiB", "3.0 GiB keys", "--kv-capacity", "--device"] {
            assert!(failure.message.contains(word), "{word}: {}", failure.message);
        }
        assert!(super::fits(&graph(), needs, of, None).is_ok(), "nothing is known");
    }

    #[test]
    fn limits_are_read_from_the_system() {
        assert_eq!(
            kilobytes("MemTotal: 9 kB\nMemAvailable:    2048 kB\n", "MemAvailable:"),
            Some(2 << 20)
        );
        let folder = tempfile::tempdir().unwrap();
        let write = |name, text| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        write("memory.current", "600\n");
        assert_eq!(left_in(folder.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(left_in(folder.path()), Some(400));
        write("memory.stat", "anon 300\nfile 200\n");
        assert_eq!(left_in(folder.path()), Some(600));
        assert!(free().is_some());
    }
}
