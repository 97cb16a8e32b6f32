//! NEON: one vector is four registers.

#![expect(unsafe_code, reason = "intrinsics, enabled by the token")]

use super::activations::{LANES, Lanes, RUN};
use super::simd::{Kernel, Simd, Tile, decode_one, tile};
use half::f16;
use std::arch::aarch64::*;

/// Proof that the processor has the feature named in [`Neon::new`], which is
/// the one that [`Neon::enter`] enables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    pub(super) fn new() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }

    #[inline]
    pub(super) fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "neon")]
        fn enter<K: Kernel>(isa: Neon, kernel: K) -> K::Output {
            kernel.run(isa)
        }
        // SAFETY: `self` proves the feature.
        unsafe { enter(self, kernel) }
    }
}

/// Evaluates intrinsics in a method of the token.
macro_rules! neon {
    ($body:expr) => {
        // SAFETY: `self` proves the feature; where the method takes a
        // pointer, its caller promises that it is valid.
        unsafe { $body }
    };
}

/// `op` on each of the four registers.
macro_rules! each {
    (|$i:ident| $op:expr) => {{
        let one = |$i: usize| $op;
        neon!([one(0), one(1), one(2), one(3)])
    }};
}

impl Simd for Neon {
    type V = [float32x4_t; 4];
    type I = [uint32x4_t; 4];
    // 24 accumulators, 2 weights and an input in 32 registers, once the
    // compiler has split the lanes into their quarters.
    const TILE_ROWS: usize = 2;
    const TILE_TOKENS: usize = 3;
    const LOOKUP_IN_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::V {
        neon!([vdupq_n_f32(value); 4])
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        each!(|i| unsafe { vld1q_f32(from.add(4 * i)) })
    }
    #[inline(always)]
    unsafe fn store(self, v: Self::V, to: *mut f32) {
        each!(|i| unsafe { vst1q_f32(to.add(4 * i), v[i]) });
    }
}
