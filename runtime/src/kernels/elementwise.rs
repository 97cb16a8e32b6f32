//! RMS normalisation and SiLU.

use super::activations::LANES;
use super::simd::{Isa, Kernel, Simd, load_f16, load_f32, store_f16, store_f32};
use super::softmax::exp_vector;
use half::f16;

/// RMS normalisation of each row: `out = f16(x * w / sqrt(mean(x^2) + eps))`
/// over rows of as many elements as `weight` has, or without `w` over rows of
/// `cols` when `weight` is `None`.
///
/// Squares are summed in f32 as sixteen lanes, `k mod 16`.
///
/// # Panics
///
/// When `x` and `out` differ in length or do not consist of whole rows, or
/// `weight` has another length than a row.
pub fn rms_norm_rows(x: &[f16], weight: Option<&[f16]>, eps: f32, cols: usize, out: &mut [f16]) {
    assert_eq!(x.len(), out.len(), "lengths of the input and the output");
    assert!(
        cols > 0 && x.len().is_multiple_of(cols),
        "whole rows of {cols}"
    );
    assert!(weight.is_none_or(|w| w.len() == cols), "a weight of {cols}");
    Isa::detect().run(NormRows {
        x,
        weight,
        eps,
        cols,
        out,
    });
}

struct NormRows<'a> {
    x: &'a [f16],
    weight: Option<&'a [f16]>,
    eps: f32,
    cols: usize,
    out: &'a mut [f16],
}

impl Kernel for NormRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.x.chunks_exact(self.cols);
        for (x, out) in rows.zip(self.out.chunks_exact_mut(self.cols)) {
            let mut sum = s.splat(0.0);
            for at in (0..x.len()).step_by(LANES) {
                let v = load_f16(s, x, at);
                sum = s.mul_add(v, v, sum);
            }
            let factor = s.splat(norm_factor(s.sum(sum), x.len(), self.eps));
            for at in (0..x.len()).step_by(LANES) {
                let mut v = s.mul(load_f16(s, x, at), factor);
                if let Some(w) = self.weight {
                    v = s.mul(v, load_f16(s, w, at));
                }
                store_f16(s, v, out, at);
            }
        }
    }
}

fn norm_factor(sum: f32, len: usize, eps: f32) -> f32 {
    1.0 / (sum / len as f32 + eps).sqrt()
}

/// RMS normalisation of each column of the channel-major `x[channels][cols]`,
/// as [`rms_norm_rows`] with `weight[channels]`.
///
/// Squares are summed in f32 in the order of the channels.
///
/// # Panics
///
/// When `x` and `out` differ in length or do not consist of whole rows, or
/// `weight` has another length than a column.
pub fn rms_norm_cols(x: &[f16], weight: Option<&[f16]>, eps: f32, cols: usize, out: &mut [f16]) {
    assert_eq!(x.len(), out.len(), "lengths of the input and the output");
    assert!(
        cols > 0 && x.len().is_multiple_of(cols),
        "whole rows of {cols}"
    );
    let channels = x.len() / cols;
    assert!(
        weight.is_none_or(|w| w.len() == channels),
        "a weight of {channels}"
    );
    Isa::detect().run(NormCols {
        x,
        weight,
        eps,
        cols,
        out,
    });
}

struct NormCols<'a> {
    x: &'a [f16],
    weight: Option<&'a [f16]>,
    eps: f32,
    cols: usize,
    out: &'a mut [f16],
}

impl Kernel for NormCols<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let channels = self.x.len() / self.cols;
        for j in (0..self.cols).step_by(LANES) {
            let end = self.cols.min(j + LANES);
            let mut sum = s.splat(0.0);
            for x in self.x.chunks_exact(self.cols) {
                let v = load_f16(s, x, j);
                sum = s.mul_add(v, v, sum);
            }
            let mut factors = [0.0; LANES];
            store_f32(s, sum, &mut factors, 0);
            for factor in &mut factors {
                *factor = norm_factor(*factor, channels, self.eps);
            }
            let factors = load_f32(s, &factors, 0);
            let rows = self.x.chunks_exact(self.cols);
            for (c, (x, out)) in rows.zip(self.out.chunks_exact_mut(self.cols)).enumerate() {
                let mut v = s.mul(load_f16(s, x, j), factors);
                if let Some(w) = self.weight {
                    v = s.mul(v, s.splat(w[c].to_f32()));
                }
                store_f16(s, v, &mut out[..end], j);
            }
        }
    }
}

/// `out = f16(f16(silu(gate)) * up)` with `silu(x) = x / (1 + exp(-x))`: the
/// roundings of the two operations that it fuses.
///
/// # Panics
///
/// When the lengths differ.
pub fn silu_mul(gate: &[f16], up: &[f16], out: &mut [f16]) {
    assert!(
        gate.len() == up.len() && gate.len() == out.len(),
        "equal lengths"
    );
    Isa::detect().run(SiluMul {
        gate,
        up: Some(up),
        out,
    });
}

/// `out = f16(silu(x))`.
///
/// # Panics
///
/// When the lengths differ.
pub fn silu(x: &[f16], out: &mut [f16]) {
    assert_eq!(x.len(), out.len(), "lengths of the input and the output");
    Isa::detect().run(SiluMul {
        gate: x,
        up: None,
        out,
    });
}

struct SiluMul<'a> {
    gate: &'a [f16],
    up: Option<&'a [f16]>,
    out: &'a mut [f16],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.gate.len()).step_by(LANES) {
            let x = load_f16(s, self.gate, at);
            let e = exp_vector(s, s.sub(s.splat(0.0), x));
            let y = s.div(x, s.add(s.splat(1.0), e));
            store_f16(s, y, self.out, at);
            if let Some(up) = self.up {
                let y = s.mul(load_f16(s, self.out, at), load_f16(s, up, at));
                store_f16(s, y, self.out, at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::twin_tests::Random;
    use super::*;

    fn assert_rounds(found: f16, exact: f64, what: &str) {
        // Half a unit of f16, and a little for the f32 arithmetic.
        let unit = (exact.abs() / 2048.0).max(2f64.powi(-25));
        assert!(
            (found.to_f64() - exact).abs() <= unit * 1.01,
            "{what}: {found} for {exact}"
        );
    }

    #[test]
    fn rms_norm_rounds_the_exact_value_in_both_layouts() {
        let mut random = Random(9);
        for (rows, cols) in [(1, 1), (3, 16), (5, 37), (18, 128), (2, 1024)] {
            let x = random.halves(rows * cols);
            let w = random.halves(cols);
            let transposed: Vec<f16> = (0..rows * cols)
                .map(|i| x[i % rows * cols + i / rows])
                .collect();
            let mut seen = None;
            for isa in Isa::all() {
                for weight in [None, Some(&w[..])] {
                    let mut by_row = vec![f16::ZERO; x.len()];
                    isa.run(NormRows {
                        x: &x,
                        weight,
                        eps: 1e-6,
                        cols,
                        out: &mut by_row,
                    });
                    let mut by_col = vec![f16::ZERO; x.len()];
                    isa.run(NormCols {
                        x: &transposed,
                        weight,
                        eps: 1e-6,
                        cols: rows,
                        out: &mut by_col,
                    });
                    for i in 0..rows {
                        let row = &x[i * cols..][..cols];
                        let mean =
                            row.iter().map(|v| v.to_f64().powi(2)).sum::<f64>() / cols as f64;
                        for j in 0..cols {
                            let factor = weight.map_or(1.0, |w| w[j].to_f64());
                            let exact = row[j].to_f64() * factor / (mean + 1e-6).sqrt();
                            assert_rounds(by_row[i * cols + j], exact, isa.name());
                            assert_rounds(by_col[j * rows + i], exact, isa.name());
                        }
                    }
                    if weight.is_none() {
                        let both = (by_row, by_col);
                        assert_eq!(
                            seen.get_or_insert_with(|| both.clone()),
                            &both,
                            "{}",
                            isa.name()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn silu_rounds_the_exact_value_for_every_half() {
        let x: Vec<f16> = (0..=u16::MAX)
            .map(f16::from_bits)
            .filter(|v| v.is_finite())
            .collect();
        let up: Vec<f16> = x.iter().rev().copied().collect();
        for isa in Isa::all() {
            let mut y = vec![f16::ZERO; x.len()];
            isa.run(SiluMul {
                gate: &x,
                up: None,
                out: &mut y,
            });
            for (x, y) in x.iter().zip(&y) {
                let exact = x.to_f64() / (1.0 + (-x.to_f64()).exp());
                assert_rounds(*y, exact, isa.name());
            }
            let mut z = vec![f16::ZERO; x.len()];
            isa.run(SiluMul {
                gate: &x,
                up: Some(&up),
                out: &mut z,
            });
            for ((y, up), z) in y.iter().zip(&up).zip(&z) {
                let exact = f16::from_f32(y.to_f32() * up.to_f32());
                assert_eq!(z.to_bits(), exact.to_bits(), "{}", isa.name());
            }
        }
    }
}
