//! Quantised weights: which stored tensors make up a matrix, and the values that they mean.
//!
//! Codes of 8 bits with a scale for each row are given as they are stored, and codes with scales for groups of columns in
//! blocks with them. Every matrix of another quantised folder is dequantised when it is first read: to f32, or to the 16
//! bits that nf4 rounds to. The values are those of the formats' definitions, evaluated in f32 in their order.

mod blocks;
pub(crate) mod checkpoint;
mod codes;
mod declared;
mod grouped;
mod matrix;
mod nf4;
mod stored;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use ir::{DType, FileRange, Graph, Tensor, TensorId, Weights};

pub(crate) use self::blocks::BlockType;
use self::checkpoint::Recognised;
pub(crate) use self::declared::Declared;
use self::grouped::Grouped;
pub(crate) use self::matrix::{Layout, Matrix, View};
use crate::error::Problem;
use crate::parallel;
use crate::pieces::{Change, Piece, Strided};
use crate::store::{self, Files, Found, Opening, Place};

/// Weights of which the matrices are dequantised, each when it is first read.
struct Dequantised {
    files: Files,
    /// By [`TensorId`].
    sources: Vec<Source>,
    made: Vec<OnceLock<Vec<u8>>>,
}

/// Where a tensor comes from.
pub(crate) enum Source {
    /// It is stored.
    Stored(Place),
    /// It is a piece of a stored one that is not a matrix.
    Piece(store::Source),
    /// It is made: rows of this many bytes at a place, in another order.
    Rows(Matrix, Place, usize),
    /// It is made: dequantised, in a type that holds its values.
    Made(Matrix, DType),
    /// It is made: codes in blocks.
    Grouped(Grouped),
    /// The scales of a matrix's rows, f32.
    Scales(Vec<u8>),
}

impl Source {
    /// The bytes of a tensor that is made; `None` if it is there.
    fn make(&self, files: &Files) -> Option<Vec<u8>> {
        match self {
            Self::Rows(matrix, place, row_bytes) => {
                Some(matrix.gather(files.slice(*place), *row_bytes))
            }
            Self::Made(matrix, dtype) => Some(matrix.dequantise(files, *dtype)),
            Self::Grouped(grouped) => Some(grouped.encode(files)),
            Self::Stored(_) | Self::Piece(_) | Self::Scales(_) => None,
        }
    }
}

/// In which form quantised matrices are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// As codes where the kernel takes them, else as f32.
    Streamed,
    /// As f32.
    Dequantised,
}

impl Weights for Dequantised {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        let i = tensor.index();
        match &self.sources[i] {
            Source::Stored(place) => self.files.slice(*place),
            Source::Piece(piece) => piece.bytes(&self.files),
            Source::Scales(bytes) => bytes,
            made @ (Source::Rows(..) | Source::Made(..) | Source::Grouped(_)) => {
                self.made[i].get_or_init(|| made.make(&self.files).unwrap_or_default())
            }
        }
    }

    fn read(&self, tensor: TensorId) -> Cow<'_, [u8]> {
        let i = tensor.index();
        let make = || self.sources[i].make(&self.files);
        let made = if self.made[i].get().is_none() { make() } else { None };
        made.map_or_else(|| Cow::Borrowed(self.bytes(tensor)), Cow::Owned)
    }

    fn file_range(&self, tensor: TensorId) -> Option<FileRange> {
        match &self.sources[tensor.index()] {
            Source::Stored(place) => Some(self.files.range(*place)),
            Source::Piece(piece) => piece.file_range(&self.files),
            Source::Rows(..) | Source::Made(..) | Source::Grouped(_) | Source::Scales(_) => None,
        }
    }
}

/// Matches the tensors of a quantised folder with the graph, whose matrices become codes or f32.
pub(crate) fn open(
    files: Files,
    mut found: HashMap<String, Found>,
    graph: &mut Graph,
    pieces: &[Option<Piece>],
    declared: &Declared,
    form: Form,
) -> Result<Opening, Vec<Problem>> {
    let tied = graph.tied();
    let mut problems = Vec::new();
    let mut sources = Vec::with_capacity(graph.tensors.len());
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    let mut notes: BTreeMap<String, usize> = BTreeMap::new();
    let mut cuts = store::Cuts::default();
    let mut whole = Matrices { files: &files, declared, known: HashMap::new() };
    for (tensor, piece) in graph.tensors.iter_mut().zip(pieces) {
        if tensor.shape.len() != 2 {
            let source = match piece {
                Some(piece) => {
                    cuts.cut(tensor, piece, &mut found, &mut problems).map(Source::Piece)
                }
                None => store::take(tensor, &mut found, &mut problems).map(Source::Stored),
            };
            sources.extend(source);
            continue;
        }
        tensor.dtype = DType::F32;
        match whole.of(tensor, piece.as_ref(), &mut found) {
            Ok(Recognised { matrix, kind, note }) => {
                sources.push(Source::Made(matrix, DType::F32));
                if let Some(kind) = kind {
                    *kinds.entry(kind.name()).or_default() += 1;
                }
                if let Some(note) = note {
                    *notes.entry(note).or_default() += 1;
                }
            }
            Err(more) => problems.extend(more),
        }
    }
    graph.dtype = DType::F32;
    found.retain(|name, found| !is_zero_bias(name, found, &files));
    problems.extend(store::extra(found, tied).into_iter().map(explained));
    if problems.is_empty() && kinds.is_empty() {
        let reason = format!("is {:?}, but no tensor is quantised", declared.method);
        problems.push(Problem::new("quantization_config.quant_method", reason));
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    // Several tensors may be rows of one that is stored.
    let names = graph.tensors.iter().zip(pieces);
    let names = names.map(|(tensor, piece)| piece.as_ref().map_or(&tensor.name, |p| &p.name));
    let names: Vec<String> = names.cloned().collect();
    let (weights, mut all) = given(files, sources, graph, &kinds, form, &names)?;
    if declared.activations {
        all.push(
            "quantization_config describes quantised activations; they are not quantised here (W8A8 runs as W8A16)"
                .to_owned(),
        );
    }
    all.extend(notes.into_iter().map(|(note, count)| format!("{count} matrices: {note}")));
    Ok((weights, all))
}

/// Finds matrices, and those that several tensors are rows of once.
struct Matrices<'a> {
    files: &'a Files,
    declared: &'a Declared,
    /// By the name of the stored matrix; `None` if it has problems, which are reported.
    known: HashMap<&'a str, Option<Recognised>>,
}

impl<'a> Matrices<'a> {
    fn of(
        &mut self,
        tensor: &Tensor,
        piece: Option<&'a Piece>,
        found: &mut HashMap<String, Found>,
    ) -> Result<Recognised, Vec<Problem>> {
        let (rows, cols) = (tensor.shape[0], tensor.shape[1]);
        let Some(piece) = piece else {
            return checkpoint::matrix(
                &tensor.name,
                (rows, cols),
                found,
                self.files,
                self.declared,
            );
        };
        let known = match self.known.entry(&piece.name) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(vacant) => {
                let recognised = match &piece.change {
                    // Experts lie transposed: rows of codes are the columns of the unquantised form.
                    Change::Strided(Strided { shape, .. }) => {
                        let shape = [shape[0], shape[2], shape[1]].map(u64::from);
                        checkpoint::stacked(&piece.name, shape, found, self.files)
                    }
                    Change::None | Change::Order(_) | Change::Affine { .. } => {
                        let size = (piece.of, cols);
                        checkpoint::matrix(&piece.name, size, found, self.files, self.declared)
                    }
                };
                match recognised {
                    Ok(recognised) => vacant.insert(Some(recognised)),
                    Err(problems) => {
                        vacant.insert(None);
                        return Err(problems);
                    }
                }
            }
        };
        let Some(known) = known else { return Err(Vec::new()) };
        let matrix = Matrix { view: View::of(piece, rows), ..known.matrix.clone() };
        Ok(Recognised { matrix, kind: known.kind, note: known.note.clone() })
    }
}

/// The weights of these sources, in the order of the graph's tensors, unless some are damaged, and what a user should know
/// of them. The matrices become codes if `form` says so and all can; else they are dequantised. `names`: of the stored
/// tensors. This reads all e4m3 codes and all blocks of GGUF once.
pub(crate) fn given(
    files: Files,
    mut sources: Vec<Source>,
    graph: &mut Graph,
    kinds: &BTreeMap<&str, usize>,
    form: Form,
    names: &[String],
) -> Result<Opening, Vec<Problem>> {
    check_codes(&files, &sources, names)?;
    let note = if form == Form::Streamed && stored::stream(graph, &mut sources, &files) {
        streamed_summary(graph, kinds)
    } else {
        summary(graph, kinds, &files, &sources)
    };
    let made = sources.iter().map(|_| OnceLock::new()).collect();
    Ok((Box::new(Dequantised { files, sources, made }), vec![note]))
}

/// Every stored matrix whose codes or scales are damaged, by the names of the tensors.
fn check_codes(files: &Files, sources: &[Source], names: &[String]) -> Result<(), Vec<Problem>> {
    let damage: Vec<OnceLock<String>> = sources.iter().map(|_| OnceLock::new()).collect();
    let matrix = |i: usize| match sources.get(i)? {
        Source::Made(matrix, _) => Some(matrix),
        Source::Stored(_)
        | Source::Piece(_)
        | Source::Rows(..)
        | Source::Grouped(_)
        | Source::Scales(_) => None,
    };
    let next = AtomicUsize::new(0);
    let scan = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        let Some(cell) = damage.get(i) else { return };
        if let Some(reason) = matrix(i).and_then(|matrix| matrix.damage(files)) {
            cell.get_or_init(|| reason);
        }
    };
    let bytes = (0..sources.len()).filter_map(matrix).map(Matrix::checked_bytes).sum::<u64>();
    parallel::run(bytes as usize, &scan);
    let reasons = damage.iter().enumerate();
    let mut problems: Vec<Problem> =
        reasons.filter_map(|(i, reason)| Some(Problem::new(&names[i], reason.get()?))).collect();
    problems.dedup();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Whether a tensor is a bias of zeros, which GPTQ's tools write for every matrix.
fn is_zero_bias(name: &str, found: &Found, files: &Files) -> bool {
    name.ends_with("_proj.bias") && files.slice(found.place()).iter().all(|&byte| byte == 0)
}

fn explained(problem: Problem) -> Problem {
    let scales = ["k_scale", "v_scale", "kv_scale", "q_scale"];
    if scales.iter().any(|scale| problem.subject.ends_with(&format!(".{scale}"))) {
        let reason = "is of a quantised key/value cache, which is not supported";
        return Problem::new(problem.subject, reason);
    }
    problem
}

/// What a user should know about a model whose codes are streamed.
fn streamed_summary(graph: &Graph, kinds: &BTreeMap<&str, usize>) -> String {
    let matrices = graph.tensors.iter().filter(|tensor| tensor.shape.len() == 2).count();
    if kinds.is_empty() {
        return format!("{matrices} matrices in {}, none quantised", graph.dtype.name());
    }
    let list: Vec<_> = kinds.iter().map(|(kind, count)| format!("{count} as {kind}")).collect();
    let how = if graph.tensors.iter().any(|tensor| tensor.dtype.is_scaled()) {
        "multiplied as codes".to_owned()
    } else {
        format!("dequantised to {} when they are read", graph.dtype.name())
    };
    format!(
        "of {matrices} matrices {} are quantised: {}. They are {how}",
        kinds.values().sum::<usize>(),
        list.join(", ")
    )
}

/// What a user should know about a model that is dequantised.
fn summary(
    graph: &Graph,
    kinds: &BTreeMap<&str, usize>,
    files: &Files,
    sources: &[Source],
) -> String {
    let list: Vec<_> = kinds.iter().map(|(kind, count)| format!("{count} as {kind}")).collect();
    let matrices = sources.iter().filter(|source| matches!(source, Source::Made(..))).count();
    let mb = |bytes: u64| bytes.div_ceil(1_000_000);
    format!(
        "of {matrices} matrices {} are quantised: {}. They are dequantised to f32 when they are read: the model takes {} MB \
         instead of the {} MB of its files and is no faster than an f32 copy",
        kinds.values().sum::<usize>(),
        if list.is_empty() { "none".to_owned() } else { list.join(", ") },
        mb(graph.weight_bytes() as u64),
        mb(files.bytes()),
    )
}
