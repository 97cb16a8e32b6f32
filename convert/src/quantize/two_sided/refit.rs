//! The tables step.

use super::descend::dot_product;
use super::{Group, Refinement};
use crate::quantize::codebook::vectorized;

/// Of each group, the product of its parts of two vectors.
fn sizes_of(a: &[Vec<f64>], b: &[Vec<f64>]) -> Vec<f64> {
    let dot = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a * b).sum();
    a.iter().zip(b).map(dot).collect()
}

impl Refinement<'_> {
    /// For each group, the sums over the weights with each code of (O x)[r, c], and
    /// the sum over all weights of y (O x).
    pub(super) fn reduce(&self, x: &[f32], y: &[f32]) -> Vec<(Vec<f64>, f64)> {
        let height = self.tile.height();
        let reduce_group = |group: &Group| {
            let band = &self.bands[group.band];
            let mut by_code = vec![0f64; group.table.len()];
            let mut dot = 0.0;
            for c in 0..self.tile.cols() {
                let x = &x[c * height..][band.rows.clone()];
                for r in group.rows.clone() {
                    let ox = vectorized(|| dot_product(band.output(r), x));
                    let at = c * height + r;
                    by_code[self.codes[at] as usize] += f64::from(ox);
                    dot += f64::from(ox) * f64::from(y[at]);
                }
            }
            (by_code, dot)
        };
        self.groups.iter().map(reduce_group).collect()
    }

    /// What f would be quadratic in, for each code, if O and H were diagonal.
    fn preconditioner(&self, group: &Group) -> Vec<f64> {
        let (height, n) = (self.tile.height(), self.tile.cols());
        let band = &self.bands[group.band];
        let mut out = vec![0.0; group.table.len()];
        for c in 0..n {
            let curvature = f64::from(self.hessian[c * n + c] + self.added[c]);
            for row in group.rows.clone() {
                let code = self.codes[c * height + row] as usize;
                let own = band.output(row)[row - band.rows.start];
                out[code] += curvature * f64::from(own);
            }
        }
        out
    }

    /// Takes some steps of conjugate gradients.
    pub(super) fn refit_tables(&mut self, count: usize) {
        let preconditioners: Vec<Vec<f64>> = self
            .groups
            .iter()
            .map(|group| self.preconditioner(group))
            .collect();
        let precondition = |residual: &[f64], g: usize| -> Vec<f64> {
            let scales = residual.iter().zip(&preconditioners[g]);
            // A value without weights stays where it is.
            scales
                .map(|(r, &m)| if m > 0.0 { r / m } else { 0.0 })
                .collect()
        };
        let mut residuals: Vec<Vec<f64>> = self
            .reduce(&self.product, &self.error)
            .into_iter()
            .map(|(gradient, _)| gradient.into_iter().map(|g| -g).collect())
            .collect();
        let mut directions: Vec<Vec<f64>> = (0..self.groups.len())
            .map(|g| precondition(&residuals[g], g))
            .collect();
        let of_bands = |parts: &[f64]| -> Vec<f64> {
            let mut sums = vec![0.0; self.bands.len()];
            for (group, part) in self.groups.iter().zip(parts) {
                sums[group.band] += part;
            }
            sums
        };
        let bands: Vec<usize> = self.groups.iter().map(|group| group.band).collect();
        let mut sizes = of_bands(&sizes_of(&residuals, &directions));
        let mut tables: Vec<Vec<f64>> = residuals.iter().map(|r| vec![0.0; r.len()]).collect();
        for _ in 0..count {
            let narrow: Vec<Vec<f32>> = directions
                .iter()
                .map(|d| d.iter().map(|&v| v as f32).collect())
                .collect();
            let change = self.look_up(narrow.iter().map(Vec::as_slice));
            let product = self.times_hessian(&change);
            let (curvatures, along): (Vec<_>, Vec<_>) =
                self.reduce(&product, &change).into_iter().unzip();
            let along = of_bands(&along);
            let steps: Vec<f64> = sizes
                .iter()
                .zip(&along)
                .map(|(&before, &along)| {
                    if along > 0.0 && before > 0.0 {
                        before / along
                    } else {
                        0.0
                    }
                })
                .collect();
            for (g, curvature) in curvatures.into_iter().enumerate() {
                let step = steps[bands[g]];
                for (value, d) in tables[g].iter_mut().zip(&directions[g]) {
                    *value += step * d;
                }
                for (r, c) in residuals[g].iter_mut().zip(curvature) {
                    *r -= step * c;
                }
            }
            let next: Vec<Vec<f64>> = (0..bands.len())
                .map(|g| precondition(&residuals[g], g))
                .collect();
            let after = of_bands(&sizes_of(&residuals, &next));
            for (g, next) in next.into_iter().enumerate() {
                let (before, after) = (sizes[bands[g]], after[bands[g]]);
                let turn = if before > 0.0 { after / before } else { 0.0 };
                for (d, z) in directions[g].iter_mut().zip(next) {
                    *d = z + turn * *d;
                }
            }
            sizes = after;
        }
        for (group, change) in self.groups.iter_mut().zip(tables) {
            for (value, change) in group.table.iter_mut().zip(change) {
                *value += change as f32;
            }
        }
    }
}
