//! Integers of eight bits with a factor for each row.

use half::f16;

/// The largest integer; its negative is the smallest, so that signs are alike.
const LARGEST: f32 = 127.0;

/// The factor that brings the largest magnitude of a row to 127. Programs may not have
/// one of zero.
pub(crate) fn row_scale(row: &[f32]) -> f16 {
    let largest = row.iter().fold(0f32, |most, v| most.max(v.abs()));
    let scale = f16::from_f32(largest / LARGEST);
    if scale == f16::ZERO {
        f16::MIN_POSITIVE_SUBNORMAL
    } else {
        scale
    }
}

/// The entry nearest to `value`, ties to even.
pub(crate) fn entry(value: f32, scale: f32) -> i8 {
    (value / scale).round_ties_even().clamp(-LARGEST, LARGEST) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_eight_bits_are_within_half_a_step_and_never_without_a_scale() {
        for row in [
            vec![1.0f32, -0.3, 0.004, 0.0],
            vec![-60000.0, 60000.0, 1.0],
            vec![3e-5, -1e-5],
            vec![0.0; 3],
            vec![1e-9, -1e-9],
        ] {
            let scale = row_scale(&row).to_f32();
            assert!(scale > 0.0 && scale.is_finite(), "{row:?}");
            for v in row {
                let kept = f32::from(entry(v, scale)) * scale;
                // Rounding the scale to f16 may move the largest by more than half a step.
                let bound = scale / 2.0 + v.abs() / 1024.0;
                assert!((kept - v).abs() <= bound, "{v} became {kept}");
            }
        }
    }
}
