//! Rounding with error feedback: GPTQ onto a fixed table.
//!
//! With H = Σ x xᵀ over the calibration inputs, rounding the rows w of a weight matrix to
//! q costs the layer's output
//!
//! ```text
//! f = Σ_rows (q - w) H (q - w)ᵀ
//! ```
//!
//! GPTQ (Frantar, Ashkboos, Hoefler, Alistarh, *GPTQ: Accurate Post-Training Quantization for
//! Generative Pre-trained Transformers*, 2022, arXiv:2210.17323) rounds one
//! column at a time and moves the columns not yet rounded so that they make up for the
//! error, by rows of the Cholesky factor of H⁻¹. Chee, Cai, Kuleshov and De Sa (*QuIP*, 2023,
//! arXiv:2307.13304, theorem 6) show that the same result comes from a factor of H
//! itself, which is how it is done here: one factorization instead of factor, inverse and
//! factor, and no inverse to lose digits in. With H = L Lᵀ and e = w - q,
//!
//! ```text
//! f = |e L|² = Σ_k L_kk² (e_k + Σ_{j>k} e_j L_jk / L_kk)² = Σ_k L_kk² (x_k - q_k)²
//! x_k = w_k + Σ_{j>k} e_j L_jk / L_kk
//! ```
//!
//! so going from the last column to the first, each q_k is the table value nearest to x_k:
//!
//! ```text
//! for k in (0..cols).rev():
//!     x_k = w_k + Σ_{j>k} e_j L_jk / L_kk
//!     q_k = nearest value of the row's table to x_k
//!     e_k = w_k - q_k
//! ```
//!
//! Columns are sorted by their share of the signal, the largest last and therefore first
//! to be rounded ("act-order"): its errors can still be made up for by all others. Tables
//! belong to rows, so the order leaves no trace in the format.
//!
//! The real loop differs in two ways. Rows do not depend on each other, so it runs on tiles
//! of 128 rows, stored with the rows of a column next to each other: all steps are
//! vector operations over rows, and tiles are what the threads share. And the sum over
//! j > k is taken in blocks of 128 columns: the errors of all finished blocks enter by one
//! matrix product when a block begins, only those within the block one by one (the "lazy
//! batch updates" of the paper).
//!
//! Where an index stands for a vector of rows, their x_k are rounded together: rows share H, so
//! that nearest means the least sum of squares (van Baalen et al., *GPTVQ*, 2024,
//! arXiv:2402.15319).

#![allow(
    clippy::inline_always,
    reason = "code must be inlined into `vectorized` to be compiled for its instructions"
)]

use std::ops::Range;

use super::codebook::{Codebook, vectorized};
use super::hessian::{Prepared, Rounding};
use super::linalg::add_product;
use super::tile::{Rounded, Tile};

/// Columns whose errors are fed back one by one before a matrix product takes over.
const BLOCK: usize = 128;

/// Rounds the rows of a tile.
pub(super) fn round(
    tile: &Tile<'_>,
    book: &Codebook,
    prepared: &Prepared<'_>,
    by: &Rounding,
) -> Rounded {
    let n = by.order.len();
    let height = tile.height();
    let w = tile.columns(&by.order);
    let mut error = vec![0f32; w.len()];
    let mut codes = vec![0u8; w.len() / book.vector()];
    let mut damped = 0.0;
    for end in (1..=n).rev().step_by(BLOCK) {
        let block = end.saturating_sub(BLOCK)..end;
        let inner = block.start * height..end * height;
        let (_, later) = error.split_at(inner.end);
        let mut x = w[inner.clone()].to_vec();
        add_product(&mut x, later, &by.factor.feedback, n, end..n, block.clone());
        let mut step = Block {
            tile,
            book,
            feedback: &square_block(&by.factor.feedback, n, &block),
            pivots: &by.factor.pivots[block.clone()],
            w: &w[inner.clone()],
            x: &mut x,
            error: &mut error[inner],
            codes: &mut codes,
            order: &by.order[block],
        };
        damped += vectorized(|| step.round());
    }
    // The factor is that of the damped Hessian: take the damping out of the objective.
    let mut plain = 0.0;
    let mut undamped = damped;
    for (column, &c) in error.chunks_exact(height).zip(&by.order) {
        let squares = column.iter().map(|&e| f64::from(e).powi(2)).sum::<f64>();
        plain += squares;
        undamped -= squares * prepared.added(c, by.damping);
    }
    Rounded {
        codes,
        plain,
        weighted: undamped.max(0.0),
    }
}

/// The rows and columns `block` of the feedback matrix, row by row.
fn square_block(feedback: &[f32], n: usize, block: &Range<usize>) -> Vec<f32> {
    let mut out = Vec::with_capacity(block.len() * block.len());
    for row in block.clone() {
        out.extend(block.clone().map(|col| feedback[col * n + row]));
    }
    out
}

/// One block of columns of one tile.
struct Block<'a> {
    tile: &'a Tile<'a>,
    book: &'a Codebook,
    /// Block of the feedback matrix, row-major.
    feedback: &'a [f32],
    pivots: &'a [f64],
    w: &'a [f32],
    /// w plus the feedback so far.
    x: &'a mut [f32],
    error: &'a mut [f32],
    /// Row-major codes of the whole tile.
    codes: &'a mut [u8],
    /// Column of the matrix for each column of the block.
    order: &'a [usize],
}

impl Block<'_> {
    /// Rounds the block; returns its part of the damped objective.
    #[inline(always)]
    fn round(&mut self) -> f64 {
        let height = self.tile.height();
        let width = self.order.len();
        let cols = self.tile.cols();
        let vector = self.book.vector();
        let mut found = vec![0u32; height / vector];
        let mut q = vec![0f32; height];
        let mut objective = 0.0;
        for k in (0..width).rev() {
            let (before, from_k) = self.x.split_at_mut(k * height);
            let x = &from_k[..height];
            let w = &self.w[k * height..][..height];
            let error = &mut self.error[k * height..][..height];
            let mut distance = 0.0;
            for (group, rows) in self.tile.groups() {
                let vectors = rows.start / vector..rows.end / vector;
                let codes = &mut found[vectors.clone()];
                let x = &x[rows.clone()];
                self.book.round(group, x, codes, &mut q[rows.clone()]);
                for ((error, w), (x, q)) in error[rows.clone()]
                    .iter_mut()
                    .zip(&w[rows.clone()])
                    .zip(x.iter().zip(&q[rows]))
                {
                    *error = w - q;
                    distance += f64::from(x - q).powi(2);
                }
                for at in vectors {
                    self.codes[at * cols + self.order[k]] = found[at] as u8;
                }
            }
            objective += self.pivots[k] * distance;
            for (x, &feedback) in before
                .chunks_exact_mut(height)
                .zip(&self.feedback[k * width..])
            {
                for (x, &e) in x.iter_mut().zip(error.iter()) {
                    *x += feedback * e;
                }
            }
        }
        objective
    }
}
