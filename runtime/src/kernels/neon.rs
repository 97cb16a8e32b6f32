//! NEON: one vector is four registers.
//!
//! Sixteen 4-bit indices are looked up with one `tbl` per byte of the entries.
//! A structure load (`ld4`) of a block puts byte `j` of every lane's word into
//! register `j`, four lookups in the byte planes of the table give the bytes of
//! sixteen weights, and a structure store (`st4`) interleaves them to f32.

#![expect(unsafe_code, reason = "intrinsics, enabled by the token")]

use super::activations::{LANES, Lanes, RUN};
use super::scalar;
use super::simd::{Kernel, Simd, Tile, decode_one, tile};
use half::f16;
#[allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]
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
        // SAFETY: `self` proves the feature; where the method takes a pointer,
        // its caller promises that it is valid.
        unsafe { $body }
    };
}

/// Evaluates intrinsics once per register.
macro_rules! each {
    ($op:expr) => {
        neon!({
            let op = $op;
            [op(0), op(1), op(2), op(3)]
        })
    };
}

impl Simd for Neon {
    type V = [float32x4_t; 4];
    type I = [uint32x4_t; 4];
    // 24 accumulators, 2 weights and an input in 32 registers, once the
    // compiler has split the lanes into their quarters.
    const TILE_ROWS: usize = 2;
    const TILE_TOKENS: usize = 3;
    const NARROW_TOKENS: usize = 0;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::V {
        neon!([vdupq_n_f32(value); 4])
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        each!(|i: usize| vld1q_f32(from.add(4 * i)))
    }
    #[inline(always)]
    unsafe fn store(self, v: Self::V, to: *mut f32) {
        each!(|i: usize| vst1q_f32(to.add(4 * i), v[i]));
    }
    /// Without the half-precision instructions, which not every processor and
    /// compiler has: the bits of a half, moved to their place in an f32, are
    /// its value times `2^-112`, subnormals included. Infinity and NaN get the
    /// exponent that they lack.
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        each!(|i: usize| {
            let half = vmovl_u16(vld1_u16(from.cast::<u16>().add(4 * i)));
            let sign = vshlq_n_u32::<16>(vandq_u32(half, vdupq_n_u32(0x8000)));
            let magnitude = vandq_u32(half, vdupq_n_u32(0x7FFF));
            let moved = vshlq_n_u32::<13>(magnitude);
            let scale = vdupq_n_f32(f32::from_bits((127 + 112) << 23));
            let finite = vreinterpretq_u32_f32(vmulq_f32(vreinterpretq_f32_u32(moved), scale));
            let special = vorrq_u32(moved, vdupq_n_u32(0x7F80_0000));
            let is_special = vcgeq_u32(magnitude, vdupq_n_u32(0x7C00));
            vreinterpretq_f32_u32(vorrq_u32(sign, vbslq_u32(is_special, special, finite)))
        })
    }
    /// One by one: results are rounded once for thousands of multiply-adds.
    #[inline(always)]
    unsafe fn store_f16(self, v: Self::V, to: *mut f16) {
        let mut lanes = [0.0; LANES];
        // SAFETY: `lanes` and, by the caller's promise, `to` hold sixteen
        // elements.
        unsafe {
            self.store(v, lanes.as_mut_ptr());
            to.cast::<[f16; LANES]>()
                .write_unaligned(lanes.map(scalar::narrow));
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Self::V {
        neon!({
            let bytes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ]
        })
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        each!(|i: usize| vaddq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        each!(|i: usize| vsubq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        each!(|i: usize| vmulq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        each!(|i: usize| vdivq_f32(a[i], b[i]))
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        each!(|i: usize| vfmaq_f32(c[i], a[i], b[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        each!(|i: usize| vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        each!(|i: usize| vbslq_f32(vcltq_f32(a[i], b[i]), a[i], b[i]))
    }
    #[inline(always)]
    fn round(self, v: Self::V) -> Self::V {
        each!(|i: usize| vrndnq_f32(v[i]))
    }
    #[inline(always)]
    fn pow2(self, n: Self::V) -> Self::V {
        each!(|i: usize| {
            let exponent = vaddq_s32(vcvtnq_s32_f32(n[i]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        })
    }

    #[inline(always)]
    unsafe fn words<const BITS: usize>(self, from: *const u8) -> Self::I {
        each!(|i: usize| {
            if BITS == 4 {
                vreinterpretq_u32_u8(vld1q_u8(from.add(16 * i)))
            } else {
                let mut words = [0_u32; 4];
                for (lane, word) in words.iter_mut().enumerate() {
                    let at = from.add(BITS * (4 * i + lane)).cast::<[u8; 4]>();
                    *word = u32::from_le_bytes(at.read());
                }
                vld1q_u32(words.as_ptr())
            }
        })
    }
    #[inline(always)]
    fn shift_right(self, i: Self::I, n: u32) -> Self::I {
        each!(|r: usize| vshlq_u32(i[r], vdupq_n_s32(-(n as i32))))
    }
    #[inline(always)]
    unsafe fn lookup<const BITS: usize>(
        self,
        _first: Self::V,
        table: *const f32,
        i: Self::I,
    ) -> Self::V {
        each!(|r: usize| {
            let mut index = [0_u32; 4];
            vst1q_u32(index.as_mut_ptr(), i[r]);
            let entries = index.map(|i| *table.add(i as usize % (1 << BITS)));
            vld1q_f32(entries.as_ptr())
        })
    }
    #[inline(always)]
    unsafe fn tile(self, tokens: usize, t: Tile) {
        neon!(match tokens {
            1 => tile::<_, 2, 1>(self, t),
            2 => tile::<_, 2, 2>(self, t),
            _ => tile::<_, 2, 3>(self, t),
        });
    }

    #[inline(always)]
    unsafe fn decode<const BITS: usize>(self, from: *const u8, table: *const f32, to: *mut Lanes) {
        neon!(if BITS == 4 {
            // Byte `p` of all sixteen entries, in little-endian order.
            let planes = vld4q_u8(table.cast());
            let words = vld4q_u8(from);
            for (pair, bytes) in [words.0, words.1, words.2, words.3].into_iter().enumerate() {
                let even = vandq_u8(bytes, vdupq_n_u8(0x0F));
                let odd = vshrq_n_u8::<4>(bytes);
                for (odd, index) in [even, odd].into_iter().enumerate() {
                    let weights = uint8x16x4_t(
                        vqtbl1q_u8(planes.0, index),
                        vqtbl1q_u8(planes.1, index),
                        vqtbl1q_u8(planes.2, index),
                        vqtbl1q_u8(planes.3, index),
                    );
                    vst4q_u8(to.add(2 * pair + odd).cast(), weights);
                }
            }
        } else {
            let first = self.load(table);
            for j in 0..RUN {
                let v = decode_one::<Self, BITS>(self, from, first, table, j);
                self.store(v, to.add(j).cast());
            }
        });
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        neon!(std::arch::asm!(
            "prfm pldl1keep, [{0}]",
            in(reg) at,
            options(nostack, readonly, preserves_flags),
        ));
    }
    #[inline(always)]
    fn prefetch_far(self, at: *const u8) {
        neon!(std::arch::asm!(
            "prfm pldl2keep, [{0}]",
            in(reg) at,
            options(nostack, readonly, preserves_flags),
        ));
    }
}
