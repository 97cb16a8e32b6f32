//! Plain arrays, for processors without a known vector unit.

#![expect(
    unsafe_code,
    reason = "implements loads and stores through raw pointers"
)]

use super::activations::LANES;
use super::scalar;
use super::simd::{Simd, Tile, tile};
use half::f16;
use std::array::from_fn;

/// Always available.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

impl Simd for Portable {
    type V = [f32; LANES];
    type I = [u32; LANES];
    const TILE_ROWS: usize = 2;
    const TILE_TOKENS: usize = 1;
    const NARROW_TOKENS: usize = 0;

    fn splat(self, value: f32) -> Self::V {
        [value; LANES]
    }
    unsafe fn load(self, from: *const f32) -> Self::V {
        // SAFETY: valid by the caller's promise.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }
    unsafe fn store(self, v: Self::V, to: *mut f32) {
        // SAFETY: valid by the caller's promise.
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        // SAFETY: valid by the caller's promise.
        unsafe { from.cast::<[f16; LANES]>().read_unaligned() }.map(f16::to_f32)
    }
    unsafe fn store_f16(self, v: Self::V, to: *mut f16) {
        // SAFETY: valid by the caller's promise.
        unsafe {
            to.cast::<[f16; LANES]>()
                .write_unaligned(v.map(scalar::narrow));
        }
    }
    unsafe fn load_i8(self, from: *const i8) -> Self::V {
        // SAFETY: valid by the caller's promise.
        unsafe { from.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from)
    }

    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] + b[i])
    }
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] - b[i])
    }
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] * b[i])
    }
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| a[i] / b[i])
    }
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    fn round(self, v: Self::V) -> Self::V {
        v.map(f32::round_ties_even)
    }
    fn pow2(self, n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    unsafe fn words<const BITS: usize>(self, from: *const u8) -> Self::I {
        // SAFETY: readable by the caller's promise.
        from_fn(|lane| unsafe {
            u32::from_le_bytes(from.add(BITS * lane).cast::<[u8; 4]>().read())
        })
    }
    fn shift_right(self, i: Self::I, n: u32) -> Self::I {
        i.map(|i| i >> n)
    }
    unsafe fn lookup<const BITS: usize>(
        self,
        _first: Self::V,
        table: *const f32,
        i: Self::I,
    ) -> Self::V {
        // SAFETY: the table holds `2^BITS` entries by the caller's promise.
        i.map(|i| unsafe { *table.add(i as usize % (1 << BITS)) })
    }
    unsafe fn tile(self, _tokens: usize, t: Tile) {
        // SAFETY: by the caller's promise.
        unsafe { tile::<_, 2, 1>(self, t) }
    }
}
