//! The forms of the graph that can be chosen, each with the reason for its default.

use std::collections::BTreeMap;
use std::ops::Range;

/// Rows of the output layer in one convolution at most. The vocabulary of Qwen3 has
/// 151,936 rows, more channels than one operation of the engine may have; 16384 is
/// the largest extent known to work on every axis.
pub const MAX_HEAD_ROWS: usize = 16384;

/// Longest context whose attention has the keys on the channel axis.
const MAX_CHANNEL_CONTEXT: usize = 4096;

/// Largest f16 whose square is finite.
const MAX_SQUARE_ROOT: f32 = 255.875;

/// How the last chunk chooses ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArgmaxForm {
    /// In the graph, on the f16 scores of each slice of the output layer.
    #[default]
    SlicedF16,
    /// As [`Self::SlicedF16`] on scores widened to f32: right where the engine's f16
    /// argmax is not (apple/coreai-torch issue 116), but placed elsewhere.
    SlicedF32,
    /// By the host: the function returns `out_logits` in place of `out_ids`.
    Host,
}

/// Which axis the softmax of attention runs over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionForm {
    /// Channels up to a context of 4096, rows above.
    #[default]
    Auto,
    /// Per head, keys on the channel axis: `[1, C, H, w]`.
    Channel,
    /// Per key group, keys on the last axis: `[1, H / G, w, C]`.
    Row,
}

impl AttentionForm {
    /// Whether a context uses rows.
    pub(super) fn is_row(self, context: usize) -> bool {
        match self {
            Self::Auto => context > MAX_CHANNEL_CONTEXT,
            Self::Channel => false,
            Self::Row => true,
        }
    }
}

/// How the MLP's SiLU is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SiluForm {
    /// As one operation: the fastest, and exact on a CPU. The engine's is said to have a
    /// large relative error near zero (apple/coreai-torch issue 21).
    #[default]
    Operation,
    /// `x / 2 + x / 2 * tanh(x / 2)`, which is the same and is not turned back into it.
    Tanh,
}

/// How the caches lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheLayout {
    /// As Apple's exporter has it: eight channels interleaved, rows as long as the
    /// longest context needs, so that one buffer serves the functions of all contexts.
    #[default]
    Interleaved,
    /// Row-major.
    Plain,
}

/// By how much the input of an RMSNorm is scaled down before it is squared.
///
/// `x * x` is infinite in f16 from `|x| = 256` on, and the residual stream of some
/// models goes far beyond in a few channels. Scaling by a power of two is exact, and
/// with `eps` scaled by its square the norm stays the same:
/// `norm(x; eps) = norm(x * 2^-k; eps * 4^-k)`. It costs small values their low bits
/// (a square below 6e-8 is zero), so `k` should be no larger than needed.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Prescale {
    /// Not at all.
    #[default]
    None,
    /// By `2^-k` wherever a norm runs over the hidden width.
    Uniform(u32),
    /// By the least power of two that keeps squares finite, given the largest
    /// magnitude of each norm's input by the name of its weight. Norms not named are
    /// not scaled.
    Magnitudes(BTreeMap<String, f32>),
}

impl Prescale {
    /// `k` for the norm with this weight; `hidden` if it runs over the hidden width.
    pub(super) fn shift(&self, norm: &str, hidden: bool) -> u32 {
        match self {
            Self::None => 0,
            Self::Uniform(k) => {
                if hidden {
                    *k
                } else {
                    0
                }
            }
            Self::Magnitudes(table) => table.get(norm).map_or(0, |&max| shift_for(max)),
        }
    }
}

/// The least `k` for which `(magnitude * 2^-k)^2` is finite in f16.
pub fn shift_for(magnitude: f32) -> u32 {
    let mut k = 0;
    let mut scaled = magnitude.abs();
    while scaled > MAX_SQUARE_ROOT && k < 16 {
        scaled /= 2.0;
        k += 1;
    }
    k
}

/// Everything that can be chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forms {
    /// How ids are chosen.
    pub argmax: ArgmaxForm,
    /// Rows of the output layer that may be chosen: those from here on are padding of
    /// the vocabulary. All of them if absent.
    pub valid_vocab: Option<usize>,
    /// Attention.
    pub attention: AttentionForm,
    /// RMSNorm.
    pub prescale: Prescale,
    /// Caches.
    pub cache_layout: CacheLayout,
    /// SiLU.
    pub silu: SiluForm,
}

/// Cuts `rows` into the fewest runs of at most [`MAX_HEAD_ROWS`] that are nearly
/// equal and start at multiples of `group`, the rows that share a table.
pub(super) fn slices(rows: usize, group: usize) -> Vec<Range<usize>> {
    let count = rows.div_ceil(MAX_HEAD_ROWS).max(1);
    let each = rows.div_ceil(count).next_multiple_of(group);
    (0..rows)
        .step_by(each.max(1))
        .map(|start| start..rows.min(start + each))
        .collect()
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn the_vocabulary_of_qwen3_falls_into_ten_slices() {
        let cut = slices(151_936, 32);
        assert_eq!(cut.len(), 10);
        assert_eq!(cut[0], 0..15_200);
        assert_eq!(cut[9], 136_800..151_936);
        for rows in [1, 4096, 16_384, 16_385, 32_768, 151_936] {
            let cut = slices(rows, 32);
            assert!(
                cut.iter()
                    .all(|s| s.len() <= MAX_HEAD_ROWS && s.start % 32 == 0)
            );
            assert_eq!(cut.iter().map(ExactSizeIterator::len).sum::<usize>(), rows);
            assert!(cut.windows(2).all(|w| w[0].end == w[1].start));
        }
    }

    #[test]
    fn the_shift_is_the_least_that_keeps_squares_finite() {
        let square = |x: f32| f16::from_f32(x) * f16::from_f32(x);
        for magnitude in [0.0, 1.0, 255.875, 256.0, 511.75, 512.0, 9000.0, 65504.0] {
            let k = shift_for(magnitude);
            let scale = |k: i32| magnitude * (-k as f32).exp2();
            assert!(square(scale(k as i32)).is_finite(), "{magnitude} by {k}");
            assert!(
                k == 0 || square(scale(k as i32 - 1)).is_infinite(),
                "{magnitude} by {k}"
            );
        }
        assert_eq!(shift_for(65504.0), 8);
    }

    #[test]
    fn only_long_contexts_use_rows() {
        assert!(!AttentionForm::Auto.is_row(4096) && AttentionForm::Auto.is_row(8192));
        assert!(AttentionForm::Row.is_row(256) && !AttentionForm::Channel.is_row(16384));
    }
}
