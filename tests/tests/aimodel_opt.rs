//! The passes of `aimodel::opt`: Apple's runtime gives the same before and after.

use std::path::Path;

use anemone_schemas::aimodel::asset::{AssetInfo, Metadata, open_asset, write_asset};
use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::check::check;
use anemone_schemas::aimodel::ir::{Blob, BlobData, Elem, Module, TensorType};
use anemone_schemas::aimodel::opt::{
    cancel_transposes, drop_dead, merge_constants, optimize, sort_tables,
};
use anemone_schemas::aimodel::summary::{Summary, summarize};
use anemone_tests::oracle::{self, Call, Report, Tensor};

fn tensor(elem: Elem, shape: &[usize]) -> Input {
    Input::Tensor(TensorType::new(elem, shape))
}

/// Reproducible numbers between -1 and 1 that f16 holds exactly.
fn noise(count: usize, seed: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 1_103 + seed * 769) % 509) as f32 / 256.0 - 1.0)
        .collect()
}

/// What a program is and gives.
struct Judged {
    info: AssetInfo,
    summary: Summary,
    report: Report,
}

fn judge(m: &Module, calls: &[Call]) -> Judged {
    check(m).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("p.aimodel");
    let info = write_asset(&path, m, &Metadata::default()).unwrap();
    Judged {
        summary: summarize(m, info.bytes),
        report: oracle::report(&path, calls).unwrap(),
        info,
    }
}

/// Runs `m` before and after `pass`: every output and state must be equal to the bit.
fn same(m: &Module, calls: &[Call], pass: impl FnOnce(&mut Module)) -> [Judged; 2] {
    let before = judge(m, calls);
    let mut after = m.clone();
    pass(&mut after);
    let after = judge(&after, calls);
    assert_eq!(before.report.functions, after.report.functions);
    for ((call, a), b) in calls
        .iter()
        .zip(&before.report.calls)
        .zip(&after.report.calls)
    {
        assert!(!a.outputs.is_empty());
        assert_eq!(a.outputs, b.outputs, "{}", call.function);
        assert_eq!(a.states, b.states, "{}", call.function);
    }
    [before, after]
}

fn count(s: &Summary, name: &str) -> u64 {
    s.operations.get(name).copied().unwrap_or(0)
}

#[test]
fn inverse_transposes_are_cancelled() {
    const TRANSPOSE: &str = "primitive.transpose_v1";
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F16, &[2, 3, 4]))]);
    let t = g.transpose(g.arg(0), &[2, 0, 1]);
    let back = g.transpose(t, &[1, 2, 0]);
    let y = g.silu(back);
    // Not inverse: stays.
    let u = g.transpose(y, &[1, 2, 0]);
    let z = g.transpose(u, &[1, 2, 0]);
    g.finish(&[("y", y), ("z", z)], &[]);
    let call = Call::new("f").input("x", Tensor::f16(&[2, 3, 4], &noise(24, 1)));
    let [before, after] = same(&m, &[call], |m| {
        assert_eq!(cancel_transposes(m), 1);
        drop_dead(m);
    });
    assert_eq!(count(&before.summary, TRANSPOSE), 4);
    assert_eq!(count(&after.summary, TRANSPOSE), 2);
}

#[test]
fn dead_operations_are_dropped_and_states_are_not() {
    let mut m = Module::default();
    let cache = Input::State(TensorType::new(Elem::F16, &[6]));
    let inputs = [("x", tensor(Elem::F16, &[6])), ("c", cache)];
    let mut g = GraphBuilder::new(&mut m, "f", &inputs);
    let x = g.arg(0);
    let token = g.token();
    let (old, token) = g.read_handle(g.arg(1), token);
    let sum = g.binary("add", old, x);
    let token = g.write_handle(g.arg(1), sum, token);
    let unread = g.unary("exp", x);
    g.silu(unread);
    let y = g.unary("abs", x);
    g.finish(&[("y", y)], &[token]);
    let call = |seed| Call::new("f").input("x", Tensor::f16(&[6], &noise(6, seed)));
    let [before, after] = same(&m, &[call(1), call(2)], |m| assert_eq!(drop_dead(m), 2));
    let operations = |j: &Judged| j.summary.functions[0].operations;
    assert_eq!(operations(&before) - operations(&after), 2);
    let state = after.report.calls[1].state("c").to_f32();
    assert!(state.iter().any(|&v| v != 0.0));
}

/// `y = W x` with a `[8, 32]` matrix of two tables.
fn product(m: &mut Module, name: &str, key: &str, codes: &[u8], tables: &[f32]) {
    let packed: Vec<u8> = codes.chunks(2).map(|p| p[0] | p[1] << 4).collect();
    let blob = m.add_blob(Blob {
        key: key.into(),
        data: BlobData::Bytes(packed),
    });
    let mut g = GraphBuilder::new(m, name, &[("x", tensor(Elem::F16, &[1, 32, 1, 4]))]);
    let i = g.constant_blob(TensorType::new(Elem::Ui4, &[8, 32, 1, 1]), blob);
    let t = g.f16s(tables, &[2, 1, 1, 1, 16, 1]);
    let w = g.lut_to_dense(i, t, 0);
    let y = g.conv1x1(g.arg(0), w);
    g.finish(&[("y", y)], &[]);
}

fn codes() -> Vec<u8> {
    (0..256).map(|i| (i * 7 % 16) as u8).collect()
}

fn products(functions: &[&str]) -> Vec<Call> {
    let x = Tensor::f16(&[1, 32, 1, 4], &noise(128, 3));
    let call = |name: &&str| Call::new(name).input("x", x.clone());
    functions.iter().map(call).collect()
}

#[test]
fn equal_constants_are_stored_once() {
    let tables: Vec<f32> = (0..32).map(|i| i as f32 / 16.0 - 1.0).collect();
    let mut m = Module::default();
    product(&mut m, "a", "first", &codes(), &tables);
    product(&mut m, "b", "second", &codes(), &tables);
    let [before, after] = same(&m, &products(&["a", "b"]), |m| {
        let savings = merge_constants(m).unwrap();
        assert_eq!((savings.blobs, savings.blob_bytes), (1, 128));
    });
    assert!(before.info.bytes - after.info.bytes >= 128);
}

#[test]
fn matrices_equal_up_to_table_order_become_one() {
    let tables: Vec<f32> = (0..32).map(|i| i as f32 / 16.0 - 1.0).collect();
    let mut m = Module::default();
    product(&mut m, "a", "first", &codes(), &tables);
    // Every table reversed, and the indices with it.
    let reversed: Vec<u8> = codes().iter().map(|c| 15 - c).collect();
    let backwards: Vec<f32> = tables
        .chunks(16)
        .flat_map(|t| t.iter().rev().copied().collect::<Vec<_>>())
        .collect();
    product(&mut m, "b", "second", &reversed, &backwards);
    let [before, after] = same(&m, &products(&["a", "b"]), |m| {
        assert_eq!(sort_tables(m), 1);
        merge_constants(m).unwrap();
        drop_dead(m);
    });
    // Indices and tables of one matrix less.
    assert!(before.info.bytes - after.info.bytes >= 128 + 64);
    let y = after.report.calls.iter().map(|c| c.get("y").to_f32());
    let y: Vec<Vec<f32>> = y.collect();
    assert_eq!(y[0], y[1]);
}

#[test]
fn a_program_of_another_writer_is_the_same_when_optimized() {
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/aimodel-samples");
    let m = open_asset(&samples.join("p4_mlp.aimodel")).unwrap();
    let graph = m.graphs().into_iter().next().unwrap();
    let mut call = Call::new(graph.name);
    for (name, value) in &graph.inputs {
        let t = m.tensor_type(*value).unwrap();
        let shape = t.dims().unwrap();
        assert_eq!(t.elem, Elem::F16);
        let values = noise(shape.iter().product(), 1);
        call = call.input(name.unwrap(), Tensor::f16(&shape, &values));
    }
    same(&m, &[call], |m| {
        optimize(m).unwrap();
    });
}
