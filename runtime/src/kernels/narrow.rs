//! 4-bit weights times tokens, without writing decoded weights to memory.
//!
//! A register tile of `R` rows by `T` tokens takes its weights from table
//! lookups: per block and row 8 lookups, 4 shifts and `8 T` multiply-adds, all
//! on the same two vector ports. With one token the lookups dominate: where a processor
//! does one of 512 bits per cycle, two thirds of the memory's speed is the most they can
//! keep up with. With six tokens they are a fifth of the work,
//! which is about what decoding to memory costs at any number of tokens. Rows
//! are taken several at a time because a multiply-add takes four cycles and two
//! can start in each, and because inputs are loaded once for all of them.
//!
//! More tokens than a tile holds are taken in turns of nearly equal width over
//! the same eight rows, whose indices then come from the first-level cache.
//! Each turn goes through all columns of its span: inputs stream from the
//! second-level cache, rows are read sequentially, and accumulators stay in
//! registers throughout.

#![expect(unsafe_code, reason = "reads the checked weights through raw pointers")]

use super::activations::{BLOCK, Lanes, RUN};
use super::panel::{Span, TILE};
use super::rows::{Table, decode_lut, readable};
use super::simd::{Simd, decode_one};
use super::weights::LutWeights;

const BITS: usize = 4;
/// Bytes of a block of one row.
const BYTES: usize = BLOCK * BITS / 8;
/// Rows that are taken through all tokens before the next ones.
const ROWS: usize = 8;
/// Bytes by which the first turn asks for each row of several tokens: for rows of 4096
/// columns the same place in the next rows.
const AHEAD: usize = 2048;
/// Blocks by which a single token asks for its rows in the second-level cache: 16 KiB of
/// eight rows. The first level could not hold so much beside the inputs.
const FAR: usize = 32;
/// The same for the first-level cache.
const NEAR: usize = 8;

/// Tables of sixteen rows, and which of them each row has.
type Tables<'a> = (&'a [Table], &'a [usize; TILE]);

/// Whether these kernels take `w`: every row has to start on a byte.
pub(super) fn takes(w: &LutWeights) -> bool {
    usize::from(w.bits) == BITS && w.cols.is_multiple_of(2)
}

/// Adds the products of a span. `tables` are those of its rows, `acc` holds
/// sixteen accumulators for each token.
#[inline(always)]
pub(super) fn add<S: Simd>(s: S, w: &LutWeights, span: &Span, tables: &[Table], acc: &mut [Lanes]) {
    let end = span.in_place(w);
    let tables = (tables, &w.tables_from(span.first));
    for group in (0..span.end - span.first).step_by(ROWS) {
        add_turns(s, w, &Span { to: end, ..*span }, tables, group, acc);
    }
    add_staged(s, w, &Span { from: end, ..*span }, tables, acc);
}

impl Span<'_> {
    /// Where the blocks end that can be read in place from every row.
    fn in_place(&self, w: &LutWeights) -> usize {
        let last = (self.end - 1) * w.cols / 2;
        let mut to = self.to.min(w.cols / BLOCK);
        while to > self.from && !readable(w.indices, last + (to - 1) * BYTES, BITS) {
            to -= 1;
        }
        to.max(self.from)
    }
}

/// [`ROWS`] rows from `span.first + group` on, times the tokens of the span in
/// turns of nearly equal width.
#[inline(always)]
fn add_turns<S: Simd>(
    s: S,
    w: &LutWeights,
    span: &Span,
    tables: Tables,
    group: usize,
    acc: &mut [Lanes],
) {
    let turns = span.count.div_ceil(S::TILE_TOKENS);
    let mut done = 0;
    for turn in 0..turns {
        let width = span.count / turns + usize::from(turn < span.count % turns);
        let part = Span {
            token: span.token + done,
            count: width,
            ..*span
        };
        let (ahead, acc) = (turn == 0, &mut acc[done * TILE..]);
        // As many rows as leave registers for their accumulators.
        if S::TILE_ROWS >= 4 {
            match width {
                1 => add_tiles::<S, 8, 1>(s, w, &part, tables, group, ahead, acc),
                2 => add_tiles::<S, 8, 2>(s, w, &part, tables, group, ahead, acc),
                3 => add_tiles::<S, 4, 3>(s, w, &part, tables, group, ahead, acc),
                4 => add_tiles::<S, 4, 4>(s, w, &part, tables, group, ahead, acc),
                5 => add_tiles::<S, 4, 5>(s, w, &part, tables, group, ahead, acc),
                _ => add_tiles::<S, 4, 6>(s, w, &part, tables, group, ahead, acc),
            }
        } else {
            match width {
                1 => add_tiles::<S, 4, 1>(s, w, &part, tables, group, ahead, acc),
                2 => add_tiles::<S, 2, 2>(s, w, &part, tables, group, ahead, acc),
                _ => add_tiles::<S, 2, 3>(s, w, &part, tables, group, ahead, acc),
            }
        }
        done += width;
    }
}

/// [`ROWS`] rows, `R` at a time, times the `T` tokens of a span.
#[inline(always)]
fn add_tiles<S: Simd, const R: usize, const T: usize>(
    s: S,
    w: &LutWeights,
    span: &Span,
    tables: Tables,
    group: usize,
    ahead: bool,
    acc: &mut [Lanes],
) {
    for group in (group..group + ROWS).step_by(R) {
        if span.first + group < span.end {
            add_tile::<S, R, T>(s, w, span, tables, group, ahead, acc);
        }
    }
}

/// `R` rows from `span.first + group` on; `ahead` asks for what the rows hold next.
#[inline(always)]
fn add_tile<S: Simd, const R: usize, const T: usize>(
    s: S,
    w: &LutWeights,
    span: &Span,
    tables: Tables,
    group: usize,
    ahead: bool,
    acc: &mut [Lanes],
) {
    let Span {
        x,
        first,
        end,
        from,
        to,
        token,
        ..
    } = *span;
    let (tables, table_of) = tables;
    let row_bytes = w.cols / 2;
    let inputs = x.vectors();
    let step = x.tokens() * RUN;
    assert!(token + T <= x.tokens() && inputs.len() >= to * step);
    assert!(acc.len() >= TILE * T && group + R <= TILE);
    let acc = acc.as_mut_ptr().wrapping_add(group);

    let mut at = [w.indices.as_ptr(); R];
    let mut table = [tables[0].0.as_ptr(); R];
    let mut entries = [s.splat(0.0); R];
    for r in 0..R {
        // Rows past the end compute the last one again; nobody reads them.
        let row = (first + group + r).min(end - 1);
        at[r] = w.indices[row * row_bytes..].as_ptr();
        table[r] = tables[table_of[row - first]].0.as_ptr();
        // SAFETY: a table has more than sixteen entries.
        entries[r] = unsafe { s.load(table[r]) };
    }
    let mut sums = [[s.splat(0.0); T]; R];
    for r in 0..R {
        for t in 0..T {
            // SAFETY: `acc` holds sixteen rows of `T` tokens.
            sums[r][t] = unsafe { s.load(acc.add(t * TILE + r).cast()) };
        }
    }
    let mut near = Ahead::new(NEAR, from, to, R * row_bytes);
    let mut far = Ahead::new(FAR, from, to, R * row_bytes);
    for block in from..to {
        let offset = block * BYTES;
        if ahead && T == 1 {
            let (near, far) = (near.step(), far.step());
            for r in 0..R {
                s.prefetch(at[r].wrapping_add(near));
                s.prefetch_far(at[r].wrapping_add(far));
            }
        } else if ahead && T > 1 {
            // Past the end of these rows, the rows after them.
            let next = match offset + AHEAD {
                within if within < row_bytes => within,
                past => past + (R - 1) * row_bytes,
            };
            for r in 0..R {
                s.prefetch(at[r].wrapping_add(next));
            }
        }
        // SAFETY: the blocks before `to` are readable from the start of every
        // row, tables have sixteen entries, and `inputs` holds every block of
        // every token.
        unsafe {
            let input = inputs.as_ptr().add(block * step + token * RUN);
            if T == 1 {
                // Two loads and six shifts per row instead of four and four: with
                // one token the loads, which cross cache lines, cost more.
                for half in 0..2 {
                    let mut words = [s.words::<BITS>(at[0].add(offset + 2 * half)); R];
                    for r in 1..R {
                        words[r] = s.words::<BITS>(at[r].add(offset + 2 * half));
                    }
                    let input = input.add(half * RUN / 2);
                    let of = (&words, &entries, &table);
                    add_one::<S, R, T, 0>(s, input, of, &mut sums);
                    add_one::<S, R, T, 1>(s, input, of, &mut sums);
                    add_one::<S, R, T, 2>(s, input, of, &mut sums);
                    add_one::<S, R, T, 3>(s, input, of, &mut sums);
                }
                continue;
            }
            // In pairs, short enough to be unrolled, so that shifts are
            // constants.
            for pair in 0..RUN / 2 {
                for odd in 0..2 {
                    let j = 2 * pair + odd;
                    let mut weights = [s.splat(0.0); R];
                    for r in 0..R {
                        let from = at[r].add(offset);
                        weights[r] = decode_one::<S, BITS>(s, from, entries[r], table[r], j);
                    }
                    for t in 0..T {
                        let input = s.load(input.add(t * RUN + j).cast());
                        for r in 0..R {
                            sums[r][t] = s.mul_add(weights[r], input, sums[r][t]);
                        }
                    }
                }
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            // SAFETY: `acc` holds sixteen rows of `T` tokens.
            unsafe { s.store(sums[r][t], acc.add(t * TILE + r).cast()) };
        }
    }
}

/// Where a tile will read some blocks later: further on in its rows, and past their span
/// in those of the next tile.
struct Ahead {
    /// Bytes from the start of a row of this tile.
    offset: usize,
    /// Blocks to the end of the span, and of the whole span.
    left: usize,
    blocks: usize,
    /// Bytes from the end of the span to its start in the next tile.
    jump: usize,
}

impl Ahead {
    /// Ahead of block `from` by `by`, in a span of blocks `from..to`, which is not empty.
    #[inline(always)]
    fn new(by: usize, from: usize, to: usize, tile_bytes: usize) -> Self {
        let blocks = (to - from).max(1);
        let (tiles, within) = (by / blocks, by % blocks);
        Self {
            offset: tiles * tile_bytes + (from + within) * BYTES,
            left: blocks - within,
            blocks,
            jump: tile_bytes.saturating_sub(blocks * BYTES),
        }
    }

    /// The place, and on to the next.
    #[inline(always)]
    fn step(&mut self) -> usize {
        let offset = self.offset;
        self.offset += BYTES;
        self.left -= 1;
        if self.left == 0 {
            self.left = self.blocks;
            self.offset += self.jump;
        }
        offset
    }
}

/// Adds the products of one token with index `J` of the words of `R` rows.
///
/// # Safety
///
/// `input` must hold `J + 1` vectors and `table` be as for [`Simd::lookup`].
#[inline(always)]
unsafe fn add_one<S: Simd, const R: usize, const T: usize, const J: usize>(
    s: S,
    input: *const Lanes,
    (words, entries, table): (&[S::I; R], &[S::V; R], &[*const f32; R]),
    sums: &mut [[S::V; T]; R],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let input = s.load(input.add(J).cast());
        for r in 0..R {
            let index = match J {
                0 => words[r],
                _ => s.shift_right(words[r], (BITS * J) as u32),
            };
            let weight = s.lookup::<BITS>(entries[r], table[r], index);
            sums[r][0] = s.mul_add(weight, input, sums[r][0]);
        }
    }
}

/// The blocks of a span that cannot be read in place.
#[inline(always)]
fn add_staged<S: Simd>(s: S, w: &LutWeights, span: &Span, tables: Tables, acc: &mut [Lanes]) {
    if span.from == span.to {
        return;
    }
    let (tables, table_of) = tables;
    for row in span.first..span.end {
        let table = &tables[table_of[row - span.first]];
        for block in span.from..span.to {
            let mut decoded = [[Lanes::default(); RUN]];
            decode_lut::<S, BITS>(s, w, row, block, table, std::ptr::null(), &mut decoded);
            for t in 0..span.count {
                let acc = &mut acc[t * TILE + row - span.first];
                for (v, input) in decoded[0].iter().zip(span.x.run(block, span.token + t)) {
                    // SAFETY: all are sixteen lanes.
                    unsafe {
                        let (v, input) = (s.load(v.0.as_ptr()), s.load(input.0.as_ptr()));
                        let sum = s.mul_add(v, input, s.load(acc.0.as_ptr()));
                        s.store(sum, acc.0.as_mut_ptr());
                    }
                }
            }
        }
    }
}
