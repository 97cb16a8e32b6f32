//! How a command ends early.

use std::error::Error;
use std::io;

use anemone_runtime::engine::EngineError;
use anemone_schemas::exit::Exit;
use anemone_schemas::tokenizer;

/// A failure as the user reads it.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    pub(crate) exit: Exit,
}

/// Why a command did not reach its end.
#[derive(Debug)]
pub(crate) enum End {
    /// Nobody reads the output any more.
    BrokenPipe,
    /// Something is wrong.
    Failure(Failure),
}

impl End {
    /// A value given that cannot be used.
    pub(crate) fn bad_input(message: impl Into<String>, hint: Option<&str>) -> Self {
        Self::Failure(Failure {
            message: message.into(),
            hint: hint.map(Into::into),
            exit: Exit::BadInput,
        })
    }

    /// A failure nobody foresaw.
    pub(crate) fn unexpected(e: &dyn Error) -> Self {
        Self::Failure(Failure {
            message: chain(e),
            hint: None,
            exit: Exit::Unexpected,
        })
    }
}

impl From<EngineError> for End {
    fn from(e: EngineError) -> Self {
        let hint = match &e {
            EngineError::Manifest(_) => Some(
                "`anemone-convert target` makes model folders, `anemone-convert verify` checks them",
            ),
            EngineError::ContextFull { .. } => {
                Some("shorten the prompt, or make the folder with a larger `--context`")
            }
            EngineError::Mismatch { .. } => Some(
                "likely causes: it was trained for another model (base or instruct, another \
                 release), it reads the wrong layers, or its rows are one off; `--draft lookup` \
                 needs no drafter",
            ),
            EngineError::Tokenizer(tokenizer::Error::NoChatTemplate { .. }) => {
                Some("`--raw` continues the prompt without a template")
            }
            _ => None,
        };
        Self::bad_input(chain(&e), hint)
    }
}

impl From<tokenizer::Error> for End {
    fn from(e: tokenizer::Error) -> Self {
        EngineError::from(e).into()
    }
}

/// Failures of reading input and writing output.
impl From<io::Error> for End {
    fn from(e: io::Error) -> Self {
        if e.kind() == io::ErrorKind::BrokenPipe {
            return Self::BrokenPipe;
        }
        Self::unexpected(&e)
    }
}

/// An error and its causes in one line; a cause that its parent already quotes is
/// left out.
fn chain(e: &dyn Error) -> String {
    let mut text = e.to_string();
    let mut source = e.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
