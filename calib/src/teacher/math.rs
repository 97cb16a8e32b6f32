//! Element-wise parts of the forward pass. Each output depends on one row only, so
//! rows are spread over threads freely.

use rayon::prelude::*;

/// Elements per parallel task.
const TASK: usize = 1 << 14;

/// Partial sums of a dot product: independent chains that fill vector registers.
const LANES: usize = 16;

/// Sum of squares in a fixed order.
fn sum_of_squares(x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    sums.iter().sum::<f32>() + tail.iter().map(|x| x * x).sum::<f32>()
}

/// `x * weight / sqrt(mean(x²) + eps)` (arXiv:1910.07467), in place.
pub(super) fn rms_norm_row(row: &mut [f32], weight: &[f32], eps: f64) {
    let mean = sum_of_squares(row) / row.len() as f32;
    let scale = 1.0 / (mean + eps as f32).sqrt();
    for (x, w) in row.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

/// RMSNorm of every row of `weight.len()` elements.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], eps: f64) -> Vec<f32> {
    let mut out = x.to_vec();
    let rows = TASK.div_ceil(weight.len()) * weight.len();
    out.par_chunks_mut(rows).for_each(|rows| {
        for row in rows.chunks_exact_mut(weight.len()) {
            rms_norm_row(row, weight, eps);
        }
    });
    out
}

/// What flows back through RMSNorm, `y = x r w` with `r = 1 / sqrt(mean(x²) + eps)`: with
/// `h = w dy` it is `r h - x r³ mean(h x)`. Replaces `dy`, and adds to `dw` the gradient
/// of the weight, `Σ dy x r`, the rows in order.
pub(super) fn rms_norm_backward(
    x: &[f32],
    weight: &[f32],
    eps: f64,
    dy: &mut [f32],
    dw: &mut [f32],
) {
    let width = weight.len();
    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact_mut(width)) {
        let scale = 1.0 / (sum_of_squares(x) / width as f32 + eps as f32).sqrt();
        let mut along = [0.0f32; LANES];
        for (at, ((x, g), w)) in x.iter().zip(&*dy).zip(weight).enumerate() {
            along[at % LANES] += x * g * w;
        }
        let along = along.iter().sum::<f32>() * scale.powi(3) / width as f32;
        for (((x, dy), w), dw) in x.iter().zip(dy).zip(weight).zip(&mut *dw) {
            *dw += *dy * x * scale;
            *dy = *dy * w * scale - x * along;
        }
    }
}

/// `silu(gate) * up`, with `silu(x) = x / (1 + e^-x)` (arXiv:2002.05202).
pub(super) fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut out = gate.to_vec();
    out.par_chunks_mut(TASK)
        .zip(up.par_chunks(TASK))
        .for_each(|(gate, up)| {
            for (g, u) in gate.iter_mut().zip(up) {
                *g = *g / (1.0 + (-*g).exp()) * u;
            }
        });
    out
}

/// The gradients of gate and up from that of [`swiglu`], `d`, in place of `gate` and `up`.
/// With `s = 1 / (1 + e^-g)`: `d u s (1 + g (1 - s))` and `d g s`.
pub(super) fn swiglu_backward(gate: &mut [f32], up: &mut [f32], d: &[f32]) {
    gate.par_chunks_mut(TASK)
        .zip(up.par_chunks_mut(TASK))
        .zip(d.par_chunks(TASK))
        .for_each(|((gate, up), d)| {
            for ((g, u), d) in gate.iter_mut().zip(up).zip(d) {
                let sigmoid = 1.0 / (1.0 + (-*g).exp());
                let silu = *g * sigmoid;
                (*g, *u) = (d * *u * sigmoid * (1.0 + *g * (1.0 - sigmoid)), d * silu);
            }
        });
}

/// `x += y`.
pub(super) fn add_assign(x: &mut [f32], y: &[f32]) {
    x.par_chunks_mut(TASK)
        .zip(y.par_chunks(TASK))
        .for_each(|(x, y)| {
            for (x, y) in x.iter_mut().zip(y) {
                *x += y;
            }
        });
}

/// Softmax of a row, in place.
pub(super) fn softmax(row: &mut [f32]) {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    let scale = 1.0 / sum;
    for x in row {
        *x *= scale;
    }
}

/// Rotates the pairs `(x[i], x[i + half])` of a head by the angles whose cosines and
/// sines are given.
pub(super) fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: &[f32], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        for (a, b) in a.iter().zip(b) {
            assert!(
                (f64::from(*a) - b).abs() <= 1e-6 * b.abs().max(1e-3),
                "{a} {b}"
            );
        }
    }

    #[test]
    fn norms_match_the_formula_in_f64_at_odd_widths_and_spikes() {
        for width in [1usize, 15, 16, 33, 500] {
            let mut x: Vec<f32> = (0..width * 3)
                .map(|i| ((i * 37) % 19) as f32 - 9.0)
                .collect();
            x[width / 2] = 3000.0;
            let weight: Vec<f32> = (0..width).map(|i| 0.5 + i as f32 / 7.0).collect();
            let exact: Vec<f64> = x
                .chunks(width)
                .flat_map(|row| {
                    let square = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
                    let scale = (square / width as f64 + 1e-6).sqrt().recip();
                    row.iter()
                        .zip(&weight)
                        .map(move |(&x, &w)| f64::from(x) * scale * f64::from(w))
                })
                .collect();
            close(&rms_norm(&x, &weight, 1e-6), &exact);
        }
    }

    #[test]
    fn swiglu_and_softmax_match_their_formulas_in_f64() {
        let x: Vec<f32> = (-200..200).map(|i| i as f32 / 2.0).collect();
        let up: Vec<f32> = x.iter().map(|x| 1.0 - x / 50.0).collect();
        let out = swiglu(&x, &up);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let exact: Vec<f64> = x
            .iter()
            .zip(&up)
            .map(|(&x, &u)| silu(f64::from(x)) * f64::from(u))
            .collect();
        close(&out, &exact);

        let mut row: Vec<f32> = x[150..250].to_vec();
        softmax(&mut row);
        let sum: f64 = x[150..250].iter().map(|&x| f64::from(x).exp()).sum();
        let exact: Vec<f64> = x[150..250]
            .iter()
            .map(|&x| f64::from(x).exp() / sum)
            .collect();
        close(&row, &exact);
    }
}
