//! The CUDA source of the megakernel, as data.
//!
//! **Promises.** No CUDA dependency and no logic beyond which files there are, in which order, and how a variant's macros are
//! spelled. [`translation_unit`] is one self-contained text: NVRTC needs no header search path, and its log still names our files.

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
    "cuda/worker.cuh",
    "cuda/slot.cuh",
    "cuda/stream.cuh",
    "cuda/op_attention_merge.cuh",
    "cuda/op_matvec.cuh",
    "cuda/op_attention.cuh",
    "cuda/op_small.cuh",
    "cuda/dispatch.cuh",
    "cuda/poller.cuh",
    "cuda/megakernel.cu",
];

/// What the kernel is compiled for. Every field becomes a macro, so two variants with different fields are different builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Element type of the matrices: 0 f32, 1 f16, 2 bf16.
    pub dtype: u32,
    /// Tensor cores instead of plain multiply-adds.
    pub mma: bool,
    /// Consumer warps.
    pub warps: u32,
    /// Units that a consumer warp has in flight.
    pub unroll: u32,
    /// Pause between two polls.
    pub poll_sleep_ns: u32,
    /// Weights leave L2 first.
    pub evict_first: bool,
    /// The key/value cache holds f32 instead of f16.
    pub kv_f32: bool,
}

impl Variant {
    /// The macro definitions, as compiler options.
    #[must_use]
    pub fn defines(&self) -> Vec<String> {
        let Self { dtype, mma, warps, unroll, poll_sleep_ns, evict_first, kv_f32 } = *self;
        vec![
            format!("-DAMK_DTYPE={dtype}"),
            format!("-DAMK_MMA={}", u32::from(mma)),
            format!("-DAMK_WARPS={warps}"),
            format!("-DAMK_UNROLL={unroll}"),
            format!("-DAMK_POLL_SLEEP_NS={poll_sleep_ns}"),
            format!("-DAMK_EVICT_FIRST={}", u32::from(evict_first)),
            format!("-DAMK_KV_F32={}", u32::from(kv_f32)),
        ]
    }

    /// Threads of a block: consumers, the loader's warp and the poller's.
    #[must_use]
    pub fn threads(&self) -> u32 {
        (self.warps + 2) * 32
    }
}

/// All sources as one text, each file introduced by a `#line` marker.
#[must_use]
pub fn translation_unit() -> String {
    let mut out = String::new();
    for source in SOURCES {
        out += &format!("#line 1 \"{}\"\n{}\n", source.name, source.text);
    }
    out
}
