//! The unit of parallel work: some whole rows of a matrix.

use std::ops::Range;

use super::codebook::{Codebook, nearest, vectorized};
use super::linalg::add_product;
use super::{Calibration, Matrix};

/// Rows of a tile. Fixed, so that results do not depend on the number of threads.
const ROWS: usize = 128;

/// Columns of the Hessian multiplied at a time where only a sum is wanted.
const PRODUCT_COLUMNS: usize = 1024;

/// Consecutive rows of a matrix.
pub(super) struct Tile<'a> {
    matrix: Matrix<'a>,
    group_rows: usize,
    rows: Range<usize>,
}

/// A tile after rounding.
pub(super) struct Rounded {
    /// Row-major.
    pub(super) codes: Vec<u8>,
    /// Sum of squared weight errors.
    pub(super) plain: f64,
    /// Σ e H eᵀ over the rows.
    pub(super) weighted: f64,
}

impl<'a> Tile<'a> {
    /// Cuts a matrix into tiles of about [`ROWS`] rows; none of them cuts a band of
    /// `whole` rows.
    pub(super) fn cut(matrix: Matrix<'a>, group_rows: usize, whole: Option<usize>) -> Vec<Self> {
        let step = whole.map_or(ROWS, |band| band * (ROWS / band).max(1));
        (0..matrix.rows)
            .step_by(step)
            .map(|start| Self {
                matrix,
                group_rows,
                rows: start..(start + step).min(matrix.rows),
            })
            .collect()
    }

    pub(super) fn first_row(&self) -> usize {
        self.rows.start
    }

    pub(super) fn height(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn cols(&self) -> usize {
        self.matrix.cols
    }

    /// Every group of the matrix that has rows here, with those rows counted from the
    /// start of the tile.
    pub(super) fn groups(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let (rows, size) = (self.rows.clone(), self.group_rows);
        (rows.start / size..rows.end.div_ceil(size)).map(move |group| {
            let start = (group * size).max(rows.start);
            let end = ((group + 1) * size).min(rows.end);
            (group, start - rows.start..end - rows.start)
        })
    }

    /// The weights column by column, the columns in the given order.
    pub(super) fn columns(&self, order: &[usize]) -> Vec<f32> {
        let height = self.height();
        let mut out = vec![0.0; order.len() * height];
        for (r, row) in self.rows.clone().enumerate() {
            let row = self.matrix.row(row);
            for (k, &c) in order.iter().enumerate() {
                out[k * height + r] = row[c];
            }
        }
        out
    }

    /// Rounds every weight to the nearest value of its table.
    pub(super) fn round_to_nearest(
        &self,
        book: &Codebook,
        calibration: &Calibration<'_>,
    ) -> Rounded {
        let (height, cols) = (self.height(), self.cols());
        if book.vector() > 1 {
            return self.round_vectors(book, calibration);
        }
        let mut codes = vec![0u8; height * cols];
        let mut error = vec![0f32; height * cols];
        let mut found = vec![0u32; cols];
        for (group, rows) in self.groups() {
            let table = book.table(group);
            for r in rows {
                let row = self.matrix.row(self.rows.start + r);
                vectorized(|| nearest(book.midpoints(group), row, &mut found));
                for c in 0..cols {
                    let code = found[c];
                    codes[r * cols + c] = code as u8;
                    error[c * height + r] = row[c] - table[code as usize];
                }
            }
        }
        Rounded {
            codes,
            plain: error.iter().map(|&e| f64::from(e).powi(2)).sum(),
            weighted: weighted_error(&error, height, calibration),
        }
    }

    /// The same for vectors of rows, column by column.
    fn round_vectors(&self, book: &Codebook, calibration: &Calibration<'_>) -> Rounded {
        let (height, cols, vector) = (self.height(), self.cols(), book.vector());
        let order: Vec<usize> = (0..cols).collect();
        let mut error = self.columns(&order);
        let mut codes = vec![0u8; height / vector * cols];
        let mut found = vec![0u32; height / vector];
        let mut q = vec![0f32; height];
        for (c, column) in error.chunks_exact_mut(height).enumerate() {
            for (group, rows) in self.groups() {
                let codes = &mut found[rows.start / vector..rows.end / vector];
                let (x, q) = (&column[rows.clone()], &mut q[rows]);
                vectorized(|| book.round(group, x, codes, q));
            }
            for (value, q) in column.iter_mut().zip(&q) {
                *value -= q;
            }
            for (at, &code) in found.iter().enumerate() {
                codes[at * cols + c] = code as u8;
            }
        }
        Rounded {
            codes,
            plain: error.iter().map(|&e| f64::from(e).powi(2)).sum(),
            weighted: weighted_error(&error, height, calibration),
        }
    }
}

/// Σ e H eᵀ over the rows of a column-major error matrix.
pub(super) fn weighted_error(error: &[f32], height: usize, calibration: &Calibration<'_>) -> f64 {
    let n = calibration.cols;
    let mut sum = 0.0;
    for start in (0..n).step_by(PRODUCT_COLUMNS) {
        let block = start..(start + PRODUCT_COLUMNS).min(n);
        let mut product = vec![0f32; block.len() * height];
        add_product(
            &mut product,
            error,
            calibration.hessian,
            n,
            0..n,
            block.clone(),
        );
        let part = &error[block.start * height..block.end * height];
        let dot = product.iter().zip(part);
        sum += dot.map(|(&p, &e)| f64::from(p) * f64::from(e)).sum::<f64>();
    }
    sum.max(0.0)
}
