//! The exponential function and softmax.
//!
//! `exp x = 2^n exp r` with `n = round(x / ln 2)` and `r = x - n ln 2`, which
//! lies within `ln 2 / 2` of zero. `ln 2` is split in two parts, of which the
//! first has so few bits that `n` times it is exact. On that interval `exp r`
//! is `1 + r + r^2 p(r)` with the polynomial of Moshier's Cephes library
//! (`expf`). The factor `2^n` is applied as two factors, so that results
//! between the smallest normal number and the smallest subnormal one round
//! once and overflow gives infinity.
//!
//! Softmax subtracts the maximum first, so no input overflows; a row of equal
//! values is uniform, whatever they are. All arithmetic is f32 with one
//! rounding of each result, and sums have a fixed order: of sixteen lanes along
//! a row, of rows down a column.

use super::activations::LANES;
use super::simd::{Isa, Kernel, Simd, load_f16, load_f32, store_f16, store_f32};
use half::f16;
use std::cell::RefCell;

#[inline(always)]
pub(super) fn exp_vector<S: Simd>(s: S, x: S::V) -> S::V {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const P: [f32; 6] = [
        1.987_569_1e-4,
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        0.166_666_65,
        0.5,
    ];
    // Beyond these the result is zero or infinite; NaN passes through.
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.mul_add(n, s.splat(-LN_2_HIGH), x);
    let r = s.mul_add(n, s.splat(-LN_2_LOW), r);
    let mut p = s.splat(P[0]);
    for c in 1..P.len() {
        p = s.mul_add(p, r, s.splat(P[c]));
    }
    let y = s.add(s.mul_add(s.mul(r, r), p, r), s.splat(1.0));
    let half = s.round(s.mul(n, s.splat(0.5)));
    s.mul(s.mul(y, s.pow2(half)), s.pow2(s.sub(n, half)))
}

/// Replaces every element by its exponential, within 1 ULP.
pub fn exp(x: &mut [f32]) {
    Isa::detect().run(Exp(x));
}

struct Exp<'a>(&'a mut [f32]);

impl Kernel for Exp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.0.len()).step_by(LANES) {
            store_f32(s, exp_vector(s, load_f32(s, self.0, at)), self.0, at);
        }
    }
}

thread_local! {
    /// Exponentials of a row or of sixteen columns, kept between calls.
    static EXPS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Softmax of each row of `x[..][cols]`, in place.
///
/// # Panics
///
/// When `x` does not consist of whole rows.
pub fn softmax_rows(x: &mut [f16], cols: usize) {
    if !x.is_empty() {
        assert!(
            cols > 0 && x.len().is_multiple_of(cols),
            "whole rows of {cols}"
        );
        EXPS.with_borrow_mut(|exps| Isa::detect().run(ByRow { x, cols, exps }));
    }
}

struct ByRow<'a> {
    x: &'a mut [f16],
    cols: usize,
    exps: &'a mut Vec<f32>,
}

impl Kernel for ByRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let exps = self.exps;
        exps.resize(self.cols.next_multiple_of(LANES), 0.0);
        for row in self.x.chunks_exact_mut(self.cols) {
            // Padding repeats the first element, which changes no maximum.
            let mut lanes = [row[0].to_f32(); LANES];
            let whole = row.len() / LANES * LANES;
            for (lane, v) in lanes.iter_mut().zip(&row[whole..]) {
                *lane = v.to_f32();
            }
            let mut most = load_f32(s, &lanes, 0);
            for at in (0..whole).step_by(LANES) {
                most = s.max(most, load_f16(s, row, at));
            }
            store_f32(s, most, &mut lanes, 0);
            let most = lanes
                .into_iter()
                .fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b });
            let most = s.splat(most);

            let mut sum = s.splat(0.0);
            for at in (0..row.len()).step_by(LANES) {
                let e = exp_vector(s, s.sub(load_f16(s, row, at), most));
                store_f32(s, e, exps, at);
                if row.len() - at < LANES {
                    exps[row.len()..].fill(0.0);
                }
                sum = s.add(sum, load_f32(s, exps, at));
            }
            let sum = s.splat(s.sum(sum));
            for at in (0..row.len()).step_by(LANES) {
                store_f16(s, s.div(load_f32(s, exps, at), sum), row, at);
            }
        }
    }
}

/// Softmax of each column of `x[rows][cols]`, in place: axis 0 of a
/// channel-major block.
///
/// # Panics
///
/// When `x` does not consist of whole rows.
pub fn softmax_cols(x: &mut [f16], cols: usize) {
    if !x.is_empty() {
        assert!(
            cols > 0 && x.len().is_multiple_of(cols),
            "whole rows of {cols}"
        );
        EXPS.with_borrow_mut(|exps| Isa::detect().run(ByColumn { x, cols, exps }));
    }
}

struct ByColumn<'a> {
    x: &'a mut [f16],
    cols: usize,
    exps: &'a mut Vec<f32>,
}

impl Kernel for ByColumn<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.x.len() / self.cols;
        let exps = self.exps;
        exps.resize(rows * LANES, 0.0);
        for j in (0..self.cols).step_by(LANES) {
            let live = LANES.min(self.cols - j);
            let mut most = load_f16(s, &self.x[..self.cols], j);
            for row in self.x.chunks_exact(self.cols) {
                most = s.max(most, load_f16(s, row, j));
            }
            let mut sum = s.splat(0.0);
            for (row, exps) in self
                .x
                .chunks_exact(self.cols)
                .zip(exps.chunks_exact_mut(LANES))
            {
                let e = exp_vector(s, s.sub(load_f16(s, row, j), most));
                store_f32(s, e, exps, 0);
                sum = s.add(sum, e);
            }
            for (row, exps) in self
                .x
                .chunks_exact_mut(self.cols)
                .zip(exps.chunks_exact(LANES))
            {
                let value = s.div(load_f32(s, exps, 0), sum);
                store_f16(s, value, &mut row[..j + live], j);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::twin_tests::Random;
    use super::*;

    /// Distance in units in the last place, for values of one sign.
    fn ulps(a: f32, b: f32) -> u32 {
        a.to_bits().abs_diff(b.to_bits())
    }

    #[test]
    fn exp_is_within_one_ulp_and_the_same_everywhere() {
        // Every 1021st f32 from -106 to 90, through subnormal results and the
        // overflow, and special values.
        let mut x: Vec<f32> = (0..=90.0_f32.to_bits())
            .step_by(1021)
            .map(f32::from_bits)
            .collect();
        x.extend(
            (0..=106.0_f32.to_bits())
                .step_by(1021)
                .map(|b| -f32::from_bits(b)),
        );
        x.extend([
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::MAX,
            f32::MIN,
        ]);
        let mut first = None;
        for isa in Isa::all() {
            let mut y = x.clone();
            isa.run(Exp(&mut y));
            for (x, y) in x.iter().zip(&y) {
                let exact = f64::from(*x).exp() as f32;
                assert!(
                    exact.is_nan() && y.is_nan() || ulps(exact, *y) <= 1,
                    "{}: exp({x:e}) = {y:e}, expected {exact:e}",
                    isa.name()
                );
            }
            let bits: Vec<_> = y
                .iter()
                .filter(|v| !v.is_nan())
                .map(|v| v.to_bits())
                .collect();
            assert_eq!(
                first.get_or_insert_with(|| bits.clone()),
                &bits,
                "{}",
                isa.name()
            );
        }
    }

    /// Softmax in f64.
    fn exact(x: &[f16]) -> Vec<f64> {
        let x: Vec<f64> = x.iter().map(|v| v.to_f64()).collect();
        let most = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = x.iter().map(|v| (v - most).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|v| v / sum).collect()
    }

    fn assert_close(found: &[f16], exact: &[f64], what: &str) {
        for (found, exact) in found.iter().zip(exact) {
            // Half a unit of f16, and a little for the f32 arithmetic.
            let unit = (exact / 2048.0).max(2f64.powi(-25));
            let error = (found.to_f64() - exact).abs();
            assert!(error <= unit * 1.01, "{what}: {found} for {exact}");
        }
    }

    #[test]
    fn softmax_of_rows_and_columns_rounds_the_exact_value() {
        let mut random = Random(8);
        for (rows, cols) in [(1, 1), (3, 5), (2, 16), (4, 33), (2, 1000), (70, 3)] {
            for scale in [1.0, 30.0, 60000.0] {
                let x: Vec<f16> = random
                    .halves(rows * cols)
                    .iter()
                    .map(|v| f16::from_f32(v.to_f32() * scale))
                    .collect();
                let transposed: Vec<f16> = (0..rows * cols)
                    .map(|i| x[i % rows * cols + i / rows])
                    .collect();
                let mut first = None;
                for isa in Isa::all() {
                    let mut by_row = x.clone();
                    isa.run(ByRow {
                        x: &mut by_row,
                        cols,
                        exps: &mut Vec::new(),
                    });
                    for (found, x) in by_row.chunks(cols).zip(x.chunks(cols)) {
                        assert_close(found, &exact(x), isa.name());
                    }
                    let mut by_col = transposed.clone();
                    isa.run(ByColumn {
                        x: &mut by_col,
                        cols: rows,
                        exps: &mut Vec::new(),
                    });
                    for (i, x) in x.chunks(cols).enumerate() {
                        let found: Vec<f16> = (0..cols).map(|j| by_col[j * rows + i]).collect();
                        assert_close(&found, &exact(x), isa.name());
                    }
                    assert_eq!(
                        first.get_or_insert_with(|| (by_row.clone(), by_col.clone())),
                        &(by_row, by_col)
                    );
                }
            }
        }
    }

    #[test]
    fn masked_rows_stay_finite() {
        let mut x = [f16::NEG_INFINITY; 20];
        x[3] = f16::from_f32(-60000.0);
        softmax_rows(&mut x, 20);
        assert!(
            x.iter()
                .enumerate()
                .all(|(i, v)| *v == if i == 3 { f16::ONE } else { f16::ZERO })
        );
        let mut x = [f16::from_f32(-10000.0); 8];
        softmax_rows(&mut x, 8);
        assert!(x.iter().all(|v| *v == f16::from_f32(0.125)));
    }
}
