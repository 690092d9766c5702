//! A GGUF file as a model: its values become the fields of a `config.json`, its tensors those of the graph.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use ir::{DType, Tensor};
use serde_json::{Map, json};

use super::vocabulary::{self, Vocabulary};
use super::{Header, Info, Value, parse};
use crate::chat::Template;
use crate::config;
use crate::error::{ModelError, Problem, quoted};
use crate::model::{Model, Origin};
use crate::quantised::{BlockType, Form, Layout, Matrix, Source, View, given};
use crate::rope::{Rope, Scaling};
use crate::shape::Shape;
use crate::store::{Files, Place};
use crate::tokenizer::Tokenizer;

/// Architectures that are read; each is also the `model_type` of its family.
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Element types that are read.
const TYPES: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K";

/// Fields of `config.json`, and the values (after the architecture's name) that hold the same.
const FIELDS: [(&str, &str); 9] = [
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("intermediate_size", "feed_forward_length"),
    ("max_position_embeddings", "context_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
];

/// Values (after the architecture's name) that change the arithmetic in ways that no graph here expresses, and what
/// leaves it as it is. Other architectures have them; llama.cpp reads some for all.
const OTHERS: [(&str, &[Value<'static>]); 14] = [
    ("expert_count", &[Value::Whole(0)]),
    ("attention.sliding_window", &[Value::Whole(0)]),
    ("attention.causal", &[Value::Flag(true)]),
    ("attention.clamp_kqv", &[Value::Real(0.0)]),
    ("attention.max_alibi_bias", &[Value::Real(0.0)]),
    ("attention.scale", &[Value::Real(0.0)]),
    ("attn_logit_softcapping", &[Value::Real(0.0)]),
    ("final_logit_softcapping", &[Value::Real(0.0)]),
    ("embedding_scale", &[Value::Real(0.0), Value::Real(1.0)]),
    ("residual_scale", &[Value::Real(0.0), Value::Real(1.0)]),
    ("logit_scale", &[Value::Real(0.0), Value::Real(1.0)]),
    ("rope.scaling.attn_factor", &[Value::Real(1.0)]),
    ("rope.scaling.alpha", &[Value::Real(0.0)]),
    ("use_parallel_residual", &[Value::Flag(false)]),
];

/// Names of a graph's tensors, and of a file's.
const NAMES: [(&str, &str); 15] = [
    ("model.embed_tokens.", "token_embd."),
    ("model.norm.", "output_norm."),
    ("lm_head.", "output."),
    ("model.layers.", "blk."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.q_proj.", ".attn_q."),
    (".self_attn.k_proj.", ".attn_k."),
    (".self_attn.v_proj.", ".attn_v."),
    (".self_attn.o_proj.", ".attn_output."),
    (".self_attn.q_norm.", ".attn_q_norm."),
    (".self_attn.k_norm.", ".attn_k_norm."),
    (".mlp.gate_proj.", ".ffn_gate."),
    (".mlp.up_proj.", ".ffn_up."),
    (".mlp.down_proj.", ".ffn_down."),
];

/// Divisors of the rotary frequencies, in files of Llama 3.1 and later.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Imports a file.
pub(crate) fn import(path: &Path, form: Form) -> Result<Model, ModelError> {
    let files = Files::map(path)?;
    let header = parse(files.whole(0)).map_err(|reason| ModelError::file(path, reason))?;
    let wrong = |problems| ModelError::Config { path: path.to_path_buf(), problems };
    let name =
        path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    let mut shape = shape(&header, &files, &name).map_err(wrong)?;
    let mut graph = shape.graph();
    let permuted = (shape.family.model_type() == "llama").then_some(shape.head_dim as usize);
    let mut found: HashMap<&str, &Info> =
        header.tensors.iter().map(|info| (&info.name[..], info)).collect();
    found.remove(ROPE_FREQS);
    let (mut sources, mut problems) = (Vec::new(), Vec::new());
    let mut kinds: BTreeMap<&'static str, usize> = BTreeMap::new();
    for tensor in &mut graph.tensors {
        match source(tensor, &mut found, permuted) {
            Ok((source, kind)) => {
                sources.push(source);
                if let Some(kind) = kind {
                    *kinds.entry(kind).or_default() += 1;
                }
            }
            Err(problem) => problems.push(problem),
        }
    }
    let mut extra: Vec<&str> = found.into_keys().collect();
    extra.sort_unstable();
    let reason = "is not part of a model of this architecture";
    problems.extend(extra.into_iter().map(|name| Problem::new(name, reason)));
    if !problems.is_empty() {
        return Err(wrong(problems));
    }
    graph.dtype = DType::F32;
    let names: Vec<String> = graph.tensors.iter().map(|tensor| file_name(&tensor.name)).collect();
    let note = vocabulary::note(&header);
    let opened = given(files, sources, &mut graph, &kinds, form, &names).map_err(wrong)?;
    shape.dtype = graph.dtype;
    let (weights, mut notes) = opened;
    notes.extend(note);
    Ok(Model { graph, shape, weights, origin: Origin::File(path.to_path_buf()), notes })
}

/// The tokenizer of a file, for a model with `vocab` embedding rows; `None` if there is none, or one that is not read.
pub(crate) fn tokenizer(path: &Path, vocab: u32) -> Result<Option<Tokenizer>, ModelError> {
    let wrong = |reason| ModelError::file(path, reason);
    let files = Files::map(path)?;
    let header = parse(files.whole(0)).map_err(wrong)?;
    let Some(found) = Vocabulary::read(&header).map_err(wrong)? else { return Ok(None) };
    let (json, template) = (found.json, found.template.map(str::to_owned));
    let template = || template.map(|source| Template::new(path, source, found.special)).transpose();
    Tokenizer::parse(path, &json, vocab, template).map(Some)
}

/// The name of a graph's tensor in a file.
pub(super) fn file_name(name: &str) -> String {
    NAMES.iter().fold(name.to_owned(), |name, (graph, file)| name.replace(graph, file))
}

/// Where a tensor of the graph comes from, and its format if it is quantised. A matrix's type becomes f32.
fn source(
    tensor: &mut Tensor,
    found: &mut HashMap<&str, &Info>,
    permuted: Option<usize>,
) -> Result<(Source, Option<&'static str>), Problem> {
    let name = file_name(&tensor.name);
    let Some(info) = found.remove(&name[..]) else { return Err(Problem::new(name, "is missing")) };
    if !info.shape.iter().copied().eq(tensor.shape.iter().map(|&side| u64::from(side))) {
        let reason = format!("has shape {:?}; expected {:?}", info.shape, tensor.shape);
        return Err(Problem::new(name, reason));
    }
    let kind = info.element.clone().map_err(|other| {
        Problem::new(&name, format!("has element type {other}; supported: {TYPES}"))
    })?;
    let place = Place { file: 0, offset: info.offset, bytes: info.bytes };
    let &[rows, cols] = &tensor.shape[..] else {
        let BlockType::Float(dtype) = kind else {
            let reason = format!("has element type {}; expected F32, F16 or BF16", kind.name());
            return Err(Problem::new(name, reason));
        };
        tensor.dtype = dtype;
        return Ok((Source::Stored(place), None));
    };
    tensor.dtype = DType::F32;
    let turned = name.ends_with(".attn_q.weight") || name.ends_with(".attn_k.weight");
    let matrix = Matrix {
        rows: rows as usize,
        cols: cols as usize,
        layout: Layout::Blocks(place, kind),
        view: permuted.filter(|_| turned).map_or(View::Whole, View::Pairs),
    };
    let kind = (!matches!(kind, BlockType::Float(_))).then_some(kind.name());
    Ok((Source::Made(matrix, DType::F32), kind))
}

/// The dimensions, or every problem with the values.
fn shape(header: &Header<'_>, files: &Files, name: &str) -> Result<Shape, Vec<Problem>> {
    // Only the first part of a model has an architecture.
    if let Some(value) = header.values.get("split.count").filter(|v| **v != Value::Whole(1)) {
        let reason =
            format!("is {value}; supported: 1. Merge the files with llama-gguf-split --merge");
        return Err(vec![Problem::new("split.count", reason)]);
    }
    let architecture = match header.values.get("general.architecture") {
        Some(Value::Text(text)) if ARCHITECTURES.contains(text) => *text,
        other => {
            let is = match other {
                Some(Value::Text(text)) => quoted(text),
                _ => "missing".to_owned(),
            };
            let reason = format!("is {is}; supported: {}", ARCHITECTURES.join(", "));
            return Err(vec![Problem::new("general.architecture", reason)]);
        }
    };
    let mut values = Values { header, architecture, fields: Map::new(), problems: Vec::new() };
    values.set("model_type", json!(architecture));
    for (field, key) in FIELDS {
        values.number(field, key);
    }
    values.tensors();
    values.ids();
    values.refuse_others();
    let scaling = values.linear_scaling();
    values.rope_freqs(files, scaling);
    let Values { fields, mut problems, .. } = values;
    let shape = config::parse(&fields, name);
    problems.extend(shape.as_ref().err().into_iter().flatten().map(|problem| {
        // The user's file has GGUF's names.
        let known = FIELDS.iter().find(|(field, _)| *field == problem.subject);
        let subject = known
            .map_or_else(|| problem.subject.clone(), |(_, key)| format!("{architecture}.{key}"));
        Problem::new(subject, problem.reason.clone())
    }));
    match shape {
        Ok(shape) if problems.is_empty() => {
            check_rotated(header, architecture, &shape).map(|()| shape)
        }
        _ => Err(problems),
    }
}

/// Every element of a head is rotated, and values are as wide as keys.
fn check_rotated(
    header: &Header<'_>,
    architecture: &str,
    shape: &Shape,
) -> Result<(), Vec<Problem>> {
    let width = i128::from(shape.head_dim);
    let other = |key: &&str| match header.values.get(&format!("{architecture}.{key}")[..]) {
        None => false,
        Some(value) => *value != Value::Whole(width),
    };
    let keys = ["rope.dimension_count", "attention.value_length"];
    let mut problems: Vec<_> = keys
        .iter()
        .filter(|key| other(key))
        .map(|key| {
            let reason = format!("differs from the width of a head; expected {width}");
            Problem::new(format!("{architecture}.{key}"), reason)
        })
        .collect();
    let half = [u64::from(shape.head_dim / 2)];
    let freqs = header.tensors.iter().find(|info| info.name == ROPE_FREQS);
    problems.extend(freqs.filter(|info| info.shape != half).map(|info| {
        Problem::new(ROPE_FREQS, format!("has shape {:?}; expected {half:?}", info.shape))
    }));
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// The values of a file on their way into the fields of a `config.json`.
struct Values<'h, 'a> {
    header: &'h Header<'a>,
    architecture: &'a str,
    fields: Map<String, serde_json::Value>,
    problems: Vec<Problem>,
}

impl Values<'_, '_> {
    fn set(&mut self, field: &str, value: serde_json::Value) {
        self.fields.insert(field.to_owned(), value);
    }

    fn get(&self, key: &str) -> Option<Value<'_>> {
        self.header.values.get(&format!("{}.{key}", self.architecture)[..]).copied()
    }

    fn refuse(&mut self, key: &str, reason: impl Into<String>) {
        self.problems.push(Problem::new(format!("{}.{key}", self.architecture), reason));
    }

    fn number(&mut self, field: &str, key: &str) {
        match self.get(key) {
            None => {}
            Some(Value::Whole(n)) => match i64::try_from(n) {
                Ok(n) => self.set(field, json!(n)),
                Err(_) => self.refuse(key, format!("is {n}, which is too large")),
            },
            // The shortest decimal of an f32 is what was written.
            Some(Value::Real(x)) => match (x as f32).to_string().parse::<f64>() {
                Ok(x) if x.is_finite() => self.set(field, json!(x)),
                _ => self.refuse(key, format!("is {x}; expected a finite number")),
            },
            Some(other) => self.refuse(key, format!("is {other}; expected one number")),
        }
    }

    /// What the tensors tell: the size of the vocabulary, and whether the embedding serves as `lm_head`.
    fn tensors(&mut self) {
        let of = |name: &str| self.header.tensors.iter().find(|info| info.name == name);
        let tied = of("output.weight").is_none();
        match of("token_embd.weight").map(|info| &info.shape[..]) {
            Some(&[rows, _]) => self.set("vocab_size", json!(rows)),
            _ => {
                let reason = "is missing, or is not a matrix";
                self.problems.push(Problem::new("token_embd.weight", reason));
                self.set("vocab_size", json!(1));
            }
        }
        self.set("tie_word_embeddings", json!(tied));
    }

    /// The ids that begin and end a text.
    fn ids(&mut self) {
        let id = |key: &str| match self.header.values.get(&format!("tokenizer.ggml.{key}")[..]) {
            Some(&Value::Whole(id)) => u32::try_from(id).ok(),
            _ => None,
        };
        let ends: Vec<u32> = ["eos_token_id", "eot_token_id"].into_iter().filter_map(id).collect();
        let begin = id("bos_token_id");
        self.set("eos_token_id", json!(ends));
        self.set("bos_token_id", json!(begin));
    }

    /// Refuses values that change the arithmetic in ways that no graph expresses.
    fn refuse_others(&mut self) {
        for (key, neutral) in OTHERS {
            if let Some(value) = self.get(key).filter(|value| !neutral.contains(value)) {
                let list: Vec<String> = neutral.iter().map(Value::to_string).collect();
                self.refuse(key, format!("is {value}; supported: none or {}", list.join(", ")));
            }
        }
    }

    /// Whether frequencies are scaled by `rope.scaling`. As llama.cpp has it, a factor without a type is linear, 0 is
    /// none, and early files have the factor under another name.
    fn linear_scaling(&mut self) -> bool {
        match self.get("rope.scaling.type") {
            Some(Value::Text("none")) => return false,
            None | Some(Value::Text("linear")) => {}
            Some(other) => {
                self.refuse("rope.scaling.type", format!("is {other}; supported: none, linear"));
                return false;
            }
        }
        let keys = ["rope.scaling.factor", "rope.scale_linear"];
        let Some(key) = keys.into_iter().find(|key| self.get(key).is_some()) else { return false };
        match self.get(key) {
            Some(Value::Real(0.0 | 1.0)) => false,
            Some(Value::Real(factor)) if factor > 0.0 && factor <= 1e9 => {
                self.set("rope_scaling", json!({ "rope_type": "linear", "factor": factor }));
                true
            }
            other => {
                let is = other.map(|value| value.to_string()).unwrap_or_default();
                self.refuse(key, format!("is {is}; expected a number from 0 to 1e9"));
                false
            }
        }
    }

    /// Files of Llama 3.1 and later hold a divisor for each frequency, instead of the parameters that they follow from.
    fn rope_freqs(&mut self, files: &Files, scaled: bool) {
        let Some(info) = self.header.tensors.iter().find(|info| info.name == ROPE_FREQS) else {
            return;
        };
        let known = llama3(info, files, self.fields.get("rope_theta"));
        match known.filter(|_| !scaled) {
            Some(factor) => self.set(
                "rope_scaling",
                json!({ "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": LLAMA3_POSITIONS }),
            ),
            None => {
                let reason = format!(
                    "holds other divisors than llama3 scaling of {LLAMA3_POSITIONS} positions, from 1 to 4; supported: \
                     those, in F32, without rope.scaling"
                );
                self.problems.push(Problem::new(ROPE_FREQS, reason));
            }
        }
    }
}

/// Positions that Llama 3 was trained with before its frequencies were scaled.
const LLAMA3_POSITIONS: u32 = 8192;

/// The factor of the scaling that these divisors belong to.
fn llama3(info: &Info, files: &Files, theta: Option<&serde_json::Value>) -> Option<f64> {
    if info.element != Ok(BlockType::Float(DType::F32)) || info.shape.len() != 1 {
        return None;
    }
    let bytes = files.slice(Place { file: 0, offset: info.offset, bytes: info.bytes });
    let divisors: Vec<f32> =
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let factor = f64::from(divisors.iter().copied().fold(0.0, f32::max));
    let theta = theta.and_then(serde_json::Value::as_f64).unwrap_or(10_000.0);
    let scaling = Scaling::Llama3 { factor, low: 1.0, high: 4.0, original: LLAMA3_POSITIONS };
    let width = u32::try_from(divisors.len() * 2).ok()?;
    let plain = Rope::plain(theta).inv_freq(width);
    let scaled = Rope { theta, scaling }.inv_freq(width);
    // The file's divisors were computed in other steps, so their last bits differ.
    let near = |((plain, scaled), divisor): ((f32, f32), f32)| {
        ((plain / scaled) / divisor - 1.0).abs() < 1e-4
    };
    let fits = plain.into_iter().zip(scaled).zip(divisors).all(near);
    (fits && factor.is_finite() && factor >= 1.0).then_some(factor)
}
