//! Statistics of a layer weighted by what the end of the model makes of its outputs.
//!
//! Near the original weights the loss grows by `½ Σ_t (g_tᵀ E x_t)²` when a matrix changes
//! by E, where `x_t` is its input and `g_t` the gradient of the loss at its output for
//! position t. Two cheap parts of that are kept:
//!
//! ```text
//! inputs    Σ_t |g_t|² x_t x_tᵀ          positions count by how much the loss minds them
//!           (Kim et al., GuidedQuant, 2025, arXiv:2505.07004)
//! outputs   Σ_t |x_t|² g_t g_tᵀ / cols    outputs count likewise
//!           (Tseng, Sun, De Sa, 2025, arXiv:2505.22988)
//! ```
//!
//! A few positions, the first of a window above all, carry hundreds of times the mean weight,
//! so the weighted sum over inputs is that of a small sample. It is mixed half and half with
//! the plain sum, both brought to the same mean diagonal. Of the sum over outputs the
//! diagonal blocks of bands of rows are kept.

use anemone_schemas::spec::Site;
use rayon::prelude::*;

use crate::matmul::{elements, matrix};
use crate::{Error, Stats, StatsBuilder};

/// What a [`GuidedBuilder`] found about a site.
#[derive(Debug, Clone)]
pub struct Guided {
    /// Unweighted inputs.
    pub plain: Stats,
    /// The mixture of plain and weighted inputs.
    pub mixed: Stats,
    /// For each matrix that reads the site, in order: one row-major block per band of
    /// rows, the last filled up with zeros.
    pub outputs: Vec<Vec<f32>>,
}

/// Takes in rows with their gradients and gives [`Guided`].
#[derive(Debug)]
pub struct GuidedBuilder {
    plain: StatsBuilder,
    weighted: StatsBuilder,
    outputs: Vec<OutputBlocks>,
    cols: usize,
}

impl GuidedBuilder {
    /// No rows yet, for matrices with these numbers of outputs that read a site of `cols` inputs,
    /// in bands of `band_rows` rows.
    ///
    /// # Panics
    /// If `cols` or `band_rows` is 0.
    pub fn new(site: Site, cols: usize, outputs: &[usize], band_rows: usize) -> Self {
        Self {
            plain: StatsBuilder::new(site, cols),
            weighted: StatsBuilder::new(site, cols),
            outputs: outputs
                .iter()
                .map(|&rows| OutputBlocks::new(rows, band_rows))
                .collect(),
            cols,
        }
    }

    /// Takes in row-major inputs and the gradients at the outputs of each matrix. As for
    /// [`StatsBuilder::add`], rows that are not finite are refused in the end.
    ///
    /// # Errors
    /// An error of a matrix product.
    ///
    /// # Panics
    /// If lengths do not agree.
    pub fn add(&mut self, inputs: &[f32], gradients: &[&[f32]]) -> Result<(), Error> {
        let rows = inputs.len() / self.cols;
        assert_eq!(gradients.len(), self.outputs.len());
        let mut weights = vec![0.0f32; rows];
        for (gradient, output) in gradients.iter().zip(&self.outputs) {
            assert_eq!(gradient.len(), rows * output.rows);
            weights
                .par_iter_mut()
                .zip(gradient.par_chunks_exact(output.rows))
                .for_each(|(sum, row)| *sum += row.iter().map(|g| g * g).sum::<f32>());
        }
        self.add_inputs(inputs, &weights)?;
        let norms = self.input_norms(inputs);
        for (gradient, output) in gradients.iter().zip(&mut self.outputs) {
            output.add(gradient, &norms)?;
        }
        Ok(())
    }

    /// [`Self::add`] for the output layer, whose gradients need not be drawn: over all next ids
    /// with the probabilities of a row p, `g gᵀ` averages to `diag(p) - p pᵀ`.
    ///
    /// # Errors
    /// An error of a matrix product.
    ///
    /// # Panics
    /// If lengths do not agree, or there is not exactly one matrix.
    pub fn add_distribution(&mut self, inputs: &[f32], probabilities: &[f32]) -> Result<(), Error> {
        let [output] = &self.outputs[..] else {
            panic!("one output layer");
        };
        let weights: Vec<f32> = probabilities
            .par_chunks_exact(output.rows)
            .map(|p| (1.0 - p.iter().map(|p| p * p).sum::<f32>()).max(0.0))
            .collect();
        assert_eq!(weights.len() * self.cols, inputs.len());
        self.add_inputs(inputs, &weights)?;
        let norms = self.input_norms(inputs);
        self.outputs[0].add_distribution(probabilities, &norms)
    }

    fn add_inputs(&mut self, inputs: &[f32], weights: &[f32]) -> Result<(), Error> {
        self.plain.add(inputs)?;
        let mut scaled = inputs.to_vec();
        scaled
            .par_chunks_exact_mut(self.cols)
            .zip(weights)
            .for_each(|(row, weight)| {
                let root = weight.sqrt();
                for x in row {
                    *x *= root;
                }
            });
        self.weighted.take(scaled)
    }

    /// `|x|² / cols` of each row.
    fn input_norms(&self, inputs: &[f32]) -> Vec<f32> {
        inputs
            .par_chunks_exact(self.cols)
            .map(|x| x.iter().map(|x| x * x).sum::<f32>() / self.cols as f32)
            .collect()
    }

    /// The sums. Where the loss minds nothing (all gradients zero), the mixture is the plain sum.
    ///
    /// # Errors
    /// [`Error::NonFiniteInput`] if any row or gradient was NaN or infinite.
    pub fn finish(self) -> Result<Guided, Error> {
        let plain = self.plain.finish()?;
        let mut mixed = self.weighted.finish()?;
        let total = |stats: &Stats| stats.sumsq.iter().sum::<f64>();
        let scale = total(&plain) / total(&mixed);
        let (own, other) = if scale.is_finite() {
            (0.5 * scale, 0.5)
        } else {
            (0.0, 1.0)
        };
        mixed
            .hessian
            .par_iter_mut()
            .zip(&plain.hessian)
            .for_each(|(w, p)| *w = (own * f64::from(*w) + other * f64::from(*p)) as f32);
        for (w, p) in mixed.sumsq.iter_mut().zip(&plain.sumsq) {
            *w = own * *w + other * p;
        }
        mixed.max_abs = plain.max_abs;
        let outputs = self.outputs.into_iter().map(|o| o.blocks).collect();
        Ok(Guided {
            plain,
            mixed,
            outputs,
        })
    }
}

/// Diagonal blocks of `Σ_t w_t g_t g_tᵀ`.
#[derive(Debug)]
struct OutputBlocks {
    rows: usize,
    size: usize,
    blocks: Vec<f32>,
}

impl OutputBlocks {
    fn new(rows: usize, size: usize) -> Self {
        Self {
            rows,
            size,
            blocks: vec![0.0; rows.div_ceil(size) * size * size],
        }
    }

    fn add(&mut self, gradients: &[f32], weights: &[f32]) -> Result<(), Error> {
        let mut scaled = gradients.to_vec();
        scaled
            .par_chunks_exact_mut(self.rows)
            .zip(weights)
            .for_each(|(row, weight)| {
                let root = weight.sqrt();
                for g in row {
                    *g *= root;
                }
            });
        self.add_products(scaled, weights.len(), 1.0)
    }

    fn add_distribution(&mut self, probabilities: &[f32], weights: &[f32]) -> Result<(), Error> {
        let mut scaled = probabilities.to_vec();
        let mut diagonal = vec![0.0f32; self.rows];
        for (p, weight) in scaled.chunks_exact_mut(self.rows).zip(weights) {
            let root = weight.sqrt();
            for (sum, p) in diagonal.iter_mut().zip(p) {
                *sum += weight * *p;
                *p *= root;
            }
        }
        self.add_products(scaled, weights.len(), -1.0)?;
        for (row, sum) in diagonal.into_iter().enumerate() {
            self.blocks[row * self.size + row % self.size] += sum;
        }
        Ok(())
    }

    /// Adds `sign Σ_t g_t g_tᵀ` of each group.
    fn add_products(&mut self, rows: Vec<f32>, count: usize, sign: f32) -> Result<(), Error> {
        let (size, all) = (self.size, self.rows);
        let x = matrix(rows, count, all)?;
        self.blocks
            .par_chunks_exact_mut(size * size)
            .enumerate()
            .try_for_each(|(group, block)| {
                let first = group * size;
                let width = size.min(all - first);
                let part = x.narrow(1, first, width)?;
                let product = elements(&part.t()?.matmul(&part)?)?;
                for (row, products) in block.chunks_exact_mut(size).zip(product.chunks(width)) {
                    for (sum, product) in row.iter_mut().zip(products) {
                        *sum += sign * product;
                    }
                }
                Ok(())
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(seed: usize, n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 500.0 - 1.0)
            .collect()
    }

    #[test]
    fn sums_are_those_of_the_formulas_in_f64() {
        let (rows, cols, outs, group) = (23, 5, [7usize, 4], 4);
        let x = values(1, rows * cols);
        let g = outs.map(|n| values(n, rows * n));
        let mut builder = GuidedBuilder::new(Site::MlpIn, cols, &outs, group);
        builder
            .add(&x[..10 * cols], &[&g[0][..70], &g[1][..40]])
            .unwrap();
        builder
            .add(&x[10 * cols..], &[&g[0][70..], &g[1][40..]])
            .unwrap();
        let found = builder.finish().unwrap();
        let x = |t: usize, c: usize| f64::from(x[t * cols + c]);
        let grad = |m: usize, t: usize, r: usize| f64::from(g[m][t * outs[m] + r]);
        let weight = |t: usize| -> f64 {
            let squares = (0..2).flat_map(|m| (0..outs[m]).map(move |r| (m, r)));
            squares.map(|(m, r)| grad(m, t, r).powi(2)).sum()
        };
        let sum = |a: usize, b: usize, w: &dyn Fn(usize) -> f64| -> f64 {
            (0..rows).map(|t| w(t) * x(t, a) * x(t, b)).sum()
        };
        let trace = |w: &dyn Fn(usize) -> f64| (0..cols).map(|c| sum(c, c, w)).sum::<f64>();
        let scale = trace(&|_| 1.0) / trace(&weight);
        for a in 0..cols {
            for b in 0..cols {
                let expected = 0.5 * sum(a, b, &|_| 1.0) + 0.5 * scale * sum(a, b, &weight);
                let found = f64::from(found.mixed.hessian[a * cols + b]);
                assert!((found - expected).abs() < 1e-4, "{found} {expected}");
            }
        }
        for m in 0..2 {
            assert_eq!(
                found.outputs[m].len(),
                outs[m].div_ceil(group) * group * group
            );
            for r in 0..outs[m] {
                for s in 0..outs[m] {
                    if r / group != s / group {
                        continue;
                    }
                    let expected: f64 = (0..rows)
                        .map(|t| {
                            let norm: f64 = (0..cols).map(|c| x(t, c).powi(2)).sum();
                            norm / cols as f64 * grad(m, t, r) * grad(m, t, s)
                        })
                        .sum();
                    let found = f64::from(found.outputs[m][r * group + s % group]);
                    assert!((found - expected).abs() < 1e-4, "{found} {expected}");
                }
            }
        }
    }

    #[test]
    fn a_distribution_counts_as_the_mean_over_its_draws() {
        let (cols, vocab) = (3, 5);
        let x = values(4, 2 * cols);
        let p = [0.1, 0.2, 0.3, 0.15, 0.25, 0.6, 0.1, 0.05, 0.05, 0.2];
        let mut builder = GuidedBuilder::new(Site::HeadIn, cols, &[vocab], vocab);
        builder.add_distribution(&x, &p).unwrap();
        let found = builder.finish().unwrap();
        let mut expected = vec![0.0f64; vocab * vocab];
        for (p, x) in p.chunks(vocab).zip(x.chunks(cols)) {
            let norm = x.iter().map(|x| f64::from(x * x)).sum::<f64>() / cols as f64;
            for y in 0..vocab {
                let g = |id: usize| f64::from(p[id]) - f64::from(u8::from(id == y));
                for (at, sum) in expected.iter_mut().enumerate() {
                    *sum += norm * f64::from(p[y]) * g(at / vocab) * g(at % vocab);
                }
            }
        }
        for (found, expected) in found.outputs[0].iter().zip(&expected) {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-5,
                "{found} {expected}"
            );
        }
    }
}
