//! Time for measurements.

use rustix::time::{ClockId, clock_gettime};

/// Seconds of a clock that suits work on `threads` threads: the processor time of
/// this thread if there are no others, which other work on the machine does not touch,
/// else the time of day.
pub fn seconds(threads: usize) -> f64 {
    let clock = match threads {
        1 => ClockId::ThreadCPUTime,
        _ => ClockId::Monotonic,
    };
    let now = clock_gettime(clock);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}
