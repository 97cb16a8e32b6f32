//! Functions in f32, on slices where that makes them fast.

pub(crate) use crate::kernels::exp;

/// 1 / (1 + e^-x) of every element.
pub(crate) fn sigmoid(x: &mut [f32]) {
    for v in x.iter_mut() {
        *v = -*v;
    }
    exp(x);
    for v in x.iter_mut() {
        *v = 1.0 / (1.0 + *v);
    }
}

/// The error function: its Taylor series with positive terms,
/// erf x = 2/sqrt(pi) e^-x² sum 2^n x^(2n+1) / (1 3 .. (2n+1)), in f64. Beyond 4
/// the result is 1 to f32 precision.
pub(crate) fn erf(x: f32) -> f32 {
    let v = f64::from(x);
    if v.abs() > 4.0 {
        return 1.0f32.copysign(x);
    }
    let (mut term, mut sum, mut odd) = (v, v, 1.0);
    while term.abs() > sum.abs() * 1e-12 {
        odd += 2.0;
        term *= 2.0 * v * v / odd;
        sum += term;
    }
    (std::f64::consts::FRAC_2_SQRT_PI * (-v * v).exp() * sum) as f32
}

/// `x * Phi(x)`, or its tanh approximation.
pub(crate) fn gelu(x: f32, tanh: bool) -> f32 {
    if tanh {
        let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        0.5 * x * (1.0 + inner.tanh())
    } else {
        0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2))
    }
}

/// Lanes of [`sum`].
const LANES: usize = 16;

/// Sum in a fixed order: lane j takes the elements j, j + 16, ..; the lanes are
/// added in order.
pub(crate) fn sum(x: &[f32]) -> f32 {
    lanes(x, 0.0, |a, b| a + b)
}

/// Product in the order of [`sum`].
pub(crate) fn product(x: &[f32]) -> f32 {
    lanes(x, 1.0, |a, b| a * b)
}

fn lanes(x: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut acc = [start; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for (a, &v) in acc.iter_mut().zip(c) {
            *a = f(*a, v);
        }
    }
    for (a, &v) in acc.iter_mut().zip(rest) {
        *a = f(*a, v);
    }
    acc.into_iter().fold(start, f)
}

/// Largest element that is not NaN, or -inf.
pub(crate) fn max(x: &[f32]) -> f32 {
    let mut acc = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for c in chunks {
        for (a, &v) in acc.iter_mut().zip(c) {
            *a = if v > *a { v } else { *a };
        }
    }
    acc.iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |a, &v| if v > a { v } else { a })
}

/// Where the first element equal to `value` is.
#[allow(clippy::float_cmp, reason = "it is looked for as it is")]
pub(crate) fn first(x: &[f32], value: f32) -> Option<usize> {
    // Without a branch per element, as vector units like it.
    let count = |part: &[f32]| part.iter().map(|&v| u32::from(v == value)).sum::<u32>();
    let at = x.chunks(BLOCK).position(|part| count(part) > 0)? * BLOCK;
    x[at..].iter().position(|&v| v == value).map(|i| at + i)
}

/// Elements that [`first`] looks at together.
const BLOCK: usize = 64;

/// Whether an element is NaN.
pub(crate) fn has_nan(x: &[f32]) -> bool {
    x.iter().fold(false, |found, v| found | v.is_nan())
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "sums are defined to the bit")]
mod tests {
    use super::*;

    #[test]
    fn exp_rounds_to_f16_as_the_f64_function_does() {
        // All f16 arguments; a double rounding may differ in very few.
        let args: Vec<half::f16> = (0..=u16::MAX).map(half::f16::from_bits).collect();
        let mut values: Vec<f32> = args.iter().map(|x| x.to_f32()).collect();
        exp(&mut values);
        let mut different = 0;
        for (x, y) in args.iter().zip(values) {
            let want = half::f16::from_f64(x.to_f64().exp());
            let got = half::f16::from_f32(y);
            different += usize::from(got != want && !(got.is_nan() && want.is_nan()));
        }
        assert!(different <= 4, "{different}");
    }

    #[test]
    fn erf_has_known_values() {
        // Abramowitz and Stegun, table 7.1.
        for (x, y) in [
            (0.0, 0.0),
            (0.5, 0.520_499_9),
            (1.0, 0.842_700_8),
            (2.0, 0.995_322_3),
            (3.5, 0.999_999_3),
        ] {
            assert!((erf(x) - y).abs() < 1e-7, "{x}");
            assert!((erf(-x) + y).abs() < 1e-7, "{x}");
        }
    }

    #[test]
    fn the_order_of_a_sum_depends_on_its_length_only() {
        let x: Vec<f32> = (0..37).map(|i| 1.0 / (i as f32 + 1.0)).collect();
        let mut lane = [0.0f32; 16];
        for (i, v) in x.iter().enumerate() {
            lane[i % 16] += v;
        }
        assert_eq!(sum(&x), lane.iter().sum::<f32>());
        assert_eq!(max(&[f32::NAN, -3.0, -2.0]), -2.0);
    }
}
