//! How a proof travels to another process: with a keyed hash of the bytes that it is about.
//!
//! Verifying takes tens of milliseconds, and a search hands a program to the device's process for every trial. Who holds the key has made
//! it for that process alone, and only a verified program is ever sealed with it; so bytes whose seal fits are bytes of a verified program.

use super::Verified;
use crate::program::Program;
use crate::text::{LoadError, load, save};

/// What two processes share, and nobody else knows.
#[derive(Clone, Copy)]
pub struct SealKey([u8; 32]);

/// The keyed hash of a saved program that was verified.
pub type Seal = [u8; 32];

/// Why bytes are not those of a verified program.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unsealed {
    /// The bytes are not those that were sealed, or the key is another.
    #[error("the seal of the program does not fit: it was not verified, or changed on its way")]
    Broken,
    /// Another build wrote them.
    #[error(transparent)]
    Load(#[from] LoadError),
}

impl SealKey {
    /// A key of random bytes.
    #[must_use]
    pub fn new(random: [u8; 32]) -> Self {
        Self(random)
    }

    /// Its bytes, for the other process.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 32] {
        self.0
    }

    /// A verified program as bytes, and their seal.
    #[must_use]
    pub fn seal(&self, program: &Verified<Program>) -> (Vec<u8>, Seal) {
        let bytes = save(program);
        let seal = *blake3::keyed_hash(&self.0, &bytes).as_bytes();
        (bytes, seal)
    }

    /// The program that was sealed.
    ///
    /// # Errors
    /// If the seal does not fit, or the bytes are of another build.
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
