//! From the block's hidden states to guesses.
//!
//! A DSpark drafter guesses left to right, each guess biased by the one before:
//!
//! ```text
//! l_j = base_j + W2 W1[t_(j-1)]       t_(-1) the anchor, t_j = argmax l_j
//! c_j = sigmoid(w [h_j ; W1[t_(j-1)]] + b)
//! ```
//!
//! The chain is unrolled, so one call does it all. `base` does not depend on the guesses
//! and comes from one product; only the bias and one argmax per guess are sequential.
//! Second and third choices and all probabilities follow for all guesses at once.

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{Elem, ValueId};
use anemone_schemas::drafter::{DrafterKind, DrafterSpec};

use super::{DrafterWeights, Markov};

/// What replaces a score that was taken: below any other, and finite.
const TAKEN: f32 = -1e30;

/// The named outputs, from the block's normed rows `[1, B, D]` in f32.
pub(super) fn guess(
    g: &mut GraphBuilder<'_>,
    spec: &DrafterSpec,
    weights: &DrafterWeights,
    hidden: ValueId,
    anchor: Option<ValueId>,
) -> Vec<(&'static str, ValueId)> {
    let (k, d) = (spec.guesses(), spec.hidden as i32);
    let hidden = match spec.kind {
        // The first row is the known token's own.
        DrafterKind::DFlash => {
            let first = (spec.block - k) as i32;
            g.slice(hidden, &[0, first, 0], &[1, spec.block as i32, d])
        }
        _ => hidden,
    };
    let rows = g.cast(hidden, Elem::F16);
    let parts: Vec<ValueId> = weights
        .head
        .iter()
        .map(|part| part.apply(g, rows))
        .collect();
    let base = match parts[..] {
        [one] => one,
        _ => g.concat(2, &parts),
    };
    let base = g.cast(base, Elem::F32);
    let (scores, first, previous) = match (&weights.markov, anchor) {
        (Some(markov), Some(anchor)) => chain(g, spec, markov, base, anchor),
        _ => (base, g.argmax(base, 2), None),
    };
    let (ids, probabilities) = best_three(g, scores, first);
    let mut outputs = vec![("out_ids", ids), ("out_probabilities", probabilities)];
    if let Some(confidence) = &weights.confidence {
        let mut logit = dot(g, hidden, &confidence.hidden);
        if let Some(previous) = previous.filter(|_| !confidence.markov.is_empty()) {
            let wide = g.cast(previous, Elem::F32);
            let part = dot(g, wide, &confidence.markov);
            logit = g.binary("add", logit, part);
        }
        let bias = g.f32s(&[confidence.bias], &[]);
        let logit = g.broadcasting("add", logit, bias);
        outputs.push(("out_confidences", g.sigmoid(logit)));
    }
    outputs
}

/// All scores `[1, K, V]`, first choices `[1, K, 1]`, and the Markov head's row of the
/// token before each, `[1, K, R]`.
fn chain(
    g: &mut GraphBuilder<'_>,
    spec: &DrafterSpec,
    markov: &Markov,
    base: ValueId,
    anchor: ValueId,
) -> (ValueId, ValueId, Option<ValueId>) {
    let (v, rank) = (spec.vocab, spec.markov_rank);
    let table = markov.table(g, v, rank);
    let mut token = g.reshape(anchor, &[1, 1]);
    let (mut scores, mut ids, mut rows) = (Vec::new(), Vec::new(), Vec::new());
    for j in 0..spec.guesses() as i32 {
        let row = g.gather_nd(table, token);
        let row = g.reshape(row, &[1, 1, rank]);
        let bias = markov.next.apply(g, row);
        let bias = g.cast(bias, Elem::F32);
        let own = g.slice(base, &[0, j, 0], &[1, j + 1, v as i32]);
        let score = g.binary("add", own, bias);
        let id = g.argmax(score, 2);
        let signed = g.cast(id, Elem::Si32);
        token = g.reshape(signed, &[1, 1]);
        scores.push(score);
        ids.push(id);
        rows.push(row);
    }
    (
        g.concat(1, &scores),
        g.concat(1, &ids),
        Some(g.concat(1, &rows)),
    )
}

/// Ids and probabilities of the three largest scores of each row, `[1, K, 3]`. Taken
/// scores are found by comparing places as floats, exact up to 16 million.
fn best_three(g: &mut GraphBuilder<'_>, scores: ValueId, first: ValueId) -> (ValueId, ValueId) {
    let v = g.shape(scores)[2];
    let largest = g.reduce_max(scores, &[2]);
    let shifted = g.broadcasting("sub", scores, largest);
    let weights = g.unary("exp", shifted);
    let sum = g.reduce_sum(weights, &[2]);
    let places: Vec<f32> = (0..v).map(|i| i as f32).collect();
    let places = g.f32s(&places, &[1, 1, v]);
    let taken = g.f32s(&[TAKEN], &[1, 1, 1]);
    let (mut ids, mut tops) = (vec![first], vec![largest]);
    let (mut left, mut last) = (scores, first);
    for _ in 1..3 {
        let place = g.cast(last, Elem::F32);
        let is_last = g.broadcasting("equal", places, place);
        left = g.broadcasting_where(is_last, taken, left);
        last = g.argmax(left, 2);
        ids.push(last);
        tops.push(g.reduce_max(left, &[2]));
    }
    let tops = g.concat(2, &tops);
    let tops = g.broadcasting("sub", tops, largest);
    let tops = g.unary("exp", tops);
    (g.concat(2, &ids), g.broadcasting("divide", tops, sum))
}

/// `x` `[1, K, n]` times a vector, `[1, K, 1]`.
fn dot(g: &mut GraphBuilder<'_>, x: ValueId, weights: &[f32]) -> ValueId {
    let weights = g.f32s(weights, &[weights.len()]);
    let product = g.broadcasting("mul", x, weights);
    g.reduce_sum(product, &[2])
}
