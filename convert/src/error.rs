//! Failures of the converter, each with its exit code and a hint.

use std::error::Error as StdError;
use std::io;
use std::path::Path;

use anemone_memguard::Reason;
use anemone_schemas::exit::Exit;

/// A failure as the user reads it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What happened, naming the file or value.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
    /// Exit code.
    pub exit: Exit,
}

impl Error {
    /// A failure with an exit code.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            message: clipped(message.into()),
            hint: None,
            exit,
        }
    }

    /// Wrong arguments.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// A file that cannot be used.
    pub fn bad_input(message: impl Into<String>) -> Self {
        Self::new(Exit::BadInput, message)
    }

    /// A file or folder that could not be read or written.
    pub fn io(path: &Path, e: &io::Error) -> Self {
        Self::bad_input(format!("`{}`: {e}", path.display())).classed(e)
    }

    /// A failure nobody foresaw.
    pub fn unexpected(e: &dyn StdError) -> Self {
        Self::new(Exit::Unexpected, chain(e))
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl Error {
    /// What the operating system said decides the exit code: a full disk is no bad
    /// input.
    fn classed(mut self, e: &(dyn StdError + 'static)) -> Self {
        let mut next = Some(e);
        while let Some(cause) = next {
            match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(
                    io::ErrorKind::StorageFull
                    | io::ErrorKind::QuotaExceeded
                    | io::ErrorKind::FileTooLarge,
                ) => {
                    self.exit = Exit::Resources;
                    return self.hint(
                        "free some room, or write to another disk; what is finished is kept \
                         and the same command goes on",
                    );
                }
                Some(io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied) => {
                    return self.hint("choose a folder that you may read and write");
                }
                _ => next = cause.source(),
            }
        }
        self
    }
}

/// Longest message in bytes: what a damaged file holds may be quoted in one.
const LONGEST: usize = 4000;

/// The message without its middle if it is too long to be read.
fn clipped(message: String) -> String {
    if message.len() <= LONGEST {
        return message;
    }
    let head = message.floor_char_boundary(LONGEST / 2);
    let tail = message.ceil_char_boundary(message.len() - LONGEST / 4);
    format!("{} [...] {}", &message[..head], &message[tail..])
}

/// An error and all its causes in one line.
fn chain(e: &dyn StdError) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

macro_rules! from_bad_input {
    ($($kind:ty),* $(,)?) => {
        $(impl From<$kind> for Error {
            fn from(e: $kind) -> Self {
                Self::bad_input(chain(&e)).classed(&e)
            }
        })*
    };
}

from_bad_input!(
    anemone_calib::Error,
    anemone_runtime::engine::EngineError,
    anemone_schemas::aimodel::asset::AssetError,
    anemone_schemas::checkpoint::Error,
    anemone_schemas::manifest::ManifestError,
    anemone_schemas::store::StoreError,
    anemone_schemas::tokenizer::Error,
);

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        let exit = match reason {
            Reason::Interrupted => Exit::Interrupted,
            _ => Exit::Stopped,
        };
        let hint = match reason {
            Reason::Memory(_) => {
                "the same command goes on where this one stopped, once there is more memory \
                 or a higher limit"
            }
            _ => "the same command goes on where this one stopped",
        };
        Self::new(exit, reason.to_string()).hint(hint)
    }
}

impl From<anemone_memguard::Error> for Error {
    fn from(e: anemone_memguard::Error) -> Self {
        use anemone_memguard::Error as Guard;
        let exit = match e {
            Guard::Memory { .. }
            | Guard::Disk { .. }
            | Guard::Exhausted(_)
            | Guard::Busy { .. } => Exit::Resources,
            _ => Exit::Unexpected,
        };
        let error = Self::new(exit, chain(&e));
        match e.hint() {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

#[cfg(feature = "hub")]
impl From<anemone_hub::Error> for Error {
    fn from(e: anemone_hub::Error) -> Self {
        use anemone_hub::Error as Hub;
        let exit = match e {
            Hub::Unavailable { .. } | Hub::Stopped => Exit::Stopped,
            Hub::Client(_) | Hub::Answer { .. } => Exit::Unexpected,
            Hub::Damaged { .. } => Exit::Verification,
            _ => Exit::BadInput,
        };
        let error = Self::new(exit, chain(&e));
        let error = match e.hint() {
            Some(hint) => error.hint(hint),
            None => error,
        };
        error.classed(&e)
    }
}

impl From<crate::quantize::QuantizeError> for Error {
    fn from(e: crate::quantize::QuantizeError) -> Self {
        Self::new(Exit::Numerical, chain(&e))
    }
}
