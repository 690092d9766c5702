//! Passes a proof to another process: a keyed hash of the saved program.
//!
//! Verifying takes tens of milliseconds, and a search sends a program to the device's process for every trial. The key
//! is made for that one process, and only verified programs are sealed with it; so bytes whose seal matches are those
//! of a verified program.

use super::Verified;
use crate::program::Program;
use crate::text::{LoadError, load, save};

/// A secret that two processes share.
#[derive(Clone, Copy)]
pub struct SealKey([u8; 32]);

/// The keyed hash of a saved program that was verified.
pub type Seal = [u8; 32];

/// Why bytes were not accepted as a verified program.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unsealed {
    /// The bytes or the key differ from those of the sealing.
    #[error("the seal of the program does not fit: it was not verified, or changed on its way")]
    Broken,
    /// The bytes were written by another build.
    #[error(transparent)]
    Load(#[from] LoadError),
}

impl SealKey {
    /// Makes a key from random bytes.
    #[must_use]
    pub fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// The key's bytes, for the other process.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 32] {
        self.0
    }

    /// Serializes a verified program, and computes its seal.
    #[must_use]
    pub fn seal(&self, program: &Verified<Program>) -> (Vec<u8>, Seal) {
        let bytes = save(program);
        let seal = *blake3::keyed_hash(&self.0, &bytes).as_bytes();
        (bytes, seal)
    }

    /// The program that was sealed.
    ///
    /// # Errors
    /// If the seal does not match, or the bytes are of another build.
    pub fn open(&self, bytes: &[u8], seal: &Seal) -> Result<Verified<Program>, Unsealed> {
        // Compared in constant time.
        if blake3::keyed_hash(&self.0, bytes) != *seal {
            return Err(Unsealed::Broken);
        }
        Ok(Verified(load(bytes)?))
    }
}

impl std::fmt::Debug for SealKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SealKey(..)")
    }
}
