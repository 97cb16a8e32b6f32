//! `target --layout apple`: the one program and bundle that Apple's runner expects, run
//! by Apple's runtime and by ours, and held to the chunk programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anemone_convert::commands::lint as lint_command;
use anemone_convert::commands::target::{self, TargetOptions};
use anemone_convert::lint::LintOptions;
use anemone_convert::lower::{Chunks, Forms};
use anemone_convert::quantize::Method;
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_runtime::engine::{Engine, Row};
use anemone_runtime::kernels::Pool;
use anemone_runtime::{Data, Program, Tensor};
use anemone_schemas::aimodel::ir::Elem;
use anemone_tests::line::{lowered, quantized, scratch};
use anemone_tests::oracle::{self, Call};
use anemone_tests::reference::data;
use half::f16;
use serde_json::Value;

const CONTEXT: usize = 256;
const WIDTH: usize = 16;

fn bundle(store: &Path, output: PathBuf) -> PathBuf {
    let options = TargetOptions {
        store: store.to_path_buf(),
        output: output.clone(),
        name: "someone/tiny".into(),
        chunks: Chunks::Count(1),
        max_context: 512,
        taps: vec![],
        with_logits: false,
        prescale: None,
        forms: Forms::default(),
    };
    target::run_apple(&options, Ui::Quiet, &Stop::default()).expect("the store is whole");
    let report = lint_command::run(&output, &LintOptions::default()).expect("one program");
    assert_eq!(report.errors(), 0, "{}", report.text());
    output
}

fn functions() -> Vec<String> {
    let mut names = vec!["load_embeddings".to_owned()];
    for w in [8, 16, 64] {
        names.push(format!("gather_embeddings_{w}"));
        for c in [256, 512] {
            names.push(format!("extend_{c}_{w}"));
            names.push(format!("prompt_opt_{c}_{w}"));
        }
    }
    names.sort();
    names
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied())
}

fn floats(t: &Tensor) -> Vec<f32> {
    t.as_f16()
        .expect("f16")
        .iter()
        .map(|v| v.to_f32())
        .collect()
}

/// What the decoder takes besides embeddings and caches, at slot 0.
struct Inputs {
    ids: Vec<i32>,
    positions: Vec<u16>,
    mask: Vec<f32>,
}

impl Inputs {
    fn new() -> Self {
        let seen = |i: usize| i / WIDTH <= i % WIDTH;
        Self {
            ids: (0..WIDTH as i32).map(|i| 300 + 37 * i).collect(),
            positions: (0..WIDTH as u16).collect(),
            mask: (0..CONTEXT * WIDTH)
                .map(|i| if seen(i) { 0.0 } else { -40_000.0 })
                .collect(),
        }
    }

    /// Gathered embeddings, logits and the value of the function for prompts, by Apple.
    fn apples(&self, asset: &Path) -> [Vec<f32>; 3] {
        let ids = oracle::Tensor::i32(&[1, WIDTH], &self.ids);
        let positions = oracle::Tensor {
            dtype: Elem::Ui16,
            shape: vec![1, WIDTH],
            bytes: self
                .positions
                .iter()
                .flat_map(|p| p.to_le_bytes())
                .collect(),
        };
        let mask = oracle::Tensor::f16(&[1, CONTEXT, 1, WIDTH], &self.mask);
        let decoder = |kind: &str| {
            Call::new(&format!("{kind}_{CONTEXT}_{WIDTH}"))
                .carry("transformer_input", 1, "gathered_embeddings")
                .carry("embedding_table", 0, "embedding_table")
                .input("position_ids", positions.clone())
                .input("in_step", oracle::Tensor::i32(&[1], &[0]))
                .input("causal_mask", mask.clone())
        };
        // An output that is carried on is not returned, so embeddings are gathered twice.
        let gather = || {
            Call::new("gather_embeddings_16")
                .input("in_new_token_ids", ids.clone())
                .carry("embedding_table", 0, "embedding_table")
        };
        let calls = [
            Call::new("load_embeddings"),
            gather(),
            decoder("extend"),
            decoder("prompt_opt"),
            gather(),
        ];
        let report = oracle::report(asset, &calls).expect("Apple's runtime");
        let mut found = report.functions.clone();
        found.sort();
        assert_eq!(found, functions());
        [
            report.calls[4].get("gathered_embeddings").to_f32(),
            report.calls[2].get("out_logits").to_f32(),
            report.calls[3].get("out_logits").to_f32(),
        ]
    }

    fn ours(&self, asset: &Path) -> [Vec<f32>; 3] {
        let program = Program::open_with(asset, Arc::new(Pool::new(2))).expect("a program");
        let run = |name: &str, inputs: &[(&str, &Tensor)], states: &mut [(&str, &mut Tensor)]| {
            let plan = program.plan(name).expect("a function");
            plan.run(inputs, states).expect("a run").remove(0).1
        };
        let tensor = |shape: &[usize], data: Data| Tensor::new(shape, data).expect("its shape");
        let halves = |v: &[f32]| -> Vec<f16> { v.iter().map(|&x| f16::from_f32(x)).collect() };
        let table = run("load_embeddings", &[], &mut []);
        let ids = tensor(&[1, WIDTH], self.ids.clone().into());
        let rows = run(
            "gather_embeddings_16",
            &[("in_new_token_ids", &ids), ("embedding_table", &table)],
            &mut [],
        );
        let positions = tensor(&[1, WIDTH], Data::U16(self.positions.clone()));
        let step = tensor(&[1], vec![0i32].into());
        let mask = tensor(&[1, CONTEXT, 1, WIDTH], halves(&self.mask).into());
        let mut results = [floats(&rows), vec![], vec![]];
        for (kind, result) in ["extend", "prompt_opt"].iter().zip(&mut results[1..]) {
            let name = format!("{kind}_{CONTEXT}_{WIDTH}");
            let listed = program.functions().iter().find(|f| f.name == name);
            let info = listed.expect("listed");
            let blank = |i: usize| {
                let shape = &info.states[i].shape;
                tensor(shape, vec![f16::ZERO; shape.iter().product()].into())
            };
            let (mut keys, mut values) = (blank(0), blank(1));
            let out = run(
                &name,
                &[
                    ("transformer_input", &rows),
                    ("position_ids", &positions),
                    ("in_step", &step),
                    ("causal_mask", &mask),
                    ("embedding_table", &table),
                ],
                &mut [("key_cache", &mut keys), ("value_cache", &mut values)],
            );
            *result = floats(&out);
        }
        results
    }
}

#[test]
fn the_program_runs_on_both_runtimes_and_agrees_with_the_chunk_programs() {
    let dir = scratch("apple-layout");
    let store = quantized(&data("tiny-qwen3"), &dir, Method::KMeans, 2048);
    let made = bundle(&store, dir.join("bundle"));
    let asset = made.join("tiny.aimodel");
    let inputs = Inputs::new();
    let (apples, ours) = (inputs.apples(&asset), inputs.ours(&asset));
    assert_eq!(apples[0], ours[0], "gathered embeddings");
    assert!(distance(&apples[1], &ours[1]) < 1e-2, "logits");
    assert!((apples[2][0] - ours[2][0]).abs() < 1e-2, "prompt");

    // The same weights in chunk programs, whose embeddings have sixteen bits.
    let engine = Engine::open(&lowered(&store, &dir, 512), 2).expect("a whole folder");
    let ids: Vec<u32> = inputs.ids.iter().map(|&i| i as u32).collect();
    let step = engine
        .step(&mut engine.cache(), 0, &Row::chain(&ids, 0))
        .expect("a step");
    let vocab = ours[1].len() / WIDTH;
    for row in 0..WIDTH {
        let logits = step.logits(row);
        let found = &ours[1][row * vocab..][..logits.len()];
        assert!(distance(found, &logits) < 0.05, "row {row}");
    }
}

#[test]
fn the_bundle_is_what_apples_runner_reads() {
    let dir = scratch("apple-bundle");
    let store = quantized(&data("tiny-qwen3"), &dir, Method::KMeansUnweighted, 1024);
    let made = bundle(&store, dir.join("bundle"));
    let text = fs::read_to_string(made.join("metadata.json")).expect("written");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["metadata_version"], "0.2");
    assert_eq!(json["kind"], "llm");
    assert_eq!(json["name"], "tiny");
    assert_eq!(json["assets"]["main"], "tiny.aimodel");
    assert_eq!(json["language"]["max_context_length"], 512);
    assert_eq!(json["language"]["vocab_size"], 4096);
    assert!(made.join("tokenizer/tokenizer.json").is_file());
    let mut entries: Vec<_> = fs::read_dir(&made)
        .expect("a folder")
        .map(|e| e.expect("an entry").file_name())
        .collect();
    entries.sort();
    assert_eq!(entries, ["metadata.json", "tiny.aimodel", "tokenizer"]);
    let report = oracle::report(&made.join("tiny.aimodel"), &[]).expect("it loads");
    assert_eq!(report.functions.len(), functions().len());
    assert_eq!(report.compatibility.as_deref(), Some("27.0"));
}
