//! Attention of a few rows over a cache, in one pass over the visible slots.
//!
//! Keys and values lie as the programs keep them, `[channel][slot]` in f16, and are
//! read in place. Per row and head, with `r(..)` a rounding to f16:
//!
//! ```text
//! s[c] = r(r(sum over i of q[i] k[i][c]) + mask[c])
//! p[c] = r(exp(s[c] - max s) / sum exp(s - max s))
//! o[i] = r(sum over c of p[c] v[i][c])
//! ```
//!
//! These are the roundings, and the orders of summation, of the operations of a
//! program one by one (sums of products in order, the sum of exponentials as sixteen
//! lanes), so fusing changes no bit.
//!
//! # Visible slots
//!
//! A slot whose mask is [`HIDDEN`] or less has weight zero, unless a score exceeds
//! all visible ones by almost half of the f16 range, which no working model has. So
//! it is neither read nor computed from the last slot on that a row sees. A row that
//! sees nothing gets all slots, as in the program. Inside the range, hidden slots
//! get the weight zero by their mask: adding zero products changes nothing, and a
//! row has the same bits beside any other rows.
//!
//! # Layout of the work
//!
//! A task is one group of heads that share keys, times some rows. Scores: 32 slots of
//! all key channels are widened to f32 once and multiplied with up to eight queries at
//! a time, lanes being slots. Values: lanes are channels, so blocks of sixteen
//! channels by sixteen slots are transposed in registers on the way.

#![expect(unsafe_code, reason = "vector loads and stores of scratch")]

use super::activations::{LANES, Lanes};
use super::exp::exp_vector;
use super::fused::in_order;
use super::pool::{Pool, Shards};
use super::products::{Products, flat, flat_mut};
use super::simd::{Isa, Kernel, Simd, load_f16, store_f16};
use half::f16;
use std::cell::RefCell;

/// From this mask value down a slot is hidden.
const HIDDEN: f32 = -30_000.0;
/// Queries of a task at most: rows times heads of a group.
const QUERIES: usize = 32;
/// Slots whose keys are widened at a time.
const KEY_SLOTS: usize = 2 * LANES;
/// Slots whose values are transposed at a time.
const VALUE_SLOTS: usize = 4 * LANES;

/// The mask of the rows of a call, and how far each row sees.
#[derive(Debug, Default)]
pub(crate) struct Mask {
    values: Vec<f16>,
    slots: usize,
    seen: Vec<usize>,
}

impl Mask {
    /// Of `rows` rows and `slots` slots; the element of slot `c` and row `r` is
    /// `data[c * by_slot + r * by_row]`.
    pub(crate) fn fill(
        &mut self,
        data: &[f16],
        rows: usize,
        slots: usize,
        by_row: usize,
        by_slot: usize,
    ) {
        self.slots = slots;
        self.values.resize(rows * slots, f16::ZERO);
        self.seen.clear();
        for (r, row) in self.values.chunks_exact_mut(slots.max(1)).enumerate() {
            for (c, v) in row.iter_mut().enumerate() {
                *v = data[c * by_slot + r * by_row];
            }
            let hidden = f16::from_f32(HIDDEN);
            let last = row.iter().rposition(|v| v.is_nan() || *v > hidden);
            self.seen.push(last.map_or(slots, |c| c + 1));
        }
    }

    fn row(&self, r: usize) -> &[f16] {
        &self.values[r * self.slots..][..self.slots]
    }
}

/// `[head][channel]` of each row, in a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries<'a> {
    pub(crate) data: &'a [f16],
    /// Elements from one head, channel and row to the next.
    pub(crate) strides: [usize; 3],
}

/// `[group][channel][slot]`, slots next to each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots<'a> {
    pub(crate) data: &'a [f16],
    /// Elements from one group and channel to the next.
    pub(crate) strides: [usize; 2],
}

impl<'a> Slots<'a> {
    fn channel(&self, group: usize, channel: usize, slots: usize) -> &'a [f16] {
        &self.data[group * self.strides[0] + channel * self.strides[1]..][..slots]
    }
}

/// Extents of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) heads: usize,
    /// Groups of heads that share keys and values; divides the heads.
    pub(crate) groups: usize,
    /// Channels of a head.
    pub(crate) depth: usize,
    pub(crate) slots: usize,
    pub(crate) rows: usize,
}

/// `out[row][head][channel]` for all rows of `shape`.
///
/// # Panics
/// When a buffer is too short for its strides, or the mask has other extents.
pub(crate) fn attend(
    pool: &Pool,
    shape: Shape,
    queries: Queries,
    cache: [Slots; 2],
    mask: &Mask,
    out: &mut [f16],
) {
    attend_on(Isa::detect(), pool, shape, queries, cache, mask, out);
}

fn attend_on(
    isa: Isa,
    pool: &Pool,
    shape: Shape,
    queries: Queries,
    [keys, values]: [Slots; 2],
    mask: &Mask,
    out: &mut [f16],
) {
    let Shape {
        heads,
        groups,
        depth,
        slots,
        rows,
    } = shape;
    assert!(groups > 0 && heads.is_multiple_of(groups) && depth > 0);
    assert_eq!(out.len(), rows * heads * depth, "output of the attention");
    assert!(mask.slots == slots && mask.seen.len() >= rows, "mask");
    let shared = heads / groups;
    let block = (QUERIES / shared).max(1).min(rows.max(1));
    let blocks = rows.div_ceil(block);
    let out = Shards::new(out);
    pool.run(groups * blocks, |task| {
        let (group, first) = (task % groups, task / groups * block);
        SCRATCH.with_borrow_mut(|scratch| {
            isa.run(Task {
                shape,
                queries,
                keys,
                values,
                mask,
                group,
                first,
                end: rows.min(first + block),
                out,
                scratch,
            });
        });
    });
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch::new()) };
}

/// Buffers that a thread keeps between tasks.
struct Scratch {
    /// `[query][channel]`.
    queries: Vec<f32>,
    /// Scores, then weights: `[query][slot]`, whole vectors per query.
    scores: Vec<Lanes>,
    /// Widened keys `[channel][KEY_SLOTS]` or values `[VALUE_SLOTS][channel]`.
    panel: Vec<Lanes>,
    /// `[query][channel]`, whole vectors per query.
    sums: Vec<Lanes>,
}

impl Scratch {
    const fn new() -> Self {
        Self {
            queries: Vec::new(),
            scores: Vec::new(),
            panel: Vec::new(),
            sums: Vec::new(),
        }
    }
}

/// One group of heads for rows `first..end`.
struct Task<'a> {
    shape: Shape,
    queries: Queries<'a>,
    keys: Slots<'a>,
    values: Slots<'a>,
    mask: &'a Mask,
    group: usize,
    first: usize,
    end: usize,
    out: Shards<f16>,
    scratch: &'a mut Scratch,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let shared = self.shape.heads / self.shape.groups;
        let count = shared * (self.end - self.first);
        let seen = self.mask.seen[self.first..self.end].iter().max();
        let seen = seen.copied().unwrap_or(0);
        if count == 0 || seen == 0 {
            return;
        }
        self.gather(shared);
        self.score(s, shared, count, seen);
        let line = seen.div_ceil(KEY_SLOTS) * 2;
        for query in self.scratch.scores[..count * line].chunks_exact_mut(line) {
            soften(s, query, seen);
        }
        self.mix(s, count, seen, line);
        self.write(s, shared);
    }
}

impl Task<'_> {
    /// Queries as `[row][head of the group][channel]` in f32.
    #[inline(always)]
    fn gather(&mut self, shared: usize) {
        let depth = self.shape.depth;
        let [by_head, by_channel, by_row] = self.queries.strides;
        let to = &mut self.scratch.queries;
        to.clear();
        for row in self.first..self.end {
            for head in self.group * shared..(self.group + 1) * shared {
                let at = row * by_row + head * by_head;
                let from = &self.queries.data[at..];
                to.extend((0..depth).map(|i| from[i * by_channel].to_f32()));
            }
        }
    }

    /// Masked scores of all queries for slots `0..seen`; `-inf` beyond.
    #[inline(always)]
    fn score<S: Simd>(&mut self, s: S, shared: usize, count: usize, seen: usize) {
        let depth = self.shape.depth;
        let line = seen.div_ceil(KEY_SLOTS) * 2;
        let Scratch {
            queries,
            scores,
            panel,
            ..
        } = &mut *self.scratch;
        scores.resize(scores.len().max(count * line), Lanes::default());
        panel.resize(panel.len().max(2 * depth), Lanes::default());
        for c in (0..seen).step_by(KEY_SLOTS) {
            for i in 0..depth {
                let keys = self.keys.channel(self.group, i, self.shape.slots);
                s.prefetch(keys.as_ptr().wrapping_add(c + KEY_SLOTS).cast());
                for v in 0..2 {
                    let at = (c + v * LANES).min(keys.len());
                    // SAFETY: sixteen lanes.
                    unsafe {
                        s.store(load_f16(s, keys, at), panel[2 * i + v].0.as_mut_ptr());
                    }
                }
            }
            let mut q = 0;
            while q < count {
                let left = count - q;
                let tile = Products {
                    left: &queries[q * depth..],
                    left_row: depth,
                    right: flat(&panel[..2 * depth]),
                    right_step: KEY_SLOTS,
                    steps: depth,
                    out: flat_mut(&mut scores[q * line + c / LANES..]),
                    out_row: line * LANES,
                };
                q += match left {
                    8.. if S::TILE_ROWS >= 4 => tile.run::<S, 8, 2>(s, false),
                    4.. if S::TILE_ROWS >= 4 => tile.run::<S, 4, 2>(s, false),
                    2.. => tile.run::<S, 2, 2>(s, false),
                    _ => tile.run::<S, 1, 2>(s, false),
                };
            }
            for q in 0..count {
                let mask = self.mask.row(self.first + q / shared);
                for v in 0..2 {
                    let at = (c + v * LANES).min(mask.len());
                    let score = &mut scores[q * line + c / LANES + v].0;
                    // SAFETY: sixteen lanes.
                    unsafe {
                        let sum = s.round_f16(s.load(score.as_ptr()));
                        let sum = s.round_f16(s.add(sum, load_f16(s, mask, at)));
                        s.store(sum, score.as_mut_ptr());
                    }
                }
            }
        }
        for query in scores[..count * line].chunks_exact_mut(line) {
            for slot in seen..line * LANES {
                query[slot / LANES].0[slot % LANES] = f32::NEG_INFINITY;
            }
        }
    }

    /// Sums of the values of slots `0..seen`, weighted.
    #[inline(always)]
    fn mix<S: Simd>(&mut self, s: S, count: usize, seen: usize, line: usize) {
        let (depth, slots) = (self.shape.depth, self.shape.slots);
        let wide = depth.div_ceil(LANES);
        let Scratch {
            scores,
            panel,
            sums,
            ..
        } = &mut *self.scratch;
        panel.resize(panel.len().max(VALUE_SLOTS * wide), Lanes::default());
        sums.resize(sums.len().max(count * wide), Lanes::default());
        sums[..count * wide].fill(Lanes::default());
        for c in (0..seen).step_by(VALUE_SLOTS) {
            let steps = VALUE_SLOTS.min(seen - c);
            for from in (c..c + steps).step_by(LANES) {
                for v in 0..wide {
                    let mut rows = [s.splat(0.0); LANES];
                    for (lane, row) in rows.iter_mut().enumerate() {
                        if v * LANES + lane < depth {
                            let channel = self.values.channel(self.group, v * LANES + lane, slots);
                            s.prefetch(channel.as_ptr().wrapping_add(from + VALUE_SLOTS).cast());
                            *row = load_f16(s, channel, from);
                        }
                    }
                    for (i, column) in s.transpose(rows).into_iter().enumerate() {
                        let to = &mut panel[(from - c + i) * wide + v];
                        // SAFETY: sixteen lanes.
                        unsafe { s.store(column, to.0.as_mut_ptr()) };
                    }
                }
            }
            // Weights of a query follow each other from slot `c` on.
            let weights = flat(&scores[..count * line]);
            let mut v = 0;
            while v < wide {
                let vectors = if wide - v >= 4 { 4 } else { 1 };
                let mut q = 0;
                while q < count {
                    let tile = Products {
                        left: &weights[q * line * LANES + c..],
                        left_row: line * LANES,
                        right: flat(&panel[v..(steps - 1) * wide + v + vectors]),
                        right_step: wide * LANES,
                        steps,
                        out: flat_mut(&mut sums[q * wide + v..]),
                        out_row: wide * LANES,
                    };
                    let left = count - q;
                    q += match (vectors, left) {
                        (4, 4..) if S::TILE_ROWS >= 4 => tile.run::<S, 4, 4>(s, true),
                        (4, 2..) if S::TILE_ROWS >= 4 => tile.run::<S, 2, 4>(s, true),
                        (4, _) => tile.run::<S, 1, 4>(s, true),
                        (_, 4..) => tile.run::<S, 4, 1>(s, true),
                        _ => tile.run::<S, 1, 1>(s, true),
                    };
                }
                v += vectors;
            }
        }
    }

    #[inline(always)]
    fn write<S: Simd>(&mut self, s: S, shared: usize) {
        let depth = self.shape.depth;
        let wide = depth.div_ceil(LANES);
        for (q, sums) in self.scratch.sums.chunks_exact(wide).enumerate() {
            let row = self.first + q / shared;
            if row == self.end {
                break;
            }
            let head = self.group * shared + q % shared;
            let at = (row * self.shape.heads + head) * depth;
            // SAFETY: a task writes the heads of its own group and rows.
            let out = unsafe { self.out.slice(at, depth) };
            for (v, sum) in sums.iter().enumerate() {
                // SAFETY: sixteen lanes.
                let sum = unsafe { s.load(sum.0.as_ptr()) };
                store_f16(s, sum, out, v * LANES);
            }
        }
    }
}

/// Scores of one query to weights. Those from `seen` on are `-inf` and become zero.
#[inline(always)]
fn soften<S: Simd>(s: S, query: &mut [Lanes], seen: usize) {
    let live = seen.div_ceil(LANES);
    let mut most = s.splat(f32::NEG_INFINITY);
    for v in &query[..live] {
        // SAFETY: sixteen lanes.
        most = s.max(unsafe { s.load(v.0.as_ptr()) }, most);
    }
    let mut lanes = [0.0; LANES];
    super::simd::store_f32(s, most, &mut lanes, 0);
    let most = lanes
        .into_iter()
        .fold(f32::NEG_INFINITY, |a, v| if v > a { v } else { a });
    let most = s.splat(most);
    let mut sum = s.splat(0.0);
    for v in &mut query[..live] {
        // SAFETY: sixteen lanes.
        unsafe {
            let e = exp_vector(s, s.sub(s.load(v.0.as_ptr()), most));
            s.store(e, v.0.as_mut_ptr());
            sum = s.add(sum, e);
        }
    }
    let sum = s.splat(in_order(s, sum));
    for v in &mut query[..live] {
        // SAFETY: sixteen lanes.
        unsafe {
            let p = s.round_f16(s.div(s.load(v.0.as_ptr()), sum));
            s.store(p, v.0.as_mut_ptr());
        }
    }
}

#[cfg(test)]
mod tests;
