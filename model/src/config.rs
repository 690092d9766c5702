//! Reads `config.json` and `generation_config.json` into a [`Shape`], in the spellings of transformers 4 and 5.

use ir::DType;
use serde_json::{Map, Value};

use crate::error::{Problem, quoted, shown};
use crate::fields::Fields;
use crate::rope::{Rope, Scaling};
use crate::shape::{Family, HEAD_DIM_STEP, Shape, Window};

/// Default base of the rotary frequencies, the same in all four families.
const THETA_DEFAULT: f64 = 10_000.0;
/// Default head width of Qwen 3.
const QWEN3_HEAD_DIM: u32 = 128;
/// Default window of Mistral, Qwen 2 and Qwen 3.
const WINDOW_DEFAULT: u32 = 4096;
/// Default first sliding layer of Qwen 2 and Qwen 3.
const MAX_WINDOW_LAYERS_DEFAULT: u32 = 28;

/// Reads a configuration. The shape's `dtype` is the configuration's; the stored tensors override it.
pub(crate) fn parse(config: &Map<String, Value>, name: &str) -> Result<Shape, Vec<Problem>> {
    let mut fields = Fields::new(config, "");
    let Some(family) = family(&mut fields) else {
        // Every other field's meaning and default depends on the family.
        return Err(fields.into_problems());
    };
    refuse_unsupported(&mut fields, family);
    let (hidden, heads) = (fields.required("hidden_size"), fields.required("num_attention_heads"));
    let layers = fields.required("num_hidden_layers");
    let max_positions = max_positions(&mut fields, family);
    let shape = Shape {
        name: name.to_owned(),
        family,
        hidden,
        layers,
        heads,
        kv_heads: kv_heads(&mut fields, family, heads),
        head_dim: head_dim(&mut fields, family, hidden, heads),
        ffn: fields.required("intermediate_size"),
        vocab: fields.required("vocab_size"),
        tied: fields.flag("tie_word_embeddings"),
        attention_bias: fields.flag("attention_bias"),
        mlp_bias: fields.flag("mlp_bias"),
        dtype: dtype(&mut fields),
        norm_eps: fields.number("rms_norm_eps").unwrap_or(1e-6) as f32,
        rope: rope(&mut fields, max_positions),
        max_positions,
        window: window(&mut fields, family, layers),
        eos: fields.ids("eos_token_id"),
        bos: fields.whole("bos_token_id"),
    };
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
    let supported = Family::ALL.map(Family::model_type).join(", ");
    let Some(value) = fields.get("model_type") else {
        fields.complain("model_type", format!("is missing; supported: {supported}"));
        return None;
    };
    let found =
        value.as_str().and_then(|text| Family::ALL.into_iter().find(|f| f.model_type() == text));
    if found.is_none() {
        fields.expected("model_type", value, &supported);
    }
    found
}

/// Fields that change the arithmetic in ways that no graph expresses.
fn refuse_unsupported(fields: &mut Fields<'_>, family: Family) {
    if let Some(value) = fields.get("hidden_act").filter(|v| v.as_str() != Some("silu")) {
        fields.expected("hidden_act", value, "\"silu\"");
    }
    if let Some(value) = fields.get("partial_rotary_factor").filter(|v| v.as_f64() != Some(1.0)) {
        fields.expected("partial_rotary_factor", value, "1.0");
    }
    let class = family.architecture();
    if let Some(value) = fields.get("architectures") {
        let named = value.as_array().is_some_and(|list| {
            list.is_empty() || list.iter().any(|entry| entry.as_str() == Some(class))
        });
        if !named {
            fields.expected("architectures", value, &format!("[\"{class}\"]"));
        }
    }
}

fn max_positions(fields: &mut Fields<'_>, family: Family) -> u32 {
    let default = match family {
        Family::Llama => 2048,
        Family::Mistral => 131_072,
        Family::Qwen2 | Family::Qwen3 => 32_768,
    };
    fields.whole("max_position_embeddings").unwrap_or(default)
}

fn kv_heads(fields: &mut Fields<'_>, family: Family, heads: u32) -> u32 {
    let absent = if fields.is_null("num_key_value_heads") {
        heads
    } else {
        match family {
            Family::Llama => heads,
            Family::Mistral => 8,
            Family::Qwen2 | Family::Qwen3 => 32,
        }
    };
    fields.whole("num_key_value_heads").unwrap_or(absent)
}

fn head_dim(fields: &mut Fields<'_>, family: Family, hidden: u32, heads: u32) -> u32 {
    if let Some(given) = fields.whole("head_dim") {
        return given;
    }
    if family == Family::Qwen3 {
        if fields.is_null("head_dim") {
            fields.complain("head_dim", "is null; qwen3 needs a whole number");
        }
        return QWEN3_HEAD_DIM;
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

/// The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4). A file may
/// have both if they agree.
fn rope(fields: &mut Fields<'_>, max_positions: u32) -> Rope {
    let theta = fields.number("rope_theta").unwrap_or(THETA_DEFAULT);
    let outer_original = fields.whole("original_max_position_embeddings");
    let original = outer_original.unwrap_or(max_positions);
    let mut read = |field, prefix| {
        let object = fields.object(field)?;
        let (rope, problems) =
            rope_object(object, prefix, theta, original, outer_original.is_some());
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
    new.or(old).unwrap_or(Rope::plain(theta))
}

fn rope_object(
    object: &Map<String, Value>,
    prefix: &'static str,
    theta: f64,
    original: u32,
    outer_wins: bool,
) -> (Option<Rope>, Vec<Problem>) {
    let mut fields = Fields::new(object, prefix);
    let field = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = fields.text(field).unwrap_or("default");
    let theta = fields.number("rope_theta").unwrap_or(theta);
    if let Some(value) = fields.get("partial_rotary_factor").filter(|v| v.as_f64() != Some(1.0)) {
        fields.expected("partial_rotary_factor", value, "1.0");
    }
    if let Some((key, _)) = object.iter().find(|(_, value)| value.is_object()) {
        // One set of frequencies per kind of layer.
        fields
            .complain(key, "is an object; supported: one set of rotary parameters for all layers");
    }
    let scaling = match kind {
        "default" => Some(Scaling::Default),
        "linear" => Some(Scaling::Linear { factor: fields.required_number("factor") }),
        "llama3" => {
            let inner = fields.whole("original_max_position_embeddings").filter(|_| !outer_wins);
            Some(Scaling::Llama3 {
                factor: fields.required_number("factor"),
                low: fields.required_number("low_freq_factor"),
                high: fields.required_number("high_freq_factor"),
                original: inner.unwrap_or(original),
            })
        }
        other => {
            let reason = format!("is {}; supported: default, linear, llama3", quoted(other));
            fields.complain(field, reason);
            None
        }
    };
    let problems = fields.into_problems();
    let rope = scaling.filter(|_| problems.is_empty()).map(|scaling| Rope { theta, scaling });
    (rope, problems)
}

/// The sliding windows. Llama has none, Mistral's is in every layer, Qwen's is off unless it is switched on and then
/// follows `layer_types` or, without that, begins at layer `max_window_layers`.
fn window(fields: &mut Fields<'_>, family: Family, layers: u32) -> Window {
    let types = layer_types(fields, layers);
    let absent = (!fields.is_null("sliding_window")).then_some(WINDOW_DEFAULT);
    match family {
        Family::Llama => {
            uniform(fields, types.as_deref(), false);
            Window::None
        }
        Family::Mistral => {
            let window = fields.whole("sliding_window").or(absent);
            uniform(fields, types.as_deref(), window.is_some());
            window.map_or(Window::None, Window::All)
        }
        Family::Qwen2 | Family::Qwen3 => {
            let on = fields.flag("use_sliding_window");
            let window = fields.whole("sliding_window").or(absent).filter(|_| on);
            let first = fields.whole("max_window_layers").unwrap_or(MAX_WINDOW_LAYERS_DEFAULT);
            let Some(window) = window else { return Window::None };
            // An absurd number of layers is reported elsewhere and must not become a long list here.
            let layers = layers.min(crate::shape::LAYERS_MAX);
            let sliding = types.unwrap_or_else(|| (0..layers).map(|i| i >= first).collect());
            if sliding.contains(&true) { Window::Layers { window, sliding } } else { Window::None }
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
