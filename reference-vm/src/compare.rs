//! Decides whether two executors agree, and returns the proof.
//!
//! What is checked: lengths, that every number on both sides is finite, and that each row (one position) of the actual
//! values is within a bound that scales with the largest expected magnitude of that row. What is not: which of the two
//! is right, and whether the inputs are a meaningful test.
//!
//! The chain has two links. [`compare`] compares the reference VM with the evaluated graph; only its
//! [`Agreement<Reference>`] can become an [`Agreement<Device>`], by [`Agreement::and_device`]. No other constructor
//! exists.
//! other constructor exists.
//!
//! ```compile_fail,E0451
//! # use reference_vm::compare::{Agreement, Device, Reference};
//! fn forge(reference: Agreement<Reference>) -> Agreement<Device> {
//!     Agreement { summary: reference.summary(), by: std::marker::PhantomData }
//! }
//! ```

use std::fmt;
use std::marker::PhantomData;

use ir::{BufferId, DType, KvDtype, Scalar};
use rayon::prelude::*;

use crate::math::{LANES, argmax};
use crate::routes::{Routed, Stray};

/// Allowed error of a correct program, as a multiple of the change that the roundings of all hand-offs cause in the
/// graph's own values. Both are the greatest of many errors with one distribution, so they differ by less than two; the
/// rest is for distributions with a longer tail.
const RESPONSE_MARGIN: f64 = 4.0;

/// Steps of a running sum whose error equals that of one flag-in-data hand-off: the square of the ratio of their
/// roundings, `2^TAG_BITS`.
const STEPS_OF_A_HANDOFF: f64 = (1_u32 << (2 * abi::TAG_BITS)) as f64;

/// Allowed error of a correct device, as a multiple of the change that a device's roundings cause in the graph's own
/// logits. The device rounds the same keys and values to the same f16, at the same positions: unlike above, these are
/// not two samples of one distribution but nearly the same error.
const DEVICE_MARGIN: f64 = 2.0;

/// Products that a tensor core adds to a sum at once (`mma.m16n8k16`).
const MMA_PRODUCTS: usize = 16;

/// Largest allowed difference between actual and expected values, relative to the largest expected magnitude in a
/// position's row.
///
/// Bounds relative to each single value would be unattainable where a sum cancels. The field is private, so that a
/// tolerance is always one of those below and never a caller's choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    rel: f64,
}

impl Tolerance {
    /// Graph evaluation by another implementation in `f32`, whose order of sums is unknown. Candidates are judged by
    /// [`of_response`](Self::of_response).
    pub const REFERENCE: Self = Self { rel: 2e-4 };

    /// Device against graph evaluation: the upper limit. Candidates are judged by [`of_device`](Self::of_device). This
    /// one is used alone where the model's response is not computed, such as at the end of a long context.
    pub const DEVICE: Self = Self { rel: 5e-3 };

    /// The same with a cache of codes. A key or value at the boundary of two codes may become either, a step of an eighth at most, and a single
    /// one of them moves the logits of a small model by more than all other roundings. The limit is well below what the codes themselves
    /// cost (docs/explanation/tolerances.md), so a wrong scale or code of a head is beyond it.
    pub const DEVICE_CODES: Self = Self { rel: 5e-2 };

    /// Cached keys and values that are codes: one step of the codes of the greatest binade.
    pub const CODES: Self = Self { rel: 0.125 };

    /// The upper limit of a device's tolerance.
    #[must_use]
    pub fn device_limit(kv: KvDtype) -> Self {
        match kv {
            KvDtype::F16 => Self::DEVICE,
            KvDtype::E4m3 => Self::DEVICE_CODES,
        }
    }

    /// For one sum of `len` products whose inputs had type `dtype`: rounding errors grow like a random walk, and eight
    /// of its standard deviations leave no false alarms.
    #[must_use]
    pub fn of_reduction(dtype: DType, len: usize) -> Self {
        let roundoff = match dtype.scalar() {
            Scalar::F32 => 2f64.powi(-24),
            Scalar::F16 => 2f64.powi(-11),
            Scalar::Bf16 | Scalar::Int8 => 2f64.powi(-8),
            Scalar::E4m3 | Scalar::Int4 => 2f64.powi(-4),
            Scalar::E2m1 => 2f64.powi(-2),
        };
        Self { rel: 8.0 * roundoff * (len.max(1) as f64).sqrt() }
    }

    /// Reference VM against graph evaluation. `response` is the [`distance`] between the graph's values with and
    /// without every hand-off rounded like a flag-in-data word: the effect of roundings on this model at these tokens.
    /// Sums of at most `longest` products in another order add to it. Derived in docs/explanation/tolerances.md.
    ///
    /// It is at least the error of one sum, and never more than a device is allowed.
    #[must_use]
    pub fn of_response(response: f64, longest: usize) -> Self {
        let steps = longest.div_ceil(LANES);
        let reordered = (1.0 + steps as f64 / STEPS_OF_A_HANDOFF).sqrt();
        let rel = RESPONSE_MARGIN * reordered * response;
        Self { rel: rel.max(Self::of_reduction(DType::F32, steps).rel).min(Self::DEVICE.rel) }
    }

    /// Device against graph evaluation. `response` is the distance between the graph's logits with and without rounding
    /// where the device rounds ([`with_device_roundings`](crate::eval::Evaluator::with_device_roundings)). Tensor cores
    /// add [`MMA_PRODUCTS`] products at a time and truncate, always to the same side; so a sum of `longest` products
    /// may lose one unit in the last place each time. Derived in docs/explanation/tolerances.md.
    ///
    /// It is never more than [`device_limit`](Self::device_limit), however much the model amplifies roundings.
    #[must_use]
    pub fn of_device(kv: KvDtype, response: f64, longest: usize) -> Self {
        let cut_off = 2f64.powi(-23) * longest.div_ceil(MMA_PRODUCTS) as f64;
        let rel = DEVICE_MARGIN * response + cut_off;
        Self { rel: rel.min(Self::device_limit(kv).rel) }
    }

    /// The larger of the two tolerances.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { rel: self.rel.max(other.rel) }
    }

    /// Judges the routes of a run by the graph's logits on these routes: each may choose an expert in place of another
    /// whose logit is greater by what rounding moves both of them. The layer of the error is counted among those with
    /// experts.
    ///
    /// # Errors
    /// The route that is least explained.
    pub fn explains(self, routed: &Routed) -> Result<(), Disagreement> {
        let Stray { position, layer, gap } = routed.worst();
        let bound = 2.0 * self.rel;
        if gap <= bound {
            return Ok(());
        }
        Err(Disagreement::Stray { position, layer, gap, bound })
    }

    /// The tolerance relative to the row's largest expected magnitude.
    #[must_use]
    pub fn rel(self) -> f64 {
        self.rel
    }
}

/// The compared values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// Logits, one row per position.
    Logits,
    /// Cached keys of a layer, one row per position.
    Keys(u32),
    /// Cached values of a layer, one row per position.
    Values(u32),
    /// Contents of a buffer after each position.
    Buffer(BufferId),
    /// Chosen tokens, one per position.
    Chosen,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Logits => f.write_str("logits"),
            Self::Keys(layer) => write!(f, "keys of layer {layer}"),
            Self::Values(layer) => write!(f, "values of layer {layer}"),
            Self::Buffer(buffer) => write!(f, "buffer {buffer}"),
            Self::Chosen => f.write_str("chosen tokens"),
        }
    }
}

/// A difference between two executors: the first position that differs, and its worst element.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Disagreement {
    /// There was nothing to compare, which proves nothing.
    #[error("there are no {what} to compare at position {position}")]
    Nothing {
        /// What was to be compared.
        what: What,
        /// The position without elements; 0 if there are no positions.
        position: usize,
    },
    /// The numbers of positions differ.
    #[error("{what} have {got} positions instead of {want}")]
    Positions {
        /// What was compared.
        what: What,
        /// Expected positions.
        want: usize,
        /// Actual positions.
        got: usize,
    },
    /// The numbers of elements at a position differ.
    #[error("{what} have {got} elements instead of {want} at position {position}")]
    Elements {
        /// What was compared.
        what: What,
        /// The position.
        position: usize,
        /// Expected elements.
        want: usize,
        /// Actual elements.
        got: usize,
    },
    /// NaN or an infinity on either side.
    #[error("{what} are not finite at position {position}, index {index}: got {got}, want {want}")]
    NotFinite {
        /// What was compared.
        what: What,
        /// The position.
        position: usize,
        /// The element.
        index: usize,
        /// Actual value.
        got: f32,
        /// Expected value.
        want: f32,
    },
    /// A difference exceeds the bound.
    #[error(
        "{what} differ at position {position}, index {index}: got {got}, want {want} within {bound:.3e}"
    )]
    Beyond {
        /// What was compared.
        what: What,
        /// The position.
        position: usize,
        /// The element.
        index: usize,
        /// Actual value.
        got: f32,
        /// Expected value.
        want: f32,
        /// Largest difference allowed.
        bound: f64,
    },
    /// Rounding does not explain a choice of experts.
    #[error(
        "experts were chosen at position {position}, layer {layer} of those with experts, whose logits are {gap:.3e} of the greatest below those of others, where rounding explains {bound:.3e}"
    )]
    Stray {
        /// The position.
        position: usize,
        /// The layer, counted among those with experts.
        layer: usize,
        /// The distance, as a share of the greatest logit's magnitude.
        gap: f64,
        /// Largest distance allowed.
        bound: f64,
    },
    /// The device continued with a token that is not the best of its own logits.
    #[error(
        "token {got} was chosen at position {position} where the device's own logits say {want}"
    )]
    Chosen {
        /// The position.
        position: usize,
        /// The token chosen.
        got: u32,
        /// The most likely token.
        want: u32,
    },
}

impl Disagreement {
    /// The same, for rows whose first one is position `first`.
    #[must_use]
    pub fn from_position(mut self, first: usize) -> Self {
        match &mut self {
            Self::Nothing { position, .. }
            | Self::Elements { position, .. }
            | Self::NotFinite { position, .. }
            | Self::Chosen { position, .. }
            | Self::Beyond { position, .. }
            | Self::Stray { position, .. } => *position += first,
            Self::Positions { .. } => {}
        }
        self
    }
}

/// Marks an agreement of the reference VM with the evaluated graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {}

/// Marks an agreement of the device with the evaluated graph, given that the reference VM agrees too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {}

/// Proof that an executor produced the expected values.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Agreement<By> {
    summary: Summary,
    by: PhantomData<By>,
}

/// How closely two executors agree.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Largest difference of any element.
    pub max_abs_err: f64,
    /// Largest over positions of: largest difference over largest expected magnitude.
    pub max_rel_err: f64,
    /// Largest over positions of: largest difference over the allowed one.
    pub max_tolerance_used: f64,
    /// Fraction of positions whose largest logit is at the same index.
    pub top1_agreement: f64,
}

/// Distance between rows: the largest over rows of the largest difference over the largest expected magnitude. Infinite
/// if the rows do not pair up, or where a value is not finite.
pub fn distance<'a>(
    expected: impl ExactSizeIterator<Item = &'a [f32]>,
    actual: impl ExactSizeIterator<Item = &'a [f32]>,
) -> f64 {
    if expected.len() != actual.len() {
        return f64::INFINITY;
    }
    // The kind of rows and the tolerance only matter for the error's text.
    let unbounded = Tolerance { rel: f64::INFINITY };
    let of = |(want, got): (&[f32], &[f32])| {
        compare_row(What::Logits, 0, want, got, unbounded)
            .map_or(f64::INFINITY, |row| row.max_rel_err)
    };
    expected.zip(actual).map(of).fold(0.0, f64::max)
}

/// Compares the reference VM's logits with the evaluated graph's, one row per position.
///
/// # Errors
/// The first position that disagrees.
pub fn compare(
    expected: &[Vec<f32>],
    actual: &[Vec<f32>],
    tolerance: Tolerance,
) -> Result<Agreement<Reference>, Disagreement> {
    let summary = compare_logits(expected, actual, None, tolerance)?;
    Ok(Agreement { summary, by: PhantomData })
}

impl<By> Agreement<By> {
    /// How closely the executors agree.
    #[must_use]
    pub fn summary(&self) -> Summary {
        self.summary
    }

    /// Extends the agreement to values other than logits, one row per position: the KV cache, or a buffer.
    ///
    /// # Errors
    /// The first position that disagrees; the agreement is lost.
    pub fn and_values<'a>(
        mut self,
        what: What,
        expected: impl ExactSizeIterator<Item = &'a [f32]>,
        actual: impl ExactSizeIterator<Item = &'a [f32]>,
        tolerance: Tolerance,
    ) -> Result<Self, Disagreement> {
        check_positions(what, expected.len(), actual.len())?;
        for (position, (want, got)) in expected.zip(actual).enumerate() {
            self.summary.include(&compare_row(what, position, want, got, tolerance)?);
        }
        Ok(self)
    }
}

impl Agreement<Reference> {
    /// Compares the device's logits with the same expected values, and its chosen tokens with its own logits: the
    /// second link of the chain.
    ///
    /// # Errors
    /// The first position that disagrees.
    pub fn and_device(
        self,
        expected: &[Vec<f32>],
        actual: &[Vec<f32>],
        chosen: &[u32],
        tolerance: Tolerance,
    ) -> Result<Agreement<Device>, Disagreement> {
        check_positions(What::Chosen, expected.len(), chosen.len())?;
        let summary = compare_logits(expected, actual, Some(chosen), tolerance)?;
        Ok(Agreement { summary, by: PhantomData })
    }
}

impl Summary {
    fn include(&mut self, other: &Self) {
        self.max_abs_err = self.max_abs_err.max(other.max_abs_err);
        self.max_rel_err = self.max_rel_err.max(other.max_rel_err);
        self.max_tolerance_used = self.max_tolerance_used.max(other.max_tolerance_used);
    }
}

fn compare_logits(
    expected: &[Vec<f32>],
    actual: &[Vec<f32>],
    chosen: Option<&[u32]>,
    tolerance: Tolerance,
) -> Result<Summary, Disagreement> {
    let what = What::Logits;
    check_positions(what, expected.len(), actual.len())?;
    // Rows are long and many, so they are compared in parallel; the first position that disagrees is still the one
    // reported.
    let rows: Vec<_> = (expected.par_iter().zip(actual).enumerate())
        .map(|(position, (want, got))| {
            let row = compare_row(what, position, want, got, tolerance)?;
            let likeliest = argmax(got);
            if let Some(&got) = chosen.and_then(|chosen| chosen.get(position))
                && got != likeliest
            {
                return Err(Disagreement::Chosen { position, got, want: likeliest });
            }
            Ok((row, argmax(want) == likeliest))
        })
        .collect();
    let (mut summary, mut same) = (Summary::default(), 0);
    for row in rows {
        let (row, top) = row?;
        summary.include(&row);
        same += usize::from(top);
    }
    summary.top1_agreement = same as f64 / expected.len() as f64;
    Ok(summary)
}

fn check_positions(what: What, want: usize, got: usize) -> Result<(), Disagreement> {
    if want != got {
        return Err(Disagreement::Positions { what, want, got });
    }
    if want == 0 {
        return Err(Disagreement::Nothing { what, position: 0 });
    }
    Ok(())
}

/// Compares one row, without the index of the largest element.
fn compare_row(
    what: What,
    position: usize,
    want: &[f32],
    got: &[f32],
    tolerance: Tolerance,
) -> Result<Summary, Disagreement> {
    if want.len() != got.len() {
        return Err(Disagreement::Elements { what, position, want: want.len(), got: got.len() });
    }
    if want.is_empty() {
        return Err(Disagreement::Nothing { what, position });
    }
    let pairs = || want.iter().copied().zip(got.iter().copied()).enumerate();
    if let Some((index, (want, got))) =
        pairs().find(|(_, (want, got))| !want.is_finite() || !got.is_finite())
    {
        return Err(Disagreement::NotFinite { what, position, index, got, want });
    }
    let largest = want.iter().fold(0f64, |largest, &v| largest.max(f64::from(v).abs()));
    let mut worst = (0, 0f64);
    for (index, (want, got)) in pairs() {
        let difference = (f64::from(want) - f64::from(got)).abs();
        if difference > worst.1 {
            worst = (index, difference);
        }
    }
    let (index, max_abs) = worst;
    let bound = tolerance.rel * largest;
    if max_abs > bound {
        return Err(Disagreement::Beyond {
            what,
            position,
            index,
            got: got[index],
            want: want[index],
            bound,
        });
    }
    if max_abs == 0.0 {
        return Ok(Summary::default());
    }
    let (max_rel_err, max_tolerance_used) = (max_abs / largest, max_abs / bound);
    Ok(Summary { max_abs_err: max_abs, max_rel_err, max_tolerance_used, top1_agreement: 0.0 })
}

#[cfg(test)]
mod tests;
