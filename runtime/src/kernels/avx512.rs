//! AVX-512: one vector is one register.

#![expect(unsafe_code, reason = "intrinsics, enabled by the token")]

use super::activations::Lanes;
use super::simd::{Kernel, Simd, Tile, tile};
use half::f16;
#[allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]
use std::arch::x86_64::*;

/// Proof that the processor has the features named in [`Avx512::new`], which
/// are those that [`Avx512::enter`] enables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }

    #[inline]
    pub(super) fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn enter<K: Kernel>(isa: Avx512, kernel: K) -> K::Output {
            kernel.run(isa)
        }
        // SAFETY: `self` proves the features.
        unsafe { enter(self, kernel) }
    }
}

/// Evaluates intrinsics in a method of the token.
macro_rules! avx512 {
    ($body:expr) => {
        // SAFETY: `self` proves the features; where the method takes a
        // pointer, its caller promises that it is valid.
        unsafe { $body }
    };
}

impl Simd for Avx512 {
    type V = __m512;
    type I = __m512i;
    // 24 accumulators, 4 weights and an input in 32 registers.
    const TILE_ROWS: usize = 4;
    const TILE_TOKENS: usize = 6;
    const NARROW_TOKENS: usize = 64;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        avx512!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        avx512!(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn store(self, v: __m512, to: *mut f32) {
        avx512!(_mm512_storeu_ps(to, v));
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(self, v: __m512, to: *mut f16) {
        avx512!({
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let v = _mm512_mask_blend_ps(nan, v, _mm512_set1_ps(f32::NAN));
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
        });
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(
            from.cast()
        ))))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn round(self, v: __m512) -> __m512 {
        avx512!(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(v))
    }
    #[inline(always)]
    fn round_f16(self, v: __m512) -> __m512 {
        avx512!(_mm512_cvtph_ps(
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)
        ))
    }
    /// Pairs, quarters and halves of the vectors change places.
    #[inline(always)]
    fn transpose(self, mut r: [__m512; 16]) -> [__m512; 16] {
        avx512!({
            let mut t = r;
            for i in 0..8 {
                t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            // r[4 i + k]: in quarter q, column 4 q + k of rows 4 i to 4 i + 3.
            for i in 0..4 {
                let t = &t[4 * i..][..4];
                r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(
                    _mm512_castps_pd(t[0]),
                    _mm512_castps_pd(t[2]),
                ));
                r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(
                    _mm512_castps_pd(t[0]),
                    _mm512_castps_pd(t[2]),
                ));
                r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(
                    _mm512_castps_pd(t[1]),
                    _mm512_castps_pd(t[3]),
                ));
                r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(
                    _mm512_castps_pd(t[1]),
                    _mm512_castps_pd(t[3]),
                ));
            }
            for k in 0..4 {
                t[k] = _mm512_shuffle_f32x4::<0x88>(r[k], r[4 + k]);
                t[4 + k] = _mm512_shuffle_f32x4::<0xdd>(r[k], r[4 + k]);
                t[8 + k] = _mm512_shuffle_f32x4::<0x88>(r[8 + k], r[12 + k]);
                t[12 + k] = _mm512_shuffle_f32x4::<0xdd>(r[8 + k], r[12 + k]);
            }
            for k in 0..4 {
                r[k] = _mm512_shuffle_f32x4::<0x88>(t[k], t[8 + k]);
                r[8 + k] = _mm512_shuffle_f32x4::<0xdd>(t[k], t[8 + k]);
                r[4 + k] = _mm512_shuffle_f32x4::<0x88>(t[4 + k], t[12 + k]);
                r[12 + k] = _mm512_shuffle_f32x4::<0xdd>(t[4 + k], t[12 + k]);
            }
            r
        })
    }
    #[inline(always)]
    fn pow2(self, n: __m512) -> __m512 {
        avx512!({
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        })
    }

    #[inline(always)]
    unsafe fn words<const BITS: usize>(self, from: *const u8) -> __m512i {
        avx512!(match BITS {
            1 => _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())),
            2 => _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())),
            4 => _mm512_loadu_si512(from.cast()),
            _ => {
                let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
                let at = _mm512_mullo_epi32(lane, _mm512_set1_epi32(BITS as i32));
                _mm512_i32gather_epi32::<1>(at, from.cast())
            }
        })
    }
    #[inline(always)]
    fn shift_right(self, i: __m512i, n: u32) -> __m512i {
        avx512!(_mm512_srl_epi32(i, _mm_cvtsi32_si128(n as i32)))
    }
    #[inline(always)]
    unsafe fn lookup<const BITS: usize>(
        self,
        first: __m512,
        table: *const f32,
        i: __m512i,
    ) -> __m512 {
        avx512!(match BITS {
            // Reads the low four bits of every lane.
            1..=4 => _mm512_permutexvar_ps(i, first),
            // Reads the low five bits; bit 5 chooses between the halves.
            6 => {
                let entries = |at: usize| _mm512_loadu_ps(table.add(at));
                let low = _mm512_permutex2var_ps(entries(0), i, entries(16));
                let high = _mm512_permutex2var_ps(entries(32), i, entries(48));
                let upper = _mm512_test_epi32_mask(i, _mm512_set1_epi32(32));
                _mm512_mask_blend_ps(upper, low, high)
            }
            _ => {
                let i = _mm512_and_si512(i, _mm512_set1_epi32((1 << BITS) - 1));
                _mm512_i32gather_ps::<4>(i, table)
            }
        })
    }

    #[inline(always)]
    unsafe fn tile(self, tokens: usize, t: Tile) {
        avx512!(match tokens {
            1 => tile::<_, 4, 1>(self, t),
            2 => tile::<_, 4, 2>(self, t),
            3 => tile::<_, 4, 3>(self, t),
            4 => tile::<_, 4, 4>(self, t),
            5 => tile::<_, 4, 5>(self, t),
            _ => tile::<_, 4, 6>(self, t),
        });
    }

    /// Three rounds of two-register permutes: quarters of eight columns, then
    /// halves, then whole vectors come together.
    #[inline(always)]
    unsafe fn interleave(self, from: *const f32, to: *mut Lanes) {
        avx512!({
            // Element `e < 16` of the first operand, `e - 16` of the second.
            let index = |e: [i32; 16]| _mm512_loadu_si512(e.as_ptr().cast());
            let first = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27];
            let later = [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23];
            let whole = [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23];
            let zero = _mm512_setzero_ps();
            let mut quarter = [[zero; 2]; 4];
            for i in 0..4 {
                let a = _mm512_loadu_ps(from.add(32 * i));
                let b = _mm512_loadu_ps(from.add(32 * i + 16));
                quarter[i][0] = _mm512_permutex2var_ps(a, index(first), b);
                quarter[i][1] = _mm512_permutex2var_ps(a, index(first.map(|e| e + 4)), b);
            }
            for h in 0..2 {
                let mut half = [[zero; 2]; 2];
                for i in 0..2 {
                    let (a, b) = (quarter[2 * i][h], quarter[2 * i + 1][h]);
                    half[i][0] = _mm512_permutex2var_ps(a, index(later), b);
                    half[i][1] = _mm512_permutex2var_ps(a, index(later.map(|e| e + 8)), b);
                }
                for q in 0..2 {
                    let (a, b) = (half[0][q], half[1][q]);
                    let j = 4 * h + 2 * q;
                    let even = _mm512_permutex2var_ps(a, index(whole), b);
                    let odd = _mm512_permutex2var_ps(a, index(whole.map(|e| e + 8)), b);
                    _mm512_storeu_ps(to.add(j).cast(), even);
                    _mm512_storeu_ps(to.add(j + 1).cast(), odd);
                }
            }
        });
    }

    /// Adds halves of pairs of vectors: each round halves the number of
    /// vectors and of lanes per sum, so sixteen sums cost fifteen additions.
    #[inline(always)]
    unsafe fn reduce(self, acc: *const Lanes) -> __m512 {
        avx512!({
            let mut v = [_mm512_setzero_ps(); 16];
            for i in 0..16 {
                v[i] = _mm512_loadu_ps(acc.add(i).cast());
            }
            // v[i]: the eight partial sums of i, then those of i + 8.
            for i in 0..8 {
                let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(v[i], v[i + 8]);
                let high = _mm512_shuffle_f32x4::<0b11_10_11_10>(v[i], v[i + 8]);
                v[i] = _mm512_add_ps(low, high);
            }
            // v[i]: four each of i, i + 8, i + 4, i + 12.
            for i in 0..4 {
                let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(v[i], v[i + 4]);
                let high = _mm512_shuffle_f32x4::<0b11_01_11_01>(v[i], v[i + 4]);
                v[i] = _mm512_add_ps(low, high);
            }
            // v[i]: in quarter q, two of i + Q[q] and two of i + 2 + Q[q],
            // where Q is 0, 8, 4, 12.
            for i in 0..2 {
                let low = _mm512_shuffle_ps::<0b01_00_01_00>(v[i], v[i + 2]);
                let high = _mm512_shuffle_ps::<0b11_10_11_10>(v[i], v[i + 2]);
                v[i] = _mm512_add_ps(low, high);
            }
            // In quarter q: the sums of 0, 2, 1, 3 plus Q[q].
            let low = _mm512_shuffle_ps::<0b10_00_10_00>(v[0], v[1]);
            let high = _mm512_shuffle_ps::<0b11_01_11_01>(v[0], v[1]);
            let sums = _mm512_add_ps(low, high);
            let order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
            _mm512_permutexvar_ps(order, sums)
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        avx512!(_mm_prefetch::<_MM_HINT_T0>(at.cast()));
    }
    #[inline(always)]
    fn prefetch_far(self, at: *const u8) {
        avx512!(_mm_prefetch::<_MM_HINT_T1>(at.cast()));
    }
}
