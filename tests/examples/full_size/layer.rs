//! One layer through the whole quantizer, as the command does it, with 64 windows of 512
//! tokens; the vocabulary is the built-in model's, so that the output layer counts for
//! nothing.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anemone_convert::stop::Stop;
use anemone_convert::synth::{self, Published, SynthOptions};
use anemone_convert::ui::Ui;
use anemone_schemas::report::QuantizeReport;
use anemone_tests::reference::data;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::measure::Seen;

/// Rows of the tables that are kept, as many as the built-in tokenizer has ids.
const VOCAB: usize = 4096;
const TOKENS: usize = 64 * 512;
/// What the process may have in memory, pages of the checkpoint included.
const MOST: u64 = 4_000_000_000;

pub(crate) fn run(folder: &Path, model: Published) -> Result<(), Box<dyn Error>> {
    let [checkpoint, store] = ["checkpoint", "store"].map(|n| folder.join(n));
    let report = folder.join("quantize.json");
    let options = SynthOptions {
        like: model,
        layers: Some(1),
        seed: 1,
        tokenizer: Some(data("tiny-qwen3")),
        output: checkpoint.clone(),
    };
    synth::run(&options, Ui::Quiet, &Stop::default())?;
    cut(&checkpoint)?;
    let example = std::env::current_exe()?;
    let bin = example.parent().and_then(Path::parent).ok_or("no folder")?;
    let start = Instant::now();
    let child = Command::new(bin.join("anemone-convert"))
        .arg("quantize")
        .args([&checkpoint, Path::new("--output"), &store])
        .args([Path::new("--report"), &report])
        .args(["--tokens", &TOKENS.to_string(), "--window", "512"])
        .stdout(Stdio::null())
        .spawn()?;
    let seen = Seen::watch(child, 5)?;
    println!("{}, one layer, {TOKENS} tokens: {seen}", model.name);
    println!("wall: {:.0} s", start.elapsed().as_secs_f64());
    let made = QuantizeReport::read(&report)?;
    for (step, seconds) in &made.seconds {
        println!("{step}: {seconds:.1} s");
    }
    for matrix in &made.matrices {
        let seconds = matrix.seconds.ok_or("a matrix that was there already")?;
        let (method, error) = (&matrix.report.method, matrix.report.plain_error);
        println!(
            "{}: {method}, {seconds:.1} s, error {error:.4}",
            matrix.name
        );
    }
    fs::remove_dir_all(&checkpoint)?;
    fs::remove_dir_all(&store)?;
    fs::remove_file(&report)?;
    assert!(seen.resident < MOST, "{} bytes in memory", seen.resident);
    Ok(())
}

/// Leaves the first rows of the embedding and the output layer.
fn cut(dir: &Path) -> Result<(), Box<dyn Error>> {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path)?)?;
    config["vocab_size"] = VOCAB.into();
    // The model's own ids are beyond those that stay.
    config["eos_token_id"] = 0.into();
    config["bos_token_id"] = 0.into();
    let _ = fs::remove_file(dir.join("generation_config.json"));
    fs::write(&path, serde_json::to_vec_pretty(&config)?)?;
    let mut shards = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            shards.push((fs::read(&path)?, path));
        }
    }
    let mut tensors = BTreeMap::new();
    for (bytes, _) in &shards {
        for (name, tensor) in SafeTensors::deserialize(bytes)?.iter() {
            let mut shape = tensor.shape().to_vec();
            let mut data = tensor.data();
            if name == "lm_head.weight" || name == "model.embed_tokens.weight" {
                shape[0] = VOCAB;
                data = &data[..2 * VOCAB * shape[1]];
            }
            tensors.insert(
                name.to_string(),
                TensorView::new(tensor.dtype(), shape, data)?,
            );
        }
    }
    let whole = dir.join("whole");
    safetensors::serialize_to_file(&tensors, None, &whole)?;
    for (_, path) in &shards {
        fs::remove_file(path)?;
    }
    let _ = fs::remove_file(dir.join("model.safetensors.index.json"));
    fs::rename(whole, dir.join("model.safetensors"))?;
    Ok(())
}
