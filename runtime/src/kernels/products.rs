//! The register tile of products that are summed in order.

#![expect(unsafe_code, reason = "the tile reads and writes through raw pointers")]

use super::activations::{LANES, Lanes};
use super::simd::Simd;

/// The elements of whole vectors.
pub(super) fn flat(lanes: &[Lanes]) -> &[f32] {
    // SAFETY: `Lanes` is sixteen f32 without padding.
    unsafe { std::slice::from_raw_parts(lanes.as_ptr().cast(), lanes.len() * LANES) }
}

/// The elements of whole vectors.
pub(super) fn flat_mut(lanes: &mut [Lanes]) -> &mut [f32] {
    // SAFETY: `Lanes` is sixteen f32 without padding.
    unsafe { std::slice::from_raw_parts_mut(lanes.as_mut_ptr().cast(), lanes.len() * LANES) }
}

/// `out[r][n] (+)= sum over k, in order, of left[r][k] * right[k][n]`: each element is
/// one chain of fused multiply-adds, so its bits do not depend on the tile it is in.
pub(super) struct Products<'a> {
    pub(super) left: &'a [f32],
    /// Elements from one row to the next.
    pub(super) left_row: usize,
    pub(super) right: &'a [f32],
    /// Elements from one `k` to the next.
    pub(super) right_step: usize,
    /// Extent of `k`.
    pub(super) steps: usize,
    pub(super) out: &'a mut [f32],
    /// Elements from one row to the next.
    pub(super) out_row: usize,
}

impl Products<'_> {
    /// `R` rows by `16 V` columns; continues the sums in `out` if `resume`. Returns `R`.
    ///
    /// # Panics
    /// If an operand is shorter than that.
    #[inline(always)]
    pub(super) fn run<S: Simd, const R: usize, const V: usize>(self, s: S, resume: bool) -> usize {
        let reach = |count: usize, step: usize, last: usize| match count {
            0 => 0,
            n => (n - 1) * step + last,
        };
        assert!(self.left.len() >= reach(R, self.left_row, self.steps));
        assert!(self.right.len() >= reach(self.steps, self.right_step, V * LANES));
        assert!(self.out.len() >= reach(R, self.out_row, V * LANES));
        let (left, right) = (self.left.as_ptr(), self.right.as_ptr());
        let out = self.out.as_mut_ptr();
        let mut acc = [[s.splat(0.0); V]; R];
        // SAFETY: the assertions cover every row, step and vector.
        unsafe {
            if resume {
                for r in 0..R {
                    for v in 0..V {
                        acc[r][v] = s.load(out.add(r * self.out_row + v * LANES));
                    }
                }
            }
            for k in 0..self.steps {
                let mut vectors = [s.splat(0.0); V];
                for v in 0..V {
                    vectors[v] = s.load(right.add(k * self.right_step + v * LANES));
                }
                for r in 0..R {
                    let factor = s.splat(*left.add(r * self.left_row + k));
                    for v in 0..V {
                        acc[r][v] = s.mul_add(factor, vectors[v], acc[r][v]);
                    }
                }
            }
            for r in 0..R {
                for v in 0..V {
                    s.store(acc[r][v], out.add(r * self.out_row + v * LANES));
                }
            }
        }
        R
    }
}
