//! Whole programs, judged by Apple's runtime.

use std::fs;
use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::asset::{AssetInfo, Metadata, open_asset, write_asset};
use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::check::check;
use anemone_schemas::aimodel::ir::{Blob, BlobData, Elem, Module, TensorType, Type};
use anemone_schemas::aimodel::same::difference;
use anemone_schemas::aimodel::text::{TextOptions, to_text};
use anemone_tests::oracle::{self, Call, Tensor};

fn tensor(elem: Elem, shape: &[usize]) -> Input {
    Input::Tensor(TensorType::new(elem, shape))
}

/// Writes a program into a fresh folder, which lives as long as the first part.
fn written(m: &Module) -> (tempfile::TempDir, PathBuf, AssetInfo) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("program.aimodel");
    let info = write_asset(&path, m, &Metadata::default()).unwrap();
    (dir, path, info)
}

/// Reproducible numbers between -1 and 1 that f16 holds exactly.
fn noise(count: usize, seed: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 1_103 + seed * 769) % 509) as f32 / 256.0 - 1.0)
        .collect()
}

#[test]
fn a_cache_is_written_at_runtime_offsets_and_lives_on_between_calls() {
    const HEADS: usize = 2;
    const ROWS: usize = 8;
    const DIM: usize = 4;
    let cache = TensorType::new(Elem::F16, &[1, HEADS, ROWS, DIM]);
    let mut m = Module::default();
    let inputs = [
        ("k_cache", Input::State(cache.clone())),
        ("k_new", tensor(Elem::F16, &[1, HEADS, 1, DIM])),
        ("pos", tensor(Elem::Si32, &[1])),
    ];
    let mut g = GraphBuilder::new(&mut m, "step", &inputs);
    let (zero, one) = (g.i32s(&[0]), g.i32s(&[1]));
    let (heads, dim) = (g.i32s(&[HEADS as i32]), g.i32s(&[DIM as i32]));
    let next = g.binary("add", g.arg(2), one);
    let start = g.concat(0, &[zero, zero, g.arg(2), zero]);
    let end = g.concat(0, &[one, heads, next, dim]);
    let token = g.token();
    let (old, token) = g.read_handle(g.arg(0), token);
    let new = g.slice_update(old, start, end, g.arg(1));
    let token = g.write_handle(g.arg(0), new, token);
    let (all, token) = g.read_handle(g.arg(0), token);
    g.finish(&[("all", all)], &[token]);
    let mut g = GraphBuilder::new(&mut m, "peek", &[("k_cache", Input::State(cache))]);
    let token = g.token();
    let (now, token) = g.read_handle(g.arg(0), token);
    let sum = g.reduce_sum(now, &[2]);
    g.finish(&[("sum", sum)], &[token]);

    let rows: Vec<Vec<f32>> = (0..3).map(|i| noise(HEADS * DIM, i)).collect();
    let at = [0usize, 5, 1];
    let mut calls: Vec<Call> = (0..3)
        .map(|i| {
            Call::new("step")
                .input("k_new", Tensor::f16(&[1, HEADS, 1, DIM], &rows[i]))
                .input("pos", Tensor::i32(&[1], &[at[i] as i32]))
        })
        .collect();
    calls.push(Call::new("peek"));
    let (_dir, path, _) = written(&m);
    let got = oracle::run(&path, &calls).unwrap();

    let mut expected = vec![0f32; HEADS * ROWS * DIM];
    for i in 0..3 {
        for h in 0..HEADS {
            for d in 0..DIM {
                expected[(h * ROWS + at[i]) * DIM + d] = rows[i][h * DIM + d];
            }
        }
        assert_eq!(got[i].get("all").to_f32(), expected, "call {i}");
        assert_eq!(got[i].state("k_cache").to_f32(), expected, "call {i}");
    }
    let sums: Vec<f32> = (0..HEADS * DIM)
        .map(|k| (0..3).map(|i| rows[i][k]).sum())
        .collect();
    assert_eq!(got[3].get("sum").to_f32(), sums);
}

#[test]
fn two_functions_share_one_blob_copied_from_a_file() {
    let (rows, cols) = (64usize, 256usize);
    let indices: Vec<u8> = (0..rows * cols).map(|i| (i * 7 % 16) as u8).collect();
    let packed: Vec<u8> = indices.chunks(2).map(|p| p[0] | p[1] << 4).collect();
    let source = tempfile::tempdir().unwrap();
    let file = source.path().join("weights");
    fs::write(&file, [&[0xaa; 5][..], &packed].concat()).unwrap();
    let mut m = Module::default();
    let blob = m.add_blob(Blob {
        key: "indices".into(),
        data: BlobData::File {
            path: file,
            offset: 5,
            len: packed.len() as u64,
        },
    });
    let table: Vec<f32> = (0..rows / 8 * 16).map(|i| i as f32 / 64.0 - 1.0).collect();
    let widths = [1usize, 16];
    for width in widths {
        let x = tensor(Elem::F16, &[1, cols, 1, width]);
        let mut g = GraphBuilder::new(&mut m, &format!("w{width}"), &[("x", x)]);
        let i = g.constant_blob(TensorType::new(Elem::Ui4, &[rows, cols, 1, 1]), blob);
        let t = g.f16s(&table, &[rows / 8, 1, 1, 1, 16, 1]);
        let w = g.lut_to_dense(i, t, 0);
        let y = g.conv1x1(g.arg(0), w);
        g.finish(&[("y", y)], &[]);
    }
    let (_dir, path, info) = written(&m);
    let payload = (packed.len() + 2 * table.len()) as u64;
    assert!(
        info.bytes > payload && info.bytes < payload + 3000,
        "{info:?}"
    );
    let calls = widths.map(|w| {
        let x = Tensor::f16(&[1, cols, 1, w], &noise(cols * w, w));
        Call::new(&format!("w{w}")).input("x", x)
    });
    let got = oracle::run(&path, &calls).unwrap();
    for (call, width) in got.iter().zip(widths) {
        let x = noise(cols * width, width);
        let y = call.get("y").to_f32();
        for (i, &found) in y.iter().enumerate() {
            let (row, column) = (i / width, i % width);
            let exact: f32 = (0..cols)
                .map(|c| {
                    let entry = indices[row * cols + c] as usize;
                    table[row / 8 * 16 + entry] * x[c * width + column]
                })
                .sum();
            assert!(
                (found - exact).abs() < 2e-3 * (1.0 + exact.abs()),
                "{found} {exact}"
            );
        }
    }
}

#[test]
fn a_private_function_is_invoked_and_not_listed() {
    let mut m = Module::default();
    let x = ("x", tensor(Elem::F32, &[2, 3]));
    let mut g = GraphBuilder::new(&mut m, "helper", std::slice::from_ref(&x));
    g.set_private();
    let half = g.full(Elem::F32, &[2, 3], 0.5);
    let y = g.binary("mul", g.arg(0), half);
    g.finish(&[("y", y)], &[]);
    for name in ["a", "b"] {
        let mut g = GraphBuilder::new(&mut m, name, std::slice::from_ref(&x));
        let mut y = g.invoke("helper", &[g.arg(0)])[0];
        if name == "b" {
            y = g.binary("add", y, g.arg(0));
        }
        g.finish(&[("y", y)], &[]);
    }
    let (_dir, path, _) = written(&m);
    let values = noise(6, 1);
    let call = |f: &str| Call::new(f).input("x", Tensor::f32(&[2, 3], &values));
    let report = oracle::report(&path, &[call("a"), call("b")]).unwrap();
    assert_eq!(report.functions, ["a", "b"]);
    let scaled = |by: f32| values.iter().map(|v| v * by).collect::<Vec<_>>();
    assert_eq!(report.calls[0].get("y").to_f32(), scaled(0.5));
    assert_eq!(report.calls[1].get("y").to_f32(), scaled(1.5));
}

#[test]
fn attention_with_a_mask_gives_the_weighted_mean() {
    let (queries, keys, dim) = (3usize, 5usize, 4usize);
    let mut m = Module::default();
    let inputs = [
        ("q", tensor(Elem::F32, &[1, queries, dim])),
        ("k", tensor(Elem::F32, &[1, keys, dim])),
        ("v", tensor(Elem::F32, &[1, keys, dim])),
        ("mask", tensor(Elem::F32, &[1, queries, keys])),
    ];
    let mut g = GraphBuilder::new(&mut m, "attention", &inputs);
    let k = g.transpose(g.arg(1), &[0, 2, 1]);
    let scores = g.batch_matmul(g.arg(0), k);
    let masked = g.binary("add", scores, g.arg(3));
    let p = g.softmax(masked, 2);
    let o = g.batch_matmul(p, g.arg(2));
    g.finish(&[("o", o)], &[]);
    let (_dir, path, _) = written(&m);
    let [q, k, v] = [1, 2, 3].map(|seed| noise(keys * dim, seed));
    // Query `i` sees keys up to `i + 2`.
    let mask: Vec<f32> = (0..queries * keys)
        .map(|i| if i % keys > i / keys + 2 { -4e4 } else { 0.0 })
        .collect();
    let call = Call::new("attention")
        .input("q", Tensor::f32(&[1, queries, dim], &q[..queries * dim]))
        .input("k", Tensor::f32(&[1, keys, dim], &k))
        .input("v", Tensor::f32(&[1, keys, dim], &v))
        .input("mask", Tensor::f32(&[1, queries, keys], &mask));
    let found = oracle::run(&path, &[call]).unwrap()[0].get("o").to_f32();
    for i in 0..queries {
        let weights: Vec<f32> = (0..i + 3)
            .map(|j| {
                (0..dim)
                    .map(|d| q[i * dim + d] * k[j * dim + d])
                    .sum::<f32>()
                    .exp()
            })
            .collect();
        let total: f32 = weights.iter().sum();
        for d in 0..dim {
            let mean: f32 = weights
                .iter()
                .enumerate()
                .map(|(j, w)| w * v[j * dim + d])
                .sum();
            assert!((found[i * dim + d] - mean / total).abs() < 1e-5);
        }
    }
}

#[test]
fn the_loader_says_what_it_dislikes() {
    let mut m = Module::default();
    let g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F32, &[2]))]);
    let x = g.arg(0);
    g.finish(&[("y", x)], &[]);
    let (_dir, path, _) = written(&m);
    let wrong = Call::new("f").input("x", Tensor::f32(&[3], &[0.0; 3]));
    let said = oracle::run(&path, &[wrong]).unwrap_err();
    assert!(said.contains("invalid shape"), "{said}");
    let program = path.join("main.mlirb");
    let bytes = fs::read(&program).unwrap();
    fs::write(&program, &bytes[..bytes.len() - 40]).unwrap();
    assert!(oracle::run(&path, &[]).is_err());
}

/// Arguments for a function, made from its types.
fn some_call(m: &Module, function: &str) -> Call {
    let graph = m.graph(function).unwrap();
    let mut call = Call::new(function);
    for (name, value) in graph.inputs {
        let Type::Tensor(t) = m.ty(m.value_type(value)) else {
            continue;
        };
        let shape = t.dims().unwrap();
        let count = shape.iter().product();
        let value = match t.elem {
            Elem::F16 => Tensor::f16(&shape, &noise(count, 1)),
            Elem::F32 => Tensor::f32(&shape, &noise(count, 1)),
            // Indices and offsets: zero is always one.
            elem => Tensor::zeros(elem, &shape),
        };
        call = call.input(name.unwrap(), value);
    }
    call
}

/// Programs of another writer: read, shown, written again, and the same to Apple.
#[test]
fn sample_programs_survive_being_read_and_written() {
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/aimodel-samples");
    let mut names: Vec<PathBuf> = fs::read_dir(&samples)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    names.sort();
    assert_eq!(names.len(), 16);
    for sample in names {
        let m = open_asset(&sample).unwrap();
        check(&m).unwrap();
        let text = to_text(&m, &TextOptions::default());
        let (_dir, path, _) = written(&m);
        let again = open_asset(&path).unwrap();
        assert_eq!(difference(&m, &again), None, "{}", sample.display());
        assert_eq!(to_text(&again, &TextOptions::default()), text);
        let public = m.graphs().into_iter().filter(|g| !g.private);
        let calls: Vec<Call> = public
            // Their offsets are arguments, and only some are within the tensor.
            .filter(|g| !["slice_rt", "slice_update_rt"].contains(&g.name))
            .map(|g| some_call(&m, g.name))
            .collect();
        let [before, after] = [&sample, &path].map(|p| oracle::report(p, &calls).unwrap());
        assert_eq!(before.functions, after.functions);
        assert_eq!(before.compatibility, after.compatibility);
        for ((call, before), after) in calls.iter().zip(&before.calls).zip(&after.calls) {
            assert!(!before.outputs.is_empty());
            assert_eq!(before.outputs, after.outputs, "{}", call.function);
            assert_eq!(before.states, after.states, "{}", call.function);
        }
    }
}
