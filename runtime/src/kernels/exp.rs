//! The exponential function.
//!
//! `exp x = 2^n exp r` with `n = round(x / ln 2)` and `r = x - n ln 2`, which
//! lies within `ln 2 / 2` of zero. `ln 2` is split in two parts, of which the
//! first has so few bits that `n` times it is exact. On that interval `exp r`
//! is `1 + r + r^2 p(r)` with the polynomial of Moshier's Cephes library
//! (`expf`). The factor `2^n` is applied as two factors, so that results
//! between the smallest normal number and the smallest subnormal one round
//! once and overflow gives infinity.

use super::activations::LANES;
use super::simd::{Isa, Kernel, Simd, load_f32, store_f32};

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
pub(crate) fn exp(x: &mut [f32]) {
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

#[cfg(test)]
mod tests {
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
}
