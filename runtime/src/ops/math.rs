//! Scalar functions in f32, written so that loops over them vectorise.

/// e^x, within 1.2 units in the last place; 0 below the normal range.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, so e^x = 2^n e^r. Adding and subtracting
/// 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits, which
/// makes 2^n by shifts. Polynomial and split of ln 2: Cephes `expf`.
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    const HIGH: f32 = 88.722_84;
    const LOW: f32 = -87.336_54;
    let t = x.clamp(LOW, HIGH) * std::f32::consts::LOG2_E + MAGIC;
    let n = t - MAGIC;
    let c = x.clamp(LOW, HIGH);
    let r = c - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5.000_000_3e-1;
    let y = p * (r * r) + r + 1.0;
    // n is at most 128: 2^n in two factors, since 2^128 has no f32.
    let bits = t.to_bits().wrapping_sub(MAGIC.to_bits()) as i32;
    let half = bits >> 1;
    let scale = |e: i32| f32::from_bits(((e + 127) << 23) as u32);
    let y = y * scale(half) * scale(bits - half);
    let y = if x < LOW { 0.0 } else { y };
    let y = if x > HIGH { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// 1 / (1 + e^-x).
#[inline]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        let mut x = -87.0f32;
        while x < 88.7 {
            let exact = f64::from(x).exp();
            let ulp =
                f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / ulp);
            x += 0.001_37;
        }
        assert!(worst < 2.0, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-40_000.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(100.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn exp_rounds_to_f16_as_the_f64_function_does() {
        // All f16 arguments; a double rounding may differ in very few.
        let mut different = 0;
        for bits in 0..=u16::MAX {
            let x = half::f16::from_bits(bits);
            if x.is_nan() {
                continue;
            }
            let want = half::f16::from_f64(x.to_f64().exp());
            different += usize::from(half::f16::from_f32(exp(x.to_f32())) != want);
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
            (3.5, 0.999_999_26),
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
