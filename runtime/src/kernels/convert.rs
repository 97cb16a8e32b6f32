//! Conversion between f16 and f32 slices.

use super::activations::LANES;
use super::simd::{Isa, Kernel, Simd, load_f16, load_f32, store_f16, store_f32};
use half::f16;

/// Widens `from` into `to`; exact.
///
/// # Panics
///
/// When the lengths differ.
pub(crate) fn widen(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "lengths of the source and the target");
    Isa::detect().run(Widen(from, to));
}

/// Rounds `from` into `to`, to nearest even; every NaN becomes `f16::NAN`.
///
/// # Panics
///
/// When the lengths differ.
pub(crate) fn narrow(from: &[f32], to: &mut [f16]) {
    assert_eq!(from.len(), to.len(), "lengths of the source and the target");
    Isa::detect().run(Narrow(from, to));
}

struct Widen<'a>(&'a [f16], &'a mut [f32]);

impl Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.0.len()).step_by(LANES) {
            store_f32(s, load_f16(s, self.0, at), self.1, at);
        }
    }
}

struct Narrow<'a>(&'a [f32], &'a mut [f16]);

impl Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.0.len()).step_by(LANES) {
            store_f16(s, load_f32(s, self.0, at), self.1, at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scalar;
    use super::*;

    #[test]
    fn every_half_widens_exactly_and_returns() {
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        for isa in Isa::all() {
            let mut wide = vec![0.0; halves.len()];
            isa.run(Widen(&halves, &mut wide));
            let mut back = vec![f16::ZERO; halves.len()];
            isa.run(Narrow(&wide, &mut back));
            for ((half, wide), back) in halves.iter().zip(&wide).zip(&back) {
                if half.is_nan() {
                    assert!(wide.is_nan());
                    assert_eq!(back.to_bits(), f16::NAN.to_bits());
                } else {
                    assert_eq!(wide.to_bits(), half.to_f32().to_bits());
                    assert_eq!(back.to_bits(), half.to_bits());
                }
            }
        }
    }

    #[test]
    fn rounding_is_that_of_the_twin_between_all_neighbours() {
        // Around each half and each midpoint between halves.
        let wide: Vec<f32> = (0..0x7C00_u16)
            .flat_map(|bits| {
                let low = f16::from_bits(bits).to_f32();
                let high = f16::from_bits(bits + 1).to_f32().min(65536.0);
                let middle = f32::midpoint(low, high);
                [middle.next_down(), middle, middle.next_up(), -middle]
            })
            .collect();
        for isa in Isa::all() {
            for len in [wide.len(), 37, 1, 0] {
                let mut narrow = vec![f16::ZERO; len];
                isa.run(Narrow(&wide[..len], &mut narrow));
                for (wide, narrow) in wide.iter().zip(&narrow) {
                    assert_eq!(
                        narrow.to_bits(),
                        scalar::narrow(*wide).to_bits(),
                        "{wide:e}"
                    );
                }
            }
        }
    }
}
