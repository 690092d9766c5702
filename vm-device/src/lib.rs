//! The CUDA source of the megakernel, as data.
//!
//! **Promises.** No CUDA dependency, and no logic beyond the list of files, their order, and the spelling of a variant's macros. The
//! files of a unit, concatenated, are self-contained: NVRTC needs no header search path.

use abi::{DType, Unpack};

/// A source file of the device.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name, as compiler messages show it.
    pub name: &'static str,
    /// Contents.
    pub text: &'static str,
}

macro_rules! sources {
    ($($path:literal),+ $(,)?) => {
        &[$(Source { name: $path, text: include_str!(concat!("../", $path)) }),+]
    };
}

/// Every file, in the order in which the device compiler sees them.
pub const SOURCES: &[Source] = sources![
    "include/amk_abi.h",
    "cuda/prelude.cuh",
    "cuda/sync.cuh",
    "cuda/ring.cuh",
    "cuda/stage.cuh",
    "cuda/keys.cuh",
    "cuda/pages.cuh",
    "cuda/tasks.cuh",
    "cuda/worker.cuh",
    "cuda/devices.cuh",
    "cuda/batch.cuh",
    "cuda/weight_stream.cuh",
    "cuda/trace.cuh",
    "cuda/halves.cuh",
    "cuda/buffer.cuh",
    "cuda/rank.cuh",
    "cuda/routed_stream.cuh",
    "cuda/stream.cuh",
    "cuda/op_attention_merge.cuh",
    "cuda/features.cuh",
    "cuda/unpack.cuh",
    "cuda/digits.cuh",
    "cuda/unit_products.cuh",
    "cuda/route.cuh",
    "cuda/matvec_input.cuh",
    "cuda/epilogue.cuh",
    "cuda/fragments.cuh",
    "cuda/op_matvec.cuh",
    "cuda/batch_products.cuh",
    "cuda/matvec_batch.cuh",
    "cuda/op_norm.cuh",
    "cuda/warp_products.cuh",
    "cuda/cache_rows.cuh",
    "cuda/op_attention.cuh",
    "cuda/op_small.cuh",
    "cuda/sampling.cuh",
    "cuda/cooperative_sampler.cuh",
    "cuda/exchange.cuh",
    "cuda/op_sample.cuh",
    "cuda/sample_batch.cuh",
    "cuda/dispatch.cuh",
    "cuda/poller.cuh",
    "cuda/megakernel.cu",
];

/// The files of the kernels that run a prompt chunk by chunk. They follow the headers among [`SOURCES`], in a compilation unit of their
/// own, so that the resident kernel does not change with them.
pub const PREFILL_SOURCES: &[Source] = sources![
    "cuda/prefill_vectors.cuh",
    "cuda/prefill_route.cuh",
    "cuda/group_products.cuh",
    "cuda/prefill_unpack.cuh",
    "cuda/prefill_gemm.cuh",
    "cuda/prefill_attention.cuh",
];

/// What the kernel is compiled for. Every field becomes a macro, so two variants with different fields are different builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Element type that matrices are multiplied in.
    pub dtype: DType,
    /// Bit n: some matrix of the model has the `Unpack` of number n.
    pub unpack: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Query heads per key/value head.
    pub group: u32,
    /// Whether queries and keys are normalised.
    pub qk_norm: bool,
    /// Bit n: the model needs the `Feature` of number n.
    pub features: u32,
    /// Elements of the residual stream, of all query heads, of the hidden layer. Vectors of other lengths work too, more slowly.
    pub widths: [u32; 3],
    /// Bit n: some matrix of the model is taken in warp fragments of n units. Bit 0: some fragment is shorter for some warps.
    pub shares: u32,
    /// The same of the matrices of each `Unpack`, by its number: what none of them is taken in is left out. Given where units have scales,
    /// whose loops are long; else all formats have all.
    pub format_shares: Option<FormatShares>,
    /// Pause between two polls.
    pub poll_sleep_ns: u32,
    /// Weights are loaded with the L2 policy evict-first.
    pub evict_first: bool,
    /// Sessions that a step may run at once: 1, 2, 4 or 8. More than one requires weights of 16 bits or codes, without experts.
    pub seqs: u32,
    /// Devices that run a step together.
    pub devices: u32,
    /// Tokens may be sampled under masks that the host gives while a step runs: kernels of servers, for grammars.
    pub masks: bool,
    /// What tasks record. Nothing in a build that is timed.
    pub trace: Trace,
    /// Number of a program's first task: 0, except in the test of the wrap at 2^32.
    pub first_task: u32,
}

/// [`Variant::shares`] of each `Unpack`, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FormatShares(pub [u32; Unpack::ALL.len()]);

/// What the tasks of a kernel record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trace {
    /// Nothing.
    Off = 0,
    /// Each writes an `amk_record`.
    Tasks = 1,
    /// The same, and each spins for as long as the host wrote into its record.
    Delays = 2,
}

impl Variant {
    /// The macro definitions, as compiler options.
    #[must_use]
    pub fn defines(&self) -> Vec<String> {
        let Self {
            dtype,
            unpack,
            head_dim,
            group,
            qk_norm,
            features,
            widths,
            shares,
            format_shares,
            poll_sleep_ns,
            evict_first,
            seqs,
            devices,
            masks,
            trace,
            first_task,
        } = *self;
        let mut defines = vec![
            format!("-DAMK_DTYPE={}", dtype as u32),
            format!("-DAMK_UNPACK={unpack}"),
            format!("-DAMK_HEAD_DIM={head_dim}"),
            format!("-DAMK_GROUP={group}"),
            format!("-DAMK_QK_NORM={}", u32::from(qk_norm)),
            format!("-DAMK_FEATURES={features}"),
            format!("-DAMK_HIDDEN={}", widths[0]),
            format!("-DAMK_Q_WIDTH={}", widths[1]),
            format!("-DAMK_FFN={}", widths[2]),
            format!("-DAMK_SHARES={shares}"),
            format!("-DAMK_POLL_SLEEP_NS={poll_sleep_ns}"),
            format!("-DAMK_EVICT_FIRST={}", u32::from(evict_first)),
            format!("-DAMK_SEQS={seqs}"),
            format!("-DAMK_DEVICES={devices}"),
            format!("-DAMK_TRACE={}", trace as u32),
            format!("-DAMK_FIRST_TASK={first_task}u"),
        ];
        // Without them the options, and so the kernel's id, are what they were before there were any.
        defines.extend(format_shares.map(|shares| {
            let shares: Vec<String> = shares.0.iter().map(u32::to_string).collect();
            format!("-DAMK_FORMAT_SHARES={}", shares.join(","))
        }));
        defines.extend(masks.then(|| "-DAMK_MASKS=1".to_owned()));
        defines
    }
}

/// What the kernels for prompt chunks are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefillVariant {
    /// Element type of the matrices, of 16 bits.
    pub dtype: DType,
    /// Bit n: some matrix of the model has the `Unpack` of number n.
    pub unpack: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Query heads per key/value head.
    pub group: u32,
    /// Whether queries and keys are normalised.
    pub qk_norm: bool,
    /// Bit n: the model needs the `Feature` of number n; of those that these kernels have.
    pub features: u32,
    /// Whether each of several GPUs has rows of every expert.
    pub parts: bool,
}

impl PrefillVariant {
    /// The macro definitions, as compiler options.
    #[must_use]
    pub fn defines(&self) -> Vec<String> {
        let Self { dtype, unpack, head_dim, group, qk_norm, features, parts } = *self;
        let mut defines = vec![
            format!("-DAMK_DTYPE={}", dtype as u32),
            format!("-DAMK_UNPACK={unpack}"),
            format!("-DAMK_HEAD_DIM={head_dim}"),
            format!("-DAMK_GROUP={group}"),
            format!("-DAMK_QK_NORM={}", u32::from(qk_norm)),
            format!("-DAMK_FEATURES={features}"),
        ];
        // Without it the options, and so the kernels' id, are those of before there were parts.
        defines.extend(parts.then(|| "-DAMK_PARTS=1".to_owned()));
        defines
    }
}

/// A GPU architecture that the kernels support.
#[derive(Debug)]
pub struct Architecture {
    /// Name, as the compiler takes it.
    pub name: &'static str,
    /// Compute capability, major: the kernels run on every minor one of it.
    pub major: i32,
    /// Cards, for messages.
    pub cards: &'static str,
    /// Files of the resident kernel, in the order in which the compiler sees them.
    pub sources: &'static [Source],
    /// Files of the kernels for prompt chunks, after the headers among `sources`: matrix products differ most between architectures.
    pub prefill_sources: &'static [Source],
    /// Registers per thread: of the warps that run tasks, and of the other warps.
    pub registers: [u32; 2],
    /// Peak rate: multiplications plus additions of 16-bit numbers per cycle of a multiprocessor.
    pub flop_per_cycle: f64,
}

/// Every supported architecture, one row each.
pub const ARCHITECTURES: &[Architecture] = &[Architecture {
    name: "sm_90a",
    major: 9,
    cards: "H100, H200",
    sources: SOURCES,
    prefill_sources: PREFILL_SOURCES,
    registers: [224, 56],
    flop_per_cycle: 4096.0,
}];

impl Architecture {
    /// The architecture of a device, if it is supported.
    #[must_use]
    pub fn of(capability: (i32, i32)) -> Option<&'static Self> {
        ARCHITECTURES.iter().find(|row| row.major == capability.0)
    }

    /// The architecture with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        ARCHITECTURES.iter().find(|row| row.name == name)
    }

    /// The files of the kernels for prompt chunks, in order.
    pub fn prefill_unit(&self) -> impl Iterator<Item = &'static Source> {
        let headers = self.sources.iter().filter(|source| source.name.ends_with('h'));
        headers.chain(self.prefill_sources)
    }

    /// The macro definitions of every kernel for this architecture, as compiler options.
    #[must_use]
    pub fn defines(&self) -> [String; 2] {
        let [consumers, helpers] = self.registers;
        [
            format!("-DAMK_CONSUMER_REGISTERS={consumers}"),
            format!("-DAMK_HELPER_REGISTERS={helpers}"),
        ]
    }

    /// The supported architectures, for messages: `9.x (H100, H200)`.
    #[must_use]
    pub fn all() -> String {
        let rows = ARCHITECTURES.iter().map(|row| format!("{}.x ({})", row.major, row.cards));
        rows.collect::<Vec<_>>().join(", ")
    }
}
