//! Runs of operations on one row, done in one pass.
//!
//! Each function computes what the separate operations of a program compute, with
//! every rounding to f16 that lies between them, so fusing changes no bit:
//! `r(..)` below is a rounding to f16, and sums are those of
//! [`crate::ops::math::sum`], sixteen lanes added in order. A row's result depends
//! on that row alone.

use super::activations::LANES;
use super::exp::exp_vector;
use super::simd::{Isa, Kernel, Simd, load_f16, store_f16};
use half::f16;

/// What an RMSNorm does to a row:
///
/// ```text
/// s = r(x * prescale)                          if there is one
/// m = r(r(mean over r(s * s)) + eps)
/// y = r(r(s * r(1 / sqrt(m))) * weight)
/// ```
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Norm {
    pub(crate) prescale: Option<f32>,
    pub(crate) eps: f32,
    pub(crate) weight: Vec<f16>,
}

/// Normalises each row of `x[..][cols]`, where `weight` has `cols` elements.
///
/// # Panics
/// When the lengths do not agree.
pub(crate) fn rms_norm(x: &[f16], norm: &Norm, out: &mut [f16]) {
    let cols = norm.weight.len();
    assert!(cols > 0 && x.len() == out.len() && x.len().is_multiple_of(cols));
    Isa::detect().run(RmsNorm { x, norm, out });
}

struct RmsNorm<'a> {
    x: &'a [f16],
    norm: &'a Norm,
    out: &'a mut [f16],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.norm.weight.len();
        let prescale = self.norm.prescale.map(|p| s.splat(p));
        let rows = self.x.chunks_exact(cols);
        for (x, out) in rows.zip(self.out.chunks_exact_mut(cols)) {
            // Past the end of a row the loads give zeros, which add nothing.
            let mut sum = s.splat(0.0);
            for at in (0..cols).step_by(LANES) {
                let v = load_scaled(s, x, at, prescale);
                sum = s.add(sum, s.round_f16(s.mul(v, v)));
            }
            let mean = half(in_order(s, sum) / cols as f32);
            let inverse = s.splat(half(1.0 / half(mean + self.norm.eps).sqrt()));
            for at in (0..cols).step_by(LANES) {
                let v = s.round_f16(s.mul(load_scaled(s, x, at, prescale), inverse));
                let w = load_f16(s, &self.norm.weight, at);
                store_f16(s, s.mul(v, w), out, at);
            }
        }
    }
}

#[inline(always)]
fn load_scaled<S: Simd>(s: S, x: &[f16], at: usize, scale: Option<S::V>) -> S::V {
    let v = load_f16(s, x, at);
    match scale {
        Some(scale) => s.round_f16(s.mul(v, scale)),
        None => v,
    }
}

/// The sum of the lanes, first to last.
#[inline(always)]
pub(super) fn in_order<S: Simd>(s: S, v: S::V) -> f32 {
    let mut lanes = [0.0; LANES];
    super::simd::store_f32(s, v, &mut lanes, 0);
    lanes.into_iter().fold(0.0, |a, b| a + b)
}

fn half(x: f32) -> f32 {
    super::scalar::narrow(x).to_f32()
}

/// Rotates rows of `d` elements, of which the two halves form the pairs:
///
/// ```text
/// t = concat(r(-x[d/2..]), x[..d/2])
/// y = r(r(x * cos) + r(t * sin))               then r(y * scale) if there is one
/// ```
///
/// `cos` and `sin` are of one position and serve all rows of `x`.
///
/// # Panics
/// When the lengths do not agree.
pub(crate) fn rope(x: &[f16], cos: &[f16], sin: &[f16], scale: Option<f32>, out: &mut [f16]) {
    let d = cos.len();
    assert!(d > 0 && d.is_multiple_of(2) && sin.len() == d);
    assert!(x.len() == out.len() && x.len().is_multiple_of(d));
    Isa::detect().run(Rope {
        x,
        cos,
        sin,
        scale,
        out,
    });
}

struct Rope<'a> {
    x: &'a [f16],
    cos: &'a [f16],
    sin: &'a [f16],
    scale: Option<f32>,
    out: &'a mut [f16],
}

impl Kernel for Rope<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = self.cos.len();
        let scale = self.scale.map(|v| s.splat(v));
        let halves = [(0, d / 2, -1.0), (d / 2, 0, 1.0)];
        for (x, out) in self.x.chunks_exact(d).zip(self.out.chunks_exact_mut(d)) {
            for (from, other, sign) in halves {
                let part = from..from + d / 2;
                let (cos, sin) = (&self.cos[part.clone()], &self.sin[part.clone()]);
                let (x, t) = (&x[part.clone()], &x[other..other + d / 2]);
                let (out, sign) = (&mut out[part], s.splat(sign));
                for at in (0..d / 2).step_by(LANES) {
                    let straight = s.round_f16(s.mul(load_f16(s, x, at), load_f16(s, cos, at)));
                    let turned = s.mul(load_f16(s, t, at), sign);
                    let turned = s.round_f16(s.mul(turned, load_f16(s, sin, at)));
                    let mut y = s.add(straight, turned);
                    if let Some(scale) = scale {
                        y = s.mul(s.round_f16(y), scale);
                    }
                    store_f16(s, y, out, at);
                }
            }
        }
    }
}

/// `out = r(r(gate / (1 + exp(-gate))) * up)`.
///
/// # Panics
/// When the lengths do not agree.
pub(crate) fn silu_mul(gate: &[f16], up: &[f16], out: &mut [f16]) {
    assert!(gate.len() == up.len() && gate.len() == out.len());
    Isa::detect().run(SiluMul { gate, up, out });
}

struct SiluMul<'a> {
    gate: &'a [f16],
    up: &'a [f16],
    out: &'a mut [f16],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let one = s.splat(1.0);
        for at in (0..self.gate.len()).step_by(LANES) {
            let gate = load_f16(s, self.gate, at);
            let e = exp_vector(s, s.mul(gate, s.splat(-1.0)));
            let sigmoid = s.div(one, s.add(one, e));
            let silu = s.round_f16(s.mul(gate, sigmoid));
            store_f16(s, s.mul(silu, load_f16(s, self.up, at)), self.out, at);
        }
    }
}

/// `out = r(a + b)`.
///
/// # Panics
/// When the lengths do not agree.
pub(crate) fn add(a: &[f16], b: &[f16], out: &mut [f16]) {
    assert!(a.len() == b.len() && a.len() == out.len());
    Isa::detect().run(Add { a, b, out });
}

struct Add<'a> {
    a: &'a [f16],
    b: &'a [f16],
    out: &'a mut [f16],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.a.len()).step_by(LANES) {
            let sum = s.add(load_f16(s, self.a, at), load_f16(s, self.b, at));
            store_f16(s, sum, self.out, at);
        }
    }
}

/// Index and value of the largest element, the first one on ties; NaN never wins,
/// and a row of only NaN gives index 0 and `-inf`.
pub(crate) fn largest(x: &[f16]) -> (usize, f32) {
    Isa::detect().run(Largest(x))
}

struct Largest<'a>(&'a [f16]);

/// Elements whose maximum is taken before it is looked for.
const SEARCHED: usize = 256;

impl Kernel for Largest<'_> {
    type Output = (usize, f32);

    #[inline(always)]
    #[allow(clippy::float_cmp, reason = "the maximum is one of the elements")]
    fn run<S: Simd>(self, s: S) -> (usize, f32) {
        let (mut block, mut best) = (None, f32::NEG_INFINITY);
        for (i, x) in self.0.chunks(SEARCHED).enumerate() {
            let whole = x.len() / LANES * LANES;
            let mut most = s.splat(best);
            for at in (0..whole).step_by(LANES) {
                most = s.max(load_f16(s, x, at), most);
            }
            let mut lanes = [0.0; LANES];
            super::simd::store_f32(s, most, &mut lanes, 0);
            let rest = x[whole..].iter().map(|v| v.to_f32());
            let most = lanes
                .into_iter()
                .chain(rest)
                .fold(best, |a, v| if v > a { v } else { a });
            if most > best {
                (block, best) = (Some(i), most);
            }
        }
        let start = block.unwrap_or(0) * SEARCHED;
        let found = self.0[start..].iter().position(|v| v.to_f32() == best);
        (found.map_or(0, |i| start + i), best)
    }
}

#[cfg(test)]
mod tests {
    use super::super::twin_tests::Random;
    use super::*;

    fn values(random: &mut Random, n: usize, wild: bool) -> Vec<f16> {
        if wild {
            random.wild_halves(n)
        } else {
            random.halves(n)
        }
    }

    fn same(found: &[f16], expected: &[f32], what: &str) {
        for (i, (f, e)) in found.iter().zip(expected).enumerate() {
            let e = super::super::scalar::narrow(*e);
            assert_eq!(f.to_bits(), e.to_bits(), "{what}, element {i}");
        }
    }

    /// The operations one after the other, with plain loops.
    #[test]
    fn a_norm_equals_its_operations_on_every_instruction_set() {
        let mut random = Random(11);
        for (cols, rows) in [(1, 2), (7, 1), (64, 3), (129, 2), (512, 1)] {
            for (wild, prescale) in [(false, None), (false, Some(0.25)), (true, None)] {
                let x = values(&mut random, cols * rows, wild);
                let norm = Norm {
                    prescale,
                    eps: 1e-5,
                    weight: random.halves(cols),
                };
                let mut expected = Vec::new();
                for row in x.chunks(cols) {
                    let row: Vec<f32> = row
                        .iter()
                        .map(|v| prescale.map_or(v.to_f32(), |p| half(v.to_f32() * p)))
                        .collect();
                    let squares: Vec<f32> = row.iter().map(|v| half(v * v)).collect();
                    let mean = half(crate::ops::math::sum(&squares) / cols as f32);
                    let inverse = half(1.0 / half(mean + norm.eps).sqrt());
                    let weights = norm.weight.iter().map(|w| w.to_f32());
                    expected.extend(row.iter().zip(weights).map(|(v, w)| half(v * inverse) * w));
                }
                for isa in Isa::all() {
                    let mut out = vec![f16::ZERO; x.len()];
                    let (x, norm, out_ref) = (&x[..], &norm, &mut out[..]);
                    isa.run(RmsNorm {
                        x,
                        norm,
                        out: out_ref,
                    });
                    same(&out, &expected, isa.name());
                }
            }
        }
    }

    #[test]
    fn a_rotation_equals_its_operations_on_every_instruction_set() {
        let mut random = Random(12);
        for (d, rows) in [(2, 3), (10, 1), (64, 2), (128, 1), (96, 4)] {
            for (wild, scale) in [(false, None), (false, Some(0.088_4)), (true, None)] {
                let x = values(&mut random, d * rows, wild);
                let (cos, sin) = (random.halves(d), random.halves(d));
                let mut expected = Vec::new();
                for row in x.chunks(d) {
                    for i in 0..d {
                        let t = if i < d / 2 {
                            -row[i + d / 2].to_f32()
                        } else {
                            row[i - d / 2].to_f32()
                        };
                        let y = half(row[i].to_f32() * cos[i].to_f32()) + half(t * sin[i].to_f32());
                        expected.push(scale.map_or(y, |s| half(y) * s));
                    }
                }
                for isa in Isa::all() {
                    let mut out = vec![f16::ZERO; x.len()];
                    isa.run(Rope {
                        x: &x,
                        cos: &cos,
                        sin: &sin,
                        scale,
                        out: &mut out,
                    });
                    same(&out, &expected, isa.name());
                }
            }
        }
    }

    #[test]
    fn gate_sum_and_largest_equal_their_operations_on_every_instruction_set() {
        let mut random = Random(13);
        for (n, wild) in [
            (1, false),
            (15, true),
            (16, false),
            (61, true),
            (1000, true),
        ] {
            let (a, b) = (values(&mut random, n, wild), values(&mut random, n, wild));
            let wide = |v: &[f16]| v.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
            let (wa, wb) = (wide(&a), wide(&b));
            let mut gates = wa.clone();
            crate::ops::math::sigmoid(&mut gates);
            let silu: Vec<f32> = wa.iter().zip(&gates).map(|(x, g)| half(x * g)).collect();
            let product: Vec<f32> = silu.iter().zip(&wb).map(|(x, y)| x * y).collect();
            let sum: Vec<f32> = wa.iter().zip(&wb).map(|(x, y)| x + y).collect();
            let mut best = (0, f32::NEG_INFINITY);
            for (i, &v) in wa.iter().enumerate() {
                if v > best.1 {
                    best = (i, v);
                }
            }
            for isa in Isa::all() {
                let mut out = vec![f16::ZERO; n];
                let (gate, up) = (&a[..], &b[..]);
                let target = &mut out[..];
                isa.run(SiluMul {
                    gate,
                    up,
                    out: target,
                });
                same(&out, &product, isa.name());
                let (a, b, target) = (&a[..], &b[..], &mut out[..]);
                isa.run(Add { a, b, out: target });
                same(&out, &sum, isa.name());
                assert_eq!(isa.run(Largest(a)), best, "{}", isa.name());
            }
        }
    }
}
