//! Lowering: from a quantized store to Core AI chunk programs.
//!
//! A chunk is a run of consecutive decoder layers in one program with one function
//! per context size `C` and call width `w`, all static. The residual stream enters
//! and leaves as `[1, w, 1, D]` (a long last axis for the engine's buffers) and is
//! `[1, D, 1, w]` inside: tokens lie on the width axis of every 1x1 convolution, so
//! weights are read once however many tokens a call carries.
//!
//! What a function takes and gives:
//!
//! | name | type | meaning |
//! |---|---|---|
//! | `transformer_input` | `f16[1,w,1,D]` | embeddings or the hidden states of the chunk before |
//! | `rope_cos`, `rope_sin` | `f16[1,1,w,d]` | rotary factors of each row's position, both halves |
//! | `in_step` | `si32[1]` | cache slot of row 0; row `i` writes slot `in_step + i` |
//! | `causal_mask` | `f16[1,C,1,w]` | added to the scores: 0 for a visible key, `mask_value` else |
//! | `key_cache`, `value_cache` | state `f16[L,1,K,1,C]` | rotated keys, and values |
//! | `out_hidden` | `f16[1,w,1,D]` | hidden states after the last layer (not in the last chunk) |
//! | `tap_{l}` | `f16[1,w,1,D]` | hidden states after layer `l` |
//! | `out_ids` | `ui32[1,1,1,w]` | argmax of the logits (last chunk) |
//! | `out_logits` | `f16[1,V,1,w]` | logits (last chunk's `logits_{C}_{w}` functions only) |
//!
//! Positions come in only through `rope_cos`/`rope_sin`, slots only through
//! `in_step`, and who sees whom only through the mask: a row's position need not
//! be its slot, which is what token trees need.

mod attention;
mod layer;
mod plan;
mod weights;

pub use plan::{ChunkPlan, TargetPlan, function_name, plan_chunks};
pub use weights::StoreWeights;

use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Elem, Module, TensorType, ValueId};
use anemone_schemas::spec::ModelSpec;
use anemone_schemas::store::Store;

use self::layer::LayerWeights;
use self::weights::{ChunkWeights, HeadWeights};
use crate::error::Error;

/// Additive mask of a hidden key: finite, since the engine mishandles infinities,
/// and far enough below any score that its weight is exactly zero in fp16.
pub const MASK_VALUE: f32 = -40000.0;

/// What every function of a chunk is built from.
struct Shape<'a> {
    spec: &'a ModelSpec,
    context: usize,
    width: usize,
}

/// Builds the program of one chunk: a function for every context and width, over
/// one copy of the weights.
///
/// # Errors
/// If the store lacks a tensor or one has the wrong shape.
pub fn lower_chunk(store: &Store, plan: &TargetPlan, chunk: &ChunkPlan) -> Result<Module, Error> {
    let mut module = Module::default();
    let weights = ChunkWeights::register(&mut module, store, &plan.spec, chunk)?;
    for &context in &plan.contexts {
        for &width in &plan.widths {
            let shape = Shape {
                spec: &plan.spec,
                context,
                width,
            };
            lower_function(&mut module, &shape, chunk, &weights, false);
            if plan.with_logits && chunk.head {
                lower_function(&mut module, &shape, chunk, &weights, true);
            }
        }
    }
    Ok(module)
}

fn lower_function(
    module: &mut Module,
    shape: &Shape<'_>,
    chunk: &ChunkPlan,
    weights: &ChunkWeights,
    logits: bool,
) {
    let (spec, w, c) = (shape.spec, shape.width, shape.context);
    let f16 = |dims: &[usize]| TensorType::new(Elem::F16, dims);
    let cache = f16(&[chunk.layers.len(), 1, spec.kv_heads * spec.head_dim, 1, c]);
    let name = if logits {
        format!("logits_{c}_{w}")
    } else {
        function_name(c, w)
    };
    let mut g = GraphBuilder::new(
        module,
        &name,
        &[
            (
                "transformer_input",
                Input::Tensor(f16(&[1, w, 1, spec.hidden])),
            ),
            ("rope_cos", Input::Tensor(f16(&[1, 1, w, spec.head_dim]))),
            ("rope_sin", Input::Tensor(f16(&[1, 1, w, spec.head_dim]))),
            ("in_step", Input::Tensor(TensorType::new(Elem::Si32, &[1]))),
            ("causal_mask", Input::Tensor(f16(&[1, c, 1, w]))),
            ("key_cache", Input::State(cache.clone())),
            ("value_cache", Input::State(cache)),
        ],
    );
    let mut x = g.transpose(g.arg(0), &[0, 3, 2, 1]);
    let mut ctx = attention::Context::open(&mut g, shape);
    let mut outputs: Vec<(String, ValueId)> = Vec::new();
    for (i, layer) in chunk.layers.clone().enumerate() {
        let lw: &LayerWeights = &weights.layers[i];
        x = layer::decoder_layer(&mut g, &mut ctx, lw, i, x);
        if chunk.taps.contains(&layer) {
            let tap = g.transpose(x, &[0, 3, 2, 1]);
            outputs.push((format!("tap_{layer}"), tap));
        }
    }
    match &weights.head {
        Some(head) => {
            let scores = lower_head(&mut g, spec, head, x);
            if logits {
                outputs.push(("out_logits".into(), scores));
            } else {
                let ids = g.argmax(scores, 1);
                outputs.push(("out_ids".into(), ids));
            }
        }
        None => {
            let hidden = g.transpose(x, &[0, 3, 2, 1]);
            outputs.push(("out_hidden".into(), hidden));
        }
    }
    let tokens = ctx.close();
    let named: Vec<(&str, ValueId)> = outputs.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    g.finish(&named, &tokens);
}

/// Final norm and output layer: `[1, D, 1, w]` to logits `[1, V, 1, w]`.
fn lower_head(
    g: &mut GraphBuilder<'_>,
    spec: &ModelSpec,
    head: &HeadWeights,
    x: ValueId,
) -> ValueId {
    let normed = layer::rms_norm(g, x, 1, &head.norm, spec.rms_eps);
    head.linear.conv(g, normed)
}
