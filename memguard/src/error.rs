//! What can go wrong before or while guarding.

use std::io;
use std::path::PathBuf;

use crate::budget::Bound;
use crate::human_bytes;
use crate::lock::Holder;
use crate::watch::Breach;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A job needs more memory than there is.
    #[error(
        "needs {} of memory, but only {} of {} are available ({bound})",
        human_bytes(*needed), human_bytes(*available), human_bytes(*total)
    )]
    Memory {
        /// Bytes the job needs.
        needed: u64,
        /// Bytes it could get.
        available: u64,
        /// Bytes it could get if nothing else ran.
        total: u64,
        /// What sets the limit.
        bound: Bound,
    },
    /// A job needs more disk than there is.
    #[error(
        "`{}` needs {} of free disk ({} and 5 % spare), but only {} are free",
        path.display(), human_bytes(*with_spare), human_bytes(*needed), human_bytes(*free)
    )]
    Disk {
        /// Where the job would write.
        path: PathBuf,
        /// Bytes it would write.
        needed: u64,
        /// The same with the spare room that is asked for.
        with_spare: u64,
        /// Bytes free for this user.
        free: u64,
    },
    /// A limit is crossed before the job has started.
    #[error("{0} before the job has started")]
    Exhausted(Breach),
    /// Another heavy job holds the lock.
    #[error("another heavy job is running: {holder} (lock `{}`)", path.display())]
    Busy {
        /// The job that holds the lock.
        holder: Holder,
        /// The lock file.
        path: PathBuf,
    },
    /// The lock file or its folder cannot be used.
    #[error("cannot use the lock `{}`", path.display())]
    Lock {
        /// The lock file or its folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The runtime folder belongs to someone else or is no folder.
    #[error("`{}` is not a folder owned by this user", path.display())]
    RuntimeDir {
        /// The folder.
        path: PathBuf,
    },
    /// The kernel's figures cannot be read.
    #[error("cannot read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel's figures are not as documented.
    #[error("no `{field}` in `{}`", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// What was expected in it.
        field: &'static str,
    },
    /// Signal handlers cannot be installed.
    #[error("cannot listen to signals")]
    Signals(#[source] io::Error),
    /// The watch thread cannot be started.
    #[error("cannot start the watch thread")]
    Thread(#[source] io::Error),
}

impl Error {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Memory { .. } | Self::Exhausted(_) => {
                Some("close other programs, or raise the limit if it is your own")
            }
            Self::Disk { .. } => Some("free some room, or write to another disk"),
            Self::Busy { .. } => Some("wait for it to end (`--wait`), or stop it"),
            Self::RuntimeDir { .. } => {
                Some("name another folder in the variable `ANEMONE_RUNTIME_DIR`")
            }
            _ => None,
        }
    }
}
