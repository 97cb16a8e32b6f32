//! The vector operations that kernels are written in, and the choice between
//! instruction sets.
//!
//! A kernel is a [`Kernel`]: a value with its inputs and a `run` that is
//! generic over [`Simd`]. [`Isa::run`] enters it through a function compiled
//! for the instruction set, and everything below is inlined into that
//! function. A value of a `Simd` type exists only where its instructions do:
//! each type has one constructor, which asks the processor. So the operations
//! are safe to call, and `unsafe` is left to those that touch raw memory.
//!
//! Every vector has sixteen f32 lanes, whatever the registers hold, so that
//! lane-wise accumulation means the same everywhere.

#![expect(unsafe_code, reason = "vector loads and stores through raw pointers")]

use super::activations::{LANES, Lanes, RUN};
use half::f16;

/// Operands of [`Simd::tile`]: `rows` by `tokens` accumulators over `blocks`
/// blocks of columns.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Decoded weights of the first row.
    pub(super) w: *const Lanes,
    /// Vectors from one row of weights to the next.
    pub(super) w_row: usize,
    /// Activations of the first token in the first block.
    pub(super) x: *const Lanes,
    /// Vectors from one block of activations to the next.
    pub(super) x_block: usize,
    pub(super) blocks: usize,
    /// Accumulator of the first row and token; rows follow each other.
    pub(super) acc: *mut Lanes,
    /// Accumulators from one token to the next.
    pub(super) acc_token: usize,
}

/// Sixteen-lane vectors of one instruction set.
///
/// # Safety of the memory operations
///
/// Loads and stores need valid memory for sixteen elements, of any alignment,
/// unless stated otherwise.
pub(super) trait Simd: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen u32.
    type I: Copy;
    /// Rows of the register tile; divides sixteen.
    const TILE_ROWS: usize;
    /// The most tokens of the register tile.
    const TILE_TOKENS: usize;
    /// Up to how many tokens it is faster to look weights up again for each
    /// register tile than to decode them to memory.
    const NARROW_TOKENS: usize;

    fn splat(self, value: f32) -> Self::V;
    unsafe fn load(self, from: *const f32) -> Self::V;
    unsafe fn store(self, v: Self::V, to: *mut f32);
    unsafe fn load_f16(self, from: *const f16) -> Self::V;
    /// Rounds to nearest even; every NaN becomes `f16::NAN`.
    unsafe fn store_f16(self, v: Self::V, to: *mut f16);
    unsafe fn load_i8(self, from: *const i8) -> Self::V;

    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `if a > b { a } else { b }`.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { a } else { b }`.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest integer, ties to even.
    fn round(self, v: Self::V) -> Self::V;
    /// To f16 and back, as [`Self::store_f16`] rounds.
    #[inline(always)]
    fn round_f16(self, v: Self::V) -> Self::V {
        let mut halves = [f16::ZERO; LANES];
        // SAFETY: sixteen elements.
        unsafe {
            self.store_f16(v, halves.as_mut_ptr());
            self.load_f16(halves.as_ptr())
        }
    }
    /// Lane `j` of result `i` is lane `i` of `rows[j]`.
    #[inline(always)]
    fn transpose(self, rows: [Self::V; LANES]) -> [Self::V; LANES] {
        let mut from = [[0.0_f32; LANES]; LANES];
        let mut to = [[0.0_f32; LANES]; LANES];
        let mut out = rows;
        // SAFETY: every array has sixteen elements.
        unsafe {
            for i in 0..LANES {
                self.store(rows[i], from[i].as_mut_ptr());
            }
            for i in 0..LANES {
                for j in 0..LANES {
                    to[i][j] = from[j][i];
                }
            }
            for i in 0..LANES {
                out[i] = self.load(to[i].as_ptr());
            }
        }
        out
    }
    /// `2^n` for integers `n` from -126 to 127.
    fn pow2(self, n: Self::V) -> Self::V;

    /// The 32-bit little-endian words at `from + BITS * lane`.
    ///
    /// # Safety
    ///
    /// `from` must be readable for `16 * BITS + 4` bytes.
    unsafe fn words<const BITS: usize>(self, from: *const u8) -> Self::I;
    /// Shifts every lane right by `n < 32` bits.
    fn shift_right(self, i: Self::I, n: u32) -> Self::I;
    /// Entry `i mod 2^BITS` of the table for every lane `i`.
    ///
    /// # Safety
    ///
    /// `table` must hold `2^max(BITS, 4)` entries, repeating its `2^BITS`, and
    /// `first` be the first sixteen.
    unsafe fn lookup<const BITS: usize>(
        self,
        first: Self::V,
        table: *const f32,
        i: Self::I,
    ) -> Self::V;
    /// The register tile of `tokens` in `1..=TILE_TOKENS` by `TILE_ROWS`.
    ///
    /// # Safety
    ///
    /// All operands must be valid for that many rows, tokens and blocks.
    unsafe fn tile(self, tokens: usize, tile: Tile);

    /// Decodes one block of `BITS`-bit indices to eight vectors at `to`.
    ///
    /// # Safety
    ///
    /// `from` must be readable for [`SLACK`](super::rows::SLACK) bytes past the
    /// block, `table` as for [`Self::lookup`], and `to` hold eight vectors.
    #[inline(always)]
    unsafe fn decode<const BITS: usize>(self, from: *const u8, table: *const f32, to: *mut Lanes) {
        // SAFETY: by the caller's promise.
        let first = unsafe { self.load(table) };
        for j in 0..RUN {
            // SAFETY: by the caller's promise.
            unsafe {
                let v = decode_one::<Self, BITS>(self, from, first, table, j);
                self.store(v, to.add(j).cast());
            }
        }
    }

    /// Brings 128 consecutive columns into the order of a block.
    ///
    /// # Safety
    ///
    /// `from` and `to` must be valid for eight vectors and not overlap.
    #[inline(always)]
    unsafe fn interleave(self, from: *const f32, to: *mut Lanes) {
        for j in 0..RUN {
            for lane in 0..LANES {
                // SAFETY: by the caller's promise.
                unsafe {
                    to.add(j)
                        .cast::<f32>()
                        .add(lane)
                        .write(*from.add(lane * RUN + j));
                };
            }
        }
    }

    /// The sums of sixteen consecutive accumulators, one per lane.
    ///
    /// # Safety
    ///
    /// `acc` must hold sixteen vectors.
    #[inline(always)]
    unsafe fn reduce(self, acc: *const Lanes) -> Self::V {
        let mut sums = [0.0_f32; LANES];
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller's promise; `sums` holds sixteen lanes.
            *sum = super::scalar::reduce(unsafe { (*acc.add(i)).0 });
        }
        // SAFETY: `sums` holds sixteen lanes.
        unsafe { self.load(sums.as_ptr()) }
    }

    /// Asks for the cache line of `at`, which may be any address.
    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        let _ = at;
    }

    /// The same for the second-level cache only.
    #[inline(always)]
    fn prefetch_far(self, at: *const u8) {
        let _ = at;
    }
}

/// Elements `at..at + 16`, zero past the end of `x`.
#[inline(always)]
pub(super) fn load_f16<S: Simd>(s: S, x: &[f16], at: usize) -> S::V {
    if x.len() - at >= LANES {
        // SAFETY: sixteen elements from `at`.
        unsafe { s.load_f16(x.as_ptr().add(at)) }
    } else {
        let mut padded = [f16::ZERO; LANES];
        padded[..x.len() - at].copy_from_slice(&x[at..]);
        // SAFETY: sixteen elements.
        unsafe { s.load_f16(padded.as_ptr()) }
    }
}

/// Writes elements `at..at + 16`, those past the end of `x` nowhere.
#[inline(always)]
pub(super) fn store_f16<S: Simd>(s: S, v: S::V, x: &mut [f16], at: usize) {
    let live = x.len() - at;
    if live >= LANES {
        // SAFETY: sixteen elements from `at`.
        unsafe { s.store_f16(v, x.as_mut_ptr().add(at)) };
    } else {
        let mut padded = [f16::ZERO; LANES];
        // SAFETY: sixteen elements.
        unsafe { s.store_f16(v, padded.as_mut_ptr()) };
        x[at..].copy_from_slice(&padded[..live]);
    }
}

/// As [`load_f16`].
#[inline(always)]
pub(super) fn load_f32<S: Simd>(s: S, x: &[f32], at: usize) -> S::V {
    if x.len() - at >= LANES {
        // SAFETY: sixteen elements from `at`.
        unsafe { s.load(x.as_ptr().add(at)) }
    } else {
        let mut padded = [0.0; LANES];
        padded[..x.len() - at].copy_from_slice(&x[at..]);
        // SAFETY: sixteen elements.
        unsafe { s.load(padded.as_ptr()) }
    }
}

/// As [`store_f16`].
#[inline(always)]
pub(super) fn store_f32<S: Simd>(s: S, v: S::V, x: &mut [f32], at: usize) {
    let live = x.len() - at;
    if live >= LANES {
        // SAFETY: sixteen elements from `at`.
        unsafe { s.store(v, x.as_mut_ptr().add(at)) };
    } else {
        let mut padded = [0.0; LANES];
        // SAFETY: sixteen elements.
        unsafe { s.store(v, padded.as_mut_ptr()) };
        x[at..].copy_from_slice(&padded[..live]);
    }
}

/// Vector `j` of a block of `BITS`-bit indices: the index of lane `l` starts at
/// bit `BITS * (8 l + j)`, so in the word at byte `BITS l + BITS j / 8`.
///
/// # Safety
///
/// As for [`Simd::decode`]; `first` is the first sixteen entries of `table`.
#[inline(always)]
pub(super) unsafe fn decode_one<S: Simd, const BITS: usize>(
    s: S,
    from: *const u8,
    first: S::V,
    table: *const f32,
    j: usize,
) -> S::V {
    // SAFETY: by the caller's promise; the offset is below `BITS`, which the
    // readable range allows for.
    unsafe {
        let words = s.words::<BITS>(from.add(BITS * j / 8));
        let shift = BITS * j % 8;
        let index = if shift == 0 {
            words
        } else {
            s.shift_right(words, shift as u32)
        };
        s.lookup::<BITS>(first, table, index)
    }
}

/// The body of [`Simd::tile`] for `R` rows and `T` tokens: `R * T` independent
/// accumulators in registers, each loaded vector used `T` or `R` times.
///
/// # Safety
///
/// As for [`Simd::tile`].
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const R: usize, const T: usize>(s: S, tile: Tile) {
    let mut acc = [[s.splat(0.0); T]; R];
    // SAFETY: by the caller's promise.
    unsafe {
        for t in 0..T {
            for r in 0..R {
                acc[r][t] = s.load(tile.acc.add(t * tile.acc_token + r).cast());
            }
        }
        for block in 0..tile.blocks {
            let w = tile.w.add(block * RUN);
            let x = tile.x.add(block * tile.x_block);
            for j in 0..RUN {
                let mut weights = [s.splat(0.0); R];
                for r in 0..R {
                    weights[r] = s.load(w.add(r * tile.w_row + j).cast());
                }
                for t in 0..T {
                    let input = s.load(x.add(t * RUN + j).cast());
                    for r in 0..R {
                        acc[r][t] = s.mul_add(weights[r], input, acc[r][t]);
                    }
                }
            }
        }
        for t in 0..T {
            for r in 0..R {
                s.store(acc[r][t], tile.acc.add(t * tile.acc_token + r).cast());
            }
        }
    }
}

/// Work that runs on any instruction set. `run` has to be `#[inline(always)]`,
/// and so has every generic function below it: that is what compiles them with
/// the instructions of the caller.
pub(super) trait Kernel {
    type Output;
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set that this processor has.
#[derive(Debug, Clone, Copy)]
pub(super) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512(super::avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(super::avx2::Avx2),
    #[cfg(target_arch = "aarch64")]
    Neon(super::neon::Neon),
    Portable(super::portable::Portable),
}

impl Isa {
    /// The widest instruction set of this processor.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(isa) = super::avx512::Avx512::new() {
                return Self::Avx512(isa);
            }
            if let Some(isa) = super::avx2::Avx2::new() {
                return Self::Avx2(isa);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if let Some(isa) = super::neon::Neon::new() {
            return Self::Neon(isa);
        }
        Self::Portable(super::portable::Portable)
    }

    /// Every instruction set of this processor.
    #[cfg(test)]
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![Self::Portable(super::portable::Portable)];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(super::avx2::Avx2::new().map(Self::Avx2));
            all.extend(super::avx512::Avx512::new().map(Self::Avx512));
        }
        #[cfg(target_arch = "aarch64")]
        all.extend(super::neon::Neon::new().map(Self::Neon));
        all
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon(_) => "neon",
            Self::Portable(_) => "portable",
        }
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(isa) => isa.enter(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(isa) => isa.enter(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Neon(isa) => isa.enter(kernel),
            Self::Portable(isa) => kernel.run(isa),
        }
    }
}

/// The instruction set that the kernels use here: `avx512`, `avx2`, `neon` or
/// `portable`.
pub fn isa_name() -> &'static str {
    Isa::detect().name()
}
