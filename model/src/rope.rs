//! Rotary frequencies, with the roundings of the reference implementation.
//!
//! An error in a frequency grows with the position, so every step below uses PyTorch's precision and order: single
//! precision throughout, and a scalar over a tensor is the tensor's reciprocal times the scalar. Only PyTorch's power
//! depends on the CPU, by at most the last bit; ours is the correctly rounded one.

/// Scaling of a model's frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, with a smooth transition between them (Llama 3.1 and
    /// later).
    Llama3 {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Longest sequence before scaling.
        original: u32,
    },
}

/// The rotary position embedding of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: Scaling,
}

impl Rope {
    /// Unscaled frequencies with this base.
    #[must_use]
    pub const fn plain(theta: f64) -> Self {
        Self { theta, scaling: Scaling::Default }
    }

    /// The `head_dim / 2` inverse frequencies, scaling applied.
    #[must_use]
    pub fn inv_freq(&self, head_dim: u32) -> Vec<f32> {
        let base = f64::from(self.theta as f32);
        let dim = head_dim as f32;
        (0..head_dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f32 / dim;
                // A double-precision power rounded once gives the correct single-precision power.
                let wave = base.powf(f64::from(exponent)) as f32;
                self.scaling.apply(1.0 / wave)
            })
            .collect()
    }
}

impl Scaling {
    fn apply(self, freq: f32) -> f32 {
        match self {
            Self::Default => freq,
            Self::Linear { factor } => freq / factor as f32,
            Self::Llama3 { factor, low, high, original } => {
                let original = f64::from(original);
                let longest_kept = (original / high) as f32;
                let shortest_divided = (original / low) as f32;
                let wavelength = (1.0 / freq) * (2.0 * std::f64::consts::PI) as f32;
                if wavelength > shortest_divided {
                    freq / factor as f32
                } else if wavelength < longest_kept {
                    freq
                } else {
                    let ratio = (1.0 / wavelength) * original as f32;
                    let smooth = (ratio - low as f32) / (high - low) as f32;
                    (1.0 - smooth) * freq / factor as f32 + smooth * freq
                }
            }
        }
    }
}
