//! Inputs for the tests of the quantizer.

use super::{Calibration, Matrix};

/// A small deterministic generator (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Above 0 and below 1.
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller).
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Σ x xᵀ over `rows` inputs that share a few directions and whose columns differ in
/// scale, as hidden states do.
pub(crate) fn correlated_hessian(random: &mut Random, cols: usize, rows: usize) -> Vec<f32> {
    let shared = 4;
    let scale: Vec<f64> = (0..cols).map(|_| (0.7 * random.normal()).exp()).collect();
    let directions: Vec<f64> = (0..shared * cols).map(|_| random.normal()).collect();
    let mut h = vec![0f64; cols * cols];
    for _ in 0..rows {
        let strength: Vec<f64> = (0..shared).map(|_| random.normal()).collect();
        let x: Vec<f64> = (0..cols)
            .map(|c| {
                let common: f64 = (0..shared)
                    .map(|d| strength[d] * directions[d * cols + c])
                    .sum();
                scale[c] * (0.5 * common + random.normal())
            })
            .collect();
        for (i, row) in h.chunks_exact_mut(cols).enumerate() {
            for (h, b) in row.iter_mut().zip(&x) {
                *h += x[i] * b;
            }
        }
    }
    h.into_iter().map(|v| v as f32).collect()
}

/// A matrix and the statistics of its inputs.
pub(crate) struct Problem {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) weights: Vec<f32>,
    pub(crate) hessian: Vec<f32>,
    pub(crate) sumsq: Vec<f64>,
    pub(crate) samples: u64,
}

impl Problem {
    pub(crate) fn new(seed: u64, rows: usize, cols: usize) -> Self {
        let mut random = Random::new(seed);
        let samples = 3 * cols;
        let hessian = correlated_hessian(&mut random, cols, samples);
        let weights = (0..rows * cols)
            .map(|_| (0.02 * random.normal()) as f32)
            .collect();
        let mut problem = Self {
            rows,
            cols,
            weights,
            hessian,
            sumsq: Vec::new(),
            samples: samples as u64,
        };
        problem.update_sumsq();
        problem
    }

    /// Makes the sums of squares those of the Hessian.
    pub(crate) fn update_sumsq(&mut self) {
        self.sumsq = (0..self.cols)
            .map(|c| self.hessian[c * self.cols + c].into())
            .collect();
    }

    pub(crate) fn matrix(&self) -> Matrix<'_> {
        Matrix {
            name: "w",
            rows: self.rows,
            cols: self.cols,
            data: &self.weights,
        }
    }

    pub(crate) fn calibration(&self) -> Calibration<'_> {
        Calibration {
            name: "x",
            cols: self.cols,
            hessian: &self.hessian,
            sumsq: &self.sumsq,
            rows: self.samples,
        }
    }

    /// Σ (q - w) H (q - w)ᵀ over the rows, term by term in f64.
    pub(crate) fn objective(&self, q: &[f32]) -> f64 {
        let mut sum = 0.0;
        for (q, w) in q
            .chunks_exact(self.cols)
            .zip(self.weights.chunks_exact(self.cols))
        {
            let e: Vec<f64> = q.iter().zip(w).map(|(q, w)| f64::from(q - w)).collect();
            for (i, h) in self.hessian.chunks_exact(self.cols).enumerate() {
                let he: f64 = h.iter().zip(&e).map(|(h, e)| f64::from(*h) * e).sum();
                sum += e[i] * he;
            }
        }
        sum
    }
}
