//! Linux: `/proc`, see `proc(5)`.
//!
//! A sample is taken several times a second for hours, so files that are read
//! again and again stay open and the buffers are kept.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::param::page_size;
use rustix::process::{Pid, Resource, getpgid, getrlimit};

use super::Reading;
use crate::cgroup::Cgroup;
use crate::{Bound, Error};

/// A kernel file that is read again from its start each time.
#[derive(Debug)]
pub(crate) struct Reread {
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
}

impl Reread {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(|source| Error::Read {
            path: path.to_path_buf(),
            source,
        })?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            buffer: vec![0; 4096],
        })
    }

    /// The text of this moment. The files read here are each made in one piece, so a
    /// read that leaves room in the buffer has reached the end.
    pub(crate) fn text(&mut self) -> Result<&str, Error> {
        let mut length = 0;
        loop {
            let read = self
                .file
                .read_at(&mut self.buffer[length..], length as u64)
                .map_err(|source| Error::Read {
                    path: self.path.clone(),
                    source,
                })?;
            length += read;
            if length < self.buffer.len() {
                break;
            }
            self.buffer.resize(2 * length, 0);
        }
        std::str::from_utf8(&self.buffer[..length]).map_err(|e| Error::Read {
            path: self.path.clone(),
            source: io::Error::new(io::ErrorKind::InvalidData, e),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Memory of the machine and of the cgroups above this process.
#[derive(Debug)]
pub(crate) struct Memory {
    meminfo: Reread,
    cgroups: Vec<Cgroup>,
}

impl Memory {
    pub(crate) fn open() -> Result<Self, Error> {
        Ok(Self {
            meminfo: Reread::open(Path::new("/proc/meminfo"))?,
            cgroups: crate::cgroup::above(Path::new("/"))?,
        })
    }

    pub(crate) fn read(&mut self) -> Result<Reading, Error> {
        let path = self.meminfo.path().to_path_buf();
        let mut reading =
            parse_meminfo(self.meminfo.text()?).map_err(|field| Error::Field { path, field })?;
        for (index, cgroup) in self.cgroups.iter_mut().enumerate() {
            let Some((limit, available)) = cgroup.room(reading.available)? else {
                continue;
            };
            reading.total = reading.total.min(limit);
            if available < reading.available {
                reading.available = available;
                reading.cgroup = Some(index);
            }
        }
        Ok(reading)
    }

    pub(crate) fn bound(&self, reading: &Reading) -> Bound {
        match reading.cgroup.and_then(|index| self.cgroups.get(index)) {
            Some(cgroup) => Bound::Cgroup(cgroup.dir().to_path_buf()),
            None => Bound::Machine,
        }
    }
}

/// `Err` holds the field that is missing.
fn parse_meminfo(text: &str) -> Result<Reading, &'static str> {
    let field = |name: &'static str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
            .map(|kib| kib.saturating_mul(1024))
            .ok_or(name)
    };
    let swap_total = field("SwapTotal")?;
    Ok(Reading {
        total: field("MemTotal")?,
        available: field("MemAvailable")?,
        swap_total,
        swap_used: swap_total.saturating_sub(field("SwapFree")?),
        cgroup: None,
    })
}

/// Name, limit and present use of the resource limits that bound memory.
/// `RLIMIT_DATA` counts private writable mappings, which `statm` calls data.
pub(crate) fn resource_limits() -> Result<Vec<(&'static str, u64, u64)>, Error> {
    let statm = statm(rustix::process::getpid()).map_err(|source| Error::Read {
        path: "/proc/self/statm".into(),
        source,
    })?;
    let limits = [
        ("RLIMIT_AS", Resource::As, statm[0]),
        ("RLIMIT_DATA", Resource::Data, statm[5]),
    ];
    Ok(limits
        .into_iter()
        .filter_map(|(name, resource, used)| Some((name, getrlimit(resource).current?, used)))
        .collect())
}

/// The columns of `/proc/<pid>/statm` in bytes: size, resident, shared, text,
/// lib, data.
fn statm(pid: Pid) -> io::Result<[u64; 6]> {
    // Without the buffer and the call for the file's size of `fs::read_to_string`.
    let mut buffer = [0; 256];
    let length =
        File::open(format!("/proc/{}/statm", pid.as_raw_nonzero()))?.read_at(&mut buffer, 0)?;
    let text = std::str::from_utf8(&buffer[..length]).map_err(io::Error::other)?;
    let mut columns = [0; 6];
    let mut words = text.split_ascii_whitespace();
    for column in &mut columns {
        let pages: u64 = words
            .next()
            .and_then(|word| word.parse().ok())
            .ok_or(io::ErrorKind::InvalidData)?;
        *column = pages.saturating_mul(page_size() as u64);
    }
    Ok(columns)
}

/// The processes of one group, remembered between two scans of `/proc`.
#[derive(Debug, Default)]
pub(crate) struct Members {
    pids: Vec<Pid>,
    newest: Option<u64>,
    loadavg: Option<Reread>,
}

impl Members {
    /// Whether any process was started since the last call. The fifth field of
    /// `/proc/loadavg` is the newest process id: one cheap line instead of a walk.
    pub(crate) fn may_have_grown(&mut self) -> bool {
        if self.loadavg.is_none() {
            self.loadavg = Reread::open(Path::new("/proc/loadavg")).ok();
        }
        let newest = self.loadavg.as_mut().and_then(|file| {
            file.text()
                .ok()?
                .split_ascii_whitespace()
                .nth(4)?
                .parse()
                .ok()
        });
        let before = std::mem::replace(&mut self.newest, newest);
        newest.is_none() || newest != before
    }

    /// Looks for the members again.
    pub(crate) fn rescan(&mut self, group: Pid) {
        self.pids = pids(|pid| getpgid(Some(pid)) == Ok(group));
    }

    /// `RssAnon` summed. `resident - shared` of `statm` is the same counter
    /// (`task_statm` in `fs/proc/task_mmu.c`) for a third of the cost of `status`.
    /// A process that has gone counts as nothing.
    pub(crate) fn anonymous(&mut self) -> u64 {
        self.pids
            .iter()
            .filter_map(|pid| statm(*pid).ok())
            .map(|columns| columns[1].saturating_sub(columns[2]))
            .sum()
    }
}

/// All processes that pass `keep`.
pub(crate) fn pids(keep: impl Fn(Pid) -> bool) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw)
        .filter(|pid| keep(*pid))
        .collect()
}

/// Whether `pid` runs; a zombie does not.
pub(crate) fn is_alive(pid: Pid) -> bool {
    fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
        // The name in parentheses may itself hold parentheses and spaces.
        .is_ok_and(|stat| match stat.rfind(')') {
            Some(end) => !matches!(stat[end + 1..].trim_start().chars().next(), Some('Z' | 'X')),
            None => false,
        })
}

/// The command line of `pid`, or its name in brackets where there is none.
pub(crate) fn command_of(pid: Pid) -> String {
    let dir = format!("/proc/{}", pid.as_raw_nonzero());
    let line = fs::read(format!("{dir}/cmdline")).unwrap_or_default();
    let words: Vec<_> = line
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty())
        .map(String::from_utf8_lossy)
        .collect();
    if words.is_empty() {
        let name = fs::read_to_string(format!("{dir}/comm")).unwrap_or_default();
        return format!("[{}]", name.trim_end());
    }
    words.join(" ")
}

/// Whether the environment `pid` was started with holds `name` with `part` among
/// the `:`-separated parts of its value.
pub(crate) fn started_by(pid: Pid, name: &str, part: &str) -> bool {
    let environment =
        fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|entry| {
        std::str::from_utf8(entry)
            .ok()
            .and_then(|entry| entry.strip_prefix(name)?.strip_prefix('='))
            .is_some_and(|value| value.split(':').any(|p| p == part))
    })
}

/// Processor time of the calling thread.
pub(crate) fn thread_cpu() -> Option<Duration> {
    let text = fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds = text.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

/// The signals this process was started to ignore, as under `nohup`; bit `n - 1`
/// stands for signal `n`.
pub(crate) fn ignored_signals() -> u64 {
    fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let mask = status
                .lines()
                .find_map(|line| line.strip_prefix("SigIgn:"))?;
            u64::from_str_radix(mask.trim(), 16).ok()
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes_and_a_missing_field_is_named() {
        let text = "MemTotal:       24684084 kB\nMemFree:        10982068 kB\n\
                    MemAvailable:   24128408 kB\nSwapCached:            7 kB\n\
                    SwapTotal:       2097148 kB\nSwapFree:        1048576 kB\n";
        let reading = parse_meminfo(text).unwrap();
        assert_eq!(reading.total, 24_684_084 * 1024);
        assert_eq!(reading.available, 24_128_408 * 1024);
        assert_eq!(reading.swap_used, (2_097_148 - 1_048_576) * 1024);
        assert_eq!(
            parse_meminfo(&text.replace("MemAvailable", "Mem")).unwrap_err(),
            "MemAvailable"
        );
    }

    #[test]
    fn anonymous_memory_is_the_kernels_rss_anon() {
        // Far more than the counters' slack and what other tests allocate meanwhile.
        let block = std::hint::black_box(vec![1u8; 256 << 20]);
        let own = rustix::process::getpid();
        let columns = statm(own).unwrap();
        let ours = columns[1] - columns[2];
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let kib: u64 = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .and_then(|rest| rest.trim().strip_suffix(" kB")?.parse().ok())
            .unwrap();
        assert!(ours >= block.len() as u64);
        assert!(ours.abs_diff(kib * 1024) < 64 << 20, "{ours} {kib} kB");
    }

    #[test]
    fn this_process_is_alive_and_known_by_its_command() {
        let own = rustix::process::getpid();
        assert!(is_alive(own));
        assert!(command_of(own).contains("memguard"));
        assert!(pids(|_| true).contains(&own));
        assert!(thread_cpu().is_some());
    }
}
