//! Lowering of a drafter: one program for the GPU, every shape fixed.
//!
//! The drafter's context is what the target made of the text: for every token the
//! target has processed, its taps are concatenated, projected and normed once, and every
//! layer turns that one vector into a key and a value. They are states, so a row is
//! projected once. What is computed anew in every call is a block of a few rows, the
//! newest token and masks, whose queries see the whole context and all of the block.
//!
//! | name | type | meaning |
//! |---|---|---|
//! | `tap_{l}` | `f16[1,n,1,D]` | hidden states of new rows after layer `l` of the target |
//! | `context_cos`, `context_sin` | `f32[n,d]` | rotary factors of their positions |
//! | `in_step` | `si32[1]` | slot of the first new row |
//! | `block_input` | `f16[1,B,1,D]` | embeddings of the block (`draft` only, as all below) |
//! | `block_cos`, `block_sin` | `f32[B,d]` | rotary factors of its positions |
//! | `context_mask` | `f32[1,1,1,S]` | added to the scores of the context's slots |
//! | `anchor` | `si32[1]` | the newest token, for the Markov head |
//! | `key_cache`, `value_cache` | state `f16[L,1,G,S,d]` | the context, rotated keys and values |
//! | `out_done` | `f16[1]` | nothing of interest (`extend` only) |
//! | `out_ids` | `ui32[1,K,3]` | first, second and third choice of each guess |
//! | `out_probabilities` | `f32[1,K,3]` | their probabilities |
//! | `out_confidences` | `f32[1,K,1]` | chance that the guess holds, if the drafter says so |
//!
//! `draft_{C}` takes `n` new rows and drafts, `extend_{C}` takes more of them and only
//! fills the states; `S` is `C` and spare slots for the padding of the last call. New
//! rows beyond those the caller counts are garbage that the mask hides and a later call
//! overwrites.
//!
//! Three things differ from the chunk programs, since the GPU is another machine. The
//! rows of a call lie on the row axis and products are matrix products with transposed
//! weights, and caches have the slots before the width, as in Apple's own export for the
//! GPU. Each state is written once per call with the rows of all layers: of several
//! writes to one state the GPU was seen to keep only one. And norms, softmax, residual
//! stream and scores are f32 between f16 products: the taps are raw residual streams,
//! which have outliers, and an argmax of f16 gave wrong ids under acceleration.

mod block;
mod context;
mod head;
mod weights;

#[cfg(test)]
mod tests;

use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Elem, Module, TensorType, ValueId};
use anemone_schemas::drafter::DrafterSpec;

pub(crate) use weights::{ConfidenceWeights, DrafterWeights, Layer, Linear, Markov, Part};

/// By how many powers of two taps are scaled down before they are projected. Sums of
/// products then stay finite even where they are accumulated in f16: 2^6 leaves room for
/// sums of 4 million, and the norm after it, in f32 on the scaled-up sum, does not notice.
const TAP_SHIFT: i32 = 6;

/// What to make of a drafter.
#[derive(Clone, Debug)]
pub(crate) struct DrafterPlan {
    /// The drafter.
    pub(crate) spec: DrafterSpec,
    /// Context sizes, ascending.
    pub(crate) contexts: Vec<usize>,
    /// New rows of a `draft` call.
    pub(crate) rows: usize,
    /// New rows of an `extend` call.
    pub(crate) prefill_rows: usize,
}

impl DrafterPlan {
    /// Slots beyond the context.
    pub(crate) fn spare_slots(&self) -> usize {
        self.rows.max(self.prefill_rows)
    }
}

/// Builds the drafter's program over weights registered with `module`.
pub(crate) fn lower_drafter(module: &mut Module, plan: &DrafterPlan, weights: &DrafterWeights) {
    for &context in &plan.contexts {
        for drafts in [true, false] {
            let shape = Shape {
                spec: &plan.spec,
                slots: context + plan.spare_slots(),
                rows: if drafts { plan.rows } else { plan.prefill_rows },
            };
            let name = if drafts { "draft" } else { "extend" };
            lower_function(
                module,
                &format!("{name}_{context}"),
                &shape,
                weights,
                drafts,
            );
        }
    }
}

/// What every part of a function is built from.
struct Shape<'a> {
    spec: &'a DrafterSpec,
    /// Slots of the states.
    slots: usize,
    /// New rows.
    rows: usize,
}

fn lower_function(
    module: &mut Module,
    name: &str,
    shape: &Shape<'_>,
    weights: &DrafterWeights,
    drafts: bool,
) {
    let (spec, n) = (shape.spec, shape.rows);
    let (d, block) = (spec.head_dim, spec.block);
    let tensor = |elem, dims: &[usize]| Input::Tensor(TensorType::new(elem, dims));
    let cache = [spec.layers, 1, spec.kv_heads, shape.slots, d];
    let cache = Input::State(TensorType::new(Elem::F16, &cache));
    let names: Vec<String> = spec.taps.iter().map(|t| format!("tap_{t}")).collect();
    let mut inputs: Vec<(&str, Input)> = names
        .iter()
        .map(|name| (name.as_str(), tensor(Elem::F16, &[1, n, 1, spec.hidden])))
        .collect();
    inputs.extend([
        ("context_cos", tensor(Elem::F32, &[n, d])),
        ("context_sin", tensor(Elem::F32, &[n, d])),
        ("in_step", tensor(Elem::Si32, &[1])),
    ]);
    if drafts {
        inputs.extend([
            (
                "block_input",
                tensor(Elem::F16, &[1, block, 1, spec.hidden]),
            ),
            ("block_cos", tensor(Elem::F32, &[block, d])),
            ("block_sin", tensor(Elem::F32, &[block, d])),
            ("context_mask", tensor(Elem::F32, &[1, 1, 1, shape.slots])),
        ]);
        if weights.markov.is_some() {
            inputs.push(("anchor", tensor(Elem::Si32, &[1])));
        }
    }
    inputs.extend([("key_cache", cache.clone()), ("value_cache", cache)]);
    let mut g = GraphBuilder::new(module, name, &inputs);
    let arg = |g: &GraphBuilder<'_>, name: &str| {
        let at = inputs.iter().position(|i| i.0 == name);
        g.arg(at.unwrap_or_else(|| panic!("no input `{name}`")))
    };
    let taps: Vec<ValueId> = names.iter().map(|name| arg(&g, name)).collect();
    let rope = [arg(&g, "context_cos"), arg(&g, "context_sin")];
    let states = [arg(&g, "key_cache"), arg(&g, "value_cache")];
    let step = arg(&g, "in_step");
    let (caches, tokens) = context::extend(&mut g, shape, weights, &taps, rope, step, states);
    if !drafts {
        // Apple's loader finds no states in a function without outputs.
        let [first, second] = caches.map(|cache| {
            let one = g.slice(cache, &[0; 5], &[1; 5]);
            g.reshape(one, &[1])
        });
        let done = g.binary("add", first, second);
        g.finish(&[("out_done", done)], &tokens);
        return;
    }
    let rope = [arg(&g, "block_cos"), arg(&g, "block_sin")];
    let (x, mask) = (arg(&g, "block_input"), arg(&g, "context_mask"));
    let hidden = block::run(&mut g, shape, weights, x, rope, mask, caches);
    let anchor = weights.markov.is_some().then(|| arg(&g, "anchor"));
    let outputs = head::guess(&mut g, spec, weights, hidden, anchor);
    g.finish(&outputs, &tokens);
}

/// RMSNorm over the last axis of an f32 value.
fn rms_norm(g: &mut GraphBuilder<'_>, x: ValueId, weight: &[f32], eps: f64) -> ValueId {
    let rank = g.shape(x).len();
    let square = g.binary("mul", x, x);
    let mean = g.reduce_mean(square, &[rank - 1]);
    let eps = g.f32s(&[eps as f32], &[]);
    let shifted = g.broadcasting("add", mean, eps);
    let inverse = g.unary("rsqrt", shifted);
    let normed = g.broadcasting("mul", x, inverse);
    let weight = g.f32s(weight, &[weight.len()]);
    g.broadcasting("mul", normed, weight)
}

/// Projects `x` `[1, n, D]` f16 to heads of width `d`, norms and rotates each, and gives
/// `[1, heads, n, d]` in f32. `rope` are `[1, n, 1, d]`.
fn rotated_heads(
    g: &mut GraphBuilder<'_>,
    spec: &DrafterSpec,
    x: ValueId,
    linear: &Linear,
    norm: &[f32],
    rope: [ValueId; 2],
) -> ValueId {
    let (d, n) = (spec.head_dim, g.shape(x)[1]);
    let heads = linear.rows() / d;
    let x = linear.apply(g, x);
    let x = g.reshape(x, &[1, n, heads, d]);
    let x = g.cast(x, Elem::F32);
    let x = rms_norm(g, x, norm, spec.rms_eps);
    let [n32, h32, d32] = [n, heads, d].map(|v| v as i32);
    let first = g.slice(x, &[0; 4], &[1, n32, h32, d32 / 2]);
    let second = g.slice(x, &[0, 0, 0, d32 / 2], &[1, n32, h32, d32]);
    let minus_one = g.f32s(&[-1.0], &[]);
    let negated = g.broadcasting("mul", second, minus_one);
    let turned = g.concat(3, &[negated, first]);
    let [cos, sin] = rope;
    let straight = g.broadcasting("mul", x, cos);
    let turned = g.broadcasting("mul", turned, sin);
    let x = g.binary("add", straight, turned);
    g.transpose(x, &[0, 2, 1, 3])
}

/// Values of `x` `[1, n, D]` as `[1, G, n, d]`.
fn value_heads(
    g: &mut GraphBuilder<'_>,
    spec: &DrafterSpec,
    x: ValueId,
    linear: &Linear,
) -> ValueId {
    let n = g.shape(x)[1];
    let x = linear.apply(g, x);
    let x = g.reshape(x, &[1, n, spec.kv_heads, spec.head_dim]);
    g.transpose(x, &[0, 2, 1, 3])
}

/// Rotary factors `[n, d]` as every head reads them.
fn rope_for_heads(g: &mut GraphBuilder<'_>, rope: [ValueId; 2]) -> [ValueId; 2] {
    rope.map(|table| {
        let shape = g.shape(table);
        g.reshape(table, &[1, shape[0], 1, shape[1]])
    })
}
