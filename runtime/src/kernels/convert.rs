//! Conversion between f16 and f32 slices.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Widens `from` into `to`; exact.
///
/// # Panics
///
/// When the lengths differ.
pub fn widen(from: &[f16], to: &mut [f32]) {
    from.convert_to_f32_slice(to);
}
