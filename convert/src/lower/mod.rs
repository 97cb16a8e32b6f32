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
//! | `out_ids` | `ui32[1,1,1,w]` | first of the largest logits (last chunk) |
//! | `out_logits` | `f16[1,V,1,w]` | logits (last chunk's `logits_{C}_{w}` functions, and all with [`ArgmaxForm::Host`]) |
//!
//! Positions come in only through `rope_cos`/`rope_sin`, slots only through
//! `in_step`, and who sees whom only through the mask: a row's position need not
//! be its slot, which is what token trees need.

mod apple;
mod attention;
mod drafter;
mod forms;
mod head;
mod layer;
mod plan;
mod size;
mod weights;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;

pub use apple::{APPLE_WIDTHS, EmbeddingTable, lower_apple};
pub(crate) use drafter::{ConfidenceWeights, DrafterWeights, Layer, Linear, Markov, Part};
pub(crate) use drafter::{DrafterPlan, lower_drafter};
/// Room left above the largest norm input that calibration saw.
pub(crate) const MAGNITUDE_HEADROOM: f32 = 2.0;

pub use forms::{
    ArgmaxForm, AttentionForm, CacheLayout, Forms, MAX_HEAD_ROWS, Prescale, SiluForm, shift_for,
};
pub use plan::{ChunkPlan, Chunks, TargetPlan, function_name, plan_chunks};
pub(crate) use size::BASE_MEMORY;
pub use size::{ChunkSize, Shapes, chunk_size};
pub use weights::{Dense, StoreWeights, WeightSource};

use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Attr, AttrId, Backing, Elem, Module, TensorType, ValueId};
use anemone_schemas::spec::ModelSpec;

use self::layer::LayerWeights;
use self::weights::ChunkWeights;
use crate::error::Error;

/// Additive mask of a hidden key: finite, since the engine mishandles infinities,
/// and far enough below any score that its weight is exactly zero in fp16.
pub const MASK_VALUE: f32 = -40000.0;

/// What every function of a chunk is built from.
struct Shape<'a> {
    spec: &'a ModelSpec,
    forms: &'a Forms,
    context: usize,
    width: usize,
    /// Hardware constraints of the caches, if any.
    cache_constraints: Option<AttrId>,
}

/// Builds the program of one chunk: a function for every context and width, over
/// one copy of the weights.
///
/// # Errors
/// If the store lacks a tensor or one has the wrong shape.
pub fn lower_chunk(
    source: &dyn WeightSource,
    plan: &TargetPlan,
    chunk: &ChunkPlan,
) -> Result<Module, Error> {
    let mut module = Module::default();
    let (spec, forms) = (&plan.spec, &plan.forms);
    let weights = ChunkWeights::register(&mut module, source, spec, &forms.prescale, chunk)?;
    let cache_constraints = cache_constraints(&mut module, plan)?;
    for &context in &plan.contexts {
        for &width in &plan.widths {
            let shape = Shape {
                spec,
                forms,
                context,
                width,
                cache_constraints,
            };
            lower_function(&mut module, &shape, chunk, &weights, false);
            if plan.with_logits && chunk.head {
                lower_function(&mut module, &shape, chunk, &weights, true);
            }
        }
    }
    Ok(module)
}

/// The constraint under which Apple's exporter keeps caches: eight channels
/// interleaved as the innermost axis, and rows of eight times the longest context in
/// every function, so that a shorter context is a view of the same buffer.
fn cache_constraints(module: &mut Module, plan: &TargetPlan) -> Result<Option<AttrId>, Error> {
    const INTERLEAVE: i64 = 8;
    if plan.forms.cache_layout == CacheLayout::Plain {
        return Ok(None);
    }
    let channels = plan.spec.kv_heads * plan.spec.head_dim;
    if !channels.is_multiple_of(INTERLEAVE as usize) {
        return Err(Error::usage(format!(
            "interleaved caches need a multiple of {INTERLEAVE} channels, the model has {channels}; \
             lower it with plain ones (`--cache-layout plain`)"
        )));
    }
    let longest = plan.contexts.iter().max().copied().unwrap_or(0) as i64;
    Ok(Some(module.add_attr(Attr::HwConstraints {
        alignments: vec![1, 1, 1, 1, INTERLEAVE * longest, 1],
        interleave: vec![1, 1, INTERLEAVE, 1, 1],
        backing: Backing::IoSurface,
    })))
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
    let cache = TensorType {
        encoding: shape.cache_constraints,
        ..f16(&[chunk.layers.len(), 1, spec.kv_heads * spec.head_dim, 1, c])
    };
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
    let host = attention::Host {
        cos: g.arg(1),
        sin: g.arg(2),
        step: g.arg(3),
        mask: g.arg(4),
        caches: [g.arg(5), g.arg(6)],
    };
    let mut ctx = attention::Context::open(&mut g, shape, host);
    let mut outputs: Vec<(String, ValueId)> = Vec::new();
    for (i, layer) in chunk.layers.clone().enumerate() {
        let lw: &LayerWeights = &weights.layers[i];
        x = layer::decoder_layer(&mut g, &mut ctx, lw, i, x);
        if chunk.taps.contains(&layer) {
            let tap = g.transpose(x, &[0, 3, 2, 1]);
            outputs.push((format!("tap_{layer}"), tap));
        }
    }
    if let Some(weights) = &weights.head {
        let scores = head::scores(&mut g, weights, spec.rms_eps, x);
        if logits || shape.forms.argmax == ArgmaxForm::Host {
            outputs.push(("out_logits".into(), head::logits(&mut g, &scores)));
        } else {
            let ids = head::choose(&mut g, shape.forms, &scores);
            outputs.push(("out_ids".into(), ids));
        }
    } else {
        let hidden = g.transpose(x, &[0, 3, 2, 1]);
        outputs.push(("out_hidden".into(), hidden));
    }
    let tokens = ctx.close();
    let named: Vec<(&str, ValueId)> = outputs.iter().map(|(n, v)| (n.as_str(), *v)).collect();
    g.finish(&named, &tokens);
}
