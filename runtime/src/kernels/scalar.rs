//! The scalar twin: the definition of every result.

use super::activations::LANES;
#[cfg(test)]
use super::activations::{Activations, BLOCK, RUN};
use half::f16;

/// The product of one row of weights with one token, by the order that the
/// module documentation defines. `weight(k)` is the weight of column `k`.
#[cfg(test)]
pub(super) fn dot(weight: impl Fn(usize) -> f32, x: &Activations, token: usize) -> f32 {
    let mut acc = [0.0_f32; LANES];
    for block in 0..x.blocks() {
        for (j, x) in x.run(block, token).iter().enumerate() {
            for (lane, acc) in acc.iter_mut().enumerate() {
                *acc = weight(block * BLOCK + lane * RUN + j).mul_add(x.0[lane], *acc);
            }
        }
    }
    reduce(acc)
}

/// The sum of sixteen lanes: the upper half onto the lower half, four times.
pub(super) fn reduce(mut acc: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            acc[lane] += acc[lane + half];
        }
    }
    acc[0]
}

/// The one rounding to f16, to nearest even, with a single NaN: payloads
/// depend on the order of operands, which compilers are free to change.
pub(super) fn narrow(value: f32) -> f16 {
    if value.is_nan() {
        f16::NAN
    } else {
        f16::from_f32(value)
    }
}
