//! A whole model as the one program that Apple's runner for static shapes expects.
//!
//! | function | takes | gives |
//! |---|---|---|
//! | `load_embeddings` | | `embedding_table` `si8[V,1,D]` |
//! | `gather_embeddings_{w}` | `in_new_token_ids` `si32[1,w]`, the table | `gathered_embeddings` `f16[1,w,1,D]` |
//! | `extend_{C}_{w}` | `transformer_input`, `position_ids` `ui16[1,w]`, `in_step` `si32[1]`, `causal_mask` `f16[1,C,1,w]`, the caches, the table | `out_logits` `f16[1,1,w,V]` |
//! | `prompt_opt_{C}_{w}` | the same | `out_logits` `f16[]`, which means nothing: it fills the caches only |
//!
//! The layers are those of the chunk programs. Embeddings are eight bits with one scale.
//! Rotary factors come from a table in the program, by position, inside a composite that
//! the engine's compiler knows; so do embeddings. The bodies of both are written out.

use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{
    Attr, AttrId, Backing, Blob, BlobData, BlobId, Elem, Module, TensorType,
};
use anemone_schemas::aimodel::opt::drop_dead;
use anemone_schemas::spec::ModelSpec;
use half::f16;

use super::weights::{ChunkWeights, WeightSource};
use super::{Shape, TargetPlan, attention, cache_constraints, head, layer};
use crate::error::Error;

/// Call widths of Apple's runner.
pub const APPLE_WIDTHS: [usize; 3] = [8, 16, 64];

/// Embeddings of eight bits, `value = scale * entry`.
#[derive(Clone, Debug)]
pub struct EmbeddingTable {
    /// The entries `si8[V, D]`.
    pub entries: BlobData,
    /// The scale of all of them.
    pub scale: f32,
}

/// Constants and layouts that several functions share.
struct Common<'a> {
    plan: &'a TargetPlan,
    table: BlobId,
    scale: f32,
    rotary: [BlobId; 2],
    table_layout: AttrId,
    rotary_layout: AttrId,
    cache_layout: Option<AttrId>,
}

impl Common<'_> {
    fn spec(&self) -> &ModelSpec {
        &self.plan.spec
    }

    /// The embedding table as functions pass it on.
    fn table_type(&self) -> TensorType {
        TensorType {
            encoding: Some(self.table_layout),
            ..TensorType::new(Elem::Si8, &[self.spec().vocab, 1, self.spec().hidden])
        }
    }

    /// Positions with rotary factors: those of the longest context.
    fn positions(&self) -> usize {
        self.plan.contexts.last().copied().unwrap_or(0)
    }

    fn rotary_type(&self) -> TensorType {
        TensorType::new(Elem::F16, &[self.positions(), self.spec().head_dim])
    }
}

/// Builds the program. The plan has one chunk.
///
/// # Errors
/// If it has more, or as [`super::lower_chunk`].
pub fn lower_apple(
    source: &dyn WeightSource,
    plan: &TargetPlan,
    embedding: EmbeddingTable,
) -> Result<Module, Error> {
    let [chunk] = &plan.chunks[..] else {
        return Err(Error::usage(format!(
            "Apple's runner takes one program, the plan has {} chunks",
            plan.chunks.len()
        )));
    };
    if !chunk.taps.is_empty() {
        return Err(Error::usage("Apple's runner knows no taps".to_owned()));
    }
    let mut m = Module::default();
    let weights = ChunkWeights::register(&mut m, source, &plan.spec, &plan.forms.prescale, chunk)?;
    let table = m.add_blob(Blob {
        key: "embedding_table".into(),
        data: embedding.entries,
    });
    let rotary = rotary_tables(&plan.spec, plan.contexts.last().copied().unwrap_or(0))
        .map(|bytes| m.intern_blob(&bytes));
    let layout = |m: &mut Module, alignments: &[i64], interleave: &[i64]| {
        m.add_attr(Attr::HwConstraints {
            alignments: alignments.to_vec(),
            interleave: interleave.to_vec(),
            backing: Backing::IoSurface,
        })
    };
    let common = Common {
        plan,
        table,
        scale: embedding.scale,
        rotary,
        table_layout: layout(&mut m, &[1, 1, 1, 1], &[8, 1, 1]),
        rotary_layout: layout(&mut m, &[1, 1, 32, 1], &[1, 1, 1]),
        cache_layout: cache_constraints(&mut m, plan)?,
    };
    load_embeddings(&mut m, &common);
    for &width in &plan.widths {
        gather_embeddings(&mut m, &common, width);
        rope_gather(&mut m, &common, width);
    }
    for &context in &plan.contexts {
        for &width in &plan.widths {
            let shape = Shape {
                spec: &plan.spec,
                forms: &plan.forms,
                context,
                width,
                cache_constraints: common.cache_layout,
            };
            decoder(&mut m, &common, &shape, &weights, true);
            decoder(&mut m, &common, &shape, &weights, false);
        }
    }
    // The last layer of a function without logits ends at its caches.
    drop_dead(&mut m);
    Ok(m)
}

/// Cosines and sines of every position, `f16[M, d]`, the second half of a row repeating
/// the first. Computed in f32, as `transformers` does, and rounded.
fn rotary_tables(spec: &ModelSpec, positions: usize) -> [Vec<u8>; 2] {
    let half = spec.head_dim / 2;
    let (cos, sin) = spec.rope.cos_sin(spec.head_dim, 0..positions);
    [cos, sin].map(|values| {
        let rows = values.chunks_exact(half);
        rows.flat_map(|row| row.iter().chain(row))
            .flat_map(|&v| f16::from_f32(v).to_le_bytes())
            .collect()
    })
}

fn load_embeddings(m: &mut Module, common: &Common<'_>) {
    let mut g = GraphBuilder::new(m, "load_embeddings", &[]);
    let plain = TensorType {
        encoding: None,
        ..common.table_type()
    };
    let table = g.constant_blob(plain, common.table);
    let table = g.copy_with_constraints(table, common.table_layout);
    g.finish(&[("embedding_table", table)], &[]);
}

/// The function, and the composite that does its work.
fn gather_embeddings(m: &mut Module, common: &Common<'_>, w: usize) {
    let d = common.spec().hidden;
    let ids = TensorType::new(Elem::Si32, &[1, w]);
    let body = format!("embedding_gather_{w}");
    let mut g = GraphBuilder::new(
        m,
        &body,
        &[
            ("embedding_table", Input::Tensor(common.table_type())),
            ("input_ids", Input::Tensor(ids.clone())),
            (
                "scale",
                Input::Tensor(TensorType::new(Elem::F16, &[w, 1, d])),
            ),
            (
                "final_shape",
                Input::Tensor(TensorType::new(Elem::Ui32, &[4])),
            ),
        ],
    );
    g.set_composite(
        "fused_interleaved_embedding_gather_dequant_reshape",
        &["output"],
    );
    let (table, ids_in, scale) = (g.arg(0), g.arg(1), g.arg(2));
    let table = g.copy_discarding_constraints(table);
    let ids_in = g.reshape(ids_in, &[1, w, 1]);
    let rows = g.gather_nd(table, ids_in);
    let scale = g.slice(scale, &[0; 3], &[1; 3]);
    let scale = g.reshape(scale, &[]);
    let (zero, shift) = (g.full(Elem::Si8, &[], 0.0), g.f16_scalar(0.0));
    let rows = g.blockwise_shift_scale(rows, scale, zero, shift);
    g.finish(&[("output", rows)], &[]);

    let mut g = GraphBuilder::new(
        m,
        &format!("gather_embeddings_{w}"),
        &[
            ("in_new_token_ids", Input::Tensor(ids)),
            ("embedding_table", Input::Tensor(common.table_type())),
        ],
    );
    let (ids, table) = (g.arg(0), g.arg(1));
    let scale = g.full(Elem::F16, &[w, 1, d], f64::from(common.scale));
    let shape = g.u32s(&[1, w as u32, 1, d as u32]);
    let rows = g.invoke(&body, &[table, ids, scale, shape])[0];
    g.finish(&[("gathered_embeddings", rows)], &[]);
}

fn rope_name(w: usize) -> String {
    format!("rope_gather_{w}")
}

/// The composite that looks up rotary factors, `[1, w, d]` each.
fn rope_gather(m: &mut Module, common: &Common<'_>, w: usize) {
    let mut g = GraphBuilder::new(
        m,
        &rope_name(w),
        &[
            (
                "pos_ids",
                Input::Tensor(TensorType::new(Elem::Ui16, &[1, w])),
            ),
            ("cos_cache", Input::Tensor(common.rotary_type())),
            ("sin_cache", Input::Tensor(common.rotary_type())),
        ],
    );
    g.set_composite(
        "rope_cached_cos_sin_gather",
        &["gathered_cos", "gathered_sin"],
    );
    let (positions, cos, sin) = (g.arg(0), g.arg(1), g.arg(2));
    let positions = g.cast(positions, Elem::Si32);
    let positions = g.reshape(positions, &[1, w, 1]);
    let [cos, sin] = [cos, sin].map(|table| {
        let rows = g.gather_nd(table, positions);
        g.copy_with_constraints(rows, common.rotary_layout)
    });
    g.finish(&[("gathered_cos", cos), ("gathered_sin", sin)], &[]);
}

/// `extend_{C}_{w}`, or `prompt_opt_{C}_{w}` without logits.
fn decoder(
    m: &mut Module,
    common: &Common<'_>,
    shape: &Shape<'_>,
    weights: &ChunkWeights,
    logits: bool,
) {
    let (spec, w, c) = (shape.spec, shape.width, shape.context);
    let f16 = |dims: &[usize]| TensorType::new(Elem::F16, dims);
    let cache = TensorType {
        encoding: shape.cache_constraints,
        ..f16(&[spec.layers, 1, spec.kv_heads * spec.head_dim, 1, c])
    };
    let kind = if logits { "extend" } else { "prompt_opt" };
    let mut g = GraphBuilder::new(
        m,
        &format!("{kind}_{c}_{w}"),
        &[
            (
                "transformer_input",
                Input::Tensor(f16(&[1, w, 1, spec.hidden])),
            ),
            (
                "position_ids",
                Input::Tensor(TensorType::new(Elem::Ui16, &[1, w])),
            ),
            ("in_step", Input::Tensor(TensorType::new(Elem::Si32, &[1]))),
            ("causal_mask", Input::Tensor(f16(&[1, c, 1, w]))),
            ("key_cache", Input::State(cache.clone())),
            ("value_cache", Input::State(cache)),
            ("embedding_table", Input::Tensor(common.table_type())),
        ],
    );
    let tables = common
        .rotary
        .map(|blob| g.constant_blob(common.rotary_type(), blob));
    let positions = g.arg(1);
    let factors = g.invoke(&rope_name(w), &[positions, tables[0], tables[1]]);
    let [cos, sin] = [factors[0], factors[1]].map(|factor| {
        let factor = g.copy_discarding_constraints(factor);
        g.reshape(factor, &[1, 1, w, spec.head_dim])
    });
    let host = attention::Host {
        cos,
        sin,
        step: g.arg(2),
        mask: g.arg(3),
        caches: [g.arg(4), g.arg(5)],
    };
    let mut ctx = attention::Context::open(&mut g, shape, host);
    let mut x = g.transpose(g.arg(0), &[0, 3, 2, 1]);
    for (i, layer) in weights.layers.iter().enumerate() {
        x = layer::decoder_layer(&mut g, &mut ctx, layer, i, x);
    }
    let out = match &weights.head {
        Some(head_weights) if logits => {
            let scores = head::scores(&mut g, head_weights, spec.rms_eps, x);
            let all = head::logits(&mut g, &scores);
            g.transpose(all, &[0, 2, 3, 1])
        }
        _ => ctx.probe(&mut g),
    };
    let tokens = ctx.close();
    g.finish(&[("out_logits", out)], &tokens);
}
