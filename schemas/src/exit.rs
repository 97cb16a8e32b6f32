//! Exit codes of the commands. They are an interface: scripts rely on them.

use std::process::ExitCode;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Everything asked for was done.
    Ok = 0,
    /// A failure nobody foresaw.
    Unexpected = 1,
    /// Wrong arguments.
    Usage = 2,
    /// A file or value given is not usable.
    BadInput = 3,
    /// Not enough disk, memory or another job holds the lock.
    Resources = 4,
    /// Numbers that cannot be computed with.
    Numerical = 5,
    /// A verification or quality gate said no.
    Verification = 6,
    /// Stopped on request; the same command goes on.
    Stopped = 75,
    /// Interrupted; the same command goes on.
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// The table for `--help`.
pub const EXIT_HELP: &str = "Exit codes:
  0    done
  1    unexpected failure
  2    wrong arguments
  3    bad input file or value
  4    not enough disk or memory, or another job holds the lock
  5    numerical failure
  6    verification or quality gate failed
  75   stopped, resumable by the same command
  130  interrupted, resumable by the same command";
