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
//! Up to four tokens there is too little arithmetic to pay for writing decoded
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
                    Some(w) => self.narrow_tile(s, &w, first, end, chunk),
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
                    && self.x.tokens() <= 4 =>
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
        for from in (0..blocks).step_by(DEPTH) {
            let depth = DEPTH.min(blocks - from);
            for row in first..end {
                let table = &tables[self.rows.table_of(row, first)];
                for i in 0..depth {
                    let next = if from + DEPTH < blocks {
                        self.rows.address(row, from + DEPTH + i)
                    } else {
                        self.rows.address(row + TILE, i)
                    };
                    s.prefetch(next);
                    let to = &mut weights[(row - first) * DEPTH + i];
                    self.rows.decode(s, row, from + i, table, to);
                }
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
    fn narrow_tile<S: Simd>(
        &mut self,
        s: S,
        w: &LutWeights,
        first: usize,
        end: usize,
        chunk: usize,
    ) {
        debug_assert_eq!(chunk, 0);
        let Scratch { acc, tables, .. } = &mut *self.scratch;
        let (rows, x) = (&self.rows, self.x);
        // As many rows as leave registers for their accumulators.
        if S::TILE_ROWS >= 4 {
            match x.tokens() {
                1 => narrow::<S, 8, 1>(s, rows, w, x, tables, first, end, acc),
                2 => narrow::<S, 8, 2>(s, rows, w, x, tables, first, end, acc),
                3 => narrow::<S, 4, 3>(s, rows, w, x, tables, first, end, acc),
                _ => narrow::<S, 4, 4>(s, rows, w, x, tables, first, end, acc),
            }
        } else {
            match x.tokens() {
                1 => narrow::<S, 4, 1>(s, rows, w, x, tables, first, end, acc),
                2 => narrow::<S, 2, 2>(s, rows, w, x, tables, first, end, acc),
                3 => narrow::<S, 2, 3>(s, rows, w, x, tables, first, end, acc),
                _ => narrow::<S, 1, 4>(s, rows, w, x, tables, first, end, acc),
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

/// 4-bit weights times `T` tokens, `R` rows at a time, weights in registers.
#[expect(clippy::too_many_arguments, reason = "one caller per width")]
#[inline(always)]
fn narrow<S: Simd, const R: usize, const T: usize>(
    s: S,
    rows: &Rows,
    w: &LutWeights,
    x: &Activations,
    tables: &[Table],
    first: usize,
    end: usize,
    acc: &mut [Lanes],
) {
    const BITS: usize = 4;
    let row_bytes = w.cols / 2;
    let blocks = x.blocks();
    // Whole blocks that can be read in place from every row of this tile.
    let mut in_place = w.cols / BLOCK;
    while in_place > 0
        && !readable(
            w.indices,
            (end - 1) * row_bytes + (in_place - 1) * BLOCK / 2,
            BITS,
        )
    {
        in_place -= 1;
    }
    let inputs = x.vectors();
    assert!(inputs.len() >= blocks * T * RUN && acc.len() >= TILE * T);

    for group in (0..end - first).step_by(R) {
        // Rows past the end compute the last one again; nobody reads them.
        let mut at = [w.indices.as_ptr(); R];
        let mut table = [tables[0].0.as_ptr(); R];
        for r in 0..R {
            let row = (first + group + r).min(end - 1);
            at[r] = w.indices[row * row_bytes..].as_ptr();
            table[r] = tables[rows.table_of(row, first)].0.as_ptr();
        }
        let mut sums = [[s.splat(0.0); T]; R];
        for block in 0..in_place {
            // SAFETY: `in_place` blocks are readable from the start of every
            // row, tables have sixteen entries, and `inputs` was checked.
            unsafe {
                let input = inputs.as_ptr().add(block * T * RUN);
                let offset = block * (BLOCK / 2);
                for r in 0..R {
                    s.prefetch(at[r].wrapping_add(offset + AHEAD));
                }
                for j in 0..RUN {
                    let mut xs = [s.splat(0.0); T];
                    for t in 0..T {
                        xs[t] = s.load(input.add(t * RUN + j).cast());
                    }
                    for r in 0..R {
                        let v = decode_one::<S, BITS>(s, at[r].add(offset), table[r], j);
                        for t in 0..T {
                            sums[r][t] = s.mul_add(v, xs[t], sums[r][t]);
                        }
                    }
                }
            }
        }
        for block in in_place..blocks {
            let mut decoded = [Lanes::default(); RUN];
            for r in 0..R {
                let row = (first + group + r).min(end - 1);
                rows.decode(
                    s,
                    row,
                    block,
                    &tables[rows.table_of(row, first)],
                    &mut decoded,
                );
                for t in 0..T {
                    for (j, v) in decoded.iter().enumerate() {
                        let input = &inputs[(block * T + t) * RUN + j];
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
                // SAFETY: sixteen lanes; `group + r` is below `TILE`, which is
                // a multiple of `R`.
                unsafe { s.store(sums[r][t], acc[t * TILE + group + r].0.as_mut_ptr()) };
            }
        }
    }
}
