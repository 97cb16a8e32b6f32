//! The matrix product over a range of rows: the loops around the register
//! tile, written once for every instruction set.
//!
//! Per tile of sixteen rows and chunk of at most 64 tokens:
//!
//! ```text
//! acc[64][16] = 0
//! for each four blocks of columns
//!     decode 16 rows x 512 columns to f32                  32 KiB
//!     for each few tokens                                   up to 12 KiB
//!         for each few rows
//!             register tile over the 512 columns
//! reduce, round, write
//! ```
//!
//! The decoded weights and the activations of a register tile stay in the
//! first-level cache, the accumulators (64 KiB) and all activations of 64
//! tokens in the second. Each weight is decoded once per 64 tokens, and read
//! from memory once, sequentially within its row; the line that the same row
//! needs for the next four blocks is asked for as the current one is decoded.
//!
//! Up to eight tokens there is too little arithmetic to pay for writing decoded
//! weights and reading them back. There, 4-bit weights go from a table lookup
//! straight into the multiply-add ([`narrow`]), several rows at once because a
//! multiply-add takes four cycles and two can start in each.

#![expect(unsafe_code, reason = "register tiles take raw pointers")]

use super::activations::{Activations, BLOCK, LANES, Lanes, RUN};
use super::matmul::Layout;
use super::pool::Shards;
use super::rows::{Rows, Table, readable};
use super::simd::{Kernel, Simd, Tile, decode_one};
use super::weights::LutWeights;
use half::f16;

/// Rows of a tile: one vector of results.
pub(super) const TILE: usize = LANES;
/// Blocks of columns that are decoded at a time.
const DEPTH: usize = 4;
/// Tokens that share decoded weights.
const CHUNK: usize = 64;
/// The most tokens of a narrow product.
const NARROW_TOKENS: usize = 8;
/// Rows that a narrow product takes through all tokens before the next ones.
const NARROW_ROWS: usize = 8;
/// Bytes by which narrow kernels prefetch ahead in each row.
const AHEAD: usize = 1024;

/// Buffers that a thread keeps between tasks.
pub(super) struct Scratch {
    weights: Vec<[Lanes; RUN]>,
    acc: Vec<Lanes>,
    tables: Vec<Table>,
    results: Vec<[f16; TILE]>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self {
            weights: vec![[Lanes::default(); RUN]; TILE * DEPTH],
            acc: vec![Lanes::default(); TILE * CHUNK],
            tables: vec![Table::EMPTY; TILE],
            results: vec![[f16::ZERO; TILE]; CHUNK],
        }
    }
}

/// Rows `first..end` of a product; `first` is a multiple of [`TILE`].
pub(super) struct Panel<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) x: &'a Activations,
    /// The whole output, checked to hold every row and token of `layout`.
    pub(super) out: Shards<f16>,
    pub(super) layout: Layout,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for Panel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let tokens = self.x.tokens();
        for first in (self.first..self.end).step_by(TILE) {
            let end = self.end.min(first + TILE);
            self.rows
                .fill_tables(s, first, end, &mut self.scratch.tables);
            for chunk in (0..tokens).step_by(CHUNK) {
                let count = CHUNK.min(tokens - chunk);
                match self.narrow_weights(s) {
                    Some(w) => self.narrow_tile(s, &w, first, end),
                    None => self.wide_tile(s, first, end, chunk, count),
                }
                self.finish(s, first, end, chunk, count);
            }
        }
    }
}

impl<'a> Panel<'a> {
    /// The weights, when [`narrow`] takes them.
    #[inline(always)]
    fn narrow_weights<S: Simd>(&self, _: S) -> Option<LutWeights<'a>> {
        match self.rows {
            Rows::Lut(w)
                if S::LOOKUP_IN_REGISTERS
                    && w.bits == 4
                    && w.cols.is_multiple_of(2)
                    && self.x.tokens() <= NARROW_TOKENS =>
            {
                Some(w)
            }
            _ => None,
        }
    }

    #[inline(always)]
    fn wide_tile<S: Simd>(&mut self, s: S, first: usize, end: usize, chunk: usize, count: usize) {
        let blocks = self.x.blocks();
        let Scratch {
            weights,
            acc,
            tables,
            ..
        } = &mut *self.scratch;
        acc[..TILE * count].fill(Lanes::default());
        let steps = count.div_ceil(S::TILE_TOKENS);
        let mut table_of = [0; TILE];
        for (table, row) in table_of.iter_mut().zip(first..end) {
            *table = self.rows.table_of(row, first);
        }
        for from in (0..blocks).step_by(DEPTH) {
            let depth = DEPTH.min(blocks - from);
            for row in first..end {
                let next = if from + DEPTH < blocks {
                    self.rows.address(row, from + DEPTH)
                } else {
                    self.rows.address(row + TILE, 0)
                };
                let table = &tables[table_of[row - first]];
                let to = &mut weights[(row - first) * DEPTH..][..depth];
                self.rows.decode(s, row, from, table, next, to);
            }
            let mut token = 0;
            for step in 0..steps {
                let width = count / steps + usize::from(step < count % steps);
                for row in (0..end - first).step_by(S::TILE_ROWS) {
                    let tile = Tile {
                        w: weights[row * DEPTH].as_ptr(),
                        w_row: DEPTH * RUN,
                        x: self.x.run(from, chunk + token).as_ptr(),
                        x_block: self.x.tokens() * RUN,
                        blocks: depth,
                        acc: acc[token * TILE + row..].as_mut_ptr(),
                        acc_token: TILE,
                    };
                    // SAFETY: `TILE_ROWS` divides `TILE`, for which `weights`
                    // and `acc` have room (rows past `end` hold left-overs
                    // that nobody reads); the activations hold `depth` blocks
                    // from `from` and `width` tokens from `chunk + token`.
                    unsafe { s.tile(width, tile) };
                }
                token += width;
            }
        }
    }

    #[inline(always)]
    fn narrow_tile<S: Simd>(&mut self, s: S, w: &LutWeights, first: usize, end: usize) {
        let Scratch { acc, tables, .. } = &mut *self.scratch;
        let tokens = self.x.tokens();
        let steps = tokens.div_ceil(S::TILE_TOKENS);
        let mut rows = Narrow {
            w,
            x: self.x,
            tables,
            first,
            end,
            token: 0,
        };
        for group in (0..TILE).step_by(NARROW_ROWS) {
            rows.token = 0;
            for step in 0..steps {
                let width = tokens / steps + usize::from(step < tokens % steps);
                let acc = &mut acc[rows.token * TILE..];
                // As many rows as leave registers for their accumulators.
                if S::TILE_ROWS >= 4 {
                    match width {
                        1 => narrow::<S, 8, 1>(s, &rows, group, acc),
                        2 => narrow::<S, 8, 2>(s, &rows, group, acc),
                        3 => narrow::<S, 4, 3>(s, &rows, group, acc),
                        4 => narrow::<S, 4, 4>(s, &rows, group, acc),
                        5 => narrow::<S, 4, 5>(s, &rows, group, acc),
                        _ => narrow::<S, 4, 6>(s, &rows, group, acc),
                    }
                } else {
                    match width {
                        1 => narrow::<S, 4, 1>(s, &rows, group, acc),
                        2 => narrow::<S, 2, 2>(s, &rows, group, acc),
                        _ => narrow::<S, 2, 3>(s, &rows, group, acc),
                    }
                }
                rows.token += width;
            }
        }
    }

    /// Reduces the accumulators of rows `first..end` and writes the results.
    #[inline(always)]
    fn finish<S: Simd>(&mut self, s: S, first: usize, end: usize, chunk: usize, count: usize) {
        let live = end - first;
        let mut scales = [1.0; TILE];
        let mut scaled = false;
        for (scale, row) in scales.iter_mut().zip(first..end) {
            if let Some(of_row) = self.rows.scale(row) {
                *scale = of_row;
                scaled = true;
            }
        }
        let Scratch { acc, results, .. } = &mut *self.scratch;
        for (token, result) in results[..count].iter_mut().enumerate() {
            let acc = &acc[token * TILE..][..TILE];
            // SAFETY: `acc`, `scales` and `result` have sixteen elements.
            unsafe {
                let mut sums = s.reduce(acc.as_ptr());
                if scaled {
                    sums = s.mul(sums, s.load(scales.as_ptr()));
                }
                s.store_f16(sums, result.as_mut_ptr());
            }
        }
        match self.layout {
            Layout::RowMajor { stride } => {
                for (token, result) in results[..count].iter().enumerate() {
                    let at = (chunk + token) * stride + first;
                    // SAFETY: a task writes the elements of its own rows,
                    // which `Layout::check` keeps apart from all others.
                    let to = unsafe { self.out.slice(at, live) };
                    to.copy_from_slice(&result[..live]);
                }
            }
            Layout::ChannelMajor { stride } => {
                for row in 0..live {
                    // SAFETY: as above.
                    let to = unsafe { self.out.slice((first + row) * stride + chunk, count) };
                    for (to, result) in to.iter_mut().zip(&results[..count]) {
                        *to = result[row];
                    }
                }
            }
        }
    }
}

/// Operands of [`narrow`]: 4-bit weights of rows `first..end`, which all start
/// on a byte.
struct Narrow<'a> {
    w: &'a LutWeights<'a>,
    x: &'a Activations,
    tables: &'a [Table],
    first: usize,
    end: usize,
    /// The first of the tokens.
    token: usize,
}

/// The products of `T` tokens with [`NARROW_ROWS`] rows from `first + group`,
/// `R` rows at a time, weights in registers.
#[inline(always)]
fn narrow<S: Simd, const R: usize, const T: usize>(
    s: S,
    rows: &Narrow,
    group: usize,
    acc: &mut [Lanes],
) {
    for group in (group..group + NARROW_ROWS).step_by(R) {
        if rows.first + group < rows.end {
            narrow_group::<S, R, T>(s, rows, group, acc);
        }
    }
}

#[inline(always)]
fn narrow_group<S: Simd, const R: usize, const T: usize>(
    s: S,
    rows: &Narrow,
    group: usize,
    acc: &mut [Lanes],
) {
    const BITS: usize = 4;
    let Narrow {
        w,
        x,
        tables,
        first,
        end,
        token,
    } = *rows;
    let row_bytes = w.cols / 2;
    let blocks = x.blocks();
    // Rows past the end compute the last one again; nobody reads them.
    let row = |r: usize| (first + group + r).min(end - 1);
    // Whole blocks that can be read in place from every row.
    let mut in_place = w.cols / BLOCK;
    while in_place > 0
        && !readable(
            w.indices,
            row(R - 1) * row_bytes + (in_place - 1) * BLOCK / 2,
            BITS,
        )
    {
        in_place -= 1;
    }
    let inputs = x.vectors();
    let step = x.tokens() * RUN;
    assert!(token + T <= x.tokens() && inputs.len() == blocks * step);
    assert!(acc.len() >= TILE * T && group + R <= TILE);

    let mut at = [w.indices.as_ptr(); R];
    let mut table = [&tables[0]; R];
    let mut entries = [s.splat(0.0); R];
    for r in 0..R {
        at[r] = w.indices[row(r) * row_bytes..].as_ptr();
        table[r] = &tables[w.group_of(row(r)) - w.group_of(first)];
        // SAFETY: a table has more than sixteen entries.
        entries[r] = unsafe { s.load(table[r].0.as_ptr()) };
    }
    let mut sums = [[s.splat(0.0); T]; R];
    for block in 0..in_place {
        let offset = block * (BLOCK / 2);
        if token == 0 {
            // Past the end of these rows, the rows after them.
            let ahead = match offset + AHEAD {
                within if within < row_bytes => within,
                past => past + (R - 1) * row_bytes,
            };
            for r in 0..R {
                s.prefetch(at[r].wrapping_add(ahead));
            }
        }
        // SAFETY: `in_place` blocks are readable from the start of every row,
        // tables have sixteen entries, and `inputs` holds every block of every
        // token.
        unsafe {
            let input = inputs.as_ptr().add(block * step + token * RUN);
            for j in 0..RUN {
                let mut weights = [s.splat(0.0); R];
                for r in 0..R {
                    let table = table[r].0.as_ptr();
                    weights[r] = decode_one::<S, BITS>(s, at[r].add(offset), entries[r], table, j);
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
    for block in in_place..blocks {
        let mut decoded = [[Lanes::default(); RUN]];
        for r in 0..R {
            Rows::Lut(*w).decode(s, row(r), block, table[r], std::ptr::null(), &mut decoded);
            for t in 0..T {
                for (v, input) in decoded[0].iter().zip(x.run(block, token + t)) {
                    // SAFETY: both are sixteen lanes.
                    unsafe {
                        let (v, input) = (s.load(v.0.as_ptr()), s.load(input.0.as_ptr()));
                        sums[r][t] = s.mul_add(v, input, sums[r][t]);
                    }
                }
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            // SAFETY: sixteen lanes.
            unsafe { s.store(sums[r][t], acc[t * TILE + group + r].0.as_mut_ptr()) };
        }
    }
}
