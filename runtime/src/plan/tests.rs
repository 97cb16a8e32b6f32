//! Properties of whole plans: states, last uses, live rows, row independence.

use std::sync::Arc;

use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Blob, BlobData, Elem, Module, TensorType, ValueId};
use half::f16;

use super::{Plan, RunOptions};
use crate::error::{ProgramError, RunError};
use crate::kernels::Pool;
use crate::program::Program;
use crate::tensor::Tensor;

fn tensor(elem: Elem, shape: &[usize]) -> Input {
    Input::Tensor(TensorType::new(elem, shape))
}

fn state(shape: &[usize]) -> Input {
    Input::State(TensorType::new(Elem::F16, shape))
}

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut s = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..n)
        .map(|_| {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn halves(shape: &[usize], values: &[f32]) -> Tensor {
    let v: Vec<f16> = values.iter().map(|&x| f16::from_f32(x)).collect();
    Tensor::new(shape, v).unwrap()
}

fn random(shape: &[usize], seed: u32) -> Tensor {
    halves(shape, &noise(shape.iter().product(), seed))
}

fn plan(module: &Module, name: &str, threads: usize) -> Plan {
    let pool = Arc::new(Pool::new(threads));
    Program::from_module(module.clone(), pool)
        .unwrap()
        .plan(name)
        .unwrap()
}

#[test]
fn a_value_read_before_a_write_stays_what_it_was() {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(
        &mut m,
        "main",
        &[("x", tensor(Elem::F16, &[1, 2])), ("kv", state(&[4, 2]))],
    );
    let (x, kv) = (g.arg(0), g.arg(1));
    let t = g.token();
    let (old, t) = g.read_handle(kv, t);
    let new = g.slice_update(old, &[1, 0], &[2, 2], x);
    let t = g.write_handle(kv, new, t);
    let (now, t) = g.read_handle(kv, t);
    let twice = g.broadcasting("add", now, now);
    let t = g.write_handle(kv, twice, t);
    g.finish(&[("old", old), ("now", now)], &[t]);
    let p = plan(&m, "main", 1);
    let mut kv = halves(&[4, 2], &[1., 2., 3., 4., 5., 6., 7., 8.]);
    let x = halves(&[1, 2], &[-1., -2.]);
    let out = p.run(&[("x", &x)], &mut [("kv", &mut kv)]).unwrap();
    assert_eq!(out[0].1, halves(&[4, 2], &[1., 2., 3., 4., 5., 6., 7., 8.]));
    assert_eq!(
        out[1].1,
        halves(&[4, 2], &[1., 2., -1., -2., 5., 6., 7., 8.])
    );
    assert_eq!(kv, halves(&[4, 2], &[2., 4., -2., -4., 10., 12., 14., 16.]));
}

/// Writes a row at a run-time offset, twice, through invoked graphs and
/// constrained copies as exported programs do.
fn two_writes(m: &mut Module) {
    let mut g = GraphBuilder::new(
        m,
        "write",
        &[
            ("x", tensor(Elem::F16, &[1, 2])),
            ("at", tensor(Elem::Si32, &[1])),
            ("kv", state(&[4, 2])),
        ],
    );
    g.set_private();
    let (x, at, kv) = (g.arg(0), g.arg(1), g.arg(2));
    let t = g.token();
    let (old, t) = g.read_handle(kv, t);
    let (zero, one, two) = (g.i32s(&[0]), g.i32s(&[1]), g.i32s(&[2]));
    let end = g.binary("add", at, one);
    let start = g.concat(0, &[at, zero]);
    let end = g.concat(0, &[end, two]);
    let new = g.slice_update(old, start, end, x);
    let t = g.write_handle(kv, new, t);
    g.finish(&[], &[t]);
    let mut g = GraphBuilder::new(
        m,
        "main",
        &[
            ("x", tensor(Elem::F16, &[1, 2])),
            ("at", tensor(Elem::Si32, &[1])),
            ("kv", state(&[4, 2])),
        ],
    );
    let (x, at, kv) = (g.arg(0), g.arg(1), g.arg(2));
    let t = g.invoke("write", &[x, at, kv])[0];
    let (now, t) = g.read_handle(kv, t);
    let sum = g.reduce_sum(now, &[0, 1]);
    let x2 = g.binary("add", x, x);
    let new = g.slice_update(now, &[0, 0], &[1, 2], x2);
    let t = g.write_handle(kv, new, t);
    g.finish(&[("sum", sum)], &[t]);
}

#[test]
fn updating_a_state_does_not_copy_it() {
    let mut m = Module::default();
    two_writes(&mut m);
    let p = plan(&m, "main", 1);
    let mut kv = halves(&[4, 2], &[0.; 8]);
    let x = halves(&[1, 2], &[3., 4.]);
    let before = kv.as_f16().unwrap().as_ptr();
    for at in [2i32, 3] {
        let at = Tensor::new(&[1], vec![at]).unwrap();
        let sum = p
            .run(&[("at", &at), ("x", &x)], &mut [("kv", &mut kv)])
            .unwrap();
        assert_eq!(kv.as_f16().unwrap().as_ptr(), before);
        assert!(sum[0].1.as_f16().unwrap()[0].to_f32() >= 7.0);
    }
    assert_eq!(kv, halves(&[4, 2], &[6., 8., 0., 0., 3., 4., 3., 4.]));
    // A tensor the caller still holds elsewhere is not written through.
    let keep = kv.clone();
    let at = Tensor::new(&[1], vec![1i32]).unwrap();
    p.run(&[("at", &at), ("x", &x)], &mut [("kv", &mut kv)])
        .unwrap();
    assert_eq!(keep, halves(&[4, 2], &[6., 8., 0., 0., 3., 4., 3., 4.]));
}

#[test]
fn an_offset_out_of_range_is_an_error_that_names_the_operation() {
    let mut m = Module::default();
    two_writes(&mut m);
    let p = plan(&m, "main", 1);
    let mut kv = halves(&[4, 2], &[1.; 8]);
    let x = halves(&[1, 2], &[3., 4.]);
    let at = Tensor::new(&[1], vec![4i32]).unwrap();
    let e = p
        .run(&[("at", &at), ("x", &x)], &mut [("kv", &mut kv)])
        .unwrap_err();
    assert!(
        matches!(&e, RunError::Op { function, op, .. } if function == "write" && op == "primitive.slice_update_v1"),
        "{e}"
    );
    assert_eq!(kv, halves(&[4, 2], &[0.; 8]));
}

#[test]
fn wrong_arguments_are_named() {
    let mut m = Module::default();
    two_writes(&mut m);
    let p = plan(&m, "main", 1);
    let mut kv = halves(&[4, 2], &[1.; 8]);
    let (x, at) = (
        halves(&[1, 2], &[3., 4.]),
        Tensor::new(&[1], vec![0u32]).unwrap(),
    );
    let e = |r: Result<_, RunError>| r.map(|_: Vec<_>| ()).unwrap_err().to_string();
    let message = e(p.run(&[("at", &at), ("x", &x)], &mut [("kv", &mut kv)]));
    assert_eq!(
        message,
        "function `main`: `at` is tensor<1xui32>, expected tensor<1xsi32>"
    );
    let message = e(p.run(&[("x", &x)], &mut [("kv", &mut kv)]));
    assert_eq!(message, "function `main`: missing input `at`");
    let message = e(p.run(&[], &mut [("cache", &mut kv)]));
    assert_eq!(message, "function `main`: `cache` is not a declared state");
}

#[test]
fn an_operation_outside_the_table_is_refused_when_planned() {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "main", &[("x", tensor(Elem::F16, &[4, 2]))]);
    let y = g.unary("exp", g.arg(0));
    let graph = g.finish(&[("y", y)], &[]);
    let first = m.region(m.op(graph).regions[0]).ops[0];
    m.op_mut(first).name = "primitive.acosh_v1".into();
    let program = Program::from_module(m, Arc::new(Pool::new(1))).unwrap();
    let e = program.plan("main").unwrap_err();
    assert!(
        matches!(&e, ProgramError::Op { function, op, index: 0, .. } if function == "main" && op == "primitive.acosh_v1"),
        "{e}"
    );
    assert!(matches!(
        program.plan("nope"),
        Err(ProgramError::NoFunction { .. })
    ));
}

const D: usize = 64;
const HEADS: usize = 2;
const C: usize = 64;
const VOCAB: usize = 96;

/// A LUT4 weight `[rows, cols, 1, 1]` with tables for 32 rows each.
fn lut_weight(g: &mut GraphBuilder<'_>, rows: usize, cols: usize, seed: u32) -> ValueId {
    let tables: Vec<f32> = noise(rows / 32 * 16, seed)
        .iter()
        .map(|x| x * 0.2)
        .collect();
    let indices: Vec<u8> = noise(rows * cols / 2, seed + 1)
        .iter()
        .map(|x| ((x + 1.0) * 127.9) as u8)
        .collect();
    let count = g.module().blobs().len();
    let blob = g.module().add_blob(Blob {
        key: format!("w{seed}_{count}"),
        data: BlobData::Bytes(indices),
    });
    let indices = g.constant_blob(TensorType::new(Elem::Ui4, &[rows, cols, 1, 1]), blob);
    let table = g.f16s(&tables, &[rows / 32, 1, 1, 1, 16, 1]);
    g.lut_to_dense(indices, table, 0)
}

/// One attention layer with a head that gives ids, for calls of `w` rows.
fn attention(m: &mut Module, w: usize) -> String {
    let name = format!("extend_{C}_{w}");
    let d = D / HEADS;
    let mut g = GraphBuilder::new(
        m,
        &name,
        &[
            ("x", tensor(Elem::F16, &[1, w, 1, D])),
            ("cos", tensor(Elem::F16, &[1, 1, w, d])),
            ("step", tensor(Elem::Si32, &[1])),
            ("mask", tensor(Elem::F16, &[1, C, 1, w])),
            ("k", state(&[1, 1, D, 1, C])),
            ("v", state(&[1, 1, D, 1, C])),
        ],
    );
    let [x, cos, step, mask, ks, vs] = [0, 1, 2, 3, 4, 5].map(|i| g.arg(i));
    let square = g.binary("mul", x, x);
    let mean = g.reduce_mean(square, &[3]);
    let eps = g.f16_scalar(1e-5);
    let mean = g.broadcasting("add", mean, eps);
    let scale = g.unary("rsqrt", mean);
    let normed = g.broadcasting("mul", x, scale);
    let normed = g.transpose(normed, &[0, 3, 2, 1]);
    let project = |g: &mut GraphBuilder<'_>, seed, x| {
        let weight = lut_weight(g, D, D, seed);
        g.conv1x1(x, weight)
    };
    let (q, k, v) = (
        project(&mut g, 10, normed),
        project(&mut g, 20, normed),
        project(&mut g, 30, normed),
    );
    let q = g.transpose(q, &[0, 3, 2, 1]);
    let q = g.reshape(q, &[1, w, HEADS, d]);
    let q = g.transpose(q, &[0, 2, 1, 3]);
    let q = g.broadcasting("mul", q, cos);
    let width = g.i32s(&[w as i32]);
    let end = g.binary("add", step, width);
    let mut tokens = Vec::new();
    let mut caches = Vec::new();
    for (state, new) in [(ks, k), (vs, v)] {
        let t = g.token();
        let (old, t) = g.read_handle(state, t);
        let (head, tail) = (g.i32s(&[0, 0, 0, 0]), g.i32s(&[1, 1, D as i32, 1]));
        let (start, end) = (g.concat(0, &[head, step]), g.concat(0, &[tail, end]));
        let new = g.reshape(new, &[1, 1, D, 1, w]);
        let all = g.slice_update(old, start, end, new);
        let t = g.write_handle(state, all, t);
        let (now, t) = g.read_handle(state, t);
        let layer = g.slice(now, &[0, 0, 0, 0, 0], &[1, 1, D as i32, 1, C as i32]);
        caches.push(g.reshape(layer, &[1, HEADS, d, C]));
        tokens.push(t);
    }
    let rows_mask = g.transpose(mask, &[0, 2, 3, 1]);
    let mut heads = Vec::new();
    let qs = g.split(q, 1, &[1; HEADS]);
    let kh = g.split(caches[0], 1, &[1; HEADS]);
    let vh = g.split(caches[1], 1, &[1; HEADS]);
    for h in 0..HEADS {
        let scores = g.batch_matmul(qs[h], kh[h]);
        let scores = g.broadcasting("add", scores, rows_mask);
        let p = g.softmax(scores, 3);
        let values = g.transpose(vh[h], &[0, 1, 3, 2]);
        let o = g.batch_matmul(p, values);
        heads.push(g.transpose(o, &[0, 3, 1, 2]));
    }
    let o = g.concat(1, &heads);
    let weight = lut_weight(&mut g, D, D, 40);
    let o = g.conv1x1(o, weight);
    let back = g.transpose(o, &[0, 3, 2, 1]);
    let hidden = g.binary("add", back, x);
    let last = g.transpose(hidden, &[0, 3, 2, 1]);
    let weight = lut_weight(&mut g, VOCAB, D, 50);
    let logits = g.conv1x1(last, weight);
    let ids = g.argmax(logits, 1);
    g.finish(&[("hidden", hidden), ("ids", ids)], &tokens);
    name
}

struct Call {
    hidden: Vec<f16>,
    logits: Vec<Vec<f32>>,
    key: Tensor,
}

/// Rows `rows` of the same text at the front of a call of width `w`; the rest is
/// filled from `other`.
fn call(m: &Module, w: usize, rows: usize, other: u32, threads: usize, live: bool) -> Call {
    let p = plan(m, &format!("extend_{C}_{w}"), threads);
    let d = D / HEADS;
    let fill = |shape: [usize; 4], per_row: usize, seed: u32| {
        let mut v = noise(rows * per_row, seed);
        v.extend(noise((w - rows) * per_row, other));
        halves(&shape, &v)
    };
    let x = fill([1, w, 1, D], D, 1);
    let cos = fill([1, 1, w, d], d, 2);
    let mut mask = vec![-40_000.0; C * w];
    for row in 0..w {
        for slot in 0..=row.min(C - 1) {
            mask[slot * w + row] = 0.0;
        }
    }
    let mask = halves(&[1, C, 1, w], &mask);
    let step = Tensor::new(&[1], vec![0i32]).unwrap();
    let (mut k, mut v) = (
        halves(&[1, 1, D, 1, C], &[0.; D * C]),
        halves(&[1, 1, D, 1, C], &[0.; D * C]),
    );
    let options = RunOptions {
        live: live.then_some((w, rows)),
        keep_argmax_inputs: true,
    };
    let out = p
        .run_with(
            &[("x", &x), ("cos", &cos), ("step", &step), ("mask", &mask)],
            &mut [("k", &mut k), ("v", &mut v)],
            &options,
        )
        .unwrap();
    let ids = out.outputs[1].1.as_u32().unwrap().to_vec();
    let logits: Vec<Vec<f32>> = (0..rows).map(|r| out.argmax[0].row(r)).collect();
    for (id, row) in ids.iter().zip(&logits) {
        assert!(row.iter().all(|x| x <= &row[*id as usize]));
    }
    Call {
        hidden: out.outputs[0].1.as_f16().unwrap()[..rows * D].to_vec(),
        logits,
        key: k,
    }
}

#[test]
fn a_row_has_the_same_bits_at_any_width_beside_any_rows_on_any_threads() {
    let mut m = Module::default();
    attention(&mut m, 16);
    attention(&mut m, 64);
    let base = call(&m, 16, 5, 7, 1, false);
    assert!(base.hidden.iter().all(|x| x.is_finite()));
    for (w, other, threads) in [(16, 8, 1), (64, 7, 1), (64, 9, 2), (16, 7, 3)] {
        let again = call(&m, w, 5, other, threads, false);
        assert_eq!(again.hidden, base.hidden, "width {w}, others {other}");
        assert_eq!(again.logits, base.logits, "width {w}, others {other}");
    }
}

#[test]
fn live_rows_are_computed_and_the_others_are_zero() {
    let mut m = Module::default();
    attention(&mut m, 16);
    let (all, live) = (call(&m, 16, 6, 7, 1, false), call(&m, 16, 6, 7, 2, true));
    assert_eq!(all.hidden, live.hidden);
    assert_eq!(all.logits, live.logits);
    let (a, b) = (all.key.as_f16().unwrap(), live.key.as_f16().unwrap());
    for channel in 0..D {
        let slots = channel * C..channel * C + 16;
        assert_eq!(
            a[slots.start..slots.start + 6],
            b[slots.start..slots.start + 6]
        );
        assert!(
            b[slots.start + 6..slots.end]
                .iter()
                .all(|x| *x == f16::ZERO)
        );
    }
}

#[test]
fn weights_in_the_file_give_what_the_dense_matrix_gives() {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "main", &[("x", tensor(Elem::F16, &[1, 64, 1, 3]))]);
    let x = g.arg(0);
    let weight = lut_weight(&mut g, 96, 64, 5);
    let fused = g.conv1x1(x, weight);
    let matrix = g.reshape(weight, &[96, 64]);
    let rows = g.reshape(x, &[64, 3]);
    let plain = g.batch_matmul(matrix, rows);
    g.finish(&[("fused", fused), ("plain", plain)], &[]);
    let p = plan(&m, "main", 1);
    let out = p
        .run(&[("x", &random(&[1, 64, 1, 3], 3))], &mut [])
        .unwrap();
    let (a, b) = (out[0].1.as_f16().unwrap(), out[1].1.as_f16().unwrap());
    for (a, b) in a.iter().zip(b) {
        assert!((a.to_f32() - b.to_f32()).abs() <= 2e-3 * b.to_f32().abs().max(0.5));
    }
}

#[test]
fn a_table_look_up_transposed_feeds_a_product_from_the_file() {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "main", &[("x", tensor(Elem::F16, &[1, 3, 64]))]);
    let x = g.arg(0);
    let blob = g.module().add_blob(Blob {
        key: "w".into(),
        data: BlobData::Bytes(
            noise(48 * 64 * 3 / 8, 9)
                .iter()
                .map(|x| (x * 127.0) as i8 as u8)
                .collect(),
        ),
    });
    let indices = g.constant_blob(TensorType::new(Elem::Ui3, &[48, 64]), blob);
    let table = g.f16s(&noise(2 * 8, 4), &[2, 1, 8, 1]);
    let dense = g.lut_to_dense(indices, table, 0);
    let weight = g.transpose(dense, &[1, 0]);
    let y = g.broadcasting_batch_matmul(x, weight);
    let same = g.transpose(x, &[0, 2, 1]);
    let z = g.broadcasting_batch_matmul(dense, same);
    let z = g.transpose(z, &[0, 2, 1]);
    g.finish(&[("y", y), ("z", z)], &[]);
    let p = plan(&m, "main", 1);
    assert!(
        p.steps
            .iter()
            .any(|s| matches!(s.kind, super::kind::Kind::WeightMatmul { .. }))
    );
    let out = p.run(&[("x", &random(&[1, 3, 64], 3))], &mut []).unwrap();
    let (a, b) = (out[0].1.as_f16().unwrap(), out[1].1.as_f16().unwrap());
    for (a, b) in a.iter().zip(b) {
        assert!((a.to_f32() - b.to_f32()).abs() <= 2e-3 * b.to_f32().abs().max(0.5));
    }
}

/// Integers with a scale per row are read in place; those that are shifted as well are
/// made dense. Both give the product with the values that they stand for.
#[test]
fn integers_scaled_by_row_feed_a_product_from_the_file() {
    let (rows, cols) = (48, 64);
    for shift in [0.0, 0.25] {
        let mut m = Module::default();
        let mut g = GraphBuilder::new(&mut m, "main", &[("x", tensor(Elem::F16, &[1, 3, cols]))]);
        let entries: Vec<i8> = noise(rows * cols, 9)
            .iter()
            .map(|x| (x * 127.0) as i8)
            .collect();
        let scales: Vec<f32> = noise(rows, 4)
            .iter()
            .map(|x| f16::from_f32((x + 1.5) / 64.0).to_f32())
            .collect();
        let blob = g.module().add_blob(Blob {
            key: "w".into(),
            data: BlobData::Bytes(entries.iter().map(|&e| e as u8).collect()),
        });
        let (x, by_row) = (g.arg(0), [rows, 1]);
        let values = g.constant_blob(TensorType::new(Elem::Si8, &[rows, cols]), blob);
        let scale = g.f16s(&scales, &by_row);
        let zero = g.full(Elem::Si8, &by_row, 0.0);
        let after = g.full(Elem::F16, &by_row, shift);
        let dense = g.blockwise_shift_scale(values, scale, zero, after);
        let weight = g.transpose(dense, &[1, 0]);
        let y = g.broadcasting_batch_matmul(x, weight);
        g.finish(&[("y", y)], &[]);
        let p = plan(&m, "main", 1);
        let in_place = |s: &super::Step| matches!(s.kind, super::kind::Kind::WeightMatmul { .. });
        assert_eq!(p.steps.iter().any(in_place), shift == 0.0);
        let x = random(&[1, 3, cols], 3);
        let out = p.run(&[("x", &x)], &mut []).unwrap();
        let (x, y) = (x.as_f16().unwrap(), out[0].1.as_f16().unwrap());
        for (i, y) in y.iter().enumerate() {
            let (t, r) = (i / rows, i % rows);
            let weight = |c: usize| scales[r] * f32::from(entries[r * cols + c]) + shift as f32;
            let sum: f32 = (0..cols)
                .map(|c| x[t * cols + c].to_f32() * weight(c))
                .sum();
            let bound = 4e-3 * sum.abs().max(1.0);
            assert!(
                (y.to_f32() - sum).abs() <= bound,
                "{i}: {y}, expected {sum}"
            );
        }
    }
}
