//! 4-bit weights times few tokens, without writing decoded weights to memory.
//!
//! A register tile of `R` rows by `T` tokens takes its weights from table
//! lookups: per block and row 8 lookups, 4 shifts and `8 T` multiply-adds, all
//! on the same two vector ports. With one token the lookups dominate and the
//! kernel is still faster than memory; with six they are a fifth of the work.
//! Rows are taken several at a time because a multiply-add takes four cycles
//! and two can start in each, and because inputs are loaded once for all of
//! them. More tokens than a tile holds are taken in turns over the same eight
//! rows, whose indices then come from the first-level cache.

#![expect(unsafe_code, reason = "reads the checked weights through raw pointers")]

use super::activations::{BLOCK, Lanes, RUN};
use super::panel::{Span, TILE};
use super::rows::{Table, decode_lut, readable};
use super::simd::{Simd, decode_one};
use super::weights::LutWeights;

const BITS: usize = 4;
/// Rows that are taken through all tokens before the next ones.
const ROWS: usize = 8;
/// Bytes by which each row is prefetched.
const AHEAD: usize = 1024;

/// Whether these kernels take `w`: every row has to start on a byte.
pub(super) fn takes(w: &LutWeights) -> bool {
    usize::from(w.bits) == BITS && w.cols.is_multiple_of(2)
}

/// Adds the products of a span. `tables` are those of its rows, `acc` holds
/// sixteen accumulators for each token.
#[inline(always)]
pub(super) fn add<S: Simd>(s: S, w: &LutWeights, span: &Span, tables: &[Table], acc: &mut [Lanes]) {
    let steps = span.count.div_ceil(S::TILE_TOKENS);
    for group in (0..span.end - span.first).step_by(ROWS) {
        let mut done = 0;
        for step in 0..steps {
            let width = span.count / steps + usize::from(step < span.count % steps);
            let span = Span {
                token: span.token + done,
                ..*span
            };
            let acc = &mut acc[done * TILE..];
            // As many rows as leave registers for their accumulators.
            if S::TILE_ROWS >= 4 {
                match width {
                    1 => add_group::<S, 8, 1>(s, w, &span, tables, group, acc),
                    2 => add_group::<S, 8, 2>(s, w, &span, tables, group, acc),
                    3 => add_group::<S, 4, 3>(s, w, &span, tables, group, acc),
                    4 => add_group::<S, 4, 4>(s, w, &span, tables, group, acc),
                    5 => add_group::<S, 4, 5>(s, w, &span, tables, group, acc),
                    _ => add_group::<S, 4, 6>(s, w, &span, tables, group, acc),
                }
            } else {
                match width {
                    1 => add_group::<S, 4, 1>(s, w, &span, tables, group, acc),
                    2 => add_group::<S, 2, 2>(s, w, &span, tables, group, acc),
                    _ => add_group::<S, 2, 3>(s, w, &span, tables, group, acc),
                }
            }
            done += width;
        }
    }
}

/// [`ROWS`] rows, `R` at a time, times `T` tokens.
#[inline(always)]
fn add_group<S: Simd, const R: usize, const T: usize>(
    s: S,
    w: &LutWeights,
    span: &Span,
    tables: &[Table],
    group: usize,
    acc: &mut [Lanes],
) {
    for group in (group..group + ROWS).step_by(R) {
        if span.first + group < span.end {
            add_rows::<S, R, T>(s, w, span, tables, group, acc);
        }
    }
}

#[inline(always)]
fn add_rows<S: Simd, const R: usize, const T: usize>(
    s: S,
    w: &LutWeights,
    span: &Span,
    tables: &[Table],
    group: usize,
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
    let row_bytes = w.cols / 2;
    // Rows past the end compute the last one again; nobody reads them.
    let row = |r: usize| (first + group + r).min(end - 1);
    // Whole blocks that can be read in place from every row.
    let mut in_place = to.min(w.cols / BLOCK);
    while in_place > from
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
    assert!(token + T <= x.tokens() && inputs.len() >= to * step);
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
    for r in 0..R {
        for t in 0..T {
            // SAFETY: `acc` holds sixteen rows of `T` tokens.
            sums[r][t] = unsafe { s.load(acc.as_ptr().add(t * TILE + group + r).cast()) };
        }
    }
    for block in from..in_place {
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
            // In pairs, of which the body is short enough to be unrolled and
            // the shifts become constants.
            for pair in 0..RUN / 2 {
                for odd in 0..2 {
                    let j = 2 * pair + odd;
                    let mut weights = [s.splat(0.0); R];
                    for r in 0..R {
                        let table = table[r].0.as_ptr();
                        weights[r] =
                            decode_one::<S, BITS>(s, at[r].add(offset), entries[r], table, j);
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
            unsafe {
                s.store(
                    sums[r][t],
                    acc.as_mut_ptr().add(t * TILE + group + r).cast(),
                );
            };
        }
    }
    for block in in_place.max(from)..to {
        let mut decoded = [[Lanes::default(); RUN]];
        for r in 0..R {
            decode_lut::<S, BITS>(
                s,
                w,
                row(r),
                block,
                table[r],
                std::ptr::null(),
                &mut decoded,
            );
            for t in 0..T {
                let acc = &mut acc[t * TILE + group + r];
                for (v, input) in decoded[0].iter().zip(x.run(block, token + t)) {
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
