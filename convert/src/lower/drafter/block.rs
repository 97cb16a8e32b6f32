//! The block: a few rows through the drafter's layers.
//!
//! Per layer, with `R = H / G` heads to a key group and the context's `S` slots apart
//! from the block's own `B` rows, so that the long cache is not copied to append a few:
//!
//! ```text
//! s   = [q_g k_c^T + mask ; q_g k_b^T]      [1, G, R*B, S + B]
//! p   = softmax of s over the last axis
//! o_g = p_c v_c + p_b v_b                   [1, G, R*B, d]
//! ```

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{Elem, ValueId};

use super::{DrafterWeights, Layer, Shape};
use super::{rms_norm, rope_for_heads, rotated_heads, value_heads};

/// The block's rows after the final norm, `[1, B, D]` in f32.
pub(super) fn run(
    g: &mut GraphBuilder<'_>,
    shape: &Shape<'_>,
    weights: &DrafterWeights,
    x: ValueId,
    rope: [ValueId; 2],
    mask: ValueId,
    caches: [ValueId; 2],
) -> ValueId {
    let spec = shape.spec;
    let rope = rope_for_heads(g, rope);
    let x = g.reshape(x, &[1, spec.block, spec.hidden]);
    let mut x = g.cast(x, Elem::F32);
    for (l, layer) in weights.layers.iter().enumerate() {
        let context = caches.map(|cache| slots_of(g, shape, cache, l));
        x = decoder_layer(g, shape, layer, x, rope, mask, context);
    }
    rms_norm(g, x, &weights.norm, spec.rms_eps)
}

/// A layer's part of a cache, `[1, G, S, d]`.
fn slots_of(g: &mut GraphBuilder<'_>, shape: &Shape<'_>, cache: ValueId, layer: usize) -> ValueId {
    let (groups, s, d) = (shape.spec.kv_heads, shape.slots, shape.spec.head_dim);
    let l = layer as i32;
    let end = [l + 1, 1, groups as i32, s as i32, d as i32];
    let one = g.slice(cache, &[l, 0, 0, 0, 0], &end);
    g.reshape(one, &[1, groups, s, d])
}

fn decoder_layer(
    g: &mut GraphBuilder<'_>,
    shape: &Shape<'_>,
    layer: &Layer,
    x: ValueId,
    rope: [ValueId; 2],
    mask: ValueId,
    context: [ValueId; 2],
) -> ValueId {
    let spec = shape.spec;
    let normed = rms_norm(g, x, &layer.input_norm, spec.rms_eps);
    let normed = g.cast(normed, Elem::F16);
    let q = rotated_heads(g, spec, normed, &layer.q, &layer.q_norm, rope);
    let scale = g.f32s(&[(spec.head_dim as f32).sqrt().recip()], &[]);
    let q = g.broadcasting("mul", q, scale);
    let q = g.cast(q, Elem::F16);
    let k = rotated_heads(g, spec, normed, &layer.k, &layer.k_norm, rope);
    let k = g.cast(k, Elem::F16);
    let v = value_heads(g, spec, normed, &layer.v);
    let attended = attend(g, shape, q, [k, v], context, mask);
    let projected = layer.o.apply(g, attended);
    let projected = g.cast(projected, Elem::F32);
    let x = g.binary("add", x, projected);

    let normed = rms_norm(g, x, &layer.post_norm, spec.rms_eps);
    let normed = g.cast(normed, Elem::F16);
    let gate = layer.gate.apply(g, normed);
    let up = layer.up.apply(g, normed);
    let gate = g.cast(gate, Elem::F32);
    let up = g.cast(up, Elem::F32);
    let gate = g.silu(gate);
    let product = g.binary("mul", gate, up);
    let product = g.cast(product, Elem::F16);
    let down = layer.down.apply(g, product);
    let down = g.cast(down, Elem::F32);
    g.binary("add", x, down)
}

/// Attention of `q` `[1, H, B, d]` over the context's and the block's keys and values,
/// as `[1, B, H*d]`.
fn attend(
    g: &mut GraphBuilder<'_>,
    shape: &Shape<'_>,
    q: ValueId,
    block: [ValueId; 2],
    context: [ValueId; 2],
    mask: ValueId,
) -> ValueId {
    let spec = shape.spec;
    let (heads, groups, b, d) = (spec.heads, spec.kv_heads, spec.block, spec.head_dim);
    let q = g.reshape(q, &[1, groups, heads / groups * b, d]);
    let scores = |g: &mut GraphBuilder<'_>, keys: ValueId| {
        let keys = g.transpose(keys, &[0, 1, 3, 2]);
        let scores = g.batch_matmul(q, keys);
        g.cast(scores, Elem::F32)
    };
    let far = scores(g, context[0]);
    let near = scores(g, block[0]);
    let far = g.broadcasting("add", far, mask);
    let all = g.concat(3, &[far, near]);
    let weights = g.softmax(all, 3);
    let weights = g.cast(weights, Elem::F16);
    let parts = g.split(weights, 3, &[shape.slots, b]);
    let far = g.batch_matmul(parts[0], context[1]);
    let near = g.batch_matmul(parts[1], block[1]);
    let sum = g.binary("add", far, near);
    let sum = g.reshape(sum, &[1, heads, b, d]);
    let rows = g.transpose(sum, &[0, 2, 1, 3]);
    g.reshape(rows, &[1, b, heads * d])
}
