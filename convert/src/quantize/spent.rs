//! Where a quantizer's time goes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A part of the work that is timed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// Checking and factorizing Hessians.
    Factorize,
    KMeans,
    Gptq,
    TwoSided,
}

/// Nanoseconds by [`Part`], summed over threads.
#[derive(Debug, Default)]
pub(super) struct Spent([AtomicU64; 4]);

impl Spent {
    /// Runs `work` and counts its time.
    pub(super) fn time<T>(&self, part: Part, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.0[part as usize].fetch_add(nanoseconds, Ordering::Relaxed);
        result
    }

    /// Seconds by name.
    pub(super) fn seconds(&self) -> [(&'static str, f64); 4] {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| self.0[i].load(Ordering::Relaxed) as f64 / 1e9);
        [
            ("factorize", a),
            ("kmeans", b),
            ("gptq", c),
            ("two_sided", d),
        ]
    }
}
