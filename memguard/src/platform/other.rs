//! Systems without `/proc`, macOS first of all, through the `sysinfo` crate.
//!
//! What differs from Linux: resident memory stands in for anonymous memory (so
//! mapped weights count, and `--max-anon` must leave room for them), there are no
//! cgroups, and a process that left the group is found only while its parent lives.

#![expect(
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "the signatures are those of the Linux module"
)]

use std::time::Duration;

use rustix::process::{Pid, Resource, getpgid, getrlimit};
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System, UpdateKind};

use super::Reading;
use crate::{Bound, Error};

fn system() -> Result<System, Error> {
    System::new().map_err(|e| Error::Read {
        path: "sysctl".into(),
        source: std::io::Error::other(e.to_string()),
    })
}

/// Memory of the machine.
#[derive(Debug)]
pub(crate) struct Memory(System);

impl Memory {
    pub(crate) fn open() -> Result<Self, Error> {
        system().map(Self)
    }

    pub(crate) fn read(&mut self) -> Result<Reading, Error> {
        self.0.refresh_memory();
        Ok(Reading {
            total: self.0.total_memory(),
            available: self.0.available_memory(),
            swap_total: self.0.total_swap(),
            swap_used: self.0.used_swap(),
        })
    }

    pub(crate) fn bound(&self, _: &Reading) -> Bound {
        Bound::Machine
    }
}

/// Name, limit and present use of the resource limits that bound memory.
/// The present use is not known here, so a limit counts as a whole.
pub(crate) fn resource_limits() -> Result<Vec<(&'static str, u64, u64)>, Error> {
    Ok(
        [("RLIMIT_AS", Resource::As), ("RLIMIT_DATA", Resource::Data)]
            .into_iter()
            .filter_map(|(name, resource)| Some((name, getrlimit(resource).current?, 0)))
            .collect(),
    )
}

fn id(pid: Pid) -> sysinfo::Pid {
    sysinfo::Pid::from_u32(pid.as_raw_nonzero().get().unsigned_abs())
}

/// The processes of one group, remembered between two scans.
#[derive(Debug, Default)]
pub(crate) struct Members {
    system: Option<System>,
    pids: Vec<sysinfo::Pid>,
}

impl Members {
    /// Whether any process may have been started since the last call: not known here.
    pub(crate) fn may_have_grown(&mut self) -> bool {
        true
    }

    /// Looks for the members again.
    pub(crate) fn rescan(&mut self, group: Pid) {
        self.pids = pids(|pid| getpgid(Some(pid)) == Ok(group))
            .into_iter()
            .map(id)
            .collect();
    }

    /// Resident memory summed.
    pub(crate) fn anonymous(&mut self) -> u64 {
        if self.system.is_none() {
            self.system = system().ok();
        }
        let Some(system) = &mut self.system else {
            return 0;
        };
        system.refresh_processes_specifics(
            ProcessesToUpdate::Some(&self.pids),
            true,
            ProcessRefreshKind::nothing().with_memory(),
        );
        self.pids
            .iter()
            .filter_map(|pid| Some(system.process(*pid)?.memory()))
            .sum()
    }
}

/// All processes that pass `keep`.
pub(crate) fn pids(keep: impl Fn(Pid) -> bool) -> Vec<Pid> {
    let Ok(mut system) = system() else {
        return Vec::new();
    };
    system.refresh_processes_specifics(ProcessesToUpdate::All, true, ProcessRefreshKind::nothing());
    system
        .processes()
        .keys()
        .filter_map(|pid| Pid::from_raw(i32::try_from(pid.as_u32()).ok()?))
        .filter(|pid| keep(*pid))
        .collect()
}

fn with_process<T>(
    pid: Pid,
    what: ProcessRefreshKind,
    get: impl FnOnce(&sysinfo::Process) -> T,
) -> Option<T> {
    let mut system = system().ok()?;
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[id(pid)]), true, what);
    system.process(id(pid)).map(get)
}

/// Whether `pid` runs; a zombie does not.
pub(crate) fn is_alive(pid: Pid) -> bool {
    with_process(pid, ProcessRefreshKind::nothing(), |process| {
        !matches!(
            process.status(),
            sysinfo::ProcessStatus::Zombie | sysinfo::ProcessStatus::Dead
        )
    })
    .unwrap_or(false)
}

/// The command line of `pid`, or its name in brackets where there is none.
pub(crate) fn command_of(pid: Pid) -> String {
    let what = ProcessRefreshKind::nothing().with_cmd(UpdateKind::Always);
    with_process(pid, what, |process| {
        let words: Vec<_> = process
            .cmd()
            .iter()
            .map(|word| word.to_string_lossy())
            .collect();
        if words.is_empty() {
            format!("[{}]", process.name().to_string_lossy())
        } else {
            words.join(" ")
        }
    })
    .unwrap_or_default()
}

/// Whether the environment `pid` was started with holds `name` with `part` among
/// the `:`-separated parts of its value.
pub(crate) fn started_by(pid: Pid, name: &str, part: &str) -> bool {
    let what = ProcessRefreshKind::nothing().with_environ(UpdateKind::Always);
    with_process(pid, what, |process| {
        process.environ().iter().any(|entry| {
            entry
                .to_str()
                .and_then(|entry| entry.strip_prefix(name)?.strip_prefix('='))
                .is_some_and(|value| value.split(':').any(|p| p == part))
        })
    })
    .unwrap_or(false)
}

/// Processor time of the calling thread: not known here.
pub(crate) fn thread_cpu() -> Option<Duration> {
    None
}

/// The signals this process was started to ignore: not known here.
pub(crate) fn ignored_signals() -> u64 {
    0
}
