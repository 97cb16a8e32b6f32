//! The program as such: types, counts and sizes. What it computes is tested against
//! the runtimes.

use anemone_schemas::aimodel::check::check;
use anemone_schemas::aimodel::ir::{BlobData, Op, Type};
use anemone_schemas::drafter::{Confidence, DrafterKind};
use anemone_schemas::spec::{Rope, RopeKind};

use super::*;

fn spec(kind: DrafterKind) -> DrafterSpec {
    let dspark = kind == DrafterKind::DSpark;
    DrafterSpec {
        kind,
        hidden: 64,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        intermediate: 96,
        vocab: 128,
        rms_eps: 1e-6,
        rope: Rope {
            theta: 1e6,
            kind: RopeKind::Default,
        },
        target_layers: 8,
        taps: vec![1, 4],
        block: if dspark { 7 } else { 16 },
        mask_id: 127,
        markov_rank: if dspark { 32 } else { 0 },
        confidence: dspark.then_some(Confidence::HiddenAndMarkov),
    }
}

fn weights(m: &mut Module, spec: &DrafterSpec) -> DrafterWeights {
    let mut linear = |name: &str, [rows, cols]: [usize; 2]| {
        let part = Part::F16(BlobData::Bytes(vec![0; rows * cols * 2]));
        Linear::register(m, name, [rows, cols], part)
    };
    let (d, q) = (spec.hidden, spec.heads * spec.head_dim);
    let kv = spec.kv_heads * spec.head_dim;
    let layers = (0..spec.layers).map(|l| Layer {
        input_norm: vec![1.0; d],
        q: linear(&format!("{l}.q"), [q, d]),
        k: linear(&format!("{l}.k"), [kv, d]),
        v: linear(&format!("{l}.v"), [kv, d]),
        o: linear(&format!("{l}.o"), [d, q]),
        q_norm: vec![1.0; spec.head_dim],
        k_norm: vec![1.0; spec.head_dim],
        post_norm: vec![1.0; d],
        gate: linear(&format!("{l}.gate"), [spec.intermediate, d]),
        up: linear(&format!("{l}.up"), [spec.intermediate, d]),
        down: linear(&format!("{l}.down"), [d, spec.intermediate]),
    });
    let layers = layers.collect();
    let fuse = linear("fc", [d, spec.taps.len() * d]);
    let head = vec![linear("head.0", [96, d]), linear("head.1", [32, d])];
    let next = (spec.markov_rank > 0).then(|| linear("w2", [spec.vocab, spec.markov_rank]));
    let markov = next.map(|next| Markov {
        previous: m.add_blob(anemone_schemas::aimodel::ir::Blob {
            key: "w1".into(),
            data: BlobData::Bytes(vec![0; spec.vocab * spec.markov_rank * 2]),
        }),
        next,
    });
    DrafterWeights {
        fuse,
        fuse_norm: vec![1.0; d],
        layers,
        norm: vec![1.0; d],
        head,
        markov,
        confidence: spec.confidence.map(|_| ConfidenceWeights {
            hidden: vec![1.0; d],
            markov: vec![1.0; spec.markov_rank],
            bias: 0.0,
        }),
    }
}

fn lowered(kind: DrafterKind) -> Module {
    let plan = DrafterPlan {
        spec: spec(kind),
        contexts: vec![256, 512],
        rows: 16,
        prefill_rows: 64,
    };
    let mut m = Module::default();
    let weights = weights(&mut m, &plan.spec);
    lower_drafter(&mut m, &plan, &weights);
    check(&m).unwrap();
    m
}

fn count(m: &Module, function: &str, name: &str) -> usize {
    let region = m.region(m.graph(function).unwrap().region);
    let ops = region.ops.iter().map(|&o| m.op(o));
    ops.filter(|o: &&Op| o.name == name).count()
}

fn outputs(m: &Module, function: &str) -> Vec<(String, Elem, Vec<usize>)> {
    let graph = m.graph(function).unwrap();
    let named = graph
        .outputs
        .iter()
        .filter_map(|&(n, v)| Some((n?, m.tensor_type(v)?)));
    named
        .map(|(n, t)| (n.to_string(), t.elem, t.dims().unwrap()))
        .collect()
}

#[test]
fn both_kinds_have_two_functions_for_each_context() {
    for kind in [DrafterKind::DSpark, DrafterKind::DFlash] {
        let m = lowered(kind);
        let mut names: Vec<_> = m.graphs().iter().map(|g| g.name.to_owned()).collect();
        names.sort();
        assert_eq!(
            names,
            ["draft_256", "draft_512", "extend_256", "extend_512"]
        );
        for graph in m.graphs() {
            let states = graph
                .inputs
                .iter()
                .filter(|i| matches!(m.ty(m.value_type(i.1)), Type::Handle(_)));
            assert_eq!(states.count(), 2, "{}", graph.name);
        }
    }
}

#[test]
fn every_state_is_written_once() {
    let m = lowered(DrafterKind::DSpark);
    for function in ["draft_256", "extend_512"] {
        assert_eq!(count(&m, function, "dataflow.write_handle_v1"), 2);
        assert_eq!(count(&m, function, "primitive.slice_update_v1"), 2);
    }
}

#[test]
fn the_chain_is_unrolled_and_the_anchor_guesses() {
    let m = lowered(DrafterKind::DSpark);
    assert_eq!(count(&m, "draft_256", "primitive.gather_nd_v1"), 7);
    // One for each guess, and second and third choices of all at once.
    assert_eq!(count(&m, "draft_256", "argmax_v1"), 7 + 2);
    let three = |name: &str, elem| (name.to_string(), elem, vec![1, 7, 3]);
    assert_eq!(
        outputs(&m, "draft_256"),
        [
            three("out_ids", Elem::Ui32),
            three("out_probabilities", Elem::F32),
            ("out_confidences".to_string(), Elem::F32, vec![1, 7, 1]),
        ]
    );
    let done = ("out_done".to_string(), Elem::F16, vec![1]);
    assert_eq!(outputs(&m, "extend_256"), [done]);
}

#[test]
fn masks_guess_where_the_anchor_does_not() {
    let m = lowered(DrafterKind::DFlash);
    assert_eq!(count(&m, "draft_256", "primitive.gather_nd_v1"), 0);
    assert_eq!(count(&m, "draft_256", "argmax_v1"), 3);
    let three = |name: &str, elem| (name.to_string(), elem, vec![1, 15, 3]);
    assert_eq!(
        outputs(&m, "draft_256"),
        [
            three("out_ids", Elem::Ui32),
            three("out_probabilities", Elem::F32)
        ]
    );
}
