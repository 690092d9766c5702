//! Import and export of models: a Hugging Face folder, a GGUF file or a preset becomes an [`ir::Graph`] with its weights, a
//! tokenizer converts between text and ids, and any model can be written as a folder that other engines load.
//!
//! **Promises.**
//!
//! - A folder either imports as the model that it describes or is refused, with the file, the field or tensor, its value and
//!   what is supported; all problems of a file come in one answer. Nothing that changes the arithmetic is ignored.
//! - No file can make this crate panic or allocate beyond a small multiple of what is really there: a length in a header
//!   is compared with the file before it is used, and a tokenizer that multiplies texts is refused. A chat template is a program: its
//!   length, steps, depth and output are limited, and its memory and time too where the program has it run in a process of its own
//!   ([`templates_run_in`]).
//! - Weights are mapped, never copied, except that a quantised model's matrices are made when they are first read: codes
//!   in the blocks that a kernel reads, or f32, either with the bits that the format's definition gives. Files must not change while the model lives: one that
//!   someone shortens meanwhile ends the process with SIGBUS, as it does for every program that maps its weights.
//! - A preset's weights are a function of their seed, the tensor's name and the element's index: the same on every machine
//!   and with any number of threads, and not computed before they are read.
//! - An exported folder appears complete or not at all.

mod chat;
mod coded;
mod config;
mod error;
mod export;
mod family;
mod fields;
mod files;
mod gguf;
mod growth;
mod header;
mod model;
mod parallel;
mod pieces;
mod preset;
mod quantise;
mod quantised;
mod random;
mod rope;
mod shape;
mod store;
mod template_process;
mod tokenizer;

pub use chat::{Chat, Message, ToolForm};
pub use coded::{CODED, Coded};
pub use error::{ModelError, Problem};
pub use export::{export, remove_unfinished};
pub use family::ExpertShape;
pub use model::{Model, Origin, import, import_dequantised, import_shape, load};
pub use preset::{PRESETS, Preset, preset};
pub use quantise::{Format, Quantisation, Written, quantise};
pub use rope::{Rope, Scaling};
pub use shape::{
    FFN_MAX, Family, HEAD_DIM_MAX, HEAD_DIM_STEP, HEADS_MAX, HIDDEN_MAX, LAYERS_MAX, Options,
    POSITIONS_MAX, Shape, VOCAB_MAX, Window,
};
pub use store::{INDEX as WEIGHTS_INDEX, SINGLE as WEIGHTS, missing_weights};
pub use template_process::{template_process, templates_run_in};
pub use tokenizer::{TextStream, Tokenizer};
