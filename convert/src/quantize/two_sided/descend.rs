//! The innermost loop of the codes step.

#![allow(
    clippy::inline_always,
    reason = "code must be inlined into `vectorized` to be compiled for its instructions"
)]

use super::Group;
use crate::quantize::codebook::nearest_one;

/// One block of columns of the tile.
pub(super) struct Block<'a> {
    pub(super) height: usize,
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
            let size = group.rows.len();
            for (r, output) in group.output.chunks_exact(size).enumerate() {
                let row = group.rows.start + r;
                for (c, target) in target.iter_mut().enumerate() {
                    let column = &self.product[c * height..][group.rows.clone()];
                    let sum: f32 = output.iter().zip(column).map(|(o, g)| o * g).sum();
                    *target = sum / output[r];
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
