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
    /// Low frequencies divided by `factor`, high ones kept, with a ramp between them, and cosine and sine multiplied.
    Yarn {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Longest sequence before scaling.
        original: u32,
        /// Frequencies of more rotations in `original` positions are kept.
        fast: f64,
        /// Frequencies of fewer rotations are divided.
        slow: f64,
        /// Whether the ramp begins and ends at whole frequencies.
        truncate: bool,
        /// Factor of cosine and sine.
        amplitude: f64,
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
        self.inv_freq_divided(head_dim, &[])
    }

    /// The same with each frequency divided by the divisor at its place, if there is one.
    pub(crate) fn inv_freq_divided(&self, head_dim: u32, divisors: &[f32]) -> Vec<f32> {
        let base = f64::from(self.theta as f32);
        let dim = head_dim as f32;
        let divisors = divisors.iter().copied().chain(std::iter::repeat(1.0));
        let waves = (0..head_dim / 2).zip(divisors).map(|(i, divisor)| {
            let exponent = (2 * i) as f32 / dim;
            // A double-precision power rounded once gives the correct single-precision power.
            base.powf(f64::from(exponent)) as f32 * divisor
        });
        match self.scaling {
            Scaling::Yarn { .. } => self.yarn(waves.collect(), head_dim),
            Scaling::Default | Scaling::Linear { .. } | Scaling::Llama3 { .. } => {
                waves.map(|wave| self.scaling.apply(1.0 / wave)).collect()
            }
        }
    }

    fn yarn(&self, waves: Vec<f32>, head_dim: u32) -> Vec<f32> {
        let Scaling::Yarn { factor, original, fast, slow, truncate, .. } = self.scaling else {
            return waves;
        };
        let dim = f64::from(head_dim);
        // The frequency that turns so often in `original` positions.
        let place = |turns: f64| {
            let wave = f64::from(original) / (turns * 2.0 * std::f64::consts::PI);
            dim * wave.ln() / (2.0 * self.theta.ln())
        };
        let (low, high) = match truncate {
            true => (place(fast).floor(), place(slow).ceil()),
            false => (place(fast), place(slow)),
        };
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        let high = if low == high { high + 0.001 } else { high };
        let blend = |(i, wave): (usize, f32)| {
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            1.0 / (factor as f32 * wave) * (1.0 - kept) + 1.0 / wave * kept
        };
        waves.into_iter().enumerate().map(blend).collect()
    }
}

impl Scaling {
    /// Factor of cosine and sine.
    pub(crate) fn factor(self) -> f64 {
        if let Self::Yarn { amplitude, .. } = self { amplitude } else { 1.0 }
    }

    fn apply(self, freq: f32) -> f32 {
        match self {
            Self::Default | Self::Yarn { .. } => freq,
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
