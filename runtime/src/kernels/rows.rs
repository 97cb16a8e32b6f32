//! Blocks of weights, decoded to f32 in the order of the activations.

#![expect(unsafe_code, reason = "reads the checked weights through raw pointers")]

use super::activations::{BLOCK, LANES, Lanes, RUN};
use super::simd::Simd;
use super::weights::{DenseValues, DenseWeights, LutWeights};
use half::f16;

/// Bytes that a block of `BITS`-bit indices must be readable for past its end:
/// the last lane reads a word that starts at most `BITS - 1` bytes late.
pub(super) const SLACK: usize = 16;

/// Entries of the largest table.
const ENTRIES: usize = 256;

/// A lookup table in f32. Tables of fewer than sixteen entries are repeated to
/// sixteen, so that the bits above an index need not be masked off.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Table(pub(super) [f32; ENTRIES]);

impl Table {
    pub(super) const EMPTY: Self = Self([0.0; ENTRIES]);

    #[inline(always)]
    fn fill<S: Simd>(&mut self, s: S, bytes: &[u8]) {
        let entries = bytes.len() / 2;
        let (chunks, rest) = bytes.as_chunks::<{ 2 * LANES }>();
        for (i, chunk) in chunks.iter().enumerate() {
            let chunk = chunk.as_chunks::<2>().0;
            let mut halves = [f16::ZERO; LANES];
            for (half, bytes) in halves.iter_mut().zip(chunk) {
                *half = f16::from_le_bytes(*bytes);
            }
            // SAFETY: sixteen halves; sixteen entries from `16 i`, because a
            // table has at most `ENTRIES`.
            unsafe {
                s.store(
                    s.load_f16(halves.as_ptr()),
                    self.0[i * LANES..][..LANES].as_mut_ptr(),
                );
            };
        }
        if !rest.is_empty() {
            for i in 0..LANES {
                let at = 2 * (i % entries);
                self.0[i] = f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
            }
        }
    }
}

/// The rows of a matrix, whatever its weights are stored as.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    Lut(LutWeights<'a>),
    Dense(DenseWeights<'a>),
}

impl Rows<'_> {
    pub(super) fn rows(&self) -> usize {
        match self {
            Self::Lut(w) => w.rows,
            Self::Dense(w) => w.rows,
        }
    }

    pub(super) fn cols(&self) -> usize {
        match self {
            Self::Lut(w) => w.cols,
            Self::Dense(w) => w.cols,
        }
    }

    /// Bytes of this many weights in one row, about.
    #[inline(always)]
    pub(super) fn bytes(&self, weights: usize) -> usize {
        let bits = match self {
            Self::Lut(w) => w.bits.into(),
            Self::Dense(w) => match w.values {
                DenseValues::F16(_) => 16,
                DenseValues::F32(_) => 32,
                DenseValues::I8 { .. } => 8,
            },
        };
        weights * bits / 8
    }

    pub(super) fn scale(&self, row: usize) -> Option<f32> {
        match self {
            Self::Lut(_) => None,
            Self::Dense(w) => w.scale(row),
        }
    }

    /// Widens the tables that rows `first..end` use, in the order of the rows.
    #[inline(always)]
    pub(super) fn fill_tables<S: Simd>(
        &self,
        s: S,
        first: usize,
        end: usize,
        tables: &mut [Table],
    ) {
        if let Self::Lut(w) = self {
            let groups = first / w.group_rows..end.div_ceil(w.group_rows);
            for (group, table) in groups.zip(tables) {
                table.fill(s, w.table(group * w.group_rows));
            }
        }
    }

    /// Where the table of each row from `first` on is, when the tables were filled
    /// from there.
    #[inline(always)]
    pub(super) fn tables_from(&self, first: usize) -> [usize; LANES] {
        match self {
            Self::Lut(w) => w.tables_from(first),
            Self::Dense(_) => [0; LANES],
        }
    }

    /// Decodes the blocks of `row` from `first` on, as many as `to` holds;
    /// columns past the last become zero. Prefetches as many bytes as it reads
    /// from `next`, which may be any address.
    #[inline(always)]
    pub(super) fn decode<S: Simd>(
        &self,
        s: S,
        row: usize,
        first: usize,
        table: &Table,
        next: *const u8,
        to: &mut [[Lanes; RUN]],
    ) {
        match self {
            Self::Lut(w) => match w.bits {
                1 => decode_lut::<S, 1>(s, w, row, first, table, next, to),
                2 => decode_lut::<S, 2>(s, w, row, first, table, next, to),
                3 => decode_lut::<S, 3>(s, w, row, first, table, next, to),
                4 => decode_lut::<S, 4>(s, w, row, first, table, next, to),
                6 => decode_lut::<S, 6>(s, w, row, first, table, next, to),
                _ => decode_lut::<S, 8>(s, w, row, first, table, next, to),
            },
            Self::Dense(w) => {
                let lines = self.bytes(BLOCK).div_ceil(64);
                for (i, to) in to.iter_mut().enumerate() {
                    for line in 0..lines {
                        s.prefetch(next.wrapping_add((i * lines + line) * 64));
                    }
                    decode_dense(s, w, row, first + i, to);
                }
            }
        }
    }

    /// The address of block `block` of `row`, for prefetching only.
    #[inline(always)]
    pub(super) fn address(&self, row: usize, block: usize) -> *const u8 {
        let element = row.wrapping_mul(self.cols()).wrapping_add(block * BLOCK);
        match self {
            Self::Lut(w) => w
                .indices
                .as_ptr()
                .wrapping_add(element.wrapping_mul(w.bits.into()) / 8),
            Self::Dense(w) => match w.values {
                DenseValues::F16(v) => v.as_ptr().wrapping_add(element).cast(),
                DenseValues::F32(v) => v.as_ptr().wrapping_add(element).cast(),
                DenseValues::I8 { values, .. } => values.as_ptr().wrapping_add(element).cast(),
            },
        }
    }
}

/// Whether `bytes` can be read in place from `at` for a block of `bits`-bit
/// indices.
#[inline(always)]
pub(super) fn readable(bytes: &[u8], at: usize, bits: usize) -> bool {
    bytes
        .len()
        .checked_sub(LANES * bits + SLACK)
        .is_some_and(|last| at <= last)
}

#[inline(always)]
pub(super) fn decode_lut<S: Simd, const BITS: usize>(
    s: S,
    w: &LutWeights,
    row: usize,
    first: usize,
    table: &Table,
    next: *const u8,
    to: &mut [[Lanes; RUN]],
) {
    let bit = (row * w.cols + first * BLOCK) * BITS;
    let table = table.0.as_ptr();
    let bytes = BLOCK * BITS / 8;
    // Whole blocks that can be read where they lie.
    let mut in_place = to.len().min((w.cols - first * BLOCK) / BLOCK);
    if !bit.is_multiple_of(8) {
        in_place = 0;
    }
    while in_place > 0 && !readable(w.indices, bit / 8 + (in_place - 1) * bytes, BITS) {
        in_place -= 1;
    }
    let (whole, rest) = to.split_at_mut(in_place);
    let from = w.indices.as_ptr().wrapping_add(bit / 8);
    for (i, to) in whole.iter_mut().enumerate() {
        s.prefetch(next.wrapping_add(i * bytes));
        // SAFETY: `in_place` blocks are readable with their slack; the table
        // has 256 entries, of which those past `2^BITS` and below sixteen
        // repeat the first; `to` holds the eight vectors of a block.
        unsafe { s.decode::<BITS>(from.add(i * bytes), table, to.as_mut_ptr()) };
    }
    for (i, to) in rest.iter_mut().enumerate() {
        let from = (first + in_place + i) * BLOCK;
        let live = BLOCK.min(w.cols - from);
        let staged = stage(w.indices, (row * w.cols + from) * BITS, live * BITS);
        // SAFETY: as above, `staged` being a whole block with its slack.
        unsafe { s.decode::<BITS>(staged.as_ptr(), table, to.as_mut_ptr()) };
        for k in live..BLOCK {
            to[k % RUN].0[k / RUN] = 0.0;
        }
    }
}

/// Copies `bits` bits from bit `bit` on to the start of a padded block: rows
/// that start inside a byte, rows that end inside a block, and the end of the
/// stream, past which nothing may be read.
#[inline(never)]
fn stage(bytes: &[u8], bit: usize, bits: usize) -> [u8; BLOCK + SLACK] {
    let mut block = [0; BLOCK + SLACK];
    let source = &bytes[bit / 8..(bit + bits).div_ceil(8)];
    let shift = bit % 8;
    for i in 0..bits.div_ceil(8) {
        let high = source.get(i + 1).copied().unwrap_or(0);
        let pair = u16::from(source[i]) | u16::from(high) << 8;
        block[i] = (pair >> shift) as u8;
    }
    block
}

#[inline(always)]
fn decode_dense<S: Simd>(s: S, w: &DenseWeights, row: usize, block: usize, to: &mut [Lanes; RUN]) {
    let live = BLOCK.min(w.cols - block * BLOCK);
    let at = row * w.cols + block * BLOCK;
    let mut wide = [Lanes::default(); RUN];
    let wide_at = wide.as_mut_ptr();
    let out = to.as_mut_ptr();
    let mut padded;
    // SAFETY: every source slice holds the 128 elements of a block, in place
    // or padded, and `wide` and `to` hold eight vectors each.
    unsafe {
        match w.values {
            DenseValues::F16(v) => {
                let mut padded = [f16::ZERO; BLOCK];
                let from = whole_block(&v[at..at + live], &mut padded).as_ptr();
                for i in 0..RUN {
                    s.store(s.load_f16(from.add(LANES * i)), wide_at.add(i).cast());
                }
                s.interleave(wide_at.cast(), out);
            }
            DenseValues::F32(v) => {
                padded = [0.0; BLOCK];
                s.interleave(whole_block(&v[at..at + live], &mut padded).as_ptr(), out);
            }
            DenseValues::I8 { values, .. } => {
                let mut padded = [0; BLOCK];
                let from = whole_block(&values[at..at + live], &mut padded).as_ptr();
                for i in 0..RUN {
                    s.store(s.load_i8(from.add(LANES * i)), wide_at.add(i).cast());
                }
                s.interleave(wide_at.cast(), out);
            }
        }
    }
}

/// `live` itself when it is a whole block, else a copy padded with zeros.
#[inline(always)]
fn whole_block<'a, T: Copy>(live: &'a [T], padded: &'a mut [T; BLOCK]) -> &'a [T] {
    if live.len() == BLOCK {
        live
    } else {
        padded[..live.len()].copy_from_slice(live);
        padded
    }
}
