//! Two-sided rounding: codes and tables refined in the metric of the model's loss.
//!
//! GPTQ weighs every output feature alike. The loss does not: near the original weights its
//! Hessian is close to a Kronecker product, so that with E = Q - W the quantity to lower is
//!
//! ```text
//! f = tr(O E H Eᵀ)        H = Σ x xᵀ over inputs,  O = Σ g gᵀ over gradients at the outputs
//! ```
//!
//! (Tseng, Sun, De Sa, *Model-Preserving Adaptive Rounding*, 2025, arXiv:2505.22988). O
//! is kept in diagonal blocks, one for each band of some groups of rows: most of the gain
//! remains, and bands become independent. Without gradients O is the identity, and
//! this is the alternation of table refit and coordinate descent for one layer's error.
//!
//! With G = E H, two kinds of steps alternate, neither of which can raise f:
//!
//! ```text
//! tables   f is quadratic in the 16 values; its gradient for value k is 2 Σ (O G)[r, c] over
//!          the weights with code k. Some steps of conjugate gradients, each an exact line
//!          search, preconditioned by the diagonal that remains for a diagonal O and H:
//!          Σ O_rr H_cc over the same weights.
//! codes    f is quadratic in each weight, with its minimum at x = q - t_c / H_cc where
//!          t = (O G)[r, :] / O_rr. Take the table value nearest to x and update G.
//! ```
//!
//! The real codes step differs in the order of its coordinates: it finishes 128 columns for all
//! rows of the tile before it moves on, and within them only that part of G is kept up to
//! date. What the flips of the block mean for all other columns then enters by one matrix product
//! per block, whatever their number.
//!
//! The last tables are rounded to f16 before the last codes are chosen.
//!
//! f knows nothing of what the other matrices of the model do. [`pull`] adds that.

mod descend;
mod metric;
mod pull;
mod refit;
#[cfg(test)]
mod tests;

use std::ops::Range;

use descend::Block;
pub(super) use metric::OutputMetric;
pub(super) use pull::Gradient;

use super::codebook::{Codebook, round_to_f16, vectorized};
use super::hessian::Prepared;
use super::linalg::add_product;
use super::tile::{Rounded, Tile};
use super::{QuantizeError, Settings};

/// Columns that are finished before the rest of G is brought up to date.
const BLOCK: usize = 128;

/// Steps of conjugate gradients per refit of the tables.
const REFIT_STEPS: usize = 3;

/// Passes end early when fewer than this fraction of the codes change.
const FEW_FLIPS: f64 = 3e-4;

/// Rows of the tile that O weighs together: some whole groups.
struct Band {
    /// Rows, counted from the start of the tile.
    rows: Range<usize>,
    /// O, row-major.
    output: Vec<f32>,
}

impl Band {
    /// The row of O that belongs to a row of the tile.
    fn output(&self, row: usize) -> &[f32] {
        let size = self.rows.len();
        &self.output[(row - self.rows.start) * size..][..size]
    }
}

/// A group of rows of the tile.
struct Group {
    /// Rows, counted from the start of the tile.
    rows: Range<usize>,
    /// Which band they lie in.
    band: usize,
    table: Vec<f32>,
    midpoints: Vec<f32>,
}

impl Group {
    fn set_table(&mut self, table: Vec<f32>) {
        let book = Codebook::new(table.len(), table);
        self.midpoints = book.midpoints(0).to_vec();
        self.table = book.table(0).to_vec();
    }
}

/// A tile under refinement. All matrices are column-major.
pub(super) struct Refinement<'a> {
    tile: &'a Tile<'a>,
    hessian: &'a [f32],
    /// Damping of each column.
    added: Vec<f32>,
    bands: Vec<Band>,
    groups: Vec<Group>,
    codes: Vec<u8>,
    weights: Vec<f32>,
    /// E.
    error: Vec<f32>,
    /// G = E (H + damping), and the pull.
    product: Vec<f32>,
    /// What [`pull`] adds to G; empty for nothing.
    pull: Vec<f32>,
}

impl<'a> Refinement<'a> {
    /// Starts from tables and from codes of the tile's rows. The tile holds whole groups.
    pub(super) fn new(
        tile: &'a Tile<'a>,
        book: &Codebook,
        start: &[u8],
        prepared: &'a Prepared<'_>,
        damping: f64,
        output: &OutputMetric,
    ) -> Self {
        let (height, cols) = (tile.height(), tile.cols());
        let size = output.rows();
        let bands = (0..height)
            .step_by(size)
            .map(|start| {
                let rows = start..(start + size).min(height);
                Band {
                    output: output.block(tile.first_row() + start, rows.len()),
                    rows,
                }
            })
            .collect();
        let groups = tile
            .groups()
            .map(|(group, rows)| Group {
                band: rows.start / size,
                rows,
                table: book.table(group).to_vec(),
                midpoints: book.midpoints(group).to_vec(),
            })
            .collect();
        let order: Vec<usize> = (0..cols).collect();
        let mut codes = vec![0; height * cols];
        for (r, row) in start.chunks_exact(cols).enumerate() {
            for (c, &code) in row.iter().enumerate() {
                codes[c * height + r] = code;
            }
        }
        let mut refinement = Self {
            tile,
            hessian: prepared.calibration.hessian,
            added: (0..cols)
                .map(|c| prepared.added(c, damping) as f32)
                .collect(),
            bands,
            groups,
            codes,
            weights: tile.columns(&order),
            error: Vec::new(),
            product: Vec::new(),
            pull: Vec::new(),
        };
        refinement.recompute();
        refinement
    }

    /// Alternates refits and codes steps; afterwards the tables are f16 values.
    pub(super) fn run(&mut self, settings: &Settings, name: &str) -> Result<(), QuantizeError> {
        for round in 0..settings.rounds {
            self.refit_tables(REFIT_STEPS);
            self.sort_tables();
            if round + 1 == settings.rounds {
                self.round_tables(name)?;
            }
            self.descend(settings.passes);
        }
        Ok(())
    }

    /// A short step of tables and codes, where many follow; afterwards the tables are f16 values.
    pub(super) fn run_once(&mut self, name: &str) -> Result<(), QuantizeError> {
        self.refit_tables(1);
        self.sort_tables();
        self.round_tables(name)?;
        self.descend(1);
        Ok(())
    }

    /// Passes over the codes.
    fn descend(&mut self, passes: u32) {
        self.recompute();
        for _ in 0..passes {
            let flips = self.codes_pass();
            if (flips as f64) < FEW_FLIPS * self.codes.len() as f64 {
                break;
            }
        }
    }

    /// The tables of the tile's groups and its codes.
    pub(super) fn finish(self) -> (Vec<f32>, Rounded) {
        let height = self.tile.height();
        let cols = self.tile.cols();
        let mut codes = vec![0; self.codes.len()];
        let [mut plain, mut weighted] = [0.0; 2];
        for c in 0..cols {
            for r in 0..height {
                let at = c * height + r;
                codes[r * cols + c] = self.codes[at];
                let e = f64::from(self.error[at]);
                let pull = self.pull.get(at).copied().unwrap_or(0.0);
                let product = f64::from(self.product[at]) - f64::from(pull);
                plain += e * e;
                weighted += e * (product - f64::from(self.added[c]) * e);
            }
        }
        let tables = self.groups.into_iter().flat_map(|g| g.table).collect();
        let rounded = Rounded {
            codes,
            plain,
            weighted: weighted.max(0.0),
        };
        (tables, rounded)
    }

    /// E and G from the codes and tables.
    fn recompute(&mut self) {
        let q = self.look_up(self.groups.iter().map(|g| g.table.as_slice()));
        self.error = q.iter().zip(&self.weights).map(|(q, w)| q - w).collect();
        self.product = self.times_hessian(&self.error);
        for (sum, pull) in self.product.iter_mut().zip(&self.pull) {
            *sum += pull;
        }
    }

    /// A matrix with `values[code]` in place of each code, where `values` belong to its group.
    fn look_up<'b>(&self, values: impl Iterator<Item = &'b [f32]>) -> Vec<f32> {
        let height = self.tile.height();
        let mut out = vec![0f32; self.codes.len()];
        for (group, values) in self.groups.iter().zip(values) {
            for c in 0..self.tile.cols() {
                for at in c * height + group.rows.start..c * height + group.rows.end {
                    out[at] = values[self.codes[at] as usize];
                }
            }
        }
        out
    }

    fn times_hessian(&self, x: &[f32]) -> Vec<f32> {
        let (height, n) = (self.tile.height(), self.tile.cols());
        let mut out: Vec<f32> = x
            .chunks_exact(height)
            .zip(&self.added)
            .flat_map(|(column, added)| column.iter().map(move |x| x * added))
            .collect();
        add_product(&mut out, x, self.hessian, n, 0..n, 0..n);
        out
    }

    /// Puts the values of each table in order and renames the codes accordingly.
    fn sort_tables(&mut self) {
        let (height, cols) = (self.tile.height(), self.tile.cols());
        for group in &mut self.groups {
            let mut order: Vec<usize> = (0..group.table.len()).collect();
            order.sort_by(|&a, &b| group.table[a].total_cmp(&group.table[b]));
            let mut place = vec![0u8; order.len()];
            for (to, &from) in order.iter().enumerate() {
                place[from] = to as u8;
            }
            let table = order.iter().map(|&from| group.table[from]).collect();
            group.set_table(table);
            for c in 0..cols {
                for code in &mut self.codes[c * height..][group.rows.clone()] {
                    *code = place[*code as usize];
                }
            }
        }
    }

    fn round_tables(&mut self, name: &str) -> Result<(), QuantizeError> {
        for group in &mut self.groups {
            let first_row = self.tile.first_row() + group.rows.start;
            let rounded = group
                .table
                .iter()
                .map(|&v| round_to_f16(v.into(), name, first_row))
                .collect::<Result<_, _>>()?;
            group.set_table(rounded);
        }
        Ok(())
    }

    /// Visits every weight once; returns how many codes changed.
    fn codes_pass(&mut self) -> usize {
        let (height, n) = (self.tile.height(), self.tile.cols());
        let mut flips = 0;
        for start in (0..n).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(n);
            let inner = block.start * height..block.end * height;
            let mut hessian = Vec::with_capacity(block.len() * block.len());
            for c in block.clone() {
                hessian.extend_from_slice(&self.hessian[c * n..][block.clone()]);
                let diagonal = hessian.len() - (block.end - c);
                hessian[diagonal] += self.added[c];
            }
            let mut change = vec![0f32; inner.len()];
            let mut step = Block {
                height,
                bands: &self.bands,
                groups: &self.groups,
                hessian: &hessian,
                codes: &mut self.codes[inner.clone()],
                product: &mut self.product[inner.clone()],
                change: &mut change,
            };
            let changed = vectorized(|| step.descend());
            if changed == 0 {
                continue;
            }
            flips += changed;
            for (e, d) in self.error[inner.clone()].iter_mut().zip(&change) {
                *e += d;
            }
            let (before, rest) = self.product.split_at_mut(inner.start);
            let after = &mut rest[inner.len()..];
            add_product(
                before,
                &change,
                self.hessian,
                n,
                block.clone(),
                0..block.start,
            );
            add_product(after, &change, self.hessian, n, block.clone(), block.end..n);
        }
        flips
    }

    /// f of the damped problem.
    #[cfg(test)]
    pub(super) fn objective(&self) -> f64 {
        let reduced = self.reduce(&self.product, &self.error);
        reduced.iter().map(|(_, dot)| dot).sum()
    }
}
