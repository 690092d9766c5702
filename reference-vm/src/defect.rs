//! Mutations of the machine: deliberate mistakes on request, to test the checks that judge machines.
//!
//! A kernel can be wrong in ways that no operand of a program expresses: the function of the MLP, the row of the cache,
//! the pairing of rotated elements. Each defect is one such mistake, requested by
//! [`Machine::with_defect`](crate::machine::Machine::with_defect); by default a machine has none.

use abi::Activation;

use crate::math::{activate, rotate, rotations};
use crate::memory::Append;

macro_rules! defects {
    ($($(#[doc = $doc:literal])+ $variant:ident $name:literal)+) => {
        /// A mistake.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Defect { $($(#[doc = $doc])+ $variant),+ }

        impl Defect {
            /// Every mistake.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// A short description.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }
    };
}

defects! {
    /// The embedding row of the token after the one fed.
    NextToken "embeds the next token"
    /// Products of the normed input without the scale of the norm.
    NoNormScale "leaves out the scale of the norm"
    /// Queries rotated as at the next position.
    LateQueries "rotates queries one position late"
    /// Keys rotated as at the next position.
    LateKeys "rotates keys one position late"
    /// Queries and keys rotated as at the next position: no logit changes, but the cache does.
    LateBoth "rotates queries and keys one position late"
    /// Rotated the other way round.
    Backwards "rotates backwards"
    /// Element `2 i` rotated with element `2 i + 1`.
    Neighbours "rotates neighbours as pairs"
    /// The values of a split shifted by one against its keys.
    ShiftedKeys "pairs keys with the next values"
    /// The first key of each split left out, unless it is the only one.
    NoOldest "drops the oldest key of a split"
    /// The last key of each split left out, unless it is the only one.
    NoNewest "drops the newest key of a split"
    /// Keys and values stored as those of the next head.
    NextHead "stores keys and values under the next head"
    /// Values stored one element on, the last one first.
    TurnedValues "stores values one element on"
    /// Sums of exponentials of the splits forgotten.
    NoTotals "forgets the sums of the splits"
    /// Greatest scores of the splits forgotten.
    NoGreatest "forgets the greatest scores of the splits"
    /// The residual not added.
    NoResidual "drops the residual"
    /// The residual added twice.
    TwiceResidual "adds the residual twice"
    /// `relu(gate) * up`.
    Relu "relu for silu"
    /// `gelu(gate) * up`, in its `tanh` form, for `silu`, or the reverse.
    Gelu "gelu for silu, or silu for gelu"
    /// `gate * up`.
    Linear "no activation"
    /// The least likely candidate chosen.
    LeastLikely "chooses the worst candidate"
}

/// A mistake in how a sequence of a window takes the keys and values of those before it. Without a window it has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum WindowDefect {
    /// Read from the cache, where this step's rows have not arrived.
    StaleRows,
    /// Those of the sequence itself instead.
    OwnRows,
    /// Keys rotated as at the position of the sequence itself.
    OwnPosition,
}

impl WindowDefect {
    /// Every mistake.
    pub const ALL: [Self; 3] = [Self::StaleRows, Self::OwnRows, Self::OwnPosition];
}

/// The rotated vectors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rotated {
    Queries,
    Keys,
}

impl Rotated {
    /// Index of the read that holds this vector's norm weights, in an attention task.
    pub(crate) fn norm(self) -> usize {
        match self {
            Self::Queries => 1,
            Self::Keys => 2,
        }
    }
}

/// The rotation of a head.
pub(crate) struct Rotation {
    by: Vec<(f32, f32)>,
    neighbours: bool,
}

impl Rotation {
    pub(crate) fn apply(&self, head: &mut [f32]) {
        if !self.neighbours {
            return rotate(head, &self.by);
        }
        for (pair, &(cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(&self.by) {
            let [low, high] = *pair;
            *pair = [low * cos - high * sin, high * cos + low * sin];
        }
    }
}

/// In each of these functions, `None` gives the op's correct behaviour.
impl Defect {
    pub(crate) fn token(defect: Option<Self>, token: u32, vocab: u32) -> u32 {
        if defect == Some(Self::NextToken) { (token + 1) % vocab } else { token }
    }

    pub(crate) fn norm_scale(defect: Option<Self>, scale: f64) -> f64 {
        if defect == Some(Self::NoNormScale) { 1.0 } else { scale }
    }

    pub(crate) fn rotation(
        defect: Option<Self>,
        which: Rotated,
        position: u32,
        (table, head_dim): (&[f32], u32),
    ) -> Rotation {
        let late = match which {
            Rotated::Queries => defect == Some(Self::LateQueries),
            Rotated::Keys => defect == Some(Self::LateKeys),
        } || defect == Some(Self::LateBoth);
        let mut by = rotations(position + u32::from(late), table, head_dim);
        if defect == Some(Self::Backwards) {
            by.iter_mut().for_each(|(_, sin)| *sin = -*sin);
        }
        Rotation { by, neighbours: defect == Some(Self::Neighbours) }
    }

    /// Applies the defect to the keys and values of a split.
    pub(crate) fn keys(defect: Option<Self>, keys: &mut Vec<(&[f32], &[f32])>) {
        match defect {
            Some(Self::NoOldest) if keys.len() > 1 => drop(keys.remove(0)),
            Some(Self::NoNewest) if keys.len() > 1 => drop(keys.pop()),
            Some(Self::ShiftedKeys) => {
                let mut values: Vec<_> = keys.iter().map(|&(_, value)| value).collect();
                values.rotate_left(1);
                for (pair, value) in keys.iter_mut().zip(values) {
                    pair.1 = value;
                }
            }
            _ => {}
        }
    }

    /// Applies the defect to the greatest scores or the sums of partial results, `stride` words each.
    pub(crate) fn partials(defect: Option<Self>, mut words: Vec<f32>, stride: usize) -> Vec<f32> {
        for partial in words.chunks_exact_mut(stride) {
            if defect == Some(Self::NoGreatest) {
                partial[0] = 0.0;
            } else if defect == Some(Self::NoTotals) {
                partial[1] = 1.0;
            }
        }
        words
    }

    pub(crate) fn append(defect: Option<Self>, mut append: Append, kv_heads: u32) -> Append {
        if defect == Some(Self::NextHead) {
            append.kv_head = (append.kv_head + 1) % kv_heads;
        } else if defect == Some(Self::TurnedValues) {
            append.value.rotate_right(1);
        }
        append
    }

    pub(crate) fn residual(defect: Option<Self>, residual: f32) -> f32 {
        match defect {
            Some(Self::NoResidual) => 0.0,
            Some(Self::TwiceResidual) => 2.0 * residual,
            _ => residual,
        }
    }

    pub(crate) fn activation(defect: Option<Self>, right: Activation, gate: f32) -> f32 {
        match defect {
            Some(Self::Relu) => gate.max(0.0),
            Some(Self::Gelu) => match right {
                Activation::Silu => activate(Activation::GeluTanh, gate),
                Activation::GeluTanh | Activation::ClampedSilu => activate(Activation::Silu, gate),
            },
            Some(Self::Linear) => gate,
            _ => activate(right, gate),
        }
    }

    /// The rank of a candidate with this logit.
    pub(crate) fn rank(defect: Option<Self>, value: f32) -> f32 {
        if defect == Some(Self::LeastLikely) { -value } else { value }
    }
}
