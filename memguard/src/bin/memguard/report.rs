//! What `--json` writes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anemone_memguard::{Breach, Process, Statistics};
use serde::Serialize;

/// How the command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// By itself.
    Ended,
    /// Within the grace period after it was asked to stop for memory.
    Stopped,
    /// Killed for memory.
    Killed,
}

/// The final statistics; sizes in bytes, times in seconds.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) command: Vec<String>,
    pub(crate) outcome: Outcome,
    /// Exit code of memguard.
    pub(crate) exit_code: u8,
    /// Exit code of the command, or
    pub(crate) command_code: Option<i32>,
    /// the signal that ended it.
    pub(crate) command_signal: Option<i32>,
    /// The line that was crossed.
    pub(crate) breach: Option<Breach>,
    /// Processes that had left the group when it was killed; not signalled.
    pub(crate) left_alone: Vec<Process>,
    pub(crate) seconds: f64,
    #[serde(flatten)]
    pub(crate) statistics: Statistics,
}

impl Report {
    /// Writes to `path` whole or not at all, or to standard error for `-`.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_string(self)?;
        if path == Path::new("-") {
            super::say(&text);
            return Ok(());
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        fs::write(&partial, text + "\n")?;
        fs::rename(&partial, path)
    }
}
