//! The matrix product over a range of rows: the loops around the register
//! tile, written once for every instruction set.
//!
//! ```text
//! for each 64 tokens
//!     for each 64 rows
//!         acc[64 rows][64 tokens] = 0                       up to 256 KiB
//!         for as many columns as leave their inputs in      up to 1 MiB
//!         the second-level cache
//!             for each 16 rows
//!                 add the products of these columns
//!         reduce, round, write
//! ```
//!
//! Each weight is read from memory once per 64 tokens, sequentially within its
//! row. How the products of sixteen rows are added depends on how much
//! arithmetic there is per weight:
//!
//! - *Narrow*: where lookups are cheap or tokens few, 4-bit weights go from a
//!   table lookup straight into the multiply-add ([`narrow`](super::narrow)).
//! - *Wide*: otherwise, rows are decoded to f32, a few blocks of columns at a
//!   time so that they stay in the first-level cache, and multiplied by a
//!   register tile. Decoding is paid once and shared by all tokens.

#![expect(unsafe_code, reason = "register tiles take raw pointers")]

use super::activations::{Activations, LANES, Lanes, RUN};
use super::matmul::Layout;
use super::narrow;
use super::pool::Shards;
use super::rows::{Rows, Table};
use super::simd::{Kernel, Simd, Tile};
use half::f16;

/// Rows of a tile: one vector of results.
pub(super) const TILE: usize = LANES;
/// Rows that share a visit to a range of columns.
pub(super) const PANEL: usize = 4 * TILE;
/// Tokens that share decoded weights.
const CHUNK: usize = 64;
/// Blocks of activations, of one token each, that stay in the second-level
/// cache between rows: 1 MiB.
const INPUT_BLOCKS: usize = 2048;
/// Blocks of columns that are decoded at a time: 24 KiB for sixteen rows.
const DEPTH: usize = 3;

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
            acc: vec![Lanes::default(); PANEL * CHUNK],
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

/// What is added to the accumulators of one tile: the products of at most
/// sixteen rows with some tokens, over some blocks of columns.
#[derive(Clone, Copy)]
pub(super) struct Span<'a> {
    pub(super) x: &'a Activations,
    /// Rows `first..end`, sharing one tile.
    pub(super) first: usize,
    pub(super) end: usize,
    /// Blocks `from..to` of columns.
    pub(super) from: usize,
    pub(super) to: usize,
    /// `count` tokens from `token` on.
    pub(super) token: usize,
    pub(super) count: usize,
}

impl Kernel for Panel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let tokens = self.x.tokens();
        for token in (0..tokens).step_by(CHUNK) {
            let count = CHUNK.min(tokens - token);
            for first in (self.first..self.end).step_by(PANEL) {
                let end = self.end.min(first + PANEL);
                self.panel(s, first, end, token, count);
            }
        }
    }
}

impl Panel<'_> {
    #[inline(always)]
    fn panel<S: Simd>(&mut self, s: S, first: usize, end: usize, token: usize, count: usize) {
        let (rows, x) = (self.rows, self.x);
        let narrow = match rows {
            Rows::Lut(w) if count <= S::NARROW_TOKENS && narrow::takes(&w) => Some(w),
            _ => None,
        };
        // The accumulators of one tile, token by token, then the next tile's.
        let per_tile = TILE * count;
        let tiles = (end - first).div_ceil(TILE);
        for acc in &mut self.scratch.acc[..tiles * per_tile] {
            // SAFETY: sixteen lanes. (Narrower stores would stall the loads of the
            // kernels.)
            unsafe { s.store(s.splat(0.0), acc.0.as_mut_ptr()) };
        }

        let depth = (INPUT_BLOCKS / count).max(1);
        for from in (0..x.blocks()).step_by(depth) {
            let to = x.blocks().min(from + depth);
            for tile in 0..tiles {
                let first = first + tile * TILE;
                let end = end.min(first + TILE);
                let span = Span {
                    x,
                    first,
                    end,
                    from,
                    to,
                    token,
                    count,
                };
                let Scratch {
                    acc,
                    tables,
                    weights,
                    ..
                } = &mut *self.scratch;
                let acc = &mut acc[tile * per_tile..][..per_tile];
                rows.fill_tables(s, first, end, tables);
                match &narrow {
                    Some(w) => narrow::add(s, w, &span, tables, acc),
                    None => add(s, &rows, &span, tables, weights, acc),
                }
            }
        }
        for tile in 0..tiles {
            let first = first + tile * TILE;
            self.finish(
                s,
                first,
                end.min(first + TILE),
                tile * per_tile,
                token,
                count,
            );
        }
    }

    /// Reduces the accumulators of rows `first..end`, from `acc` on, and
    /// writes the results.
    #[inline(always)]
    fn finish<S: Simd>(
        &mut self,
        s: S,
        first: usize,
        end: usize,
        acc: usize,
        chunk: usize,
        count: usize,
    ) {
        let live = end - first;
        let mut scales = [1.0; TILE];
        let mut scaled = false;
        for (scale, row) in scales.iter_mut().zip(first..end) {
            if let Some(of_row) = self.rows.scale(row) {
                *scale = of_row;
                scaled = true;
            }
        }
        let results = &mut self.scratch.results[..count];
        let acc = self.scratch.acc[acc..].chunks_exact(TILE);
        for (acc, result) in acc.zip(&mut *results) {
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
                for (token, result) in results.iter().enumerate() {
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
                    for (to, result) in to.iter_mut().zip(&*results) {
                        *to = result[row];
                    }
                }
            }
        }
    }
}

/// Adds the products of a span with the rows decoded in `weights`.
#[inline(always)]
fn add<S: Simd>(
    s: S,
    rows: &Rows,
    span: &Span,
    tables: &[Table],
    weights: &mut [[Lanes; RUN]],
    acc: &mut [Lanes],
) {
    let Span {
        x,
        first,
        end,
        token,
        count,
        ..
    } = *span;
    assert!(token + count <= x.tokens() && acc.len() == TILE * count);
    let table_of = rows.tables_from(first);
    let steps = count.div_ceil(S::TILE_TOKENS);
    for from in (span.from..span.to).step_by(DEPTH) {
        let depth = DEPTH.min(span.to - from);
        for row in first..end {
            let next = if from + DEPTH < span.to {
                rows.address(row, from + DEPTH)
            } else {
                rows.address(row + TILE, span.from)
            };
            let table = &tables[table_of[row - first]];
            let to = &mut weights[(row - first) * DEPTH..][..depth];
            rows.decode(s, row, from, table, next, to);
        }
        let mut done = 0;
        for step in 0..steps {
            let width = count / steps + usize::from(step < count % steps);
            for row in (0..end - first).step_by(S::TILE_ROWS) {
                let tile = Tile {
                    w: weights[row * DEPTH].as_ptr(),
                    w_row: DEPTH * RUN,
                    x: x.run(from, token + done).as_ptr(),
                    x_block: x.tokens() * RUN,
                    blocks: depth,
                    acc: acc[done * TILE + row..].as_mut_ptr(),
                    acc_token: TILE,
                };
                // SAFETY: `TILE_ROWS` divides `TILE`, for which `weights` and
                // `acc` have room (rows past `end` hold left-overs that nobody
                // reads); the activations hold `depth` blocks from `from` and
                // `width` tokens from `token + done`.
                unsafe { s.tile(width, tile) };
            }
            done += width;
        }
    }
}
