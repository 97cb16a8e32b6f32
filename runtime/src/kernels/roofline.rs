//! What the machine can do: the denominators of every share of the roofline.
//!
//! Two figures bound a matrix product: how fast weights can be read from
//! memory and how many f32 multiply-adds the vector units can finish. Both are
//! measured with the instruction set and the threads that the kernels use.
//! They are the best of several short runs, because on a shared machine every
//! disturbance makes a run slower and none makes it faster, and on one thread they
//! are in processor time ([`clock`]).

#![expect(unsafe_code, reason = "streams a buffer through vector loads")]

use super::activations::{LANES, Lanes};
use super::clock;
use super::pool::Pool;
use super::simd::{Isa, Kernel, Simd};
use std::hint::black_box;

/// Measured limits of the machine at some number of threads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roofline {
    /// Threads that worked together.
    pub threads: usize,
    /// Bytes read from memory per second.
    pub bytes_per_second: f64,
    /// f32 operations per second, a multiply-add counting as two.
    pub flops_per_second: f64,
}

impl Roofline {
    /// Measures with all threads of `pool`. Bandwidth is that of reading a
    /// buffer of `bytes`, which should be several times the last-level cache;
    /// a smaller one measures that cache.
    ///
    /// # Panics
    ///
    /// When the buffer cannot be allocated.
    pub fn measure(pool: &Pool, bytes: usize) -> Self {
        let isa = Isa::detect();
        let tasks = 8 * pool.threads();
        let lines = (bytes / size_of::<Lanes>()).next_multiple_of(tasks);
        let buffer = vec![Lanes([1.0; LANES]); lines];
        let read = best(pool, || {
            pool.run(tasks, |i| {
                let part = lines / tasks;
                isa.run(Read(&buffer[i * part..][..part]));
            });
        });
        let rounds = 1 << 14;
        let chains = isa.run(MultiplyAdd(1));
        let work = best(pool, || {
            pool.run(tasks, |_| {
                isa.run(MultiplyAdd(rounds));
            });
        });
        let flops = tasks * rounds * chains * LANES * 2;
        Self {
            threads: pool.threads(),
            bytes_per_second: (lines * size_of::<Lanes>()) as f64 / read,
            flops_per_second: flops as f64 / work,
        }
    }

    /// Seconds below which no product of a matrix of `bytes` with `tokens`
    /// tokens and `weights` weights can stay.
    pub fn bound(&self, bytes: usize, weights: usize, tokens: usize) -> f64 {
        let flops = 2.0 * weights as f64 * tokens as f64;
        (bytes as f64 / self.bytes_per_second).max(flops / self.flops_per_second)
    }
}

/// Seconds of the fastest of nine runs.
fn best(pool: &Pool, mut run: impl FnMut()) -> f64 {
    (0..9)
        .map(|_| {
            let start = clock::seconds(pool.threads());
            run();
            clock::seconds(pool.threads()) - start
        })
        .fold(f64::INFINITY, f64::min)
}

/// Reads a buffer as four streams, prefetching in each.
struct Read<'a>(&'a [Lanes]);

impl Kernel for Read<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const STREAMS: usize = 4;
        const AHEAD: usize = 2048;
        let part = self.0.len() / STREAMS;
        let mut sums = [s.splat(0.0); STREAMS];
        for i in 0..part {
            for (stream, sum) in sums.iter_mut().enumerate() {
                let at = self.0[stream * part + i].0.as_ptr();
                s.prefetch(at.cast::<u8>().wrapping_add(AHEAD));
                // SAFETY: `at` points to sixteen lanes.
                *sum = s.add(*sum, unsafe { s.load(at) });
            }
        }
        let mut seen = [0.0; LANES];
        for sum in sums {
            // SAFETY: `seen` has sixteen lanes.
            unsafe { s.store(sum, seen.as_mut_ptr()) };
            black_box(&seen);
        }
    }
}

/// Runs as many independent chains as a register tile has accumulators for
/// this many rounds, and returns their number.
struct MultiplyAdd(usize);

impl Kernel for MultiplyAdd {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        const MOST: usize = 24;
        let chains = S::TILE_ROWS * S::TILE_TOKENS;
        let (factor, term) = (s.splat(black_box(0.999)), s.splat(black_box(0.001)));
        let mut v = [s.splat(1.0); MOST];
        for _ in 0..self.0 {
            for v in &mut v[..chains] {
                *v = s.mul_add(*v, factor, term);
            }
        }
        let mut seen = [0.0; LANES];
        for v in v {
            // SAFETY: `seen` has sixteen lanes.
            unsafe { s.store(v, seen.as_mut_ptr()) };
            black_box(&seen);
        }
        chains
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_limits_are_those_of_a_computer() {
        let roofline = Roofline::measure(&Pool::new(1), 1 << 24);
        assert!(
            (1e6..1e13).contains(&roofline.bytes_per_second),
            "{roofline:?}"
        );
        assert!(
            (1e6..1e13).contains(&roofline.flops_per_second),
            "{roofline:?}"
        );
        assert!(roofline.bound(1 << 30, 1, 1) > roofline.bound(1 << 20, 1, 1));
    }
}
