//! One decoder layer on `[1, D, 1, w]`.

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::ValueId;

use super::attention::Context;
use super::forms::SiluForm;
use super::weights::LinearWeights;

/// Smallest positive f16, `2^-24`.
const SMALLEST_F16: f64 = 1.0 / 16_777_216.0;

/// A norm's weight, and by how many powers of two its input is scaled down.
pub(super) struct NormWeights {
    pub(super) weight: Vec<f32>,
    pub(super) shift: u32,
}

/// The weights of one decoder layer, registered with a module.
pub(super) struct LayerWeights {
    pub(super) input_norm: NormWeights,
    pub(super) q: LinearWeights,
    pub(super) k: LinearWeights,
    pub(super) v: LinearWeights,
    pub(super) o: LinearWeights,
    /// Of queries and keys, in architectures that have them.
    pub(super) head_norms: Option<[NormWeights; 2]>,
    pub(super) post_norm: NormWeights,
    pub(super) gate: LinearWeights,
    pub(super) up: LinearWeights,
    pub(super) down: LinearWeights,
}

/// RMSNorm over `axis` of a rank-4 value, with one weight per place on that axis:
/// `x * rsqrt(mean(x^2) + eps) * weight`, for `x` and `eps` scaled as
/// [`super::Prescale`] says.
pub(super) fn rms_norm(
    g: &mut GraphBuilder<'_>,
    mut x: ValueId,
    axis: usize,
    norm: &NormWeights,
    mut eps: f64,
) -> ValueId {
    if norm.shift > 0 {
        let scale = (-f64::from(norm.shift)).exp2();
        let factor = g.f16_scalar(scale as f32);
        x = g.broadcasting("mul", x, factor);
        // An epsilon of zero would turn a row of zeros into NaN.
        eps = (eps * scale * scale).max(SMALLEST_F16);
    }
    let square = g.binary("mul", x, x);
    let mean = g.reduce_mean(square, &[axis]);
    let eps = g.f16_scalar(eps as f32);
    let shifted = g.broadcasting("add", mean, eps);
    let inverse = g.unary("rsqrt", shifted);
    let normed = g.broadcasting("mul", x, inverse);
    let mut shape = [1; 4];
    shape[axis] = norm.weight.len();
    let weight = g.f16s(&norm.weight, &shape);
    g.broadcasting("mul", normed, weight)
}

fn silu(g: &mut GraphBuilder<'_>, form: SiluForm, x: ValueId) -> ValueId {
    match form {
        SiluForm::Operation => g.silu(x),
        SiluForm::Tanh => {
            let half = g.f16_scalar(0.5);
            let half = g.broadcasting("mul", x, half);
            let tanh = g.unary("tanh", half);
            let product = g.binary("mul", half, tanh);
            g.binary("add", half, product)
        }
    }
}

/// Attention and MLP with their residuals; `slot` is the layer's place in the
/// chunk's caches.
pub(super) fn decoder_layer(
    g: &mut GraphBuilder<'_>,
    ctx: &mut Context<'_>,
    weights: &LayerWeights,
    slot: usize,
    x: ValueId,
) -> ValueId {
    let spec = ctx.shape().spec;
    let w = ctx.shape().width;
    let (heads, groups, d) = (spec.heads, spec.kv_heads, spec.head_dim);

    let normed = rms_norm(g, x, 1, &weights.input_norm, spec.rms_eps);
    let q = weights.q.conv(g, normed);
    let k = weights.k.conv(g, normed);
    let v = weights.v.conv(g, normed);
    let mut q = g.reshape(q, &[1, heads, d, w]);
    let mut k = g.reshape(k, &[1, groups, d, w]);
    if let Some([q_norm, k_norm]) = &weights.head_norms {
        q = rms_norm(g, q, 2, q_norm, spec.rms_eps);
        k = rms_norm(g, k, 2, k_norm, spec.rms_eps);
    }
    let q = ctx.rotate(g, q, heads);
    let k = ctx.rotate(g, k, groups);
    let attended = ctx.attend(g, slot, [q, k, v]);
    let projected = weights.o.conv(g, attended);
    let x = g.binary("add", x, projected);

    let normed = rms_norm(g, x, 1, &weights.post_norm, spec.rms_eps);
    let gate = weights.gate.conv(g, normed);
    let up = weights.up.conv(g, normed);
    let gate = silu(g, ctx.shape().forms.silu, gate);
    let product = g.binary("mul", gate, up);
    let down = weights.down.conv(g, product);
    g.binary("add", x, down)
}
