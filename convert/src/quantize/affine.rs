//! Round to nearest on an affine grid per group of columns: the comparison row.
//!
//! This is the 4-bit format of MLX (`mx.quantize`, groups of 64 columns, scale and bias in
//! bf16), which no chunk program can hold; only its error is of interest. As MLX does, the grid
//! runs from the end with the larger magnitude towards the other one, with the scale adjusted so
//! that zero is on it.

use half::bf16;

use super::{Matrix, QuantizeError};

/// What remains of a matrix after affine quantization to `bits` bits in groups of
/// `group` columns; the last group of a row may be shorter.
///
/// # Errors
/// [`QuantizeError::Setting`] for `bits` outside 1 to 8 or an empty group, and whatever
/// is wrong with the matrix.
pub fn affine_round_trip(
    matrix: Matrix<'_>,
    bits: u8,
    group: usize,
) -> Result<Vec<f32>, QuantizeError> {
    matrix.check()?;
    let setting = |setting, value, expected| QuantizeError::Setting {
        setting,
        value,
        expected,
    };
    if !(1..=8).contains(&bits) {
        return Err(setting("bits", f64::from(bits), "1 to 8"));
    }
    if group == 0 {
        return Err(setting("group", 0.0, "at least 1"));
    }
    let steps = f32::from((1u16 << bits) - 1);
    let mut out = matrix.data.to_vec();
    for row in out.chunks_exact_mut(matrix.cols) {
        for values in row.chunks_mut(group) {
            round_group(values, steps);
        }
    }
    Ok(out)
}

fn round_group(values: &mut [f32], steps: f32) {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let width = ((high - low) / steps).max(1e-7);
    let (edge, toward_other) = if low.abs() > high.abs() {
        (low, width)
    } else {
        (high, -width)
    };
    let to_zero = (edge / toward_other).round_ties_even();
    let (scale, bias) = if to_zero == 0.0 {
        (toward_other, 0.0)
    } else {
        (edge / to_zero, edge)
    };
    let (stored_scale, stored_bias) = (bf16::from_f32(scale), bf16::from_f32(bias));
    for value in values {
        let code = ((*value - bias) / scale)
            .round_ties_even()
            .clamp(0.0, steps);
        *value = stored_scale.to_f32() * code + stored_bias.to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(data: &[f32], group: usize) -> Vec<f32> {
        let matrix = Matrix {
            name: "w",
            rows: 1,
            cols: data.len(),
            data,
        };
        affine_round_trip(matrix, 4, group).unwrap()
    }

    #[test]
    fn values_on_the_grid_survive() {
        let grid: Vec<f32> = (0..16).map(|i| i as f32 * 0.25 - 2.0).collect();
        assert_eq!(round_trip(&grid, 64), grid);
        assert_eq!(round_trip(&[0.0; 8], 4), [0.0; 8]);
        assert_eq!(round_trip(&[-3.0; 8], 4), [-3.0; 8]);
    }

    #[test]
    fn errors_stay_within_a_step_and_groups_do_not_mix() {
        let data: Vec<f32> = (0..130)
            .map(|i| ((i * 37 % 101) as f32 - 50.0) * if i < 64 { 1.0 } else { 0.01 })
            .collect();
        let out = round_trip(&data, 64);
        for (i, (a, b)) in data.iter().zip(&out).enumerate() {
            // Half a step, but more at the far end, which the grid gives up to hit zero.
            let step = if i < 64 { 100.0 / 15.0 } else { 1.0 / 15.0 };
            assert!((a - b).abs() < step, "{i}: {a} became {b}");
        }
    }
}
