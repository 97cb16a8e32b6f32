//! The end of the last chunk: final norm, output layer, choice of ids.
//!
//! The output layer is cut into slices of rows. Each slice gives the index and the
//! value of its largest score, and a fold over the slices keeps the better: the
//! later slice wins only if it is strictly larger, so of equal scores the first row
//! wins, as in an argmax over the whole vocabulary. Rows that only pad the
//! vocabulary are cut off the scores before.

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{Elem, ValueId};

use super::forms::{ArgmaxForm, Forms};
use super::layer::rms_norm;
use super::weights::HeadWeights;

/// Scores of each slice, `[1, rows, 1, w]`, from hidden states `[1, D, 1, w]`.
pub(super) fn scores(
    g: &mut GraphBuilder<'_>,
    head: &HeadWeights,
    eps: f64,
    x: ValueId,
) -> Vec<ValueId> {
    let normed = rms_norm(g, x, 1, &head.norm, eps);
    head.slices.iter().map(|s| s.conv(g, normed)).collect()
}

/// All scores as one tensor, `[1, V, 1, w]`.
pub(super) fn logits(g: &mut GraphBuilder<'_>, scores: &[ValueId]) -> ValueId {
    match scores {
        [one] => *one,
        many => g.concat(1, many),
    }
}

/// The first row with the largest score, `ui32[1, 1, 1, w]`.
pub(super) fn choose(g: &mut GraphBuilder<'_>, forms: &Forms, scores: &[ValueId]) -> ValueId {
    let mut parts = valid(g, forms, scores);
    if forms.argmax == ArgmaxForm::SlicedF32 {
        for part in &mut parts {
            part.1 = g.cast(part.1, Elem::F32);
        }
    }
    let last = parts.len() - 1;
    let mut best: Option<(ValueId, ValueId)> = None;
    for (i, (start, scores)) in parts.into_iter().enumerate() {
        let mut id = g.argmax(scores, 1);
        if start > 0 {
            let shape = g.shape(id);
            let start = g.full(Elem::Ui32, &shape, start as f64);
            id = g.binary("add", id, start);
        }
        if last == 0 {
            return id;
        }
        let value = g.reduce_max(scores, &[1]);
        best = Some(match best {
            None => (id, value),
            Some((best_id, best_value)) => {
                let better = g.binary("greater", value, best_value);
                let id = g.r#where(better, id, best_id);
                let value = if i == last {
                    value
                } else {
                    g.binary("maximum", value, best_value)
                };
                (id, value)
            }
        });
    }
    best.expect("a head has rows").0
}

/// Slices without padding rows, each with its first row.
fn valid(g: &mut GraphBuilder<'_>, forms: &Forms, scores: &[ValueId]) -> Vec<(usize, ValueId)> {
    let limit = forms.valid_vocab.unwrap_or(usize::MAX);
    let mut start = 0;
    let mut parts = Vec::with_capacity(scores.len());
    for &slice in scores {
        let shape = g.shape(slice);
        let (rows, w) = (shape[1], shape[3] as i32);
        if start + rows <= limit {
            parts.push((start, slice));
        } else if start < limit {
            let keep = (limit - start) as i32;
            parts.push((start, g.slice(slice, &[0; 4], &[1, keep, 1, w])));
        }
        start += rows;
    }
    parts
}
