//! Weight matrices times packed activations.

#![expect(unsafe_code, reason = "tasks write disjoint parts of one output")]

use super::activations::Activations;
use super::pool::{Pool, Shards};
use super::scalar;
use super::weights::{DenseWeights, LutWeights};
use half::f16;

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
    pub(super) fn at(self, row: usize, token: usize) -> usize {
        match self {
            Self::RowMajor { stride } => token * stride + row,
            Self::ChannelMajor { stride } => row * stride + token,
        }
    }

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
    assert_eq!(
        w.cols,
        x.cols(),
        "columns of the weights and of the activations"
    );
    layout.check(w.rows, x.tokens(), out.len());
    let out = Shards::new(out);
    pool.run(w.rows, |row| {
        for token in 0..x.tokens() {
            let weight = |k| if k < w.cols { w.get(row, k) } else { 0.0 };
            let value = scalar::narrow(scalar::dot(weight, x, token));
            // SAFETY: a task writes the elements of its own row, which
            // `Layout::check` keeps apart from those of other rows.
            unsafe { out.write(layout.at(row, token), value) };
        }
    });
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
    assert_eq!(
        w.cols,
        x.cols(),
        "columns of the weights and of the activations"
    );
    layout.check(w.rows, x.tokens(), out.len());
    let out = Shards::new(out);
    pool.run(w.rows, |row| {
        for token in 0..x.tokens() {
            let weight = |k| if k < w.cols { w.get(row, k) } else { 0.0 };
            let sum = scalar::dot(weight, x, token);
            let value = scalar::narrow(w.scale(row).map_or(sum, |scale| sum * scale));
            // SAFETY: a task writes the elements of its own row, which
            // `Layout::check` keeps apart from those of other rows.
            unsafe { out.write(layout.at(row, token), value) };
        }
    });
}
