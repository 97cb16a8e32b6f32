//! What can go wrong with the Hub.

use std::io;
use std::path::PathBuf;

use hf_hub::HFError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The HTTP client cannot be made.
    #[error("cannot talk to the Hub: {0}")]
    Client(String),
    /// There is no such repository, revision or file, or it is private.
    #[error("`{what}` is not on the Hub, or not for this user")]
    NotFound {
        /// Repository, revision or file.
        what: String,
    },
    /// The token is missing, wrong or not allowed to do this.
    #[error("the Hub refuses access to `{what}` (HTTP {status})")]
    Denied {
        /// Repository or file.
        what: String,
        /// HTTP status.
        status: u16,
    },
    /// The Hub does not answer, even after waiting.
    #[error("the Hub failed on `{what}` after {tries} tries: {problem}")]
    Unavailable {
        /// Repository or file.
        what: String,
        /// Number of tries.
        tries: usize,
        /// The last failure.
        problem: String,
    },
    /// The Hub answers something unexpected.
    #[error("the Hub's answer on `{what}` makes no sense: {problem}")]
    Answer {
        /// Repository or file.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// What came is not what the Hub lists.
    #[error("`{file}` of `{repo}` came damaged: expected {expected}, found {found}")]
    Damaged {
        /// Repository.
        repo: String,
        /// File.
        file: String,
        /// Size or digest listed.
        expected: String,
        /// Size or digest of what came.
        found: String,
    },
    /// The network is needed but not allowed.
    #[error("`{repo}` is not whole in the cache `{}`, and the network is off", cache.display())]
    Offline {
        /// Repository.
        repo: String,
        /// The cache.
        cache: PathBuf,
    },
    /// A file of the cache or of the folder cannot be read or written.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Asked to stop; the same command goes on.
    #[error("stopped while downloading")]
    Stopped,
}

impl Error {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NotFound { .. } => Some(
                "check the spelling of `owner/name@revision`; for a private repository set HF_TOKEN",
            ),
            Self::Denied { .. } => Some(
                "set HF_TOKEN to a token with access; a gated model's terms must be accepted on \
                 its page first",
            ),
            Self::Unavailable { .. } => {
                Some("the same command goes on where this one broke off; try it later")
            }
            Self::Damaged { .. } => Some("the same command fetches that file again"),
            Self::Offline { .. } => Some("unset HF_HUB_OFFLINE, or give a folder"),
            _ => None,
        }
    }

    /// The status of an answer as an error, `None` for one that may pass.
    pub(crate) fn of_status(what: &str, status: u16) -> Option<Self> {
        let what = what.to_string();
        match status {
            401 | 403 => Some(Self::Denied { what, status }),
            404 | 410 => Some(Self::NotFound { what }),
            408 | 425 | 429 | 500.. => None,
            _ => Some(Self::Answer {
                what,
                problem: format!("HTTP {status}"),
            }),
        }
    }

    pub(crate) fn of_api(what: &str, tries: usize, e: HFError) -> Self {
        let what = what.to_string();
        match e {
            HFError::AuthRequired { context } | HFError::Forbidden { context } => Self::Denied {
                what,
                status: context.status.as_u16(),
            },
            HFError::RepoNotFound { .. }
            | HFError::RevisionNotFound { .. }
            | HFError::EntryNotFound { .. } => Self::NotFound { what },
            HFError::Io(source) => Self::Io {
                path: what.into(),
                source,
            },
            e => Self::Unavailable {
                what,
                tries,
                problem: chain(&e),
            },
        }
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = cause.source();
    }
    text
}
