//! What the rest of the model asks of a matrix.
//!
//! [`super`] lowers the error of each matrix as if all others were exact. They are not: what one
//! layer adds to the residual stream, another can take away. The gradient D of the whole model's
//! divergence at the quantized weights says how, and G = E H is to be what makes O G equal to it.
//! So G gets a summand, the pull P, that goes in rounds where it has to:
//!
//! ```text
//! P ← P + β (O⁻¹ s D - G)        G = E (H + damping) + P
//! s = positions · mean diagonal of H / mean diagonal of O as it was summed
//! ```
//!
//! s brings D, of the mean divergence per position, to the units of f, in which O has a mean diagonal
//! of one. After each step codes and tables descend against the new G, and D is measured again. At
//! rest O G is s D itself: the codes cannot be improved one by one in the metric of the loss,
//! given all other matrices.
//!
//! All matrices move at once, and most of D is what they do together: on the models measured
//! O⁻¹ s D is 5 to 15 times as large as G, and far more where the metric is a poor model of the
//! loss. So β is not given but follows from how far G may go, some hundredths of its own
//! size in each band of rows:
//!
//! ```text
//! β = rate · |G| / |O⁻¹ s D - G|, at most 1        |X|² = Σ O_rr X[r, c]² / H_cc
//! ```

use super::Refinement;
use crate::quantize::linalg::solve;

/// The gradient of the loss at a tile.
pub(in crate::quantize) struct Gradient<'a> {
    /// Of the mean divergence per position with respect to the tile's weights, row-major.
    pub(in crate::quantize) values: &'a [f32],
    /// s.
    pub(in crate::quantize) scale: f64,
    /// How far G may go, relative to its size.
    pub(in crate::quantize) rate: f64,
}

impl Refinement<'_> {
    /// Moves the pull, row-major like the gradient, and lets it act on the steps that follow.
    pub(in crate::quantize) fn follow(&mut self, gradient: &Gradient<'_>, pull: &mut [f32]) {
        let (height, cols) = (self.tile.height(), self.tile.cols());
        self.pull = columns(pull, height, cols);
        self.recompute();
        for band in &self.bands {
            let size = band.rows.len();
            let mut asked: Vec<f64> = (0..cols * size)
                .map(|at| {
                    let (c, r) = (at / size, band.rows.start + at % size);
                    gradient.scale * f64::from(gradient.values[r * cols + c])
                })
                .collect();
            solve(&band.output, size, &mut asked);
            let [mut own, mut way] = [0.0; 2];
            for (c, asked) in asked.chunks_exact_mut(size).enumerate() {
                let curvature = f64::from(self.hessian[c * cols + c] + self.added[c]);
                for (r, asked) in asked.iter_mut().enumerate() {
                    let product = f64::from(self.product[c * height + band.rows.start + r]);
                    let weight = f64::from(band.output[r * size + r]) / curvature;
                    *asked -= product;
                    own += weight * product * product;
                    way += weight * *asked * *asked;
                }
            }
            let rate = gradient.rate * (own / way).sqrt();
            // Also where nothing is asked, and the ratio is not a number.
            let rate = if rate < 1.0 { rate } else { 1.0 };
            for (c, asked) in asked.chunks_exact(size).enumerate() {
                for (r, asked) in band.rows.clone().zip(asked) {
                    let at = c * height + r;
                    let step = (rate * asked) as f32;
                    self.pull[at] += step;
                    self.product[at] += step;
                    pull[r * cols + c] = self.pull[at];
                }
            }
        }
    }
}

/// A row-major matrix column by column.
fn columns(rows: &[f32], height: usize, cols: usize) -> Vec<f32> {
    (0..cols * height)
        .map(|at| rows[at % height * cols + at / height])
        .collect()
}
