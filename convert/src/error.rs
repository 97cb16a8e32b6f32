//! Failures of the converter, each with its exit code and a hint.

use std::error::Error as StdError;
use std::io;
use std::path::Path;

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
            message: message.into(),
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
        let exit = match e.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::Resources,
            _ => Exit::BadInput,
        };
        Self::new(exit, format!("`{}`: {e}", path.display()))
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
                Self::bad_input(chain(&e))
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

impl From<crate::quantize::QuantizeError> for Error {
    fn from(e: crate::quantize::QuantizeError) -> Self {
        Self::new(Exit::Numerical, chain(&e))
    }
}
