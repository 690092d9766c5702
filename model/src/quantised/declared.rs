//! Reads `quantization_config` of `config.json`: which formats a folder's matrices may be stored in.

use serde_json::{Map, Value};

use crate::error::{Problem, quoted, shown};
use crate::fields::Fields;

/// Prefix of the fields in errors.
const PREFIX: &str = "quantization_config.";
/// Values of `quant_method` that are read.
const METHODS: &str = "fp8, compressed-tensors, gptq, awq, bitsandbytes, mxfp4";
/// Values of compressed-tensors' `format` that are read.
const CT_FORMATS: &str =
    "float-quantized, int-quantized, pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized";

/// What a configuration says about the stored matrices.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Declared {
    /// `quant_method`.
    pub(crate) method: String,
    /// The formats; at least one.
    pub(crate) schemes: Vec<Scheme>,
    /// Modules that are said not to be quantised. Some entries are patterns.
    pub(crate) exceptions: Vec<String>,
    /// Whether activations are said to be quantised.
    pub(crate) activations: bool,
}

/// One format with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    pub(crate) kind: Kind,
    pub(crate) strategy: Strategy,
    /// Whether there are no zero points, or all have the middle code.
    pub(crate) symmetric: bool,
    /// Whether columns must name their groups.
    pub(crate) act_order: bool,
}

/// A way to store a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `fp8`: e4m3 with `weight_scale_inv`.
    Fp8Inverse,
    /// e4m3 with `weight_scale`: compressed-tensors `float-quantized`, and `fp8` of AutoFP8.
    Fp8,
    /// compressed-tensors `int-quantized`.
    Int8,
    /// compressed-tensors `pack-quantized`.
    Int4,
    /// compressed-tensors `nvfp4-pack-quantized`.
    Nvfp4,
    /// GPTQ; zero points may be stored less one (v1).
    Gptq { less_one: bool },
    /// AWQ gemm.
    Awq,
    /// mxfp4, a power of two for 32 columns: experts in one tensor, or compressed-tensors `mxfp4-pack-quantized`.
    Mxfp4,
    /// nf4 of bitsandbytes; its scales may be quantised too.
    Nf4 { nested: bool },
}

impl Kind {
    /// Its name in messages.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Fp8Inverse => "fp8 (weight_scale_inv)",
            Self::Fp8 => "fp8 (weight_scale)",
            Self::Int8 => "int8 of compressed-tensors",
            Self::Int4 => "int4 of compressed-tensors",
            Self::Nvfp4 => "nvfp4 of compressed-tensors",
            Self::Gptq { .. } => "int4 of GPTQ",
            Self::Awq => "int4 of AWQ",
            Self::Mxfp4 => "mxfp4",
            Self::Nf4 { .. } => "nf4 of bitsandbytes",
        }
    }
}

/// Which elements of a matrix share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strategy {
    /// All.
    Tensor,
    /// A row.
    Channel,
    /// This many columns of a row.
    Group(u32),
    /// A block of rows and columns.
    Block([u32; 2]),
}

impl Declared {
    /// Reads the field of a `config.json`; `None` if the model is not quantised.
    pub(crate) fn parse(config: &Map<String, Value>) -> Result<Option<Self>, Vec<Problem>> {
        let mut outer = Fields::new(config, "");
        let Some(object) = outer.object("quantization_config") else {
            let problems = outer.into_problems();
            return if problems.is_empty() { Ok(None) } else { Err(problems) };
        };
        let mut fields = Fields::new(object, PREFIX);
        let declared = method(&mut fields);
        let problems = fields.into_problems();
        if problems.is_empty() { Ok(declared) } else { Err(problems) }
    }
}

fn method(fields: &mut Fields<'_>) -> Option<Declared> {
    let Some(name) = fields.text("quant_method") else {
        if fields.get("quant_method").is_none() {
            fields.complain("quant_method", format!("is missing; supported: {METHODS}"));
        }
        return None;
    };
    let schemes = match name {
        "fp8" => fp8(fields),
        "compressed-tensors" => compressed_tensors(fields),
        "gptq" => vec![gptq(fields)],
        "awq" => vec![awq(fields)],
        "bitsandbytes" => vec![bitsandbytes(fields)],
        "mxfp4" => {
            let strategy = Strategy::Group(32);
            vec![Scheme { kind: Kind::Mxfp4, strategy, symmetric: true, act_order: false }]
        }
        other => {
            let reason = format!("is {}; supported: {METHODS}; {}", quoted(other), advice(other));
            fields.complain("quant_method", reason);
            return None;
        }
    };
    let exceptions = match name {
        "compressed-tensors" => names(fields, "ignore"),
        "bitsandbytes" => names(fields, "llm_int8_skip_modules"),
        // AutoFP8 has another name for it than transformers.
        "fp8" => {
            [names(fields, "modules_to_not_convert"), names(fields, "ignored_layers")].concat()
        }
        _ => names(fields, "modules_to_not_convert"),
    };
    let activations = match name {
        "fp8" => fields.get("activation_scheme").is_some(),
        "compressed-tensors" => quantises_activations(fields),
        _ => false,
    };
    Some(Declared { method: name.to_owned(), schemes, exceptions, activations })
}

/// What to use instead of a format that is not read.
fn advice(method: &str) -> &'static str {
    match method {
        "hqq" | "torchao" | "quanto" | "eetq" => {
            "such folders are meant for fine-tuning: use the 16-bit original, or a GPTQ, AWQ or FP8 copy"
        }
        "modelopt" | "fbgemm_fp8" => "use the compressed-tensors copy (FP8 or NVFP4) of the model",
        "auto-round" | "intel/auto-round" => {
            "export it again with the format auto_gptq or auto_awq"
        }
        _ => "use the 16-bit original, or a copy in one of these formats",
    }
}

fn names(fields: &mut Fields<'_>, field: &str) -> Vec<String> {
    let Some(value) = fields.get(field) else { return Vec::new() };
    let list = value.as_array().map(|list| {
        list.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
    });
    match list {
        Some(Some(names)) => names,
        _ => {
            fields.expected(field, value, "a list of module names or null");
            Vec::new()
        }
    }
}

/// Reports a field that is present with another value than the supported ones.
fn only(fields: &mut Fields<'_>, field: &str, supported: &[Value]) {
    if let Some(value) = fields.get(field)
        && !supported.contains(value)
    {
        let list: Vec<_> = supported.iter().map(Value::to_string).collect();
        fields.expected(field, value, &list.join(", "));
    }
}

/// As [`only`], of a field that must be there.
fn exactly(fields: &mut Fields<'_>, field: &str, supported: &Value) {
    if fields.get(field).is_none() {
        fields.complain(field, format!("is missing; supported: {supported}"));
    }
    only(fields, field, std::slice::from_ref(supported));
}

fn fp8(fields: &mut Fields<'_>) -> Vec<Scheme> {
    only(fields, "fmt", &["e4m3".into()]);
    let field = "weight_block_size";
    let of = |kind, strategy| Scheme { kind, strategy, symmetric: true, act_order: false };
    if fields.get(field).is_some() {
        return vec![of(Kind::Fp8Inverse, Strategy::Block(block(fields, field)))];
    }
    // One scale for each matrix, which AutoFP8 and transformers name differently.
    [Kind::Fp8, Kind::Fp8Inverse].map(|kind| of(kind, Strategy::Tensor)).to_vec()
}

/// Rows and columns of a block, as a list or as `128x128`.
fn block(fields: &mut Fields<'_>, field: &str) -> [u32; 2] {
    let Some(value) = fields.get(field) else { return [1, 1] };
    let number = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
    let sides: Option<Vec<u32>> = if let Some(text) = value.as_str() {
        text.split('x').take(3).map(|side| side.parse().ok()).collect()
    } else {
        value.as_array().and_then(|list| list.iter().take(3).map(number).collect())
    };
    match sides.as_deref() {
        Some(&[rows, cols]) if rows > 0 && cols > 0 => [rows, cols],
        _ => {
            fields.expected(field, value, "[rows, columns], such as [128, 128]");
            [1, 1]
        }
    }
}

/// Columns of a group; -1 and `null` are the whole row.
fn group_size(fields: &mut Fields<'_>) -> Strategy {
    match fields.get("group_size") {
        None => Strategy::Channel,
        Some(value) => match value.as_i64() {
            Some(-1) => Strategy::Channel,
            Some(size) if size > 0 && size <= i64::from(u32::MAX) => Strategy::Group(size as u32),
            _ => {
                fields.expected("group_size", value, "a positive whole number, or -1 for a row");
                Strategy::Channel
            }
        },
    }
}

fn gptq(fields: &mut Fields<'_>) -> Scheme {
    exactly(fields, "bits", &4.into());
    only(fields, "pack_dtype", &["int32".into()]);
    only(fields, "is_marlin_format", &[false.into()]);
    // GPTQModel has had two names for the field. Without either, zero points are those of version 1.
    let versions = ["checkpoint_format", "format"].map(|field| {
        only(fields, field, &["gptq".into(), "gptq_v2".into()]);
        fields.text(field)
    });
    if let [Some(one), Some(other)] = versions
        && one != other
    {
        let reason = format!("is {}, but checkpoint_format is {}", quoted(other), quoted(one));
        fields.complain("format", format!("{reason}; expected the same"));
    }
    let less_one = !versions.contains(&Some("gptq_v2"));
    // A key that begins with "-:" leaves modules out, which their tensors show; any other changes bits or groups.
    let overrides = fields.object("dynamic");
    if let Some(key) = overrides.and_then(|map| map.keys().find(|key| !key.starts_with("-:"))) {
        let reason = format!("has other options for {}; supported: the same for all", quoted(key));
        fields.complain("dynamic", reason);
    }
    // Without the field nothing is claimed, so nothing is checked.
    let symmetric = fields.flag("sym");
    let act_order = fields.flag("desc_act");
    let strategy = group_size(fields);
    Scheme { kind: Kind::Gptq { less_one }, strategy, symmetric, act_order }
}

fn awq(fields: &mut Fields<'_>) -> Scheme {
    exactly(fields, "bits", &4.into());
    only(fields, "zero_point", &[true.into()]);
    // AutoAWQ and GPTQModel name the layout differently.
    for field in ["version", "format", "checkpoint_format"] {
        if let Some(value) = fields.get(field)
            && !value.as_str().is_some_and(|text| text.eq_ignore_ascii_case("gemm"))
        {
            fields.expected(field, value, "\"gemm\"; use such a copy of the model");
        }
    }
    if let Some(value) = fields.get("backend").filter(|value| **value == "llm-awq") {
        fields.expected(
            "backend",
            value,
            "weights of AutoAWQ; llm-awq stores them in another order",
        );
    }
    let strategy = group_size(fields);
    Scheme { kind: Kind::Awq, strategy, symmetric: false, act_order: false }
}

fn bitsandbytes(fields: &mut Fields<'_>) -> Scheme {
    only(fields, "load_in_8bit", &[false.into()]);
    exactly(fields, "load_in_4bit", &true.into());
    exactly(fields, "bnb_4bit_quant_type", &"nf4".into());
    only(fields, "bnb_4bit_quant_storage", &["uint8".into()]);
    let kind = Kind::Nf4 { nested: fields.flag("bnb_4bit_use_double_quant") };
    // Blocks are said by each matrix.
    Scheme { kind, strategy: Strategy::Channel, symmetric: true, act_order: false }
}

fn compressed_tensors(fields: &mut Fields<'_>) -> Vec<Scheme> {
    // Early checkpoints say that their scales are frozen, though their tensors are compressed.
    only(fields, "quantization_status", &["compressed".into(), "frozen".into()]);
    if let Some(value) = fields.get("kv_cache_scheme") {
        let reason = format!("is {}; a quantised key/value cache is not supported", shown(value));
        fields.complain("kv_cache_scheme", reason);
    }
    for (field, plain) in [("sparsity_config", Some("dense")), ("transform_config", None)] {
        if let Some(value) = fields.get(field)
            && value.as_object().is_none_or(|map| !map.is_empty())
            && (plain.is_none() || value.get("format").and_then(Value::as_str) != plain)
        {
            let reason =
                format!("is {}; sparse or rotated weights are not supported", shown(value));
            fields.complain(field, reason);
        }
    }
    let format = fields.text("format");
    let Some(groups) = fields.object("config_groups").filter(|groups| !groups.is_empty()) else {
        fields.complain("config_groups", "has no group; supported: one or more");
        return Vec::new();
    };
    let mut schemes = Vec::new();
    for (name, group) in groups {
        let field = format!("config_groups.{name}");
        let Some(object) = group.as_object() else {
            fields.expected(&field, group, "an object");
            continue;
        };
        let mut inner = Fields::new(object, format!("{PREFIX}{field}."));
        schemes.extend(ct_group(&mut inner, format));
        fields.adopt(inner.into_problems());
    }
    schemes
}

fn ct_group(group: &mut Fields<'_>, format: Option<&str>) -> Option<Scheme> {
    let own = group.text("format");
    let Some(weights) = group.object("weights") else {
        group.complain("weights", "is missing; supported: an object");
        return None;
    };
    let prefix = group.prefixed("weights.");
    let mut weights = Fields::new(weights, prefix);
    let format = own.or(format.filter(|format| *format != "mixed-precision"));
    let scheme = match format {
        Some("float-quantized") => {
            let strategies = ["tensor", "channel", "block"];
            Some(ct_scheme(&mut weights, Kind::Fp8, (8, "float"), &strategies))
        }
        Some("int-quantized") => {
            exactly(&mut weights, "symmetric", &true.into());
            let strategies = ["tensor", "channel", "group"];
            Some(ct_scheme(&mut weights, Kind::Int8, (8, "int"), &strategies))
        }
        Some("pack-quantized") => {
            Some(ct_scheme(&mut weights, Kind::Int4, (4, "int"), &["channel", "group"]))
        }
        Some("nvfp4-pack-quantized") => {
            exactly(&mut weights, "group_size", &16.into());
            Some(ct_scheme(&mut weights, Kind::Nvfp4, (4, "float"), &["tensor_group"]))
        }
        Some("mxfp4-pack-quantized") => {
            exactly(&mut weights, "group_size", &32.into());
            Some(ct_scheme(&mut weights, Kind::Mxfp4, (4, "float"), &["group"]))
        }
        other => {
            let is = other.map_or_else(|| "missing".to_owned(), quoted);
            group.complain("format", format!("is {is}; supported: {CT_FORMATS}"));
            None
        }
    };
    group.adopt(weights.into_problems());
    scheme
}

fn ct_scheme(
    weights: &mut Fields<'_>,
    kind: Kind,
    (bits, kind_of_number): (u32, &str),
    strategies: &[&str],
) -> Scheme {
    exactly(weights, "num_bits", &bits.into());
    exactly(weights, "type", &kind_of_number.into());
    only(weights, "dynamic", &[false.into()]);
    only(weights, "actorder", &["weight".into(), "group".into(), "static".into()]);
    let named = weights.text("strategy");
    if !named.is_some_and(|name| strategies.contains(&name)) {
        let is = named.map_or_else(|| "missing".to_owned(), quoted);
        weights.complain("strategy", format!("is {is}; supported: {}", strategies.join(", ")));
    }
    let strategy = match named {
        Some("tensor") => Strategy::Tensor,
        Some("block") => {
            if weights.get("block_structure").is_none() {
                weights.complain("block_structure", "is missing; supported: [rows, columns]");
            }
            Strategy::Block(block(weights, "block_structure"))
        }
        Some("group" | "tensor_group") => {
            let size = group_size(weights);
            if size == Strategy::Channel {
                weights.complain("group_size", "is missing; supported: a positive whole number");
            }
            size
        }
        _ => Strategy::Channel,
    };
    let symmetric = weights.get("symmetric").is_none() || weights.flag("symmetric");
    let act_order = weights.get("actorder").and_then(Value::as_str) == Some("group");
    Scheme { kind, strategy, symmetric, act_order }
}

/// Whether some group of compressed-tensors quantises what a matrix is multiplied with.
fn quantises_activations(fields: &mut Fields<'_>) -> bool {
    let Some(groups) = fields.object("config_groups") else { return false };
    groups.values().any(|group| {
        let given = |field| group.get(field).is_some_and(|value| !value.is_null());
        given("input_activations") || given("output_activations")
    })
}
