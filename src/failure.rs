//! The outcomes of a command, and their exit codes.

use std::fmt::Display;
use std::path::Path;
use std::process::ExitCode;

use corpus::CorpusError;
use lower::LowerError;
use model::ModelError;
use search::{DeviceError, Rejection};
use vm_host::HostError;

/// The exit codes. They are part of the interface: scripts and agents depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::VariantArray)]
pub enum Exit {
    /// The answer is yes, or the work is done.
    Yes = 0,
    /// A gate said no.
    No = 1,
    /// Wrong usage, or input that cannot be read or written.
    Usage = 2,
    /// This machine lacks something, such as a GPU.
    Missing = 3,
    /// A file was tampered with or is corrupt.
    Integrity = 4,
    /// The samples do not decide.
    Inconclusive = 5,
    /// A bug in amk.
    Bug = 70,
    /// Stopped by Ctrl-C.
    Interrupted = 130,
}

impl Exit {
    /// The exit code of the process.
    #[must_use]
    pub fn code(self) -> i32 {
        self as i32
    }

    /// The word in an error document.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.words().0
    }

    /// The meaning for the caller, and what to do.
    pub(crate) fn sentence(self) -> &'static str {
        self.words().1
    }

    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Yes => ("yes", "The answer is yes, or the work is done."),
            Self::No => (
                "refused",
                "A gate said no: the schedule or program was rejected, disagreed or trapped. The document says which gate, where, and what would be legal.",
            ),
            Self::Usage => (
                "usage",
                "Wrong usage, or input that cannot be read or written. The message names the argument or the file, and the remedy.",
            ),
            Self::Missing => (
                "capability_missing",
                "This machine lacks something: a GPU, a driver, NVRTC. `amk doctor` says what, and how to get it.",
            ),
            Self::Integrity => (
                "integrity",
                "A file was tampered with or is corrupt: a ledger whose chain breaks, an edited bundle, a damaged program, an altered number.",
            ),
            Self::Inconclusive => (
                "inconclusive",
                "The samples do not tell: neither better nor worse. Measure longer. Of `provenance`: evidence of another build, or none.",
            ),
            Self::Bug => ("bug", "A bug in amk. Please report it with the command."),
            Self::Interrupted => (
                "interrupted",
                "Stopped by Ctrl-C. What was finished is on the disk; `--resume` goes on.",
            ),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code() as u8)
    }
}

/// Why a command ended without its answer.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The class of the failure: the exit code of the command.
    pub exit: Exit,
    /// What, where and the remedy, in one line.
    pub message: String,
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, message: message.into() }
    }

    pub(crate) fn missing(message: impl Into<String>) -> Self {
        Self { exit: Exit::Missing, message: message.into() }
    }

    pub(crate) fn integrity(message: impl Into<String>) -> Self {
        Self { exit: Exit::Integrity, message: message.into() }
    }

    pub(crate) fn refused(message: impl Into<String>) -> Self {
        Self { exit: Exit::No, message: message.into() }
    }

    pub(crate) fn bug(message: impl Into<String>) -> Self {
        Self { exit: Exit::Bug, message: message.into() }
    }

    /// A failed operation on a path, and the remedy.
    pub(crate) fn cannot<E: Display>(
        verb: &str,
        path: &Path,
        remedy: &str,
    ) -> impl Fn(E) -> Self + Copy {
        move |error| Self::usage(format!("cannot {verb} {}: {error}; {remedy}", path.display()))
    }

    /// `why` names the option that needs a GPU.
    pub(crate) fn no_gpu(why: &str) -> Self {
        Self::missing(format!("{why}, and there is no GPU here: see `amk doctor`"))
    }
}

pub(crate) type Outcome = Result<Exit, Failure>;

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<CorpusError> for Failure {
    fn from(error: CorpusError) -> Self {
        if error.is_integrity() {
            Self::integrity(error.to_string())
        } else {
            Self::usage(error.to_string())
        }
    }
}

impl From<LowerError> for Failure {
    fn from(error: LowerError) -> Self {
        match error {
            LowerError::Internal(_) => Self::bug(error.to_string()),
            LowerError::LimitExceeded { .. } | LowerError::NotValidHere(_) => {
                Self::refused(error.to_string())
            }
        }
    }
}

/// Why this machine cannot drive its GPU.
impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        Self::missing(format!("capability missing: {error}"))
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        // Memory that is not there is missing like a device that is not there: no schedule is at fault.
        let gone =
            matches!(error, DeviceError::Unavailable { .. } | DeviceError::OutOfMemory { .. });
        Self { exit: if gone { Exit::Missing } else { Exit::No }, message: error.to_string() }
    }
}

/// Rejections that are not the schedule's fault: a bug of amk, or a lost device.
impl From<&Rejection> for Failure {
    fn from(dropped: &Rejection) -> Self {
        let fault = if let Rejection::Unloadable(error) = dropped {
            Some(Self::from(error.clone()))
        } else if let Rejection::Failed(error) = dropped {
            Some(Self::from(error.clone()))
        } else {
            None
        };
        let fault = fault.filter(|fault| fault.exit != Exit::No);
        fault.unwrap_or_else(|| Self::refused(dropped.to_string()))
    }
}
