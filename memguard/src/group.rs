//! The process group under guard: the only thing that is ever signalled.

use std::fmt;
use std::io;

use rustix::process::{Pid, Signal, getpgid, getpgrp, kill_process_group};

use crate::platform;

/// Variable by which descendants that left the group are recognised: the ids of
/// the guards above a process, joined by `:`.
pub const GUARDS_VARIABLE: &str = "MEMGUARD";

/// A process group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group(pub(crate) Pid);

/// A process as a report names it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Its command line.
    pub command: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut command: String = self.command.chars().take(120).collect();
        if command.len() < self.command.len() {
            command.push_str("...");
        }
        write!(f, "{} `{command}`", self.pid)
    }
}

impl Group {
    /// The group of this process.
    pub fn own() -> Self {
        Self(getpgrp())
    }

    /// The group led by the process `pid`, which must not have been waited for: as
    /// long as it is at least a zombie, no other group can get its number.
    pub fn led_by(pid: u32) -> Option<Self> {
        Pid::from_raw(i32::try_from(pid).ok()?).map(Self)
    }

    /// The number of the group.
    pub fn id(self) -> i32 {
        self.0.as_raw_nonzero().get()
    }

    /// The members that run, zombies left out.
    pub fn members(self) -> Vec<Process> {
        describe(platform::pids(|pid| {
            getpgid(Some(pid)) == Ok(self.0) && platform::is_alive(pid)
        }))
    }

    /// The processes started under the guard `guard` that have left the group: they
    /// opened a session or a group of their own. Found by the variable `MEMGUARD` of
    /// their environment, so also after their parent has gone.
    pub fn strays(self, guard: u32) -> Vec<Process> {
        let guard = guard.to_string();
        describe(platform::pids(|pid| {
            getpgid(Some(pid)).is_ok_and(|group| group != self.0)
                && platform::started_by(pid, GUARDS_VARIABLE, &guard)
                && platform::is_alive(pid)
        }))
    }

    /// Sends the signal with this number to every member.
    ///
    /// # Errors
    /// No such signal, or what `kill(2)` answers; a group without members is no error.
    pub fn signal(self, number: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput)?;
        match kill_process_group(self.0, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

fn describe(pids: Vec<Pid>) -> Vec<Process> {
    pids.into_iter()
        .map(|pid| Process {
            pid: pid.as_raw_nonzero().get(),
            command: platform::command_of(pid),
        })
        .collect()
}
