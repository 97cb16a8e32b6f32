//! From the taps of new rows to keys and values of the context.

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{Elem, ValueId};

use super::{DrafterWeights, Shape, TAP_SHIFT};
use super::{rms_norm, rope_for_heads, rotated_heads, value_heads};

/// Writes the new rows into both states, once each, and gives their contents
/// `[L, 1, G, S, d]` and last tokens.
pub(super) fn extend(
    g: &mut GraphBuilder<'_>,
    shape: &Shape<'_>,
    weights: &DrafterWeights,
    taps: &[ValueId],
    rope: [ValueId; 2],
    step: ValueId,
    states: [ValueId; 2],
) -> ([ValueId; 2], [ValueId; 2]) {
    let spec = shape.spec;
    let (groups, n, d) = (spec.kv_heads, shape.rows, spec.head_dim);
    let rows = fuse(g, shape, weights, taps);
    let rope = rope_for_heads(g, rope);
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for layer in &weights.layers {
        let k = rotated_heads(g, spec, rows, &layer.k, &layer.k_norm, rope);
        let k = g.cast(k, Elem::F16);
        keys.push(g.reshape(k, &[1, 1, groups, n, d]));
        let v = value_heads(g, spec, rows, &layer.v);
        values.push(g.reshape(v, &[1, 1, groups, n, d]));
    }
    let width = g.i32s(&[n as i32]);
    let step_end = g.binary("add", step, width);
    let front = g.i32s(&[0; 3]);
    let back = g.i32s(&[0]);
    let start = g.concat(0, &[front, step, back]);
    let front = g.i32s(&[spec.layers as i32, 1, groups as i32]);
    let back = g.i32s(&[d as i32]);
    let end = g.concat(0, &[front, step_end, back]);
    let (mut contents, mut tokens) = (Vec::new(), Vec::new());
    for (state, new) in states.into_iter().zip([keys, values]) {
        let new = match new[..] {
            [one] => one,
            _ => g.concat(0, &new),
        };
        let token = g.token();
        let (old, token) = g.read_handle(state, token);
        let updated = g.slice_update(old, start, end, new);
        let token = g.write_handle(state, updated, token);
        let (current, token) = g.read_handle(state, token);
        contents.push(current);
        tokens.push(token);
    }
    ([contents[0], contents[1]], [tokens[0], tokens[1]])
}

/// The vector of each new row that all layers read, `[1, n, D]`.
fn fuse(
    g: &mut GraphBuilder<'_>,
    shape: &Shape<'_>,
    weights: &DrafterWeights,
    taps: &[ValueId],
) -> ValueId {
    let spec = shape.spec;
    let flat: Vec<ValueId> = taps
        .iter()
        .map(|&tap| g.reshape(tap, &[1, shape.rows, spec.hidden]))
        .collect();
    let all = match flat[..] {
        [one] => one,
        _ => g.concat(2, &flat),
    };
    let down = g.f16_scalar((TAP_SHIFT as f32).exp2().recip());
    let all = g.broadcasting("mul", all, down);
    let x = weights.fuse.apply(g, all);
    let x = g.cast(x, Elem::F32);
    let up = g.f32s(&[(TAP_SHIFT as f32).exp2()], &[]);
    let x = g.broadcasting("mul", x, up);
    let x = rms_norm(g, x, &weights.fuse_norm, spec.rms_eps);
    g.cast(x, Elem::F16)
}
