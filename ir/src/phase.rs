//! The phase table. Each class of phases is one row: its names, the buffer that it writes and its knobs are derived
//! from it. `lower/src/flow.rs` decides which steps contain it.

use abi::Opcode;

/// Calls `$macro` with `$args` and the whole table, in the order of a step. A row has the name in knobs, predictions
/// and traces, the variant, and the op of its tasks; for products also the last part of the matrix's name. The cost
/// model identifies tasks by these. Optional parts follow: the buffer that it writes, its hand-off knob with a
/// sentence, and its tiling knob with the struct, the items that are dealt, and a sentence.
macro_rules! for_each_phase {
    ($macro:ident!($($args:tt)*)) => {
        $macro! {
            ($($args)*)
            embed = Embed, op Embed, buffer "x.0",
                sync SyncEmbed "How the embedding row is handed over.";
            qkv = Qkv, op Matvec "qkv", buffer "layers.{layer}.qkv",
                sync SyncQkv "How queries, keys and values are handed to attention.",
                rows TilingQkvRows QkvTiling "Queries, keys and values." "Rows of q, k and v dealt at once.";
            attention = Attention, op Attention, buffer "layers.{layer}.partials",
                sync SyncAttention "How the attention partials are handed over.";
            merge = Merge, op AttentionMerge, buffer "layers.{layer}.attn",
                sync SyncMerge "How the merged attention output is handed over.";
            o_proj = OProj, op Matvec "o", buffer "layers.{layer}.x",
                sync SyncOProj "How the residual after attention is handed over.",
                rows TilingOProjRows OProjTiling "The output projection." "Rows of the output projection dealt at once.";
            router = Router, op Matvec "router", buffer "layers.{layer}.router";
            route = Route, op Route, buffer "layers.{layer}.route";
            shared_up = SharedUp, op Matvec "shared_up", buffer "layers.{layer}.shared_h";
            gate_up = GateUp, op Matvec "gate_up", buffer "layers.{layer}.h",
                sync SyncGateUp "How the hidden layer of the MLP is handed over.",
                rows TilingGateUpRows GateUpTiling "The first half of the MLP."
                    "Rows of the hidden layer dealt at once; each is a gate row and an up row.";
            shared_down = SharedDown, op Matvec "shared_down", buffer "layers.{layer}.shared";
            down = Down, op Matvec "down", buffer "x.{next}",
                sync SyncDown "How the residual after the MLP is handed over.",
                rows TilingDownRows DownTiling "The second half of the MLP." "Rows of the down projection dealt at once.";
            norm = Norm, op Norm, buffer "layers.{layer}.normed";
            lm_head = LmHead, op Matvec "lm_head", buffer "candidates",
                rows TilingLmHeadRows LmHeadTiling "The logits." "Rows of the logits dealt at once.";
            sample = Sample, op Sample;
        }
    };
}
pub(crate) use for_each_phase;

/// `Some` for a part that a row has, `None` for a missing one.
macro_rules! optional {
    () => {
        None
    };
    ($value:expr) => {
        Some($value)
    };
}
pub(crate) use optional;

macro_rules! define_phases {
    (() $(
        $name:ident = $class:ident, op $op:ident $($matrix:literal)? $(, buffer $buffer:literal)?
        $(, sync $sync:ident $handed:literal)? $(, rows $rows:ident $tiling:ident $what:literal $dealt:literal)?;
    )+) => {
        /// A class of phases.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum PhaseClass { $(#[doc = concat!("`", stringify!($name), "`.")] $class,)+ }

        impl PhaseClass {
            /// Every class, in the order of a step.
            pub const ALL: &'static [Self] = &[$(Self::$class,)+];

            /// Its name in knobs, predictions and traces.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$class => stringify!($name),)+ }
            }

            /// The op of its tasks.
            #[must_use]
            pub const fn opcode(self) -> Opcode {
                match self { $(Self::$class => Opcode::$op,)+ }
            }

            /// The last part of the name of the matrix that it multiplies.
            #[must_use]
            pub const fn matrix(self) -> Option<&'static str> {
                match self { $(Self::$class => optional!($($matrix)?),)+ }
            }

            /// The name of the buffer that it writes in a layer.
            #[must_use]
            pub fn buffer(self, layer: u32) -> Option<String> {
                let pattern: Option<&str> = match self { $(Self::$class => optional!($($buffer)?),)+ };
                let (layer, next) = (layer.to_string(), (layer + 1).to_string());
                pattern.map(|name| name.replace("{layer}", &layer).replace("{next}", &next))
            }
        }
    };
}
for_each_phase!(define_phases!());
