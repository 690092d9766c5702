//! Device memory for sampling: per session its settings, the set of its tokens and its biases; and one list in total, since one step runs at a
//! time.

use abi::{
    BIAS_MAX, Bias, CONSUMER_WARPS, LISTED_BYTES, SAMPLED_VOCAB_MAX, SAMPLER_ALIGN, SAMPLER_BYTES,
    SAMPLING_MASKED, SessionSampling,
};
use ir::sampling::Sampling;

use crate::error::HostError;
use crate::masks::Masks;
use crate::memory::{Copier, DeviceBuffer};

/// Tokens that the threads of a worker process at once: four each.
const LIST_STEP: u64 = CONSUMER_WARPS as u64 * 32 * 4;

/// The host's state of a session.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    /// Settings in device memory, except the tokens seen; `None` before the first settings.
    settings: Option<SessionSampling>,
    /// The set of tokens may be wrong and must be rebuilt.
    anew: bool,
}

pub(crate) struct SamplingMemory {
    /// Settings of the sessions, then the cooperative sampler's memory.
    settings: DeviceBuffer,
    /// Per session: a bit for each token that has occurred, then one for each that has a bias.
    sets: DeviceBuffer,
    biases: DeviceBuffer,
    list: DeviceBuffer,
    changed: DeviceBuffer,
    pub(crate) masks: Masks,
    logits: u64,
    vocab: u32,
    told: Vec<Told>,
}

/// Bytes of a set of tokens.
fn set_bytes(vocab: u32) -> u64 {
    (u64::from(vocab).div_ceil(32) * 4).next_multiple_of(16)
}

/// Bytes of a list of the whole vocabulary: each thread's part has room for the most tokens that a thread can hold.
fn list_bytes(vocab: u32) -> u64 {
    u64::from(vocab).next_multiple_of(LIST_STEP) * u64::from(LISTED_BYTES)
}

/// Bytes of a row in whole groups of four logits.
fn changed_bytes(vocab: u32) -> u64 {
    (u64::from(vocab) * 4).next_multiple_of(16)
}

/// Settings as the device takes them; the caller fills in addresses and lengths.
pub(crate) fn wire(sampling: &Sampling) -> SessionSampling {
    let fixed = sampling.fixed();
    SessionSampling {
        seed: sampling.seed,
        share: fixed.share,
        least: fixed.least,
        scale: fixed.scale,
        penalty: sampling.repetition_penalty,
        top_k: sampling.top_k,
        bias_len: sampling.bias.len() as u32,
        greedy: u32::from(sampling.is_greedy()),
        ..SessionSampling::default()
    }
}

impl SamplingMemory {
    pub(crate) fn bytes(sessions: u32, vocab: u32) -> u64 {
        let session = size_of::<SessionSampling>() as u64
            + 2 * set_bytes(vocab)
            + u64::from(BIAS_MAX) * size_of::<Bias>() as u64;
        let shared = u64::from(SAMPLER_BYTES + SAMPLER_ALIGN);
        u64::from(sessions) * session + shared + list_bytes(vocab) + changed_bytes(vocab)
    }

    /// For `sessions` sessions, and the rows of logits at an address. No kernel is resident.
    pub(crate) fn new(sessions: u32, vocab: u32, logits: u64) -> Result<Self, HostError> {
        let of_each = |bytes: u64| DeviceBuffer::zeroed(u64::from(sessions) * bytes);
        Ok(Self {
            settings: DeviceBuffer::zeroed(
                u64::from(sessions) * size_of::<SessionSampling>() as u64
                    + u64::from(SAMPLER_BYTES + SAMPLER_ALIGN),
            )?,
            sets: of_each(2 * set_bytes(vocab))?,
            biases: of_each(u64::from(BIAS_MAX) * size_of::<Bias>() as u64)?,
            list: DeviceBuffer::zeroed(list_bytes(vocab))?,
            changed: DeviceBuffer::zeroed(changed_bytes(vocab))?,
            masks: Masks::new(sessions, vocab)?,
            logits,
            vocab,
            told: vec![Told::default(); sessions as usize],
        })
    }

    pub(crate) fn settings(&self) -> u64 {
        self.settings.address
    }

    /// Writes a session's settings. No command of the session is running. With `masked` each token has a mask: a bias of
    /// minus infinity for all tokens that it bans.
    pub(crate) fn set(
        &mut self,
        copier: &mut Copier,
        session: u32,
        sampling: &Sampling,
        masked: bool,
    ) -> Result<(), HostError> {
        let index = u64::from(session);
        if self.told.len() <= session as usize {
            let sessions = self.told.len();
            return Err(HostError::Request(format!("session {session} of {sessions}")));
        }
        if sampling.bias.len() > BIAS_MAX as usize {
            let got = sampling.bias.len();
            return Err(HostError::Request(format!(
                "{got} biases; the device takes {BIAS_MAX} at most"
            )));
        }
        if self.vocab > SAMPLED_VOCAB_MAX {
            return Err(HostError::Request(format!(
                "a vocabulary of {}; the device samples from {SAMPLED_VOCAB_MAX} tokens at most",
                self.vocab
            )));
        }
        if masked && !sampling.bias.is_empty() {
            return Err(HostError::Request(
                "biases and masks together: sample on the host, which has both".into(),
            ));
        }
        let set = set_bytes(self.vocab);
        let seen = self.sets.address + index * 2 * set;
        let bias = self.biases.address + index * u64::from(BIAS_MAX) * size_of::<Bias>() as u64;
        let mut settings = SessionSampling {
            logits: self.logits,
            seen,
            biased: seen + set,
            bias,
            list: self.list.address,
            changed: self.changed.address,
            ..wire(sampling)
        };
        if !sampling.bias.is_empty() {
            let mut words = vec![0_u32; set as usize / 4];
            for token in sampling.bias.keys() {
                words[*token as usize / 32] |= 1 << (token % 32);
            }
            copier.upload(settings.biased, bytemuck::cast_slice(&words))?;
            let biases: Vec<Bias> =
                sampling.bias.iter().map(|(&token, &value)| Bias { token, value }).collect();
            copier.upload(bias, bytemuck::cast_slice(&biases))?;
        }
        if masked {
            settings.biased = self.masks.address(session);
            settings.bias_len = 1;
            settings.greedy |= SAMPLING_MASKED;
            // The last bias whose token is not above a token: of all tokens this one.
            let ban = Bias { token: 0, value: f32::NEG_INFINITY };
            copier.upload(bias, bytemuck::bytes_of(&ban))?;
        }
        let at = self.settings.address + index * size_of::<SessionSampling>() as u64;
        copier.upload(at, bytemuck::bytes_of(&settings))?;
        self.told[session as usize] = Told { settings: Some(settings), anew: false };
        Ok(())
    }

    /// Called before a sampled request: marks the set of tokens for a rebuild if it may differ from the sequence's tokens.
    pub(crate) fn uses(
        &mut self,
        copier: &mut Copier,
        session: u32,
        position: u32,
    ) -> Result<(), HostError> {
        let told = &mut self.told[session as usize];
        let Some(settings) = told.settings else {
            return Err(HostError::Request(format!(
                "session {session} has no sampling settings: set them first"
            )));
        };
        if told.anew || position == 0 {
            let at =
                self.settings.address + u64::from(session) * size_of::<SessionSampling>() as u64;
            copier.upload(at, bytemuck::bytes_of(&settings))?;
            told.anew = false;
        }
        Ok(())
    }

    /// Whether a session's settings have a repetition penalty.
    pub(crate) fn penalised(&self, session: u32) -> bool {
        let settings = self.told.get(session as usize).and_then(|told| told.settings);
        settings.is_some_and(|settings| settings.penalty != 1.0)
    }

    /// Whether a session's tokens have masks.
    pub(crate) fn masked(&self, session: u32) -> bool {
        let settings = self.told.get(session as usize).and_then(|told| told.settings);
        settings.is_some_and(|settings| settings.greedy & SAMPLING_MASKED != 0)
    }

    /// Called before a request that is not sampled: what it runs may replace tokens that are in the set.
    pub(crate) fn passes_by(&mut self, session: u32) {
        if let Some(told) = self.told.get_mut(session as usize) {
            told.anew = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_what_the_arithmetic_takes() {
        let sampling = Sampling {
            temperature: 0.5,
            top_k: 7,
            top_p: 0.5,
            min_p: 0.25,
            repetition_penalty: 1.5,
            seed: 0x0123_4567_89ab_cdef,
            ..Sampling::default()
        };
        let got = wire(&sampling);
        let (share, least) = (1 << 31, 1 << 38);
        assert_eq!((got.share, got.least, got.top_k, got.greedy), (share, least, 7, 0));
        assert_eq!((got.seed, got.penalty, got.upto), (sampling.seed, 1.5, 0));
        assert_eq!(got.scale, 2.0 * std::f32::consts::LOG2_E);
        assert_eq!(wire(&Sampling::default()).greedy, 1);
        assert_eq!(wire(&Sampling { top_k: 1, ..sampling }).greedy, 1);
        assert!(wire(&Sampling { top_p: 1.0, ..Sampling::default() }).share >= 1 << 32);
    }
}
