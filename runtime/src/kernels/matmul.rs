//! Weight matrices times packed activations.

use super::activations::Activations;
use super::panel::{PANEL, Panel, Scratch, TILE};
use super::pool::{Pool, Shards};
use super::rows::Rows;
use super::simd::Isa;
use super::weights::{DenseWeights, LutWeights};
use half::f16;
use std::cell::RefCell;

/// Where the product of row `r` and token `t` goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `out[t * stride + r]`: one token after the other.
    RowMajor {
        /// Elements from one token to the next, at least the rows.
        stride: usize,
    },
    /// `out[r * stride + t]`: `[1, channels, 1, width]` of the programs.
    ChannelMajor {
        /// Elements from one channel to the next, at least the tokens.
        stride: usize,
    },
}

impl Layout {
    /// Checks that a `rows` by `tokens` product fits `len` elements and that no
    /// two of its elements share a place.
    fn check(self, rows: usize, tokens: usize, len: usize) {
        if rows == 0 || tokens == 0 {
            return;
        }
        let (outer, inner, stride) = match self {
            Self::RowMajor { stride } => (tokens, rows, stride),
            Self::ChannelMajor { stride } => (rows, tokens, stride),
        };
        assert!(inner <= stride, "a stride of {stride} for {inner} elements");
        let needed = (outer - 1)
            .checked_mul(stride)
            .and_then(|v| v.checked_add(inner));
        assert!(
            needed.is_some_and(|v| v <= len),
            "an output of {len} elements for {outer} rows of {stride}"
        );
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// Multiplies a lookup-table matrix with packed tokens.
///
/// `out[r, t] = f16(sum over k of w[r][k] * x[t][k])`, summed in f32 in the
/// order that the module documentation defines; places of `out` that `layout`
/// does not name stay as they are.
///
/// # Panics
///
/// When `x` has another number of columns than `w`, or `out` is too short.
pub fn lut_matmul(pool: &Pool, w: &LutWeights, x: &Activations, out: &mut [f16], layout: Layout) {
    matmul(Isa::detect(), pool, Rows::Lut(*w), x, out, layout);
}

/// Multiplies a dense matrix with packed tokens, as [`lut_matmul`].
///
/// # Panics
///
/// When `x` has another number of columns than `w`, or `out` is too short.
pub fn dense_matmul(
    pool: &Pool,
    w: &DenseWeights,
    x: &Activations,
    out: &mut [f16],
    layout: Layout,
) {
    matmul(Isa::detect(), pool, Rows::Dense(*w), x, out, layout);
}

pub(super) fn matmul(
    isa: Isa,
    pool: &Pool,
    rows: Rows,
    x: &Activations,
    out: &mut [f16],
    layout: Layout,
) {
    assert_eq!(
        rows.cols(),
        x.cols(),
        "columns of the weights and of the activations"
    );
    layout.check(rows.rows(), x.tokens(), out.len());
    if x.tokens() == 0 {
        return;
    }
    let out = Shards::new(out);
    // Tasks of roughly equal work, far more of them than threads.
    let work = TASK_WEIGHTS / x.tokens().div_ceil(4);
    let least = if rows.rows() < 16 * PANEL {
        TILE
    } else {
        PANEL
    };
    let share = (work / rows.cols().max(1))
        .next_multiple_of(TILE)
        .max(least);
    pool.run(rows.rows().div_ceil(share), |task| {
        SCRATCH.with_borrow_mut(|scratch| {
            let first = task * share;
            let end = rows.rows().min(first + share);
            isa.run(Panel {
                rows,
                first,
                end,
                x,
                out,
                layout,
                scratch,
            });
        });
    });
}

/// Weights per task at up to four tokens: 128 KiB of 4-bit indices, which take
/// about ten microseconds.
const TASK_WEIGHTS: usize = 1 << 18;
