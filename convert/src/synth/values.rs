//! Random values as functions of a seed, a tensor's name and a position, so that
//! any part of a checkpoint can be made by any thread.
//!
//! Weights of trained models have heavy tails: here they follow Student's t with
//! four degrees of freedom. That distribution has a form without transcendental
//! functions, whose last bits would differ between platforms. With
//! `s = t / sqrt(4 + t^2)` its distribution function is `1/2 + 3s/4 - s^3/4`, so `s`
//! has the density `3/4 (1 - s^2)` on (-1, 1), which is that of `2m - 1` for the
//! median `m` of three uniform numbers (Beta(2, 2)). Hence `t = 2s / sqrt(1 - s^2)`:
//! one 64-bit random number, three of its 21-bit parts, one square root.

use half::bf16;

/// SplitMix64's increment and mixer (Steele, Lea, Flood, OOPSLA 2014): a bijection
/// that turns a counter into random bits.
fn mix(counter: u64) -> u64 {
    let mut z = counter;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The random stream of one tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    key: u64,
}

impl Stream {
    pub(super) fn new(seed: u64, tensor: &str) -> Self {
        let key = tensor.bytes().fold(mix(seed ^ INCREMENT), |key, byte| {
            mix(key.wrapping_add(u64::from(byte)).wrapping_mul(INCREMENT))
        });
        Self { key }
    }

    /// `s` of the module's text at a position: in (-1, 1), standard deviation
    /// `1 / sqrt(5)`.
    fn s(self, position: u64) -> f64 {
        const PART: u64 = (1 << 21) - 1;
        let bits = mix(self.key.wrapping_add(position.wrapping_mul(INCREMENT)));
        let [a, b, c] = [bits & PART, (bits >> 21) & PART, bits >> 42 & PART];
        let median = a.max(b).min(a.min(b).max(c));
        (2 * median + 1) as f64 / (1u64 << 21) as f64 - 1.0
    }

    /// Student's t with four degrees of freedom; its standard deviation is `sqrt(2)`.
    pub(super) fn student_t(self, position: u64) -> f64 {
        let s = self.s(position);
        2.0 * s / (1.0 - s * s).sqrt()
    }

    /// A norm's weight: near 1, between 0.8 and 1.2.
    pub(super) fn near_one(self, position: u64) -> f64 {
        1.0 + 0.2 * self.s(position)
    }
}

/// Writes bf16 values of `out.len() / 2` positions from `first` on.
pub(super) fn fill(out: &mut [u8], first: u64, value: impl Fn(u64) -> f64) {
    for (bytes, position) in out.as_chunks_mut::<2>().0.iter_mut().zip(first..) {
        *bytes = bf16::from_f64(value(position)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `P(|T| > x)` of four degrees of freedom at table values of the t distribution.
    #[test]
    fn weights_follow_students_t() {
        const N: u64 = 1_000_000;
        let stream = Stream::new(7, "model.layers.0.mlp.up_proj.weight");
        let values: Vec<f64> = (0..N).map(|i| stream.student_t(i)).collect();
        let quantiles = [
            (0.741, 0.5),
            (2.132, 0.1),
            (2.776, 0.05),
            (4.604, 0.01),
            (8.610, 0.001),
        ];
        for (x, p) in quantiles {
            let beyond = values.iter().filter(|v| v.abs() > x).count() as f64 / N as f64;
            let sigma = (p * (1.0 - p) / N as f64).sqrt();
            assert!(
                (beyond - p).abs() < 5.0 * sigma + 2e-3 * p,
                "{x}: {beyond}, not {p}"
            );
        }
        let mean = values.iter().sum::<f64>() / N as f64;
        assert!(mean.abs() < 5.0 * (2.0 / N as f64).sqrt());
    }

    #[test]
    fn streams_of_other_tensors_and_seeds_are_unrelated() {
        let base = Stream::new(0, "a");
        for other in [
            Stream::new(0, "b"),
            Stream::new(1, "a"),
            Stream::new(0, "aa"),
        ] {
            let n = 10_000;
            let dot: f64 = (0..n).map(|i| base.s(i) * other.s(i)).sum::<f64>() / n as f64;
            assert!(
                dot.abs() < 5.0 * 0.2 / (n as f64).sqrt(),
                "correlation {dot}"
            );
        }
    }
}
