//! The graph as such: types, counts and sizes. What it computes is tested against
//! the runtimes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anemone_schemas::aimodel::asset::{Metadata, write_asset};
use anemone_schemas::aimodel::check::check;
use anemone_schemas::aimodel::ir::{BlobData, Elem, Graph, Module, Op, Type, ValueId};
use anemone_schemas::spec::{Architecture, ModelSpec, Rope, RopeKind};
use anemone_schemas::store::StoredLut;

use super::*;
use crate::lint::{LintOptions, Severity, lint, moves};

fn spec([layers, hidden, intermediate, heads]: [usize; 4], vocab: usize) -> ModelSpec {
    ModelSpec {
        architecture: Architecture::Qwen3,
        hidden,
        layers,
        heads,
        kv_heads: 8,
        head_dim: 128,
        intermediate,
        vocab,
        max_position: 40_960,
        rms_eps: 1e-6,
        rope: Rope {
            theta: 1e6,
            kind: RopeKind::Default,
        },
        tie_word_embeddings: false,
        bos: None,
        eos: vec![],
    }
}

fn qwen3_8b(layers: usize) -> ModelSpec {
    spec([layers, 4096, 12_288, 32], 151_936)
}

fn small() -> ModelSpec {
    ModelSpec {
        kv_heads: 2,
        head_dim: 32,
        ..spec([2, 128, 384, 4], 4096)
    }
}

fn shapes(spec: &ModelSpec) -> Shapes<'_> {
    Shapes {
        spec,
        bits: 4,
        group_rows: 32,
    }
}

fn plan(spec: &ModelSpec, chunks: usize, context: usize, forms: Forms) -> TargetPlan {
    TargetPlan {
        forms,
        ..plan_chunks(spec, chunks, context, &[], false).unwrap()
    }
}

/// The only chunk of a model.
fn lowered(spec: &ModelSpec, context: usize, forms: Forms) -> Module {
    let plan = plan(spec, 1, context, forms);
    let module = lower_chunk(&shapes(spec), &plan, &plan.chunks[0]).unwrap();
    check(&module).unwrap();
    module
}

fn ops<'a>(m: &'a Module, function: &str, name: &str) -> Vec<&'a Op> {
    let graph = m.graph(function).unwrap();
    m.region(graph.region)
        .ops
        .iter()
        .map(|&o| m.op(o))
        .filter(|o| o.name == name)
        .collect()
}

fn dims(m: &Module, v: ValueId) -> Vec<usize> {
    m.tensor_type(v).unwrap().dims().unwrap()
}

fn output(m: &Module, function: &str, name: &str) -> Option<(Elem, Vec<usize>)> {
    let graph: Graph<'_> = m.graph(function)?;
    let value = graph.outputs.iter().find(|o| o.0 == Some(name))?.1;
    Some((m.tensor_type(value)?.elem, dims(m, value)))
}

fn every_form() -> Vec<Forms> {
    let mut all = Vec::new();
    for argmax in [
        ArgmaxForm::SlicedF16,
        ArgmaxForm::SlicedF32,
        ArgmaxForm::Host,
    ] {
        for attention in [AttentionForm::Channel, AttentionForm::Row] {
            for cache_layout in [CacheLayout::Plain, CacheLayout::Interleaved] {
                for (prescale, silu) in [
                    (Prescale::None, SiluForm::Tanh),
                    (Prescale::Uniform(4), SiluForm::Operation),
                ] {
                    all.push(Forms {
                        argmax,
                        valid_vocab: Some(4090),
                        attention,
                        prescale,
                        cache_layout,
                        silu,
                    });
                }
            }
        }
    }
    all
}

#[test]
fn every_form_is_well_formed_and_free_of_lint_errors() {
    let spec = small();
    for forms in every_form() {
        let m = lowered(&spec, 512, forms.clone());
        let errors: Vec<_> = lint(&m, &LintOptions::default())
            .into_iter()
            .filter(|f| f.severity == Severity::Error)
            .collect();
        assert!(errors.is_empty(), "{forms:?}: {errors:#?}");
    }
}

#[test]
fn published_shapes_are_free_of_lint_errors_at_all_contexts() {
    for dims in [
        [2, 2560, 9728, 32],
        [2, 4096, 12_288, 32],
        [2, 5120, 17_408, 40],
    ] {
        let spec = spec(dims, 151_936);
        let forms = Forms {
            valid_vocab: Some(151_669),
            ..Forms::default()
        };
        let m = lowered(&spec, 16_384, forms);
        let findings = lint(&m, &LintOptions::default());
        let errors: Vec<_> = findings
            .iter()
            .filter(|f| f.severity == Severity::Error)
            .collect();
        assert!(errors.is_empty(), "{dims:?}: {errors:#?}");
        // Rules that Apple's own export breaks and this one keeps.
        for rule in ["B2", "B3", "B4", "C1", "C7", "C14"] {
            assert!(findings.iter().all(|f| f.rule != rule), "{rule}");
        }
    }
}

#[test]
fn a_layer_transposes_once_and_a_function_four_times() {
    let m = lowered(&qwen3_8b(2), 4096, Forms::default());
    for (name, moves) in moves(&m) {
        assert_eq!(moves.layers, 2, "{name}");
        // The input and the two rotary tables, and the keys of each layer.
        assert_eq!(moves.transposes, 3 + 2, "{name}");
    }
}

#[test]
fn the_output_layer_of_a_large_vocabulary_is_cut_and_merged() {
    let forms = Forms {
        valid_vocab: Some(151_669),
        ..Forms::default()
    };
    let m = lowered(&qwen3_8b(1), 256, forms);
    let function = "extend_256_16";
    let argmax = ops(&m, function, "argmax_v1");
    let rows: Vec<usize> = argmax.iter().map(|o| dims(&m, o.operands[0])[1]).collect();
    assert_eq!(rows.iter().sum::<usize>(), 151_669);
    assert!(rows.iter().all(|&r| r <= MAX_HEAD_ROWS));
    assert_eq!(
        ops(&m, function, "primitive.conv2d_v1").len(),
        7 + rows.len()
    );
    assert_eq!(
        ops(&m, function, "primitive.where_v1").len(),
        rows.len() - 1
    );
    assert_eq!(
        output(&m, function, "out_ids"),
        Some((Elem::Ui32, vec![1, 1, 1, 16]))
    );
}

#[test]
fn slices_of_the_output_layer_tile_its_bytes() {
    let spec = qwen3_8b(1);
    let m = lowered(&spec, 256, Forms::default());
    let lut: StoredLut = shapes(&spec).matrix("lm_head.weight").unwrap();
    for (part, (offset, len)) in [("indices", lut.indices), ("tables", lut.tables)] {
        let mut ranges: Vec<(u64, u64)> = m
            .blobs()
            .iter()
            .filter(|b| b.key.starts_with("lm_head") && b.key.ends_with(part))
            .map(|b| match &b.data {
                BlobData::File { offset, len, .. } => (*offset, *len),
                _ => panic!("`{}` is in memory", b.key),
            })
            .collect();
        ranges.sort_unstable();
        assert_eq!(ranges[0].0, offset);
        assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 == w[1].0));
        let last = ranges[ranges.len() - 1];
        assert_eq!(last.0 + last.1, offset + len);
    }
}

#[test]
fn logits_have_all_rows_in_order() {
    let spec = qwen3_8b(1);
    let mut plan = plan(&spec, 1, 256, Forms::default());
    plan.with_logits = true;
    let m = lower_chunk(&shapes(&spec), &plan, &plan.chunks[0]).unwrap();
    let expected = Some((Elem::F16, vec![1, 151_936, 1, 16]));
    assert_eq!(output(&m, "logits_256_16", "out_logits"), expected);
    let host = Forms {
        argmax: ArgmaxForm::Host,
        ..Forms::default()
    };
    let m = lowered(&spec, 256, host);
    assert_eq!(output(&m, "extend_256_16", "out_logits"), expected);
    assert_eq!(output(&m, "extend_256_16", "out_ids"), None);
}

#[test]
fn a_small_vocabulary_is_chosen_from_as_it_is() {
    let m = lowered(&small(), 256, Forms::default());
    let argmax = ops(&m, "extend_256_16", "argmax_v1");
    assert_eq!(argmax.len(), 1);
    assert!(ops(&m, "extend_256_16", "reduce_max_v1").is_empty());
    let graph = m.graph("extend_256_16").unwrap();
    let ids = graph
        .outputs
        .iter()
        .find(|o| o.0 == Some("out_ids"))
        .unwrap()
        .1;
    assert_eq!(argmax[0].results, [ids]);
}

#[test]
fn long_contexts_have_one_row_softmax_per_key_group() {
    let m = lowered(&qwen3_8b(1), 8192, Forms::default());
    let softmax = |name: &str| -> Vec<Vec<usize>> {
        ops(&m, name, "softmax_v1")
            .iter()
            .map(|o| dims(&m, o.operands[0]))
            .collect()
    };
    assert_eq!(softmax("extend_4096_16"), vec![vec![1, 4096, 32, 16]]);
    assert_eq!(softmax("extend_8192_16"), vec![vec![1, 4, 16, 8192]; 8]);
    assert_eq!(softmax("extend_8192_64"), vec![vec![1, 4, 64, 8192]; 8]);
}

#[test]
fn prescaling_touches_the_norms_it_names() {
    let count = |prescale: Prescale| {
        let forms = Forms {
            prescale,
            ..Forms::default()
        };
        let m = lowered(&small(), 256, forms);
        ops(&m, "extend_256_16", "broadcasting_mul_v1").len()
    };
    let plain = count(Prescale::None);
    // Two norms of each of two layers, and the last.
    assert_eq!(count(Prescale::Uniform(4)), plain + 5);
    let table = BTreeMap::from([
        ("model.layers.1.input_layernorm.weight".to_owned(), 9000.0),
        ("model.layers.0.self_attn.q_norm.weight".to_owned(), 300.0),
        ("model.norm.weight".to_owned(), 255.0),
    ]);
    assert_eq!(count(Prescale::Magnitudes(table)), plain + 2);
}

#[test]
fn interleaved_caches_have_one_row_length_in_all_functions() {
    let m = lowered(&small(), 1024, Forms::default());
    for graph in m.graphs() {
        for (name, v) in &graph.inputs {
            let Type::Handle(inner) = m.ty(m.value_type(*v)) else {
                continue;
            };
            let Type::Tensor(t) = m.ty(*inner) else {
                panic!("{name:?} holds no tensor")
            };
            let Some(Attr::HwConstraints {
                alignments,
                interleave,
                backing,
            }) = t.encoding.map(|e| m.attr(e))
            else {
                panic!("{name:?} is not constrained")
            };
            assert_eq!(alignments[..], [1, 1, 1, 1, 8 * 1024, 1]);
            assert_eq!(interleave[..], [1, 1, 8, 1, 1]);
            assert_eq!(*backing, Backing::IoSurface);
        }
    }
}

#[test]
fn qwen3_8b_falls_into_four_chunks_of_the_known_sizes() {
    let spec = qwen3_8b(36);
    let plan = plan(&spec, 4, 4096, Forms::default());
    let source = shapes(&spec);
    let sizes: Vec<ChunkSize> = plan
        .chunks
        .iter()
        .map(|c| chunk_size(&source, &plan, c).unwrap())
        .collect();
    assert!(plan.chunks.iter().all(|c| c.layers.len() == 9));
    // Nine layers of 192,937,984 weights: half a byte each, a table of 32 bytes for
    // 32 rows, and norms.
    let rows = 2 * 4096 + 2 * 1024 + 2 * 12_288 + 4096;
    let layer = 192_937_984 / 2 + rows + (2 * 4096 + 2 * 128) * 2;
    assert!(sizes[0].weight_bytes >= 9 * layer);
    assert!(sizes[0].weight_bytes < 9 * layer + 100_000);
    assert!(
        (860_000_000..890_000_000).contains(&sizes[0].file_bytes),
        "{sizes:?}"
    );
    assert!(
        (1_150_000_000..1_250_000_000).contains(&sizes[3].file_bytes),
        "{sizes:?}"
    );
    let overhead = sizes[0].file_bytes - sizes[0].weight_bytes;
    assert!(overhead < 4_000_000, "{overhead} bytes are no weights");
}

#[test]
fn as_few_chunks_as_a_limit_allows() {
    let spec = qwen3_8b(36);
    let source = shapes(&spec);
    let whole = plan(&spec, 1, 256, Forms::default());
    let chunks = |limit: u64| {
        whole
            .clone()
            .rechunk(Chunks::MaxBytes(limit), &source)
            .map(|p| p.chunks.len())
    };
    assert_eq!(chunks(4_000_000_000).unwrap(), 1);
    assert_eq!(chunks(1_300_000_000).unwrap(), 4);
    assert!(chunks(100_000_000).is_err());
}

/// Matrices of zeros in one file.
struct Zeros<'a>(Shapes<'a>, PathBuf);

impl WeightSource for Zeros<'_> {
    fn matrix(&self, name: &str) -> Result<StoredLut, Error> {
        let path = self.1.clone();
        self.0.matrix(name).map(|lut| StoredLut { path, ..lut })
    }

    fn norm(&self, name: &str) -> Result<Vec<f32>, Error> {
        self.0.norm(name)
    }
}

#[test]
fn the_predicted_size_is_that_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let zeros = dir.path().join("zeros");
    std::fs::write(&zeros, vec![0; 1 << 20]).unwrap();
    let spec = ModelSpec {
        vocab: 32_800,
        ..small()
    };
    let source = Zeros(shapes(&spec), zeros);
    let zeros_needed = source.matrix("lm_head.weight").unwrap().indices;
    std::fs::write(
        &source.1,
        vec![0; (zeros_needed.0 + zeros_needed.1) as usize],
    )
    .unwrap();
    for forms in every_form() {
        let plan = plan(&spec, 2, 512, forms);
        for (i, chunk) in plan.chunks.iter().enumerate() {
            let predicted = chunk_size(&source, &plan, chunk).unwrap();
            let module = lower_chunk(&source, &plan, chunk).unwrap();
            let asset = dir.path().join(format!("{i}.aimodel"));
            let written = write_asset(&asset, &module, &Metadata::default()).unwrap();
            assert_eq!(predicted.file_bytes, written.bytes);
            std::fs::remove_dir_all(asset).unwrap();
        }
    }
}

#[test]
fn plans_out_of_range_are_refused() {
    let spec = qwen3_8b(36);
    for (chunks, context, taps) in [
        (0, 4096, vec![]),
        (37, 4096, vec![]),
        (4, 32_768, vec![]),
        (4, 300, vec![]),
        (4, 4096, vec![35]),
    ] {
        assert!(plan_chunks(&spec, chunks, context, &taps, false).is_err());
    }
    let plan = plan_chunks(&spec, 4, 4096, &[1, 9, 17, 25, 33], false).unwrap();
    let taps: Vec<_> = plan.chunks.iter().map(|c| c.taps.clone()).collect();
    assert_eq!(taps, [vec![1], vec![9, 17], vec![25], vec![33]]);
}
