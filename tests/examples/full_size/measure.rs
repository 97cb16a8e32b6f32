//! Time and memory of one step of this process, from Linux's `/proc`.

use std::error::Error;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// A step that is being measured.
pub(crate) struct Measure {
    start: Instant,
    processor: Duration,
}

/// What a step took.
pub(crate) struct Cost {
    wall: Duration,
    processor: Duration,
    /// Most resident memory of the process during the step, in bytes.
    peak: u64,
}

impl Measure {
    /// Starts a step; the peak of the memory before is forgotten.
    pub(crate) fn start() -> Self {
        let _ = fs::write("/proc/self/clear_refs", "5");
        Self {
            start: Instant::now(),
            processor: own_time(),
        }
    }

    pub(crate) fn end(self) -> Cost {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
        Cost {
            wall: self.start.elapsed(),
            processor: own_time().saturating_sub(self.processor),
            peak: kib.unwrap_or(0) * 1024,
        }
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.2} s, {:.2} s of processor time, {:.0} MB at most",
            self.wall.as_secs_f64(),
            self.processor.as_secs_f64(),
            self.peak as f64 / 1e6
        )
    }
}

/// User and system time in a process's `stat`, in hundredths of a second.
pub(crate) fn processor_time(stat: &str) -> Duration {
    // The name of the program, in parentheses, may hold blanks.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    let ticks = rest.split_whitespace().skip(11).take(2);
    Duration::from_millis(10 * ticks.filter_map(|t| t.parse::<u64>().ok()).sum::<u64>())
}

fn own_time() -> Duration {
    processor_time(&fs::read_to_string("/proc/self/stat").unwrap_or_default())
}

/// The most that was seen of another process.
#[derive(Default)]
pub(crate) struct Seen {
    /// Bytes in memory.
    pub(crate) resident: u64,
    /// Bytes in memory that are not pages of files.
    pub(crate) own: u64,
    processor: Duration,
}

impl Seen {
    /// Looks at a child until it ends, so many milliseconds apart; fails if it fails.
    pub(crate) fn watch(mut child: Child, pause: u64) -> Result<Self, Box<dyn Error>> {
        let process = PathBuf::from(format!("/proc/{}", child.id()));
        let mut seen = Self::default();
        loop {
            if let Some(status) = child.try_wait()? {
                if status.success() {
                    return Ok(seen);
                }
                return Err(format!("the command ended with {status}").into());
            }
            seen.look(&process);
            std::thread::sleep(Duration::from_millis(pause));
        }
    }

    fn look(&mut self, process: &Path) {
        let status = fs::read_to_string(process.join("status")).unwrap_or_default();
        let bytes = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key));
            let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok());
            kib.unwrap_or(0) * 1024
        };
        self.resident = self.resident.max(bytes("VmHWM:"));
        self.own = self.own.max(bytes("RssAnon:"));
        let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
        self.processor = self.processor.max(processor_time(&stat));
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.2} s of processor time, {:.0} MB at most, {:.0} MB of them its own",
            self.processor.as_secs_f64(),
            self.resident as f64 / 1e6,
            self.own as f64 / 1e6,
        )
    }
}
