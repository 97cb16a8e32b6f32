//! Failures of the converter, each with its exit code and a hint.

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

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}
