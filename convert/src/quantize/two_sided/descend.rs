//! The innermost loop of the codes step.

#![allow(
    clippy::inline_always,
    reason = "code must be inlined into `vectorized` to be compiled for its instructions"
)]

use super::{Band, Group};
use crate::quantize::codebook::nearest_one;

/// Numbers added up side by side.
const LANES: usize = 16;

/// The product of two vectors of one length.
#[inline(always)]
pub(super) fn dot_product(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// One block of columns of the tile.
pub(super) struct Block<'a> {
    pub(super) height: usize,
    pub(super) bands: &'a [Band],
    pub(super) groups: &'a [Group],
    /// Block of the damped Hessian, row-major.
    pub(super) hessian: &'a [f32],
    pub(super) codes: &'a mut [u8],
    pub(super) product: &'a mut [f32],
    pub(super) change: &'a mut [f32],
}

impl Block<'_> {
    /// Takes each weight of the block to the table value that lowers f most; returns how many
    /// changed.
    #[inline(always)]
    pub(super) fn descend(&mut self) -> usize {
        let height = self.height;
        let width = self.codes.len() / height;
        let mut target = vec![0f32; width];
        let mut moved = vec![0f32; width];
        let mut flips = 0;
        for group in self.groups {
            let band = &self.bands[group.band];
            for row in group.rows.clone() {
                let output = band.output(row);
                let own = output[row - band.rows.start];
                for (c, target) in target.iter_mut().enumerate() {
                    let column = &self.product[c * height..][band.rows.clone()];
                    *target = dot_product(output, column) / own;
                }
                moved.fill(0.0);
                for c in 0..width {
                    let at = c * height + row;
                    let h = &self.hessian[c * width..][..width];
                    let old = group.table[self.codes[at] as usize];
                    let code = nearest_one(&group.midpoints, old - target[c] / h[c]);
                    let step = group.table[code as usize] - old;
                    if step == 0.0 {
                        continue;
                    }
                    for (target, h) in target.iter_mut().zip(h) {
                        *target += step * h;
                    }
                    for (moved, h) in moved.iter_mut().zip(h) {
                        *moved += step * h;
                    }
                    self.codes[at] = code as u8;
                    self.change[at] += step;
                    flips += 1;
                }
                for (c, moved) in moved.iter().enumerate() {
                    self.product[c * height + row] += moved;
                }
            }
        }
        flips
    }
}
