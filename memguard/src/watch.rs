//! The watch: takes samples and holds them against the limits.
//!
//! # When to look again
//!
//! Looking costs some microseconds, and a job can fill gigabytes a second. The
//! pause follows from the room that is left: with `room` bytes to the nearest line
//! and memory growing by `rate`, the line cannot be reached before `room / rate`,
//! so the next look is at half of that. `rate` is the growth seen between the last
//! two samples, and at least 1 GiB/s, what one thread that starts to allocate can
//! touch. Far from any line the pause is the interval, and as long as it takes to
//! keep the watch itself under a thousandth of a processor.

use std::fmt;
use std::time::{Duration, Instant};

use crate::platform::{Members, Memory, Reading, thread_cpu};
use crate::{Amount, Error, Group, human_bytes};

const FASTEST: Duration = Duration::from_millis(10);
const SLOWEST: Duration = Duration::from_secs(1);
/// Growth to be ready for, bytes per second.
const LEAST_RATE: f64 = (1u64 << 30) as f64;
/// Pauses are at least this many times the cost of a sample, lines permitting.
const COST_SHARE: u32 = 1000;
/// The same for a walk through `/proc`.
const SCAN_COST_SHARE: u32 = 3000;
/// A process may also join a group long after its start.
const SCAN_ANYWAY: Duration = Duration::from_secs(2);

/// When a job is asked to stop and when it is ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Hard: bytes by which swap in use may grow, whoever swaps.
    pub swap_growth: Option<u64>,
    /// Hard: available memory that must remain.
    pub min_free: Option<Amount>,
    /// Hard: anonymous memory of the process group in bytes.
    pub max_anon: Option<u64>,
    /// Soft: anonymous memory of the process group in bytes.
    pub soft_anon: Option<u64>,
    /// Soft lines for swap and available memory, three quarters of the way to the
    /// hard ones: at 4.5 GiB and 8 % for 6 GiB and 6 %.
    pub ask_first: bool,
    /// Longest pause between two samples; shorter when a line is near.
    pub interval: Duration,
}

impl Default for Limits {
    /// Swap grown by 6 GiB, or less than 6 % of memory available.
    fn default() -> Self {
        Self {
            swap_growth: Some(6 << 30),
            min_free: Some(Amount::Percent(6.0)),
            max_anon: None,
            soft_anon: None,
            ask_first: true,
            interval: Duration::from_millis(500),
        }
    }
}

/// What a limit is set on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Measure {
    /// Growth of swap in use since the start.
    SwapGrowth,
    /// Available memory.
    Available,
    /// Anonymous memory of the process group.
    Anonymous,
}

/// A line that was crossed; both numbers in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Breach {
    /// Which figure.
    pub measure: Measure,
    /// What it was.
    pub value: u64,
    /// What it may be.
    pub limit: u64,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.measure {
            Measure::SwapGrowth => "swap grew by",
            Measure::Available => "available memory fell to",
            Measure::Anonymous => "anonymous memory reached",
        };
        let (value, limit) = (human_bytes(self.value), human_bytes(self.limit));
        write!(f, "{what} {value} (limit {limit})")
    }
}

/// What a sample says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// All is well.
    Fine,
    /// A soft line is crossed: ask the job to stop.
    Soft(Breach),
    /// A hard line is crossed: end the group.
    Hard(Breach),
}

/// What was seen so far.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Statistics {
    /// Samples taken.
    pub samples: u64,
    /// Samples that failed and were left out.
    pub missed: u64,
    /// Most anonymous memory of the group, bytes.
    pub peak_anonymous: u64,
    /// Least available memory, bytes.
    pub least_available: u64,
    /// Most growth of swap, bytes.
    pub peak_swap_growth: u64,
    /// Processor time of the watching thread in seconds, where the system tells.
    pub watch_cpu_seconds: Option<f64>,
}

/// The lines in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lines {
    swap_growth: Option<u64>,
    available: Option<u64>,
    anonymous: Option<u64>,
}

/// One sample in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sample {
    swap_growth: u64,
    available: u64,
    anonymous: u64,
}

impl Lines {
    fn resolve(limits: &Limits, total: u64) -> (Self, Self) {
        let hard = Self {
            swap_growth: limits.swap_growth,
            available: limits.min_free.map(|amount| amount.of(total)),
            anonymous: limits.max_anon,
        };
        let asked = |line: Option<u64>| line.filter(|_| limits.ask_first);
        let soft = Self {
            swap_growth: asked(hard.swap_growth).map(|bytes| bytes / 4 * 3),
            available: asked(hard.available).map(|bytes| bytes.saturating_add(bytes / 3)),
            anonymous: limits.soft_anon,
        };
        (soft, hard)
    }

    fn crossed(&self, sample: &Sample) -> Option<Breach> {
        let breach = |measure, value, limit| Breach {
            measure,
            value,
            limit,
        };
        let over = |measure, value, line: Option<u64>| {
            line.filter(|limit| value >= *limit)
                .map(|limit| breach(measure, value, limit))
        };
        over(Measure::Anonymous, sample.anonymous, self.anonymous)
            .or_else(|| {
                self.available
                    .filter(|limit| sample.available < *limit)
                    .map(|limit| breach(Measure::Available, sample.available, limit))
            })
            .or_else(|| over(Measure::SwapGrowth, sample.swap_growth, self.swap_growth))
    }

    /// Bytes to the nearest line that is not crossed yet.
    fn room(&self, sample: &Sample) -> u64 {
        let below = |value: u64, line: Option<u64>| line?.checked_sub(value).filter(|b| *b > 0);
        let available = || sample.available.checked_sub(self.available?);
        [
            below(sample.anonymous, self.anonymous),
            below(sample.swap_growth, self.swap_growth),
            available(),
        ]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(u64::MAX)
    }
}

/// Watches one process group and the machine under it.
#[derive(Debug)]
pub struct Watch {
    soft: Lines,
    hard: Lines,
    interval: Duration,
    memory: Memory,
    swap_at_start: u64,
    group: Option<Group>,
    members: Members,
    /// When `/proc` was last walked for members, and what that cost.
    scanned: Option<(Instant, Duration)>,
    /// A process was started since.
    unseen: bool,
    last: (Instant, u64),
    pause: Duration,
    statistics: Statistics,
    cpu_at_start: Option<Duration>,
}

impl Watch {
    /// Resolves the limits for this machine and notes how much swap is in use: made
    /// before the job starts.
    ///
    /// # Errors
    /// [`Error::Exhausted`] if a line is crossed already, or the errors of reading
    /// the kernel's figures.
    pub fn new(limits: &Limits) -> Result<Self, Error> {
        let mut memory = Memory::open()?;
        let reading = memory.read()?;
        let (soft, hard) = Lines::resolve(limits, reading.total);
        let start = Sample {
            swap_growth: 0,
            available: reading.available,
            anonymous: 0,
        };
        if let Some(breach) = hard.crossed(&start).or_else(|| soft.crossed(&start)) {
            return Err(Error::Exhausted(breach));
        }
        Ok(Self {
            soft,
            hard,
            interval: limits.interval,
            memory,
            swap_at_start: reading.swap_used,
            group: None,
            members: Members::default(),
            scanned: None,
            unseen: false,
            last: (Instant::now(), u64::MAX),
            pause: FASTEST,
            statistics: Statistics {
                samples: 0,
                missed: 0,
                peak_anonymous: 0,
                least_available: reading.available,
                peak_swap_growth: 0,
                watch_cpu_seconds: None,
            },
            cpu_at_start: thread_cpu(),
        })
    }

    /// Names the group whose anonymous memory counts; called by the thread that will
    /// take the samples, whose processor time counts from here.
    pub fn follow(&mut self, group: Group) {
        self.group = Some(group);
        self.scanned = None;
        self.cpu_at_start = thread_cpu();
    }

    /// Takes a sample. One that fails counts as missed: it says nothing about the job.
    pub fn sample(&mut self) -> Verdict {
        let began = Instant::now();
        let Ok(reading) = self.memory.read() else {
            self.statistics.missed += 1;
            return Verdict::Fine;
        };
        let sample = self.take(&reading, began);
        let seen = &mut self.statistics;
        seen.samples += 1;
        seen.peak_anonymous = seen.peak_anonymous.max(sample.anonymous);
        seen.least_available = seen.least_available.min(sample.available);
        seen.peak_swap_growth = seen.peak_swap_growth.max(sample.swap_growth);

        let room = self.hard.room(&sample).min(self.soft.room(&sample));
        let (before, room_before) = std::mem::replace(&mut self.last, (began, room));
        let rate = room_before.saturating_sub(room) as f64
            / began.duration_since(before).as_secs_f64().max(1e-3);
        self.pause = pause(room, rate, self.interval, began.elapsed());

        if let Some(breach) = self.hard.crossed(&sample) {
            Verdict::Hard(breach)
        } else if let Some(breach) = self.soft.crossed(&sample) {
            Verdict::Soft(breach)
        } else {
            Verdict::Fine
        }
    }

    fn take(&mut self, reading: &Reading, now: Instant) -> Sample {
        if let Some(group) = self.group
            && self.scan_is_due(now)
        {
            self.members.rescan(group.0);
            self.scanned = Some((now, now.elapsed()));
            self.unseen = false;
        }
        Sample {
            swap_growth: reading.swap_used.saturating_sub(self.swap_at_start),
            available: reading.available,
            anonymous: self.members.anonymous(),
        }
    }

    /// Finding new members means walking all of `/proc`. Where no line is set on the
    /// group's memory, that happens now and then for the statistics; else when some
    /// process was started, and less often where the walk is dear, unless a line is
    /// near. Memory of a member not seen yet still shows in `available`.
    fn scan_is_due(&mut self, now: Instant) -> bool {
        self.unseen |= self.members.may_have_grown();
        let Some((at, cost)) = self.scanned else {
            return true;
        };
        let since = now.duration_since(at);
        if since >= SCAN_ANYWAY {
            return true;
        }
        let counts = self.hard.anonymous.or(self.soft.anonymous).is_some();
        let near = self.pause < self.interval;
        let unhurried = self.interval.max(cost * SCAN_COST_SHARE).min(SLOWEST);
        counts && self.unseen && (near || since >= unhurried)
    }

    /// How long to wait before the next sample.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// What was seen so far; asked by the thread that takes the samples.
    pub fn statistics(&self) -> Statistics {
        let cpu = thread_cpu().zip(self.cpu_at_start);
        Statistics {
            watch_cpu_seconds: cpu.map(|(now, start)| now.saturating_sub(start).as_secs_f64()),
            ..self.statistics
        }
    }
}

/// The rule at the top of this module.
fn pause(room: u64, rate: f64, interval: Duration, cost: Duration) -> Duration {
    let unhurried = interval.max(cost * COST_SHARE).min(SLOWEST.max(interval));
    let until_half_way = room as f64 / (2.0 * rate.max(LEAST_RATE));
    Duration::from_secs_f64(until_half_way.min(unhurried.as_secs_f64())).max(FASTEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_default_lines_are_six_gigabytes_and_six_percent_and_ask_before() {
        let (soft, hard) = Lines::resolve(&Limits::default(), 100 * GIB);
        assert_eq!(hard.swap_growth, Some(6 * GIB));
        assert_eq!(hard.available, Some(6 * GIB));
        assert_eq!(hard.anonymous, None);
        assert_eq!(soft.swap_growth, Some(9 * GIB / 2));
        assert_eq!(soft.available, Some(8 * GIB));
        let quiet = Limits {
            ask_first: false,
            ..Limits::default()
        };
        let (soft, _) = Lines::resolve(&quiet, 100 * GIB);
        assert_eq!((soft.swap_growth, soft.available), (None, None));
    }

    #[test]
    fn each_line_is_crossed_where_it_lies_and_not_before() {
        let lines = Lines {
            swap_growth: Some(100),
            available: Some(50),
            anonymous: Some(1000),
        };
        let calm = Sample {
            swap_growth: 99,
            available: 50,
            anonymous: 999,
        };
        assert_eq!(lines.crossed(&calm), None);
        let measure = |sample: Sample| lines.crossed(&sample).unwrap().measure;
        let swapping = Sample {
            swap_growth: 100,
            ..calm
        };
        let starving = Sample {
            available: 49,
            ..calm
        };
        let grown = Sample {
            anonymous: 1000,
            ..calm
        };
        assert_eq!(measure(swapping), Measure::SwapGrowth);
        assert_eq!(measure(starving), Measure::Available);
        assert_eq!(measure(grown), Measure::Anonymous);
    }

    #[test]
    fn the_watch_looks_closer_as_a_line_comes_near() {
        let interval = Duration::from_millis(250);
        let cheap = Duration::from_micros(50);
        let look = |room, rate| pause(room, rate, interval, cheap);
        assert_eq!(look(20 * GIB, 0.0), interval);
        assert_eq!(look(u64::MAX, 0.0), interval);
        // 100 MiB away: at 1 GiB/s half of 98 ms, at 4 GiB/s half of 24 ms.
        assert!((48..50).contains(&look(100 << 20, 0.0).as_millis()));
        assert!((12..13).contains(&look(100 << 20, 4.0 * GIB as f64).as_millis()));
        assert_eq!(look(0, 0.0), FASTEST);
        // A sample of 2 ms is not taken four times a second, unless it has to be.
        let dear = Duration::from_millis(2);
        assert_eq!(pause(20 * GIB, 0.0, interval, dear), SLOWEST);
        assert!(pause(100 << 20, 0.0, interval, dear) < interval);
    }

    #[test]
    fn a_machine_already_short_of_memory_is_not_given_a_job() {
        let limits = Limits {
            min_free: Some(Amount::Percent(100.0)),
            ..Limits::default()
        };
        let refused = Watch::new(&limits).unwrap_err().to_string();
        assert!(refused.contains("before the job has started"), "{refused}");
    }
}
