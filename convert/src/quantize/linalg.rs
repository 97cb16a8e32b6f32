//! The dense linear algebra of the quantizer: the only file that knows faer.
//!
//! Matrices are column-major slices. Every product runs on one thread and work is
//! divided into tiles of fixed size, so results do not depend on the number of
//! threads: parallelism lies between tiles only.

use std::ops::Range;

use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::cholesky::llt::factor::{
    LltError, LltRegularization, cholesky_in_place, cholesky_in_place_scratch,
};
use faer::linalg::matmul::matmul;
use faer::linalg::triangular_solve::{
    solve_lower_triangular_in_place, solve_upper_triangular_in_place,
};
use faer::prelude::{IntoConst, MatMut, MatRef, ReborrowMut};
use faer::traits::RealField;
use faer::traits::math_utils::one;
use faer::{Accum, Par, Spec};
use rayon::prelude::*;

/// Width of the panels of the factorization and of the tiles of its update.
const PANEL: usize = 256;

/// Up to this size Hessians are factored in f64. Above, an f64 copy alone would
/// take gigabytes (1.2 GB at 12288 columns).
const F64_LIMIT: usize = 5120;

/// H = L Lᵀ in the form that rounding uses.
pub(super) struct Factor {
    /// n × n, column-major: below the diagonal `L[j][k] / L[k][k]`; the rest is unspecified.
    pub feedback: Vec<f32>,
    /// `L[k][k]²`.
    pub pivots: Vec<f64>,
}

/// Factors the symmetric matrix whose lower triangle `element(row, column)` gives.
///
/// # Errors
/// The index of the first pivot that is not positive.
pub(super) fn factor(
    n: usize,
    element: impl Fn(usize, usize) -> f64 + Sync,
) -> Result<Factor, usize> {
    if n <= F64_LIMIT {
        let mut a = vec![0f64; n * n];
        fill_lower(&mut a, n, &element);
        cholesky(&mut a, n)?;
        let pivots = (0..n).map(|k| a[k * n + k].powi(2)).collect();
        let mut feedback = vec![0f32; n * n];
        feedback
            .par_chunks_exact_mut(n)
            .zip(a.par_chunks_exact(n))
            .enumerate()
            .for_each(|(k, (out, column))| {
                for j in k + 1..n {
                    out[j] = (column[j] / column[k]) as f32;
                }
            });
        Ok(Factor { feedback, pivots })
    } else {
        let mut a = vec![0f32; n * n];
        fill_lower(&mut a, n, |row, col| element(row, col) as f32);
        cholesky(&mut a, n)?;
        let pivots = (0..n).map(|k| f64::from(a[k * n + k]).powi(2)).collect();
        a.par_chunks_exact_mut(n)
            .enumerate()
            .for_each(|(k, column)| {
                let pivot = column[k];
                column[k + 1..].iter_mut().for_each(|v| *v /= pivot);
            });
        Ok(Factor {
            feedback: a,
            pivots,
        })
    }
}

fn fill_lower<T: Send>(a: &mut [T], n: usize, element: impl Fn(usize, usize) -> T + Sync) {
    a.par_chunks_exact_mut(n)
        .enumerate()
        .for_each(|(col, column)| {
            for row in col..n {
                column[row] = element(row, col);
            }
        });
}

/// Replaces the lower triangle of `a` by L of `a = L Lᵀ`.
///
/// Right-looking and blocked: factor a diagonal block, solve the panel below it,
/// subtract the panel's outer product from the columns to the right. faer could do
/// all this in one call, but its parallel schedule depends on the number of threads.
fn cholesky<T: RealField + Copy + Send + Sync>(a: &mut [T], n: usize) -> Result<(), usize> {
    let mut a = MatMut::from_column_major_slice_mut(a, n, n);
    let mut memory = MemBuffer::new(cholesky_in_place_scratch::<T>(
        PANEL,
        Par::Seq,
        Spec::default(),
    ));
    for start in (0..n).step_by(PANEL) {
        let width = PANEL.min(n - start);
        let rest = n - start - width;
        let lower = a
            .rb_mut()
            .submatrix_mut(start, start, width + rest, width + rest);
        let (left, right) = lower.split_at_col_mut(width);
        let (mut block, mut panel) = left.split_at_row_mut(width);
        cholesky_in_place(
            block.rb_mut(),
            LltRegularization::default(),
            Par::Seq,
            MemStack::new(&mut memory),
            Spec::default(),
        )
        .map_err(|LltError::NonPositivePivot { index }| start + index)?;
        if rest == 0 {
            break;
        }
        let block = block.into_const();
        // P ← P L⁻ᵀ, that is L Pᵀ = Pᵀ.
        panel.rb_mut().par_row_chunks_mut(PANEL).for_each(|rows| {
            solve_lower_triangular_in_place(block, rows.transpose_mut(), Par::Seq);
        });
        let panel = panel.into_const();
        right
            .split_at_row_mut(width)
            .1
            .par_col_chunks_mut(PANEL)
            .enumerate()
            .for_each(|(tile, columns)| {
                // Whole tiles, including what lies above the diagonal and is never read.
                let top = tile * PANEL;
                let across = panel.subrows(top, columns.ncols());
                matmul(
                    columns.split_at_row_mut(top).1,
                    Accum::Add,
                    panel.split_at_row(top).1,
                    across.transpose(),
                    -one::<T>(),
                    Par::Seq,
                );
            });
    }
    Ok(())
}

/// Solves `a x = b` for each column b of n values of `rhs`, in their place. `a` is n × n, symmetric
/// and positive definite; if rounding has made it anything else, its diagonal stands for it.
pub(super) fn solve(a: &[f32], n: usize, rhs: &mut [f64]) {
    let mut factor: Vec<f64> = a.iter().map(|&v| v.into()).collect();
    if cholesky(&mut factor, n).is_err() {
        for column in rhs.chunks_exact_mut(n) {
            for (at, value) in column.iter_mut().enumerate() {
                *value /= f64::from(a[at * n + at]);
            }
        }
        return;
    }
    let factor = MatRef::from_column_major_slice(&factor, n, n);
    let count = rhs.len() / n;
    let mut rhs = MatMut::from_column_major_slice_mut(rhs, n, count);
    solve_lower_triangular_in_place(factor, rhs.rb_mut(), Par::Seq);
    solve_upper_triangular_in_place(factor.transpose(), rhs, Par::Seq);
}

/// `dst += lhs · square[rows, cols]`, where `square` is n × n and column-major, `lhs`
/// has one column per row of the block and `dst` one per column of it.
pub(super) fn add_product(
    dst: &mut [f32],
    lhs: &[f32],
    square: &[f32],
    n: usize,
    rows: Range<usize>,
    cols: Range<usize>,
) {
    if rows.is_empty() || cols.is_empty() {
        return;
    }
    let height = dst.len() / cols.len();
    let rhs = MatRef::from_column_major_slice(square, n, n).submatrix(
        rows.start,
        cols.start,
        rows.len(),
        cols.len(),
    );
    matmul(
        MatMut::from_column_major_slice_mut(dst, height, cols.len()),
        Accum::Add,
        MatRef::from_column_major_slice(lhs, height, rows.len()),
        rhs,
        1.0,
        Par::Seq,
    );
}

#[cfg(test)]
mod tests {
    use nalgebra::DMatrix;

    use super::*;
    use crate::quantize::testing::{Random, correlated_hessian};

    #[test]
    fn the_factor_agrees_with_nalgebra_in_both_precisions() {
        // Not multiples of the panel width, one and several panels.
        for n in [5, 256, 600] {
            let h = correlated_hessian(&mut Random::new(n as u64), n, 2 * n);
            let element = |i: usize, j: usize| h[j * n + i] as f64 + f64::from(u8::from(i == j));
            let oracle = DMatrix::from_fn(n, n, element).cholesky().unwrap().unpack();
            let wide = factor(n, element).unwrap();
            let mut narrow = vec![0f32; n * n];
            fill_lower(&mut narrow, n, |i, j| element(i, j) as f32);
            cholesky(&mut narrow, n).unwrap();
            for k in 0..n {
                let pivot = oracle[(k, k)];
                assert!((wide.pivots[k] / pivot.powi(2) - 1.0).abs() < 1e-10);
                for j in k + 1..n {
                    let expected = oracle[(j, k)] / pivot;
                    let found = wide.feedback[k * n + j] as f64;
                    assert!((found - expected).abs() < 1e-6, "{found} {expected}");
                    let found = narrow[k * n + j] as f64;
                    assert!((found - oracle[(j, k)]).abs() < 2e-4 * pivot.max(1.0));
                }
            }
        }
    }

    #[test]
    fn the_first_pivot_that_is_not_positive_is_named() {
        let element = |i: usize, j: usize| match (i == j, i) {
            (true, 300) => -1.0,
            (true, _) => 1.0,
            _ => 0.0,
        };
        assert_eq!(factor(400, element).err(), Some(300));
    }

    #[test]
    fn the_factor_has_the_same_bits_for_any_number_of_threads() {
        let n = 700;
        let h = correlated_hessian(&mut Random::new(1), n, 2 * n);
        let element = |i: usize, j: usize| h[j * n + i] as f64 + f64::from(u8::from(i == j));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let factor = pool
                .build()
                .unwrap()
                .install(|| factor(n, element).unwrap());
            let feedback: Vec<u32> = factor.feedback.iter().map(|v| v.to_bits()).collect();
            (feedback, factor.pivots)
        };
        let one = run(1);
        assert!(one == run(2) && one == run(4));
    }
}
