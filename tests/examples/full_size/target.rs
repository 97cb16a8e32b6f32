//! The command `target` as a whole, beside what its `--dry-run` says of it.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anemone_convert::lower::Chunks;
use anemone_convert::synth::Published;
use anemone_tests::reference::shared;
use serde_json::Value;

use crate::measure::Seen;
use crate::store;

/// What the command may take by its prediction, relative to the latter.
const WITHIN: f64 = 0.2;

pub(crate) fn run(
    folder: &Path,
    model: Published,
    layers: usize,
    chunks: &str,
) -> Result<(), Box<dyn Error>> {
    let [weights, output] = ["store", "model"].map(|n| folder.join(n));
    let spec = crate::spec(folder, model, layers)?;
    let plan = crate::plan(&spec, Chunks::Count(1))?;
    store::whole(&weights, &spec, &plan.chunks[0], &shared("qwen3-tokenizer"))?;
    println!("{}, {layers} layers in {chunks} chunks", model.name);
    let planned = command(&weights, &output, chunks)?
        .args(["--dry-run", "--json"])
        .stderr(Stdio::inherit())
        .output()?;
    let planned: Value = serde_json::from_slice(&planned.stdout)?;
    let start = Instant::now();
    let child = command(&weights, &output, chunks)?
        .stdout(Stdio::null())
        .spawn()?;
    let seen = Seen::watch(child, 1)?;
    println!("target: {:.2} s, {seen}", start.elapsed().as_secs_f64());
    let memory = planned["peak_memory"].as_u64().ok_or("no peak memory")?;
    println!("predicted: {:.0} MB", memory as f64 / 1e6);
    for step in planned["steps"].as_array().ok_or("no steps")? {
        let what = step["what"].as_str().unwrap_or_default();
        let file = what.split(',').next().unwrap_or_default();
        let path = output.join(file);
        let path = if path.is_dir() {
            path.join("main.mlirb")
        } else {
            path
        };
        let bytes = fs::metadata(&path)?.len();
        println!("{what}: {bytes} bytes, predicted {}", step["bytes"]);
        assert_eq!(step["bytes"].as_u64(), Some(bytes));
    }
    fs::remove_dir_all(&weights)?;
    fs::remove_dir_all(&output)?;
    let off = seen.resident as f64 / memory as f64 - 1.0;
    assert!(off.abs() <= WITHIN, "memory is off by {:.0}%", off * 100.0);
    Ok(())
}

/// `anemone-convert target`, built beside this example.
fn command(store: &Path, output: &Path, chunks: &str) -> Result<Command, Box<dyn Error>> {
    let example = std::env::current_exe()?;
    let folder = example.parent().and_then(Path::parent).ok_or("no folder")?;
    let mut command = Command::new(folder.join("anemone-convert"));
    command.arg("target").arg(store).arg("--output").arg(output);
    command.args(["--chunks", chunks, "--max-context", "4096"]);
    Ok(command)
}
