//! A checkpoint of some layers through every command: two whose programs go through both
//! runtimes, or as many as the first and the last chunk of the model have.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use anemone_convert::commands::lint as lint_command;
use anemone_convert::commands::quantize::{self, QuantizeOptions};
use anemone_convert::commands::target::{self, TargetOptions};
use anemone_convert::lint::LintOptions;
use anemone_convert::lower::{Chunks, Forms};
use anemone_convert::quantize::Method;
use anemone_convert::stop::Stop;
use anemone_convert::synth::{self, Published, SynthOptions};
use anemone_convert::ui::Ui;
use anemone_runtime::kernels::Pool;
use anemone_runtime::{Data, Program, Tensor};
use anemone_schemas::manifest::Manifest;
use anemone_tests::oracle::{self, Call};
use anemone_tests::reference::shared;
use half::f16;

use crate::MAX_CONTEXT;
use crate::measure::Measure;

const CONTEXT: usize = 256;
const WIDTH: usize = 16;
/// Relative distance of hidden states that f16 sums in Apple's products explain.
const NEAR: f32 = 0.03;

/// Two layers in two programs, which are also called.
pub(crate) fn run(folder: &Path, model: Published) -> Result<(), Box<dyn Error>> {
    let output = folder.join("model");
    let manifest = convert(folder, &output, model, 2)?;
    compare(&output, &manifest)?;
    fs::remove_dir_all(&output)?;
    Ok(())
}

/// The layers of the model's first and last chunk in two programs, opened by Apple's loader.
pub(crate) fn chunks(folder: &Path, model: Published) -> Result<(), Box<dyn Error>> {
    let spec = crate::spec(folder, model, model.layers)?;
    let plan = crate::plan(&spec, Chunks::MaxBytes(crate::MAX_BYTES))?;
    let [first, last] = [false, true].map(|last| crate::chunk(&plan, last).1.layers.len());
    let output = folder.join("model");
    let manifest = convert(folder, &output, model, first + last)?;
    for (chunk, layers) in manifest.chunks.iter().zip([first, last]) {
        assert_eq!(chunk.layers[1] - chunk.layers[0], layers);
        let asset = output.join(&chunk.path);
        let report = oracle::report(&asset, &[])?;
        println!(
            "{}: {layers} layers, {} bytes; Apple's loader finds {} functions, for OS {}",
            chunk.path,
            fs::metadata(asset.join("main.mlirb"))?.len(),
            report.functions.len(),
            report.compatibility.as_deref().unwrap_or("unknown")
        );
        for function in &chunk.functions {
            assert!(report.functions.contains(&function.name));
        }
    }
    fs::remove_dir_all(&output)?;
    Ok(())
}

/// `synth`, `quantize`, `target` and `lint` as a user calls them; returns what the model
/// folder `output` has.
fn convert(
    folder: &Path,
    output: &Path,
    model: Published,
    layers: usize,
) -> Result<Manifest, Box<dyn Error>> {
    let [checkpoint, store] = ["checkpoint", "store"].map(|n| folder.join(n));
    let stop = Stop::default();
    println!("{}, {layers} layers", model.name);
    let step = Measure::start();
    let options = SynthOptions {
        like: model,
        layers: Some(layers),
        seed: 1,
        tokenizer: Some(shared("qwen3-tokenizer")),
        output: checkpoint.clone(),
    };
    synth::run(&options, Ui::Quiet, &stop)?;
    println!("synth: {}", step.end());
    let step = Measure::start();
    let options = QuantizeOptions {
        model: checkpoint.clone(),
        output: store.clone(),
        method: Method::KMeans,
        guided: false,
        bits: 4,
        vector: 1,
        rules: Vec::new(),
        calibration: Vec::new(),
        tokens: 256,
        window: 128,
        jobs: 2,
        fit_order: false,
        layers: None,
        target_bpw: None,
    };
    quantize::run(&options, Ui::Quiet, &stop)?;
    println!("quantize --method kmeans: {}", step.end());
    fs::remove_dir_all(&checkpoint)?;
    let options = TargetOptions {
        store: store.clone(),
        output: output.to_path_buf(),
        name: model.name.into(),
        chunks: Chunks::Count(2),
        max_context: MAX_CONTEXT,
        taps: vec![],
        with_logits: false,
        forms: Forms::default(),
        prescale: None,
    };
    let step = Measure::start();
    let manifest = target::run(&options, Ui::Quiet, &stop)?;
    println!("target: {}", step.end());
    fs::remove_dir_all(&store)?;
    let report = lint_command::run(output, &LintOptions::default())?;
    println!("lint: {} errors", report.errors());
    assert_eq!(report.errors(), 0, "{}", report.text());
    Ok(manifest)
}

/// Name, shape and values of the f16 inputs of a call at slot 0, but the hidden states.
fn inputs(manifest: &Manifest) -> Vec<(&'static str, Vec<usize>, Vec<f16>)> {
    let d = manifest.model.head_dim;
    let rotary = |part: fn(f32) -> f32| -> Vec<f16> {
        (0..WIDTH * d)
            .map(|i| {
                let angle = (i / d) as f32 * manifest.rope.inv_freq[i % (d / 2)];
                f16::from_f32(part(angle) * manifest.rope.attention_factor)
            })
            .collect()
    };
    let mask = (0..CONTEXT * WIDTH).map(|i| {
        let seen = i / WIDTH <= i % WIDTH;
        f16::from_f32(if seen { 0.0 } else { manifest.mask_value })
    });
    vec![
        ("rope_cos", vec![1, 1, WIDTH, d], rotary(f32::cos)),
        ("rope_sin", vec![1, 1, WIDTH, d], rotary(f32::sin)),
        ("causal_mask", vec![1, CONTEXT, 1, WIDTH], mask.collect()),
    ]
}

fn compare(folder: &Path, manifest: &Manifest) -> Result<(), Box<dyn Error>> {
    let name = format!("extend_{CONTEXT}_{WIDTH}");
    let hidden = manifest.model.hidden;
    let table = fs::read(folder.join(&manifest.embedding.path))?;
    let mut x: Vec<f16> = Vec::new();
    for row in 0..WIDTH {
        let id = (row * 7919 + 11) % manifest.model.tokenizer_vocab;
        let bytes = &table[id * hidden * 2..(id + 1) * hidden * 2];
        x.extend(bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b)));
    }
    drop(table);
    let fixed = inputs(manifest);
    let pool = Arc::new(Pool::new(2));
    for chunk in &manifest.chunks {
        let asset = folder.join(&chunk.path);
        let mut tensors = vec![("transformer_input", vec![1, WIDTH, 1, hidden], x.clone())];
        tensors.extend(fixed.clone());
        let step = Measure::start();
        let mut call = Call::new(&name);
        for (name, shape, values) in &tensors {
            let values: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
            call = call.input(name, oracle::Tensor::f16(shape, &values));
        }
        call = call.input("in_step", oracle::Tensor::i32(&[1], &[0]));
        let report = oracle::report(&asset, &[call])?;
        println!(
            "{}: Apple's loader finds {} functions; one call in {}",
            chunk.path,
            report.functions.len(),
            step.end()
        );
        assert_eq!(report.functions.len(), chunk.functions.len());
        let theirs = &report.calls[0];

        let program = Program::open_with(&asset, Arc::clone(&pool))?;
        let plan = program.plan(&name)?;
        let mut ours: Vec<(&str, Tensor)> = Vec::new();
        for (name, shape, values) in &tensors {
            ours.push((name, Tensor::new(shape, values.clone())?));
        }
        ours.push(("in_step", Tensor::new(&[1], vec![0i32])?));
        let ours: Vec<(&str, &Tensor)> = ours.iter().map(|(n, t)| (*n, t)).collect();
        let shape = [
            chunk.layers[1] - chunk.layers[0],
            1,
            manifest.model.kv_channels,
            1,
            CONTEXT,
        ];
        let cache = || Tensor::new(&shape, vec![f16::ZERO; shape.iter().product()]);
        let (mut keys, mut values) = (cache()?, cache()?);
        let mut states = [("key_cache", &mut keys), ("value_cache", &mut values)];
        let step = Measure::start();
        let outcome = plan.run_with_argmax_inputs(&ours, &mut states)?;
        println!("{}: our runtime in {}", chunk.path, step.end());
        for (name, tensor) in &outcome.outputs {
            if let Data::U32(ids) = tensor.data() {
                let rows = (0..WIDTH)
                    .map(|row| outcome.argmax.iter().flat_map(|s| s.row(row)).collect())
                    .collect::<Vec<_>>();
                same_ids(ids, &words(&theirs.get(name).bytes), &rows);
            } else {
                let found = tensor.as_f16().ok_or("hidden states are f16")?;
                let found: Vec<f32> = found.iter().map(|v| v.to_f32()).collect();
                let far = distance(&theirs.get(name).to_f32(), &found);
                println!("{name}: {far:.5} apart, relative to their norm");
                assert!(far < NEAR);
                x = found.iter().map(|&v| f16::from_f32(v)).collect();
            }
        }
        for (name, ours) in [("key_cache", &keys), ("value_cache", &values)] {
            let ours: Vec<f32> = ours
                .as_f16()
                .ok_or("caches are f16")?
                .iter()
                .map(|v| v.to_f32())
                .collect();
            let far = distance(&theirs.state(name).to_f32(), &ours);
            println!("{name}: {far:.5} apart");
            assert!(far < NEAR);
        }
    }
    Ok(())
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|&b| u32::from_le_bytes(b))
        .collect()
}

/// Ids may differ where two logits are as good as equal.
fn same_ids(ours: &[u32], theirs: &[u32], logits: &[Vec<f32>]) {
    let mut equal = 0;
    for (row, logits) in logits.iter().enumerate() {
        if ours[row] == theirs[row] {
            equal += 1;
            continue;
        }
        let [a, b] = [ours[row], theirs[row]].map(|id| logits[id as usize]);
        println!(
            "row {row}: ids {} and {}, logits {a} and {b}",
            ours[row], theirs[row]
        );
        assert!((a - b).abs() < 0.02 * a.abs(), "row {row}: another choice");
    }
    println!("out_ids: {equal} of {WIDTH} equal");
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let norm =
        |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    (norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied())) as f32
}
