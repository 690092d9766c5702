//! Reads `config.json` and `generation_config.json` into a [`Shape`], in the spellings of transformers 4 and 5.

use ir::{Activation, DType};
use serde_json::{Map, Value};

use crate::error::{Problem, quoted, shown};
use crate::family::{LONGROPE, Row, WindowRule};
use crate::fields::{Fields, Neutral};
use crate::rope::{Rope, Scaling};
use crate::shape::{Family, HEAD_DIM_STEP, LAYERS_MAX, Options, Shape, Window};

/// Default window of Mistral, Qwen 2 and Qwen 3.
const WINDOW_DEFAULT: u32 = 4096;
/// Default first sliding layer of Qwen 2 and Qwen 3.
const MAX_WINDOW_LAYERS_DEFAULT: u32 = 28;

/// Multimodal models whose language model computes text as a family of ours does, and the `model_type` of a `text_config`
/// that has none.
const WRAPPERS: [(&str, &str); 8] = [
    ("gemma3", "gemma3_text"),
    ("idefics3", "llama"),
    ("internvl", "qwen2"),
    ("llava", "llama"),
    ("llava_next", "llama"),
    ("llava_onevision", "qwen2"),
    ("mistral3", "mistral"),
    ("smolvlm", "llama"),
];

/// Fields of any model that change the arithmetic, and the values with which they do not. A family that does not read one
/// of them refuses other values.
const ARITHMETIC: [(&str, Neutral); 43] = [
    ("alibi", Neutral::False),
    ("attention_multiplier", Neutral::Null),
    ("attn_logit_softcapping", Neutral::Null),
    ("clip_qkv", Neutral::Null),
    ("cross_attention_layers", Neutral::Zero),
    ("dim_model_base", Neutral::Null),
    ("embedding_multiplier", Neutral::One),
    ("embedding_scale", Neutral::One),
    ("final_logit_softcapping", Neutral::Null),
    ("first_k_dense_replace", Neutral::Zero),
    ("full_attention_interval", Neutral::Null),
    ("is_causal", Neutral::True),
    ("kv_lora_rank", Neutral::Null),
    ("layer_norm_eps", Neutral::Null),
    ("layer_norm_epsilon", Neutral::Null),
    ("linear_num_key_heads", Neutral::Zero),
    ("logit_scale", Neutral::One),
    ("logits_scaling", Neutral::One),
    ("mlp_only_layers", Neutral::Zero),
    ("moe_intermediate_size", Neutral::Null),
    ("n_routed_experts", Neutral::Zero),
    ("n_shared_experts", Neutral::Zero),
    ("no_rope_layers", Neutral::Zero),
    ("num_experts", Neutral::Zero),
    ("num_experts_per_tok", Neutral::Zero),
    ("num_kv_shared_layers", Neutral::Zero),
    ("num_local_experts", Neutral::Zero),
    ("num_shared_experts", Neutral::Zero),
    ("parallel_attn", Neutral::False),
    ("position_embedding_type", Neutral::Null),
    ("q_lora_rank", Neutral::Null),
    ("qk_layernorm", Neutral::False),
    ("query_pre_attn_scalar", Neutral::Null),
    ("residual_multiplier", Neutral::One),
    ("rope_local_base_freq", Neutral::Null),
    ("routed_scaling_factor", Neutral::One),
    ("scale_depth", Neutral::One),
    ("scoring_func", Neutral::Null),
    ("scale_emb", Neutral::One),
    ("shared_expert_intermediate_size", Neutral::Zero),
    ("sliding_window_pattern", Neutral::Null),
    ("swiglu_limit", Neutral::Null),
    ("use_bidirectional_attention", Neutral::False),
];

/// The part of a configuration that describes the language model, and whether it is that of a multimodal wrapper.
pub(crate) fn text_part(config: &Map<String, Value>) -> (Map<String, Value>, bool) {
    let kind = config.get("model_type").and_then(Value::as_str);
    let wrapper = WRAPPERS.iter().find(|(name, _)| Some(*name) == kind);
    let text = config.get("text_config").and_then(Value::as_object);
    let (Some((_, inner)), Some(mut text)) = (wrapper, text.cloned()) else {
        return (config.clone(), false);
    };
    text.entry("model_type").or_insert_with(|| (*inner).into());
    text.remove("architectures");
    // Versions of transformers differ in which of the two flags they follow, and write both. Either is enough: a stored
    // `lm_head` of its own is found with the weights.
    if config.get("tie_word_embeddings") == Some(&Value::Bool(true)) {
        text.insert("tie_word_embeddings".to_owned(), true.into());
    }
    // Some folders have these outside.
    let outside = [
        "torch_dtype",
        "dtype",
        "eos_token_id",
        "bos_token_id",
        "tie_word_embeddings",
        "quantization_config",
    ];
    for field in outside {
        if let Some(value) = config.get(field).filter(|_| !text.contains_key(field)) {
            text.insert(field.to_owned(), value.clone());
        }
    }
    (text, true)
}

/// Reads a configuration. The shape's `dtype` is the configuration's; the stored tensors override it.
pub(crate) fn parse(config: &Map<String, Value>, name: &str) -> Result<Shape, Vec<Problem>> {
    let (text, wrapper) = text_part(config);
    let mut shape = parse_text(&text, name)?;
    if wrapper {
        let note = "a multimodal model: its language model is loaded, and its other parts (a vision tower) are ignored";
        shape.options.notes.push(note.to_owned());
    }
    Ok(shape)
}

fn parse_text(config: &Map<String, Value>, name: &str) -> Result<Shape, Vec<Problem>> {
    let mut fields = Fields::new(config, "");
    let Some(family) = family(&mut fields) else {
        // Every other field's meaning and default depends on the family; those that no family here reads do not.
        fields.refuse_unread(&ARITHMETIC);
        return Err(fields.into_problems());
    };
    let row = family.row();
    let activation = check_class(&mut fields, row);
    let required = |fields: &mut Fields<'_>, field, absent: Option<u32>| match absent {
        Some(absent) => fields.whole(field).unwrap_or(absent),
        None => fields.required(field),
    };
    let hidden = fields.required("hidden_size");
    let heads = required(&mut fields, "num_attention_heads", row.heads);
    let layers = fields.required("num_hidden_layers");
    let max_positions = fields.whole("max_position_embeddings").unwrap_or(row.max_positions);
    let (rope, inside) = rope(&mut fields, row, max_positions);
    let outer = fields.number("partial_rotary_factor");
    let partial = inside.rotated.or(outer);
    if let Some(value) = fields.get("partial_rotary_factor")
        && row.rotated.is_none()
        && value.as_f64() != Some(1.0)
    {
        fields.expected("partial_rotary_factor", value, "1.0");
    }
    let mut shape = Shape {
        name: name.to_owned(),
        family,
        hidden,
        layers,
        heads,
        kv_heads: kv_heads(&mut fields, row, heads),
        head_dim: head_dim(&mut fields, row, hidden, heads),
        ffn: fields.required("intermediate_size"),
        vocab: required(&mut fields, "vocab_size", row.vocab),
        tied: match fields.get("tie_word_embeddings") {
            Some(_) => fields.flag("tie_word_embeddings"),
            None => row.tied,
        },
        attention_bias: fields.flag("attention_bias"),
        mlp_bias: fields.flag("mlp_bias"),
        dtype: dtype(&mut fields),
        norm_eps: fields.number("rms_norm_eps").unwrap_or(row.norm_eps) as f32,
        rope,
        max_positions,
        window: window(&mut fields, row, layers),
        options: Options {
            activation,
            rotated: partial.or(row.rotated).unwrap_or(1.0),
            sliding_rope: inside.sliding,
            ..Options::default()
        },
        eos: fields.ids("eos_token_id"),
        bos: fields.whole("bos_token_id"),
    };
    shape.options.experts = row.experts.as_ref().map(|row| row.read(&mut fields, &shape));
    (row.read)(&mut fields, &mut shape);
    fields.refuse_unread(&ARITHMETIC);
    let unsound: Vec<Problem> =
        shape.problems().into_iter().filter(|p| !fields.complained(&p.subject)).collect();
    fields.adopt(unsound);
    let problems = fields.into_problems();
    if problems.is_empty() { Ok(shape) } else { Err(problems) }
}

/// The ids that `generation_config.json` adds to those that end a generation.
pub(crate) fn generation_eos(
    config: &Map<String, Value>,
    vocab: u32,
) -> Result<Vec<u32>, Vec<Problem>> {
    let mut fields = Fields::new(config, "");
    let ids = fields.ids("eos_token_id");
    if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
        let reason = format!("is {id}; it must be below vocab_size, which is {vocab}");
        fields.complain("eos_token_id", reason);
    }
    let problems = fields.into_problems();
    if problems.is_empty() { Ok(ids) } else { Err(problems) }
}

fn family(fields: &mut Fields<'_>) -> Option<Family> {
    let supported: Vec<_> = Family::ALL.iter().map(|family| family.model_type()).collect();
    let wrappers = WRAPPERS.map(|(name, _)| name).join(", ");
    let supported = format!("{}; multimodal ones around them: {wrappers}", supported.join(", "));
    let Some(value) = fields.get("model_type") else {
        fields.complain("model_type", format!("is missing; supported: {supported}"));
        return None;
    };
    let is = |family: &&Family| Some(family.model_type()) == value.as_str();
    let found = Family::ALL.iter().find(is).copied();
    if found.is_none() {
        fields.expected("model_type", value, &supported);
    }
    found
}

/// Checks the class, and reads the activation.
fn check_class(fields: &mut Fields<'_>, row: &Row) -> Activation {
    let class = row.architecture;
    if let Some(value) = fields.get("architectures") {
        let named = value.as_array().is_some_and(|list| {
            list.is_empty() || list.iter().any(|entry| entry.as_str() == Some(class))
        });
        if !named {
            fields.expected("architectures", value, &format!("[\"{class}\"]"));
        }
    }
    let named = fields.get(row.activation_field);
    match named.map_or(Some(row.activation), Value::as_str) {
        Some("silu") => Activation::Silu,
        Some("gelu_pytorch_tanh") => Activation::GeluTanh,
        _ => {
            if let Some(value) = named {
                let supported = "\"silu\", \"gelu_pytorch_tanh\"";
                fields.expected(row.activation_field, value, supported);
            }
            Activation::Silu
        }
    }
}

fn kv_heads(fields: &mut Fields<'_>, row: &Row, heads: u32) -> u32 {
    let absent = row.kv_heads.filter(|_| !fields.is_null("num_key_value_heads"));
    fields.whole("num_key_value_heads").unwrap_or(absent.unwrap_or(heads))
}

fn head_dim(fields: &mut Fields<'_>, row: &Row, hidden: u32, heads: u32) -> u32 {
    if let Some(given) = fields.whole("head_dim") {
        return given;
    }
    if let Some(absent) = row.head_dim {
        if fields.is_null("head_dim") {
            let reason = format!("is null; {} needs a whole number", row.model_type);
            fields.complain("head_dim", reason);
        }
        return absent;
    }
    if hidden == 0 || heads == 0 {
        // Already reported; a valid width avoids further errors that follow from it.
        return HEAD_DIM_STEP;
    }
    if !hidden.is_multiple_of(heads) {
        let reason = format!(
            "is {hidden}; it must be a multiple of num_attention_heads, which is {heads}, or head_dim must be given"
        );
        fields.complain("hidden_size", reason);
        return HEAD_DIM_STEP;
    }
    hidden / heads
}

fn dtype(fields: &mut Fields<'_>) -> DType {
    let field = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let Some(value) = fields.get(field) else { return DType::F32 };
    let text = value.as_str().unwrap_or_default();
    match text.strip_prefix("torch.").unwrap_or(text) {
        "float32" | "float" | "auto" => DType::F32,
        "float16" | "half" => DType::F16,
        "bfloat16" => DType::Bf16,
        _ => {
            fields.expected(field, value, "\"float32\", \"float16\", \"bfloat16\"");
            DType::F32
        }
    }
}

/// What the objects of rotary parameters say beside the embedding of most layers.
#[derive(Clone, Copy, Default, PartialEq)]
struct Inside {
    /// The fraction of a head that is rotated.
    rotated: Option<f64>,
    /// The embedding of layers with a window, if it is another.
    sliding: Option<Rope>,
}

/// The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4). A file may
/// have both if they agree.
fn rope(fields: &mut Fields<'_>, row: &Row, max_positions: u32) -> (Rope, Inside) {
    let theta = fields.number("rope_theta").unwrap_or(row.theta);
    let outer_original = fields.whole("original_max_position_embeddings");
    let sliding = row.sliding_theta.map(|(field, absent)| fields.number(field).unwrap_or(absent));
    let reader = RopeReader {
        theta,
        sliding,
        original: outer_original.unwrap_or(max_positions),
        outer: outer_original.is_some(),
        row,
    };
    let mut read = |field, prefix| {
        let object = fields.object(field)?;
        let (rope, problems) = reader.read(object, prefix);
        fields.adopt(problems);
        rope
    };
    let new = read("rope_parameters", "rope_parameters.");
    let old = read("rope_scaling", "rope_scaling.");
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        fields.complain("rope_scaling", "differs from rope_parameters; keep one of the two");
    }
    let (rope, inside) = new.or(old).unwrap_or((Rope::plain(theta), Inside::default()));
    (rope, Inside { sliding: inside.sliding.or(sliding.map(Rope::plain)), ..inside })
}

/// Reads objects of rotary parameters.
struct RopeReader<'a> {
    row: &'a Row,
    /// Defaults from outside of the object.
    theta: f64,
    /// Of layers with a window, in families where they have an embedding of their own.
    sliding: Option<f64>,
    original: u32,
    /// Whether the outer `original` was given: it wins.
    outer: bool,
}

impl RopeReader<'_> {
    fn read(
        &self,
        object: &Map<String, Value>,
        prefix: &'static str,
    ) -> (Option<(Rope, Inside)>, Vec<Problem>) {
        let kinds = ["full_attention", "sliding_attention"].map(|kind| object.get(kind));
        let [full, sliding] = kinds.map(|kind| kind.and_then(Value::as_object));
        let Some(theta) = self.sliding.filter(|_| full.is_some() || sliding.is_some()) else {
            if self.sliding.is_some() && prefix == "rope_parameters." {
                // transformers reads nothing of such an object, not even its base.
                let reason = "has neither full_attention nor sliding_attention";
                return (None, vec![Problem::new("rope_parameters", reason)]);
            }
            let (found, problems) = self.one(object, prefix.to_owned(), self.theta);
            let inside = |rotated| Inside { rotated, sliding: None };
            return (found.map(|(rope, rotated)| (rope, inside(rotated))), problems);
        };
        let none = Map::new();
        let full = (full.unwrap_or(&none), format!("{prefix}full_attention."), self.theta);
        let sliding = (sliding.unwrap_or(&none), format!("{prefix}sliding_attention."), theta);
        let [full, sliding] = [full, sliding].map(|(kind, at, theta)| self.one(kind, at, theta));
        let both = full.0.zip(sliding.0).map(|((rope, rotated), (sliding, _))| {
            (rope, Inside { rotated, sliding: Some(sliding) })
        });
        (both, [full.1, sliding.1].concat())
    }

    fn one(
        &self,
        object: &Map<String, Value>,
        prefix: String,
        theta: f64,
    ) -> (Option<(Rope, Option<f64>)>, Vec<Problem>) {
        let mut fields = Fields::new(object, prefix);
        let field = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
        let kind = fields.text(field).unwrap_or("default");
        let theta = fields.number("rope_theta").unwrap_or(theta);
        let rotated = fields.number("partial_rotary_factor");
        if let Some(value) = fields.get("partial_rotary_factor")
            && self.row.rotated.is_none()
            && value.as_f64() != Some(1.0)
        {
            fields.expected("partial_rotary_factor", value, "1.0");
        }
        if let Some((key, _)) = object.iter().find(|(_, value)| value.is_object()) {
            let reason = match self.sliding {
                Some(_) => "is an object; supported: full_attention and sliding_attention",
                None => "is an object; layers of this family have one rotary embedding",
            };
            fields.complain(key, reason);
        }
        let scaling = self.scaling(&mut fields, field, kind);
        let problems = fields.into_problems();
        let rope = scaling.filter(|_| problems.is_empty()).map(|scaling| Rope { theta, scaling });
        (rope.map(|rope| (rope, rotated)), problems)
    }

    fn scaling(&self, fields: &mut Fields<'_>, field: &str, kind: &str) -> Option<Scaling> {
        let original = |fields: &mut Fields<'_>| {
            let inner = fields.whole("original_max_position_embeddings").filter(|_| !self.outer);
            inner.unwrap_or(self.original)
        };
        if self.row.longrope && kind != "default" && !LONGROPE.contains(&kind) {
            let reason = format!("is {}; supported: default, longrope", quoted(kind));
            fields.complain(field, reason);
            return None;
        }
        match kind {
            // Dynamic frequencies change beyond the longest sequence, which no program exceeds.
            "default" | "dynamic" => Some(Scaling::Default),
            // The family reads the factors.
            _ if self.row.longrope => Some(Scaling::Default),
            "linear" => Some(Scaling::Linear { factor: fields.required_number("factor") }),
            "llama3" => Some(Scaling::Llama3 {
                factor: fields.required_number("factor"),
                low: fields.required_number("low_freq_factor"),
                high: fields.required_number("high_freq_factor"),
                original: original(fields),
            }),
            "yarn" => Some(yarn(fields, original)),
            other => {
                let supported = "default, linear, dynamic, llama3, yarn";
                fields.complain(field, format!("is {}; supported: {supported}", quoted(other)));
                None
            }
        }
    }
}

fn yarn(fields: &mut Fields<'_>, original: impl FnOnce(&mut Fields<'_>) -> u32) -> Scaling {
    let factor = fields.required_number("factor");
    let scale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
    let (mscale, all) = (fields.number("mscale"), fields.number("mscale_all_dim"));
    let amplitude = match (mscale, all) {
        (Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => scale(mscale) / scale(all),
        _ => scale(1.0),
    };
    // To transformers, null is not absent here but false.
    let absent = fields.get("truncate").is_none() && !fields.is_null("truncate");
    let truncate = absent || fields.flag("truncate");
    Scaling::Yarn {
        factor,
        original: original(fields),
        fast: fields.number("beta_fast").unwrap_or(32.0),
        slow: fields.number("beta_slow").unwrap_or(1.0),
        truncate,
        amplitude: fields.number("attention_factor").unwrap_or(amplitude),
    }
}

/// The sliding windows.
fn window(fields: &mut Fields<'_>, row: &Row, layers: u32) -> Window {
    let types = layer_types(fields, layers);
    let absent = (!fields.is_null("sliding_window")).then_some(WINDOW_DEFAULT);
    // An absurd number of layers is reported elsewhere and must not become a long list here.
    let count = layers.min(LAYERS_MAX);
    let some = |fields: &mut Fields<'_>, window, sliding: Vec<bool>| match window {
        Some(window) if sliding.contains(&true) => Window::Layers { window, sliding },
        None if sliding.contains(&true) => {
            fields.complain("sliding_window", "is null, but there are layers with a window");
            Window::None
        }
        _ => Window::None,
    };
    match row.windows {
        WindowRule::None => {
            uniform(fields, types.as_deref(), false);
            Window::None
        }
        WindowRule::All { absent: default } => {
            let window = fields.whole("sliding_window").or(absent.and(default));
            uniform(fields, types.as_deref(), window.is_some());
            window.map_or(Window::None, Window::All)
        }
        WindowRule::Switched => {
            let window = fields.whole("sliding_window").or(absent);
            let first = fields.whole("max_window_layers").unwrap_or(MAX_WINDOW_LAYERS_DEFAULT);
            if !fields.flag("use_sliding_window") {
                if types.is_some_and(|types| types.contains(&true)) {
                    let reason = "has sliding_attention although use_sliding_window is not true";
                    fields.complain("layer_types", reason);
                }
                return Window::None;
            }
            let sliding = |i: u32| window.is_some() && i >= first;
            some(fields, window, types.unwrap_or_else(|| (0..count).map(sliding).collect()))
        }
        WindowRule::Pattern { window, full_every, field } => {
            let every = field.and_then(|field| fields.whole(field)).unwrap_or(full_every);
            let window = fields.whole("sliding_window").or(absent.and(Some(window)));
            let sliding = |i: u32| every == 0 || !(i + 1).is_multiple_of(every);
            some(fields, window, types.unwrap_or_else(|| (0..count).map(sliding).collect()))
        }
    }
}

/// The layers that `layer_types` calls sliding.
fn layer_types(fields: &mut Fields<'_>, layers: u32) -> Option<Vec<bool>> {
    let value = fields.get("layer_types")?;
    let Some(list) = value.as_array() else {
        fields.expected("layer_types", value, "a list of layer types or null");
        return None;
    };
    if list.len() != layers as usize {
        fields.complain("layer_types", format!("has {} entries for {layers} layers", list.len()));
        return None;
    }
    let mut sliding = Vec::with_capacity(list.len());
    for entry in list {
        match entry.as_str() {
            Some("full_attention") => sliding.push(false),
            Some("sliding_attention") => sliding.push(true),
            _ => {
                let reason =
                    format!("has {}; supported: full_attention, sliding_attention", shown(entry));
                fields.complain("layer_types", reason);
                return None;
            }
        }
    }
    Some(sliding)
}

/// Reports `layer_types` that differ from the family's single type of layer.
fn uniform(fields: &mut Fields<'_>, types: Option<&[bool]>, sliding: bool) {
    if types.is_some_and(|types| types.iter().any(|&t| t != sliding)) {
        let reason = if sliding {
            "has full_attention although sliding_window is set; this family has one kind of layer"
        } else {
            "has sliding_attention; this family has none without sliding_window"
        };
        fields.complain("layer_types", reason);
    }
}
