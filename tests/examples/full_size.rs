//! The published models at their real sizes, by hand: see docs/full-size.md.
//!
//! ```text
//! full_size program FOLDER MODEL first|last
//! full_size line FOLDER MODEL
//! full_size chunks FOLDER MODEL
//! full_size layer FOLDER MODEL
//! full_size target FOLDER MODEL LAYERS CHUNKS
//! ```
//!
//! `program` lowers, lints and writes the first or the last chunk from random 4-bit
//! weights (every index random, every table ascending), has Apple's loader open it, and
//! says what it cost. `line` takes a checkpoint of two layers through the commands a
//! user calls, and its two programs through both runtimes. `chunks` does the same with as
//! many layers as the first and the last chunk have, and opens them in Apple's loader.
//! `layer` measures `quantize` on one layer. `target` makes a whole random store of that
//! many layers and measures the command beside what its `--dry-run` says. All leave nothing
//! behind.

#![allow(clippy::print_stdout, reason = "it reports to a terminal")]

#[path = "full_size/layer.rs"]
mod layer;
#[path = "full_size/line.rs"]
mod line;
#[path = "full_size/measure.rs"]
mod measure;
#[path = "full_size/store.rs"]
mod store;
#[path = "full_size/target.rs"]
mod target;

use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anemone_convert::lint::{LintOptions, Severity, lint};
use anemone_convert::lower::{
    ChunkPlan, Chunks, Forms, Shapes, TargetPlan, chunk_size, lower_chunk, plan_chunks,
};
use anemone_convert::synth::Published;
use anemone_schemas::aimodel::asset::{Metadata, write_asset};
use anemone_schemas::aimodel::opt::optimize;
use anemone_schemas::checkpoint::read_spec;
use anemone_schemas::spec::ModelSpec;
use anemone_schemas::store::Store;
use anemone_tests::oracle;
use measure::Measure;

/// The longest context of the programs.
const MAX_CONTEXT: usize = 4096;
/// The largest program file: four programs for Qwen3-8B.
const MAX_BYTES: u64 = 1_300_000_000;
/// Ids the Qwen3 tokenizer knows.
const KNOWN_IDS: usize = 151_669;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["program", folder, model, which] => {
            program(Path::new(folder), model.parse()?, which == "last")
        }
        ["store", folder, model, which] => {
            let folder = Path::new(folder);
            let model: Published = model.parse()?;
            let spec = spec(folder, model, model.layers)?;
            let plan = plan(&spec, Chunks::MaxBytes(MAX_BYTES))?;
            store::random(
                &folder.join("store"),
                &spec,
                chunk(&plan, which == "last").1,
            )?;
            println!("{}", plan.chunks.len());
            Ok(())
        }
        ["line", folder, model] => line::run(Path::new(folder), model.parse()?),
        ["chunks", folder, model] => line::chunks(Path::new(folder), model.parse()?),
        ["layer", folder, model] => layer::run(Path::new(folder), model.parse()?),
        ["target", folder, model, layers, chunks] => {
            target::run(Path::new(folder), model.parse()?, layers.parse()?, chunks)
        }
        _ => Err("usage: full_size program FOLDER MODEL first|last, \
             full_size line|chunks|layer FOLDER MODEL, \
             or full_size target FOLDER MODEL LAYERS CHUNKS"
            .into()),
    }
}

/// The spec of the model's first `layers`, read from its configuration file as published.
fn spec(folder: &Path, model: Published, layers: usize) -> Result<ModelSpec, Box<dyn Error>> {
    let dir = folder.join("config");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("config.json"), model.config(layers).to_string())?;
    let spec = read_spec(&dir)?;
    fs::remove_dir_all(dir)?;
    Ok(spec)
}

fn plan(spec: &ModelSpec, chunks: Chunks) -> Result<TargetPlan, Box<dyn Error>> {
    let shapes = Shapes {
        spec,
        bits: 4,
        group_rows: 32,
    };
    let mut plan = plan_chunks(spec, 1, MAX_CONTEXT, &[], false)?;
    plan.forms = Forms {
        valid_vocab: Some(KNOWN_IDS),
        ..Forms::default()
    };
    Ok(plan.rechunk(chunks, &shapes)?)
}

fn chunk(plan: &TargetPlan, last: bool) -> (usize, &ChunkPlan) {
    let at = if last { plan.chunks.len() - 1 } else { 0 };
    (at, &plan.chunks[at])
}

fn program(folder: &Path, model: Published, last: bool) -> Result<(), Box<dyn Error>> {
    let (weights, output) = (folder.join("store"), folder.join("chunk.aimodel"));
    // In a process of its own, so that its memory is not measured here.
    let made = Command::new(std::env::current_exe()?)
        .arg("store")
        .arg(folder)
        .args([model.name, if last { "last" } else { "first" }])
        .stderr(Stdio::inherit())
        .output()?;
    let chunks = String::from_utf8(made.stdout)?;
    let chunks = chunks
        .trim()
        .parse()
        .map_err(|_| "the store was not made")?;
    let spec = spec(folder, model, model.layers)?;
    let plan = plan(&spec, Chunks::Count(chunks))?;
    let (at, chunk) = chunk(&plan, last);
    println!(
        "{}, chunk {at} of {chunks}: layers {:?}",
        model.name, chunk.layers
    );
    let store = Store::open(&weights)?;

    let step = Measure::start();
    let module = lower_chunk(&store, &plan, chunk)?;
    let findings = lint(&module, &LintOptions::default());
    let errors = findings
        .iter()
        .filter(|f| f.severity == Severity::Error)
        .count();
    let info = write_asset(&output, &module, &Metadata::default())?;
    let cost = step.end();
    let operations: usize = module
        .graphs()
        .iter()
        .map(|g| module.region(g.region).ops.len())
        .sum();
    println!(
        "lowered, linted and written: {cost}; {} functions, {operations} operations, {} bytes, \
         {errors} lint errors, {} other findings",
        module.graphs().len(),
        info.bytes,
        findings.len() - errors,
    );
    copied(&output, &folder.join("copy"), info.bytes)?;
    let mut smaller = module.clone();
    let savings = optimize(&mut smaller)?;
    println!("what the optimizing passes would take away: {savings:?}");
    let size = chunk_size(&store, &plan, chunk)?;
    println!(
        "predicted: {} bytes, {:.0} MB of memory",
        size.file_bytes,
        size.peak_memory() as f64 / 1e6
    );
    assert_eq!(size.file_bytes, info.bytes);
    fs::remove_dir_all(&weights)?;
    let report = oracle::report(&output, &[])?;
    println!(
        "Apple's loader: {} functions, for OS {}",
        report.functions.len(),
        report.compatibility.as_deref().unwrap_or("unknown")
    );
    fs::remove_dir_all(&output)?;
    assert_eq!(errors, 0, "{findings:#?}");
    assert_eq!(report.functions.len(), module.graphs().len());
    Ok(())
}

/// What the disk does: the program read and written again, with the same sync.
fn copied(asset: &Path, to: &PathBuf, bytes: u64) -> Result<(), Box<dyn Error>> {
    let step = Measure::start();
    let mut from = File::open(asset.join("main.mlirb"))?;
    let mut out = File::create(to)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match from.read(&mut buffer)? {
            0 => break,
            n => out.write_all(&buffer[..n])?,
        }
    }
    out.sync_all()?;
    println!("plain copy of {bytes} bytes: {}", step.end());
    fs::remove_file(to)?;
    Ok(())
}
