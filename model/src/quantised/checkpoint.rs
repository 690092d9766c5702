//! Finds the stored tensors that make up one matrix, and checks them.
//!
//! The tensors that are present decide how a matrix is stored; the configuration must agree. Every difference is
//! reported, with the tensor, what was found and what was expected.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use ir::DType;

use super::codes::{Codes, Order};
use super::declared::{Declared, Kind, Scheme, Strategy};
use super::matrix::{Layout, Matrix, ScaleType, Scales, View, Zeros};
use crate::error::Problem;
use crate::store::{Files, Found, Place};

/// Names of a matrix's tensors, after its module's name and a dot.
const PARTS: [&str; 22] = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4",
];
/// Those that matter to quantised activations only.
const ACTIVATIONS: [&str; 4] =
    ["input_scale", "input_zero_point", "input_global_scale", "activation_scale"];

/// Element types of floats.
const FLOATS: &[&str] = &["F32", "F16", "BF16"];

/// A matrix that was found.
pub(crate) struct Recognised {
    pub(crate) matrix: Matrix,
    /// Its format; `None` if it is not quantised.
    pub(crate) kind: Option<Kind>,
    /// Something that the user should know.
    pub(crate) note: Option<String>,
}

/// Finds the matrix that lies as codes of e2m1 in blocks of 32 with a power of two each: mxfp4, the experts of a layer
/// in one tensor of `[experts, rows, cols]`. Its tensors are removed from `found`.
pub(crate) fn stacked(
    name: &str,
    [experts, rows, cols]: [u64; 3],
    found: &mut HashMap<String, Found>,
    files: &Files,
) -> Result<Recognised, Vec<Problem>> {
    /// Columns that share a scale.
    const EACH: u64 = 32;
    let mut stored = BTreeMap::new();
    for part in ["_blocks", "_scales"] {
        stored.extend(found.remove(&format!("{name}{part}")).map(|found| (part, found)));
    }
    let problems = Vec::new();
    let mut parts = Parts { module: name, rows: experts * rows, cols, stored, files, problems };
    let blocks = [experts, rows, cols.div_ceil(EACH), EACH / 2];
    let codes = parts.want_stacked("_blocks", &blocks);
    let scales = parts.want_stacked("_scales", &blocks[..3]);
    if !cols.is_multiple_of(EACH) {
        let reason = format!("have {cols} columns; expected a multiple of {EACH}");
        parts.problems.push(Problem::new(name, reason));
    }
    let (Some(codes), Some(scales), true) = (codes, scales, parts.problems.is_empty()) else {
        return Err(parts.problems);
    };
    let scales = Scales {
        place: scales.place(),
        element: ScaleType::E8m0,
        rows_each: 1,
        cols_each: EACH as usize,
        transposed: false,
        divisor: None,
        groups: None,
    };
    if let Some(reason) = scales.unsound(files, Codes::E2m1, true) {
        return Err(vec![Problem::new(format!("{name}_scales"), reason)]);
    }
    let layout =
        Layout::Scaled { place: codes.place(), codes: Codes::E2m1, zeros: Zeros::None, scales };
    let (rows, cols) = ((experts * rows) as usize, cols as usize);
    let matrix = Matrix { rows, cols, layout, view: View::Whole };
    Ok(Recognised { matrix, kind: Some(Kind::Mxfp4), note: None })
}

/// A tensor that only quantised checkpoints have, if there is one.
pub(crate) fn sign(found: &HashMap<String, Found>) -> Option<&str> {
    let quantised = |(name, found): &(&String, &Found)| {
        let codes = ["F8_E4M3", "F8_E5M2", "I8", "U8"].contains(&&found.entry.element[..]);
        let part = name.rsplit_once('.').map_or("", |(_, part)| part);
        part == "weight" && codes || part != "weight" && PARTS.contains(&part)
    };
    found.iter().filter(quantised).map(|(name, _)| &name[..]).min()
}

/// Finds the matrix with this name and size. Its tensors are removed from `found`.
pub(crate) fn matrix(
    name: &str,
    (rows, cols): (u32, u32),
    found: &mut HashMap<String, Found>,
    files: &Files,
    declared: &Declared,
) -> Result<Recognised, Vec<Problem>> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let stored: BTreeMap<&'static str, Found> = PARTS
        .iter()
        .filter_map(|&part| Some((part, found.remove(&format!("{module}.{part}"))?)))
        .collect();
    let new = || Parts {
        module,
        rows: u64::from(rows),
        cols: u64::from(cols),
        stored: stored.clone(),
        files,
        problems: Vec::new(),
    };
    let Some(stored_as) = Stored::of(&stored) else {
        return new().floats(&stored).map(|matrix| Recognised { matrix, kind: None, note: None });
    };
    let fitting = declared.schemes.iter().filter(|scheme| stored_as.fits(scheme.kind));
    let mut refused = Vec::new();
    for scheme in fitting {
        let mut parts = new();
        let note = parts.zero_convention(scheme);
        let layout = parts.quantised(scheme, note.is_some());
        parts.check_exceptions(declared);
        parts.nothing_left(scheme.kind);
        match layout {
            Some(layout) if parts.problems.is_empty() => {
                let matrix =
                    Matrix { rows: rows as usize, cols: cols as usize, layout, view: View::Whole };
                return Ok(Recognised { matrix, kind: Some(scheme.kind), note });
            }
            _ if refused.is_empty() => refused = parts.problems,
            _ => {}
        }
    }
    if refused.is_empty() {
        let said: Vec<_> = declared.schemes.iter().map(|scheme| scheme.kind.name()).collect();
        let reason = format!(
            "is stored as {}; quantization_config describes {}",
            stored_as.name(),
            said.join(", ")
        );
        refused.push(Problem::new(module, reason));
    }
    Err(refused)
}

/// How a matrix is stored, as far as its tensors tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    E4m3Inverse,
    E4m3,
    Int8,
    PackedWords,
    PackedBytes,
    Qweight,
    Bytes,
    /// Some tensors, but no codes.
    Incomplete,
}

impl Stored {
    /// `None` if the matrix is not quantised, or missing.
    fn of(parts: &BTreeMap<&'static str, Found>) -> Option<Self> {
        let element = |part: &str| parts.get(part).map(|found| &found.entry.element[..]);
        match element("weight") {
            Some("F8_E4M3") if parts.contains_key("weight_scale_inv") => {
                return Some(Self::E4m3Inverse);
            }
            Some("F8_E4M3") => return Some(Self::E4m3),
            Some("I8") => return Some(Self::Int8),
            Some("U8") => return Some(Self::Bytes),
            Some(_) => return None,
            None => {}
        }
        match element("weight_packed") {
            Some("U8") => return Some(Self::PackedBytes),
            Some(_) => return Some(Self::PackedWords),
            None => {}
        }
        let gptq = ["qweight", "qzeros", "scales", "g_idx"];
        if gptq.iter().any(|part| parts.contains_key(part)) {
            return Some(Self::Qweight);
        }
        (!parts.is_empty()).then_some(Self::Incomplete)
    }

    fn fits(self, kind: Kind) -> bool {
        self == Self::Incomplete
            || match kind {
                // Without its scale, such a matrix looks like the other kind.
                Kind::Fp8Inverse => matches!(self, Self::E4m3Inverse | Self::E4m3),
                Kind::Fp8 => self == Self::E4m3,
                Kind::Int8 => self == Self::Int8,
                Kind::Int4 => self == Self::PackedWords,
                Kind::Nvfp4 | Kind::Mxfp4 => self == Self::PackedBytes,
                Kind::Gptq { .. } | Kind::Awq => self == Self::Qweight,
                Kind::Nf4 { .. } => self == Self::Bytes,
            }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::E4m3Inverse => "fp8 (F8_E4M3 with weight_scale_inv)",
            Self::E4m3 => "fp8 (F8_E4M3)",
            Self::Int8 => "int8 (I8)",
            Self::PackedWords => "packed integers (weight_packed)",
            Self::PackedBytes => "fp4 (weight_packed of U8)",
            Self::Qweight => "int4 of GPTQ or AWQ (qweight)",
            Self::Bytes => "bytes (U8)",
            Self::Incomplete => "scales without codes",
        }
    }
}

/// The tensors of one matrix during its checks.
pub(super) struct Parts<'a> {
    module: &'a str,
    pub(super) rows: u64,
    pub(super) cols: u64,
    /// Those not used yet.
    pub(super) stored: BTreeMap<&'static str, Found>,
    pub(super) files: &'a Files,
    problems: Vec<Problem>,
}

impl Parts<'_> {
    /// As [`want`](Self::want), of bytes whose name follows the module's without a dot.
    fn want_stacked(&mut self, part: &'static str, shape: &[u64]) -> Option<Found> {
        let found = self.want(part, &["U8"], &[shape]);
        for problem in &mut self.problems {
            problem.subject = problem.subject.replace("._", "_");
        }
        found
    }

    pub(super) fn complain(&mut self, part: &str, reason: impl Into<String>) {
        self.problems.push(Problem::new(format!("{}.{part}", self.module), reason));
    }

    /// Takes a tensor that must be there, of one of these element types and shapes.
    pub(super) fn want(
        &mut self,
        part: &str,
        elements: &[&str],
        shapes: &[&[u64]],
    ) -> Option<Found> {
        let types = elements.join(" or ");
        let Some(found) = self.stored.remove(part) else {
            let reason = format!("is missing; expected {types} of shape {:?}", shapes[0]);
            self.complain(part, reason);
            return None;
        };
        let (element, shape) = (&found.entry.element, &found.entry.shape);
        let mut reason = String::new();
        if !elements.contains(&&element[..]) {
            reason = format!("has element type {element}; expected {types}");
        }
        if !shapes.contains(&&shape[..]) {
            let and = if reason.is_empty() { "" } else { ", and " };
            // Writing to a string cannot fail.
            let _ = write!(reason, "{and}has shape {shape:?}; expected {:?}", shapes[0]);
        }
        if reason.is_empty() {
            return Some(found);
        }
        self.complain(part, reason);
        None
    }

    /// A matrix of floats.
    fn floats(mut self, stored: &BTreeMap<&'static str, Found>) -> Result<Matrix, Vec<Problem>> {
        let place = match self.want("weight", FLOATS, &[&[self.rows, self.cols]]) {
            Some(found) => found.entry.dtype().map(|dtype| Layout::Floats(found.place(), dtype)),
            None => None,
        };
        for part in stored.keys().filter(|&&part| part != "weight") {
            self.complain(part, "belongs to a quantised matrix, which this is not");
        }
        let (rows, cols) = (self.rows as usize, self.cols as usize);
        match place {
            Some(layout) if self.problems.is_empty() => {
                Ok(Matrix { rows, cols, layout, view: View::Whole })
            }
            _ => Err(self.problems),
        }
    }

    /// The layout, unless there are problems.
    fn quantised(&mut self, scheme: &Scheme, other_convention: bool) -> Option<Layout> {
        let Some((rows_each, cols_each)) = self.group(scheme) else {
            // Expected shapes follow from the groups.
            return None;
        };
        let (n, k) = (self.rows, self.cols);
        let groups = k.div_ceil(cols_each);
        let (part, elements, codes, shape): (_, _, _, [u64; 2]) = match scheme.kind {
            Kind::Fp8Inverse | Kind::Fp8 => ("weight", "F8_E4M3", Codes::E4m3, [n, k]),
            Kind::Int8 => ("weight", "I8", Codes::Int8, [n, k]),
            Kind::Nvfp4 | Kind::Mxfp4 => ("weight_packed", "U8", Codes::E2m1, [n, k / 2]),
            Kind::Int4 => packed("weight_packed", Order::AlongColumns, n, k),
            Kind::Gptq { .. } => packed("qweight", Order::Gptq, n, k),
            Kind::Awq => packed("qweight", Order::Awq, n, k),
            Kind::Nf4 { nested } => return self.nf4(nested).map(Layout::Nf4),
        };
        let weight = self.want(part, &[elements], &[&shape]);
        let scales = self.scales(scheme, (rows_each, cols_each), groups, codes);
        let zeros = self.zeros(scheme, groups, other_convention);
        if scheme.kind == Kind::Int4 {
            self.check_shape();
        }
        let place = weight?.place();
        Some(Layout::Scaled { place, codes, zeros: zeros?, scales: scales? })
    }

    /// Rows and columns that share a scale.
    fn group(&mut self, scheme: &Scheme) -> Option<(u64, u64)> {
        let (n, k) = (self.rows, self.cols);
        let eights = match scheme.kind {
            Kind::Gptq { .. } => n.is_multiple_of(8) && k.is_multiple_of(8),
            Kind::Awq => n.is_multiple_of(8),
            Kind::Fp8Inverse
            | Kind::Fp8
            | Kind::Int8
            | Kind::Int4
            | Kind::Nvfp4
            | Kind::Mxfp4
            | Kind::Nf4 { .. } => true,
        };
        if !eights {
            let reason = format!(
                "is [{n}, {k}]; words of this format hold 8 codes: expected multiples of 8"
            );
            self.complain("qweight", reason);
            return None;
        }
        match scheme.strategy {
            Strategy::Tensor => Some((n, k)),
            Strategy::Channel => Some((1, k)),
            Strategy::Block([rows, cols]) => Some((u64::from(rows), u64::from(cols))),
            Strategy::Group(size) => {
                let size = u64::from(size);
                // GPTQ's last group may be short.
                if matches!(scheme.kind, Kind::Gptq { .. }) || k.is_multiple_of(size) {
                    return Some((1, size));
                }
                let reason = format!(
                    "has {k} columns, which groups of {size} do not divide; expected a multiple of {size}"
                );
                self.complain("weight", reason);
                None
            }
        }
    }

    fn scales(
        &mut self,
        scheme: &Scheme,
        (rows_each, cols_each): (u64, u64),
        groups: u64,
        codes: Codes,
    ) -> Option<Scales> {
        let rows = self.rows.div_ceil(rows_each);
        let (part, elements, transposed) = match scheme.kind {
            Kind::Fp8Inverse => ("weight_scale_inv", FLOATS, false),
            // Those of nf4 are read elsewhere.
            Kind::Fp8 | Kind::Int8 | Kind::Int4 | Kind::Nf4 { .. } => {
                ("weight_scale", FLOATS, false)
            }
            Kind::Mxfp4 => ("weight_scale", &["U8"][..], false),
            Kind::Nvfp4 => ("weight_scale", &["F8_E4M3"][..], false),
            Kind::Gptq { .. } | Kind::Awq => ("scales", FLOATS, true),
        };
        let shape = if transposed { [groups, rows] } else { [rows, groups] };
        let found = match scheme.strategy {
            Strategy::Tensor => self.want(part, elements, &[&[1], &[], &[1, 1]]),
            Strategy::Channel if !transposed => self.want(part, elements, &[&shape, &[rows]]),
            Strategy::Channel | Strategy::Group(_) | Strategy::Block(_) => {
                self.want(part, elements, &[&shape])
            }
        };
        let divisor = match scheme.kind {
            Kind::Nvfp4 => self.global_scale().map(Some),
            Kind::Fp8Inverse
            | Kind::Fp8
            | Kind::Int8
            | Kind::Int4
            | Kind::Gptq { .. }
            | Kind::Awq
            | Kind::Mxfp4
            | Kind::Nf4 { .. } => Some(None),
        };
        let columns = match scheme.kind {
            Kind::Gptq { .. } => self.column_groups("g_idx", scheme.act_order, cols_each, groups),
            Kind::Int4 => self.column_groups("weight_g_idx", scheme.act_order, cols_each, groups),
            Kind::Fp8Inverse
            | Kind::Fp8
            | Kind::Int8
            | Kind::Nvfp4
            | Kind::Mxfp4
            | Kind::Awq
            | Kind::Nf4 { .. } => Some(None),
        };
        let found = found?;
        let scales = Scales {
            place: found.place(),
            element: ScaleType::of(&found.entry.element)?,
            rows_each: rows_each as usize,
            cols_each: cols_each as usize,
            transposed,
            divisor: divisor?,
            groups: columns?,
        };
        if let Some(reason) = scales.unsound(self.files, codes, scheme.symmetric) {
            self.complain(part, reason);
            return None;
        }
        Some(scales)
    }

    fn global_scale(&mut self) -> Option<f32> {
        let part = "weight_global_scale";
        let found = self.want(part, &["F32"], &[&[1], &[]])?;
        let value = ScaleType::Float(DType::F32).get(self.files.slice(found.place()), 0);
        if value.is_finite() && value > 0.0 {
            return Some(value);
        }
        self.complain(part, format!("holds {value}; expected a finite number above 0"));
        None
    }

    /// The group of each column; `Some(None)` if groups are runs of columns.
    fn column_groups(
        &mut self,
        part: &str,
        required: bool,
        cols_each: u64,
        groups: u64,
    ) -> Option<Option<Vec<u32>>> {
        if !required && !self.stored.contains_key(part) {
            return Some(None);
        }
        let found = self.want(part, &["I32"], &[&[self.cols]])?;
        let words = self.files.slice(found.place()).as_chunks::<4>().0;
        let list: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        if let Some(column) = list.iter().position(|&group| u64::from(group) >= groups) {
            let group = list[column].cast_signed();
            let most = groups - 1;
            let reason = format!("puts column {column} into group {group}; expected 0 to {most}");
            self.complain(part, reason);
            return None;
        }
        if !required && groups > 1 && list.iter().all(|&group| group == 0) {
            // Some tools leave the list zero where there is no act-order.
            return Some(None);
        }
        // Act-order spreads the columns of a group; it never gives a group more of them.
        let mut counts = vec![0_u64; groups as usize];
        list.iter().for_each(|&group| counts[group as usize] += 1);
        if let Some(group) = counts.iter().position(|&count| count > cols_each) {
            let count = counts[group];
            let reason =
                format!("puts {count} columns into group {group}; expected at most {cols_each}");
            self.complain(part, reason);
            return None;
        }
        let runs = (0..).zip(&list).all(|(column, &group)| column / cols_each == u64::from(group));
        Some((!runs).then_some(list))
    }

    fn zeros(&mut self, scheme: &Scheme, groups: u64, other_convention: bool) -> Option<Zeros> {
        let n = self.rows;
        match scheme.kind {
            Kind::Fp8Inverse
            | Kind::Fp8
            | Kind::Int8
            | Kind::Nvfp4
            | Kind::Mxfp4
            | Kind::Nf4 { .. } => Some(Zeros::None),
            Kind::Int4 if scheme.symmetric => Some(Zeros::All(8.0)),
            Kind::Int4 => {
                let part = "weight_zero_point";
                if self.stored.get(part).is_some_and(|found| found.entry.element == "I8") {
                    let found = self.want(part, &["I8"], &[&[n, groups]])?;
                    return self.unpacked_zeros(part, found.place());
                }
                let order = Order::AlongRows;
                let found = self.want(part, &["I32"], &[&order.shape(n, groups)])?;
                Some(Zeros::Int4(found.place(), order, 0))
            }
            Kind::Gptq { less_one } => {
                let order = Order::Transposed;
                let found = self.want("qzeros", &["I32"], &[&order.shape(n, groups)])?;
                Some(Zeros::Int4(found.place(), order, u8::from(less_one != other_convention)))
            }
            Kind::Awq => {
                let found = self.want("qzeros", &["I32"], &[&Order::Awq.shape(n, groups)])?;
                Some(Zeros::Int4(found.place(), Order::Awq, 0))
            }
        }
    }

    /// Zero points that lie one to a byte, which must be among the codes.
    fn unpacked_zeros(&mut self, part: &str, place: Place) -> Option<Zeros> {
        let zeros = self.files.slice(place).iter().map(|byte| byte.cast_signed());
        if let Some((index, zero)) = zeros.enumerate().find(|(_, zero)| !(-8..8).contains(zero)) {
            self.complain(part, format!("holds {zero} at index {index}; expected -8 to 7"));
            return None;
        }
        Some(Zeros::Int8(place))
    }

    /// A note if a symmetric GPTQ matrix holds the zero points of the other convention than its configuration says:
    /// they are all 8, stored as 7 (v1) or 8 (v2), and some published configurations name the wrong version.
    fn zero_convention(&mut self, scheme: &Scheme) -> Option<String> {
        let Kind::Gptq { less_one } = scheme.kind else { return None };
        let found = self.stored.get("qzeros").filter(|_| scheme.symmetric)?;
        if found.entry.element != "I32" {
            return None;
        }
        let bytes = self.files.slice(found.place());
        let (own, other) = if less_one { (0x77, 0x88) } else { (0x88, 0x77) };
        if bytes.iter().all(|&byte| byte == own) {
            return None;
        }
        if bytes.iter().all(|&byte| byte == other) {
            let (said, read) = if less_one { ("gptq", "gptq_v2") } else { ("gptq_v2", "gptq") };
            return Some(format!(
                "the zero points are stored as checkpoint_format {read:?} has them, although quantization_config says \
                 {said:?}; they are read as {read:?}"
            ));
        }
        self.complain(
            "qzeros",
            "holds zero points other than 8; expected 8 everywhere, since sym is true",
        );
        None
    }

    /// compressed-tensors writes the size of the matrix beside its packed codes.
    fn check_shape(&mut self) {
        let part = "weight_shape";
        let Some(found) = self.want(part, &["I64"], &[&[2]]) else { return };
        let words = self.files.slice(found.place()).as_chunks::<8>().0;
        let sides: Vec<i64> = words.iter().map(|word| i64::from_le_bytes(*word)).collect();
        let expected = [self.rows.cast_signed(), self.cols.cast_signed()];
        if sides != expected {
            self.complain(part, format!("holds {sides:?}; config.json asks for {expected:?}"));
        }
    }

    /// Only exact names are compared: patterns and classes say too little to contradict a tensor.
    fn check_exceptions(&mut self, declared: &Declared) {
        if declared.exceptions.iter().any(|name| name == self.module) {
            self.complain("weight", "is quantised; quantization_config lists it as not quantised");
        }
    }

    fn nothing_left(&mut self, kind: Kind) {
        let left: Vec<_> = self.stored.keys().copied().collect();
        for part in left.into_iter().filter(|part| !ACTIVATIONS.contains(part)) {
            let reason =
                format!("is not expected beside {} as quantization_config has it", kind.name());
            self.complain(part, reason);
        }
    }
}

fn packed(
    part: &'static str,
    order: Order,
    rows: u64,
    cols: u64,
) -> (&'static str, &'static str, Codes, [u64; 2]) {
    (part, "I32", Codes::Int4(order), order.shape(rows, cols))
}
