//! AVX2 with FMA and F16C: one vector is two registers.

#![expect(unsafe_code, reason = "intrinsics, enabled by the token")]

use super::simd::{Kernel, Simd, Tile, tile};
use half::f16;
#[allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]
use std::arch::x86_64::*;

/// Proof that the processor has the features named in [`Avx2::new`], which
/// are those that [`Avx2::enter`] enables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }

    #[inline]
    pub(super) fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enter<K: Kernel>(isa: Avx2, kernel: K) -> K::Output {
            kernel.run(isa)
        }
        // SAFETY: `self` proves the features.
        unsafe { enter(self, kernel) }
    }
}

/// Evaluates intrinsics in a method of the token.
macro_rules! avx2 {
    ($body:expr) => {
        // SAFETY: `self` proves the features; where the method takes a
        // pointer, its caller promises that it is valid.
        unsafe { $body }
    };
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    type I = [__m256i; 2];
    // 12 accumulators, 2 weights and an input in 16 registers, once the
    // compiler has split the lanes into their halves.
    const TILE_ROWS: usize = 2;
    const TILE_TOKENS: usize = 3;
    const NARROW_TOKENS: usize = 3;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::V {
        avx2!([_mm256_set1_ps(value); 2])
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        avx2!([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))])
    }
    #[inline(always)]
    unsafe fn store(self, v: Self::V, to: *mut f32) {
        avx2!({
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(8), v[1]);
        });
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        avx2!([
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
        ])
    }
    #[inline(always)]
    unsafe fn store_f16(self, v: Self::V, to: *mut f16) {
        avx2!(for (i, v) in v.into_iter().enumerate() {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v);
            let v = _mm256_blendv_ps(v, _mm256_set1_ps(f32::NAN), nan);
            let h = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
            _mm_storeu_si128(to.add(8 * i).cast(), h);
        });
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Self::V {
        avx2!({
            let bytes = _mm_loadu_si128(from.cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))),
            ]
        })
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        avx2!([_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        avx2!([_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        avx2!([_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        avx2!([_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        avx2!([
            _mm256_fmadd_ps(a[0], b[0], c[0]),
            _mm256_fmadd_ps(a[1], b[1], c[1])
        ])
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        avx2!([_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        avx2!([_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])])
    }
    #[inline(always)]
    fn round(self, v: Self::V) -> Self::V {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        avx2!([
            _mm256_round_ps::<NEAREST>(v[0]),
            _mm256_round_ps::<NEAREST>(v[1])
        ])
    }
    #[inline(always)]
    fn round_f16(self, v: Self::V) -> Self::V {
        avx2!([
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0])),
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]))
        ])
    }
    #[inline(always)]
    fn pow2(self, n: Self::V) -> Self::V {
        avx2!({
            let one = |n| {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            };
            [one(n[0]), one(n[1])]
        })
    }

    #[inline(always)]
    unsafe fn words<const BITS: usize>(self, from: *const u8) -> Self::I {
        avx2!(if BITS == 4 {
            [
                _mm256_loadu_si256(from.cast()),
                _mm256_loadu_si256(from.add(32).cast()),
            ]
        } else {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let at = _mm256_mullo_epi32(lane, _mm256_set1_epi32(BITS as i32));
            [
                _mm256_i32gather_epi32::<1>(from.cast(), at),
                _mm256_i32gather_epi32::<1>(from.add(8 * BITS).cast(), at),
            ]
        })
    }
    #[inline(always)]
    fn shift_right(self, i: Self::I, n: u32) -> Self::I {
        avx2!({
            let n = _mm_cvtsi32_si128(n as i32);
            [_mm256_srl_epi32(i[0], n), _mm256_srl_epi32(i[1], n)]
        })
    }
    #[inline(always)]
    unsafe fn lookup<const BITS: usize>(
        self,
        first: Self::V,
        table: *const f32,
        i: Self::I,
    ) -> Self::V {
        avx2!(if BITS <= 4 {
            // A permute reads the low three bits; bit 3, moved to the sign,
            // chooses between the halves of the table.
            let one = |i| {
                let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(i));
                let low = _mm256_permutevar8x32_ps(first[0], i);
                let high = _mm256_permutevar8x32_ps(first[1], i);
                _mm256_blendv_ps(low, high, upper)
            };
            [one(i[0]), one(i[1])]
        } else {
            let mask = _mm256_set1_epi32((1 << BITS) - 1);
            [
                _mm256_i32gather_ps::<4>(table, _mm256_and_si256(i[0], mask)),
                _mm256_i32gather_ps::<4>(table, _mm256_and_si256(i[1], mask)),
            ]
        })
    }

    #[inline(always)]
    unsafe fn tile(self, tokens: usize, t: Tile) {
        avx2!(match tokens {
            1 => tile::<_, 2, 1>(self, t),
            2 => tile::<_, 2, 2>(self, t),
            _ => tile::<_, 2, 3>(self, t),
        });
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        avx2!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
    }
    #[inline(always)]
    fn prefetch_far(self, at: *const u8) {
        avx2!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
    }
}
