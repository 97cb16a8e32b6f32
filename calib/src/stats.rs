//! Second moments of a linear layer's input: what GPTQ (arXiv:2210.17323) calls the
//! Hessian of the layer's squared error, `H = Σ x xᵀ`, and its diagonal.

use anemone_schemas::spec::Site;
use rayon::prelude::*;

use crate::Error;
use crate::matmul::{elements, matrix};

/// Columns per matrix product. Only panels on and below the diagonal are computed,
/// so the smaller the panel the less is computed twice, and the larger the faster.
const PANEL: usize = 512;

/// Sums over all rows `x` that a site saw.
#[derive(Debug, Clone, PartialEq)]
pub struct Stats {
    /// Where.
    pub site: Site,
    /// Length of `x`.
    pub cols: usize,
    /// How many.
    pub rows: u64,
    /// `Σ x xᵀ`, `cols * cols`, exactly symmetric. Products and sums are in f32.
    pub hessian: Vec<f32>,
    /// `Σ x²` of each column, in f64.
    pub sumsq: Vec<f64>,
    /// Largest magnitude seen.
    pub max_abs: f32,
}

/// Takes in rows and gives [`Stats`]. Memory is `4 * cols²` bytes.
#[derive(Debug)]
pub struct StatsBuilder {
    stats: Stats,
    /// The first row that was not finite, and its column.
    bad: Option<(u64, usize)>,
}

impl StatsBuilder {
    /// No rows yet.
    ///
    /// # Panics
    /// If `cols` is 0.
    pub fn new(site: Site, cols: usize) -> Self {
        assert!(cols > 0);
        let stats = Stats {
            site,
            cols,
            rows: 0,
            hessian: vec![0.0; cols * cols],
            sumsq: vec![0.0; cols],
            max_abs: 0.0,
        };
        Self { stats, bad: None }
    }

    /// Takes in row-major rows. The result depends on how rows are divided among
    /// calls, in rounding only, and not on the number of threads.
    ///
    /// Rows that are not finite are remembered and refused by [`Self::finish`], since
    /// a [`Hook`](crate::Hook) cannot fail.
    ///
    /// # Errors
    /// An error of the matrix product.
    ///
    /// # Panics
    /// If the length is not a multiple of `cols`.
    pub fn add(&mut self, activations: &[f32]) -> Result<(), Error> {
        self.take(activations.to_vec())
    }

    /// [`Self::add`] without a copy.
    pub(crate) fn take(&mut self, activations: Vec<f32>) -> Result<(), Error> {
        let cols = self.stats.cols;
        assert!(activations.len().is_multiple_of(cols));
        let rows = activations.len() / cols;
        if rows == 0 || self.bad.is_some() {
            return Ok(());
        }
        if let Some(at) = activations.iter().position(|x| !x.is_finite()) {
            self.bad = Some((self.stats.rows + (at / cols) as u64, at % cols));
            return Ok(());
        }
        let max = activations.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        self.stats.max_abs = self.stats.max_abs.max(max);
        self.stats.rows += rows as u64;
        self.add_squares(&activations);

        let x = matrix(activations, rows, cols)?;
        for first in (0..cols).step_by(PANEL) {
            let width = PANEL.min(cols - first);
            // Rows `first..` of columns `first..first + width`.
            let below = x.narrow(1, first, cols - first)?;
            let panel = elements(&below.t()?.matmul(&x.narrow(1, first, width)?)?)?;
            self.stats.hessian[first * cols..]
                .par_chunks_exact_mut(cols)
                .zip(panel.par_chunks_exact(width))
                .for_each(|(row, panel)| {
                    for (h, p) in row[first..first + width].iter_mut().zip(panel) {
                        *h += p;
                    }
                });
        }
        Ok(())
    }

    fn add_squares(&mut self, activations: &[f32]) {
        let cols = self.stats.cols;
        let sums = self.stats.sumsq.par_chunks_mut(64).enumerate();
        sums.for_each(|(chunk, sums)| {
            for row in activations.chunks_exact(cols) {
                for (sum, x) in sums.iter_mut().zip(&row[chunk * 64..]) {
                    *sum += f64::from(*x) * f64::from(*x);
                }
            }
        });
    }

    /// The sums.
    ///
    /// # Errors
    /// [`Error::NonFiniteInput`] if any row was NaN or infinite.
    pub fn finish(self) -> Result<Stats, Error> {
        let mut stats = self.stats;
        if let Some((row, column)) = self.bad {
            return Err(Error::NonFiniteInput {
                site: stats.site,
                row,
                column,
            });
        }
        // Panels filled the lower triangle; the upper is its mirror.
        let cols = stats.cols;
        for row in 0..cols {
            for col in row + 1..cols {
                stats.hessian[row * cols + col] = stats.hessian[col * cols + row];
            }
        }
        Ok(stats)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activations(rows: usize, cols: usize) -> Vec<f32> {
        (0..rows * cols)
            .map(|i| ((i * 7919 + 13) % 1009) as f32 / 500.0 - 1.0)
            .collect()
    }

    #[test]
    fn sums_match_f64_at_widths_around_the_panel() {
        for cols in [1, 3, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL + 5] {
            let mut builder = StatsBuilder::new(Site::AttnIn, cols);
            let x = activations(41, cols);
            builder.add(&x[..17 * cols]).unwrap();
            builder.add(&[]).unwrap();
            builder.add(&x[17 * cols..]).unwrap();
            let stats = builder.finish().unwrap();
            assert_eq!((stats.rows, stats.cols), (41, cols));
            let column = |c: usize| x.iter().skip(c).step_by(cols).map(|&x| f64::from(x));
            for a in (0..cols).step_by(37) {
                let square: f64 = column(a).map(|x| x * x).sum();
                assert!((stats.sumsq[a] - square).abs() <= 1e-12 * square);
                for b in (0..cols).step_by(29) {
                    let exact: f64 = column(a).zip(column(b)).map(|(a, b)| a * b).sum();
                    let found = stats.hessian[a * cols + b];
                    assert!((f64::from(found) - exact).abs() < 2e-5, "{found} {exact}");
                    assert_eq!(found.to_bits(), stats.hessian[b * cols + a].to_bits());
                }
            }
            let max = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            assert_eq!(stats.max_abs.to_bits(), max.to_bits());
        }
    }

    #[test]
    fn a_nan_is_refused_with_its_place() {
        let mut builder = StatsBuilder::new(Site::MlpMid, 3);
        builder.add(&[1.0; 6]).unwrap();
        builder.add(&[1.0, 1.0, 1.0, 1.0, f32::NAN, 1.0]).unwrap();
        builder.add(&[1.0; 3]).unwrap();
        assert!(matches!(
            builder.finish(),
            Err(Error::NonFiniteInput {
                site: Site::MlpMid,
                row: 3,
                column: 1
            })
        ));
    }
}
