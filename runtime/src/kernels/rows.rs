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
                )
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

    /// Where the table of `row` is, when `tables` were filled from `first`.
    #[inline(always)]
    pub(super) fn table_of(&self, row: usize, first: usize) -> usize {
        match self {
            Self::Lut(w) => row / w.group_rows - first / w.group_rows,
            Self::Dense(_) => 0,
        }
    }

    /// Decodes block `block` of `row`; columns past the last become zero.
    #[inline(always)]
    pub(super) fn decode<S: Simd>(
        &self,
        s: S,
        row: usize,
        block: usize,
        table: &Table,
        to: &mut [Lanes; RUN],
    ) {
        match self {
            Self::Lut(w) => decode_lut(s, w, row, block, table, to),
            Self::Dense(w) => decode_dense(s, w, row, block, to),
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
fn decode_lut<S: Simd>(
    s: S,
    w: &LutWeights,
    row: usize,
    block: usize,
    table: &Table,
    to: &mut [Lanes; RUN],
) {
    let bits = usize::from(w.bits);
    let live = BLOCK.min(w.cols - block * BLOCK);
    let bit = (row * w.cols + block * BLOCK) * bits;
    let staged;
    let from = if live == BLOCK && bit % 8 == 0 && readable(w.indices, bit / 8, bits) {
        w.indices[bit / 8..].as_ptr()
    } else {
        staged = stage(w.indices, bit, live * bits);
        staged.as_ptr()
    };
    let table = table.0.as_ptr();
    let out = to.as_mut_ptr();
    // SAFETY: `from` is readable for the block and its slack, in place or
    // staged; the table has 256 entries, of which those past `2^bits` and
    // below sixteen repeat the first; `to` holds the eight vectors of a block.
    unsafe {
        match bits {
            1 => s.decode::<1>(from, table, out),
            2 => s.decode::<2>(from, table, out),
            3 => s.decode::<3>(from, table, out),
            4 => s.decode::<4>(from, table, out),
            6 => s.decode::<6>(from, table, out),
            _ => s.decode::<8>(from, table, out),
        }
    }
    for k in live..BLOCK {
        to[k % RUN].0[k / RUN] = 0.0;
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
