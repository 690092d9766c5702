//! The opcode table: the only place where an op is added. The compiler then lists what is missing.

use serde::{Deserialize, Serialize};

use crate::layout::wire_struct;
use crate::limits::PARAM_BYTES;

/// Calls `$macro` with the whole opcode table.
macro_rules! for_each_op {
    ($macro:ident) => {
        $macro! {
            /// Does nothing. Opcode zero, so that a zeroed task is valid and inert.
            nop = Nop = 0 NopParams amk_nop_params { reads 0, writes 0 } {
                /// Zero.
                pub reserved: [u32; 16],
            }
            /// Writes `len` elements of the current token's embedding row to the residual buffer.
            ///
            /// Reads `[embedding]`, writes `[x]`.
            embed = Embed = 1 EmbedParams amk_embed_params { reads 1, writes 1 } {
                /// First element.
                pub offset: u32,
                /// Elements.
                pub len: u32,
                /// Factor of the elements; zero for none.
                pub scale: f32,
                /// Zero.
                pub reserved: [u32; 13],
            }
            /// Multiplies rows of a streamed matrix with a vector: `out[row] = epilogue(W[row, ..] . prologue(x) + bias[row])`.
            ///
            /// Reads `[x, norm weight, bias, residual, route, logits]` (each but `x` may be none), writes `[out, candidates]`.
            ///
            /// With `post_norm`, `x` is a block's result, the residual the stream that its norm is added to, and the norm
            /// weights are those of this norm and, if the sum is normed too, the second norm's behind them. The sum is the
            /// stream that the next block reads. Each task stores a part of it in the place of the candidates, or none: with
            /// equally many groups of four elements per tile of the matrix, just enough for all, those of its tiles.
            ///
            /// With a route of k slots the matrix holds experts one after the other, of which the route chooses one per slot. With
            /// `silu_mul` its rows are those of the first slot's expert, of the second's, and so on, and each result is multiplied by
            /// its slot's weight. Otherwise `x` has a part for each slot, and a row is the sum of the chosen experts' rows times these
            /// parts, with their biases times the slots' weights. Where there is a choice, its loads follow the logits that the
            /// route is made of, which the worker ranks itself; weights and biases are those of the route.
            matvec = Matvec = 2 MatvecParams amk_matvec_params { reads 6, writes 2 } {
                /// Matrix of the program; the rows come from the worker's load stream, in order.
                pub matrix: u32,
                /// First tile of 8 rows.
                pub tile0: u32,
                /// Tiles; even for `silu_mul`.
                pub tiles: u32,
                /// Units of 64 bytes along a row.
                pub units: u32,
                /// Elements of `x` that count; the rest of the last unit is zero in the matrix.
                pub k_len: u32,
                /// Rows of the matrix that count; the rest of the last tile is padding.
                pub rows: u32,
                /// A `Prologue`.
                pub prologue: u32,
                /// An `Epilogue`.
                pub epilogue: u32,
                /// Epsilon of the norms, for `rms` and `post_norm`.
                pub eps: f32,
                /// Splits of the attention partials, for `merge`.
                pub splits: u32,
                /// Elements of a head, for `merge`.
                pub head_dim: u32,
                /// Keys of a block, for `merge`.
                pub kv_block: u32,
                /// Sliding window or zero, for `merge`.
                pub window: u32,
                /// Index of this task's entry in the candidates buffer, for `logits`.
                pub candidate: u32,
                /// An `Activation`, for `silu_mul`.
                pub activation: u32,
                /// Soft cap `c` of the logits, which become `c tanh(logit / c)`, or zero for none. With `clamped_silu` its limit.
                pub cap: f32,
            }
            /// Attention of a part of one key/value head's query group over one split of the keys. The first part of the split that has
            /// the newest position also appends its key, normalised and rotated, and its value.
            ///
            /// Reads `[qkv, q norm, k norm, inverse frequencies, sinks]` (norms and sinks may be none), writes `[partials, kv cache]`.
            /// A head's sink is a score of the newest key's split whose value is zero.
            attention = Attention = 3 AttentionParams amk_attention_params { reads 5, writes 2 } {
                /// Key/value head.
                pub kv_head: u32,
                /// Key/value heads of the model.
                pub kv_heads: u32,
                /// Query heads that share a key/value head.
                pub group: u32,
                /// Elements of a head.
                pub head_dim: u32,
                /// This task's split.
                pub split: u32,
                /// Splits of this head; how many are active follows from the keys at run time.
                pub splits: u32,
                /// Keys of a block: splits are made of whole blocks.
                pub kv_block: u32,
                /// Sliding window, or zero for full attention.
                pub window: u32,
                /// Factor on q.k.
                pub scale: f32,
                /// Epsilon of the q and k norms.
                pub eps: f32,
                /// Soft cap `c` of the scores, which become `c tanh(score / c)`, or zero for none.
                pub cap: f32,
                /// This task's part of the group: `ATTENTION_GROUP` query heads, the last part those that are left.
                pub part: u32,
                /// Zero.
                pub reserved: [u32; 4],
            }
            /// Combines the partial results of the active splits of some heads.
            ///
            /// Reads `[partials]`, writes `[attention output]`.
            attention_merge = AttentionMerge = 4 AttentionMergeParams amk_attention_merge_params { reads 1, writes 1 } {
                /// First query head.
                pub head0: u32,
                /// Query heads.
                pub heads: u32,
                /// Query heads of the model.
                pub heads_total: u32,
                /// Elements of a head.
                pub head_dim: u32,
                /// Splits of the partials.
                pub splits: u32,
                /// Keys of a block.
                pub kv_block: u32,
                /// Sliding window or zero.
                pub window: u32,
                /// Zero.
                pub reserved: [u32; 9],
            }
            /// Picks the next token from the candidates, and ends the step.
            ///
            /// Reads `[candidates]`, writes nothing but the step state.
            sample = Sample = 5 SampleParams amk_sample_params { reads 1, writes 0 } {
                /// Candidates.
                pub candidates: u32,
                /// Zero.
                pub reserved: [u32; 15],
            }
            /// Normalises a vector in one or two parts: `out = x * weight / rms(part)`. What follows them is copied.
            ///
            /// Reads `[x, norm weight]`, writes `[out]`.
            norm = Norm = 6 NormParams amk_norm_params { reads 2, writes 1 } {
                /// First element written.
                pub offset: u32,
                /// Elements written.
                pub len: u32,
                /// Elements of `x`.
                pub width: u32,
                /// Elements of the first part.
                pub first: u32,
                /// Elements of the second part, after the first.
                pub second: u32,
                /// Epsilon of the norms.
                pub eps: f32,
                /// Zero.
                pub reserved: [u32; 10],
            }
            /// Chooses experts: those of the largest logits, of equal ones the first.
            ///
            /// Reads `[logits]`, writes `[route]`: the numbers of the chosen experts, then their weights, both as f32.
            route = Route = 7 RouteParams amk_route_params { reads 1, writes 1 } {
                /// First logit.
                pub first: u32,
                /// Logits: experts to choose from.
                pub experts: u32,
                /// Experts that are chosen: slots of the route.
                pub slots: u32,
                /// A `Scoring`.
                pub scoring: u32,
                /// Zero.
                pub reserved: [u32; 12],
            }
        }
    };
}

/// An op's row of the table.
#[derive(Clone, Copy, Debug)]
pub struct OpInfo {
    /// The op.
    pub opcode: Opcode,
    /// Its name in the text form, in CUDA (`op_<name>`) and in the reference VM.
    pub name: &'static str,
    /// First line of its documentation.
    pub doc: &'static str,
    /// Buffers it may read.
    pub reads: usize,
    /// Buffers it may write.
    pub writes: usize,
}

macro_rules! define_ops {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident = $variant:ident = $number:literal $params:ident $c_params:ident { reads $reads:literal, writes $writes:literal } {
            $($(#[doc = $fdoc:literal])+ pub $field:ident: $ty:ty,)+
        }
    )+) => {
        /// The operations of the VM. Numbers are append-only: stored programs carry them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[repr(u16)]
        pub enum Opcode { $($(#[doc = $doc])+ $variant = $number),+ }

        impl Opcode {
            /// Every op in numeric order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The op with this number.
            #[must_use]
            pub const fn new(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// The op's row of the table.
            #[must_use]
            pub const fn info(self) -> OpInfo {
                match self {
                    $(Self::$variant => OpInfo {
                        opcode: self,
                        name: stringify!($name),
                        doc: $crate::layout::first(&[$($doc),+]),
                        reads: $reads,
                        writes: $writes,
                    }),+
                }
            }
        }

        $(wire_struct! {
            #[doc = concat!("Parameters of `", stringify!($name), "`.")]
            $c_params align(4) size(64)
            pub struct $params { $($(#[doc = $fdoc])+ pub $field: $ty,)+ }
        })+

        pub(crate) fn param_layouts() -> Vec<crate::StructLayout> {
            vec![$($params::LAYOUT),+]
        }

        /// A task's parameters by op; a `match` that omits an op does not compile.
        #[derive(Clone, Copy, Debug)]
        pub enum Params<'a> { $(#[doc = concat!("Those of `", stringify!($name), "`.")] $variant(&'a $params)),+ }

        impl<'a> Params<'a> {
            /// Decodes `params` for `opcode`.
            #[must_use]
            pub fn new(opcode: Opcode, params: &'a [u32; PARAM_BYTES / 4]) -> Self {
                match opcode {
                    $(Opcode::$variant => Self::$variant(bytemuck::cast_ref(params))),+
                }
            }
        }

        const _: () = {
            let mut next = 0;
            $(assert!($number == next, "opcode numbers must be dense"); next += 1;)+
            let _ = next;
            $(assert!($reads < crate::READS_MAX + 1 && $writes < crate::WRITES_MAX + 1);)+
        };
    };
}
for_each_op!(define_ops);

macro_rules! wire_enum {
    ($(#[$edoc:meta])* $name:ident { $($(#[doc = $doc:literal])+ $variant:ident = $number:literal $text:literal,)+ }) => {
        $(#[$edoc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[repr(u32)]
        pub enum $name { $($(#[doc = $doc])+ $variant = $number),+ }

        impl $name {
            /// Every value in numeric order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The value with this number.
            #[must_use]
            pub const fn new(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)+
                    _ => None,
                }
            }

            /// Its name in text and JSON.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The value with this name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|v| v.name() == name)
            }

            /// Its documentation, as printed in the reference pages.
            #[must_use]
            pub fn sentence(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),+).trim()),+ }
            }
        }

        /// The value with the smallest number.
        impl Default for $name {
            fn default() -> Self {
                Self::ALL[0]
            }
        }
    };
}
pub(crate) use wire_enum;

wire_enum! {
    /// What a `matvec` does to its input before multiplying.
    Prologue {
        /// Takes the vector as it is.
        Copy = 0 "copy",
        /// Multiplies with the norm weight; the products are scaled with the inverse root mean square.
        Rms = 1 "rms",
        /// Combines the attention partials of the active splits.
        Merge = 2 "merge",
        /// Adds the norm of a block's result to the residual stream; with a second norm's weights it goes on as `rms` does with the sum.
        PostNorm = 3 "post_norm",
    }
}

wire_enum! {
    /// What a `matvec` does with its products.
    Epilogue {
        /// Stores them.
        Store = 0 "store",
        /// Adds the residual element of the same row, then stores.
        Residual = 1 "residual",
        /// `activation(gate) * up`, gate and up tiles alternating; stores half as many rows.
        SiluMul = 2 "silu_mul",
        /// Stores logits, and the best of them as a candidate.
        Logits = 3 "logits",
    }
}

wire_enum! {
    /// The function between the two halves of an MLP.
    Activation {
        /// `x * sigmoid(x)`.
        Silu = 0 "silu",
        /// GELU in its `tanh` form.
        GeluTanh = 1 "gelu_tanh",
        /// `x * sigmoid(1.702 * x)` of a gate that is at most the limit; the other half is within the limit on both sides, plus 1.
        ClampedSilu = 2 "clamped_silu",
    }
}

wire_enum! {
    /// The weights of chosen experts.
    Scoring {
        /// Softmax over the logits of all experts.
        All = 0 "all",
        /// Softmax over the logits of the chosen experts.
        Chosen = 1 "chosen",
        /// The sigmoid of each logit.
        Sigmoid = 2 "sigmoid",
    }
}

wire_enum! {
    /// What some models need of a kernel; bit n of `AMK_FEATURES` is the feature of number n.
    Feature {
        /// `gelu_tanh` in place of `silu`.
        GeluTanh = 0 "gelu_tanh",
        /// A soft cap of scores.
        ScoreCap = 1 "score_cap",
        /// A soft cap of logits.
        LogitCap = 2 "logit_cap",
        /// A factor of the embedding.
        EmbedScale = 3 "embed_scale",
        /// The op `norm`.
        Norm = 4 "norm",
        /// The op `route`, and products with a route.
        Route = 5 "route",
        /// Attention sinks.
        Sinks = 6 "sinks",
        /// `clamped_silu` in place of `silu`.
        ClampedSilu = 7 "clamped_silu",
        /// The prologue `post_norm`.
        PostNorm = 8 "post_norm",
        /// Key/value caches of e4m3.
        KvE4m3 = 9 "kv_e4m3",
        /// An embedding of f32 beside matrices that are multiplied in 16 bits.
        F32Rows = 10 "f32_rows",
    }
}
