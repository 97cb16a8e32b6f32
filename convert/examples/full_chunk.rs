//! Writes one chunk program of Qwen3-8B from random 4-bit weights, and measures it:
//! time and peak memory of lowering and writing, beside a plain copy of as many bytes.
//!
//! ```text
//! cargo run --release -p anemone-convert --example full_chunk -- FOLDER [LAYERS]
//! ```
//!
//! The first run makes `FOLDER/store` (97 MB a layer); `FOLDER/chunk.aimodel` is
//! written anew each time. The weights are not quantized from anything: every index
//! is random, every table ascends.

#![allow(clippy::print_stdout, reason = "it reports to a terminal")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anemone_convert::error::Error;
use anemone_convert::lower::{ChunkPlan, TargetPlan, lower_chunk, plan_chunks};
use anemone_schemas::aimodel::asset::{AssetInfo, Metadata, write_asset};
use anemone_schemas::aimodel::opt::optimize;
use anemone_schemas::aimodel::summary::summarize;
use anemone_schemas::lut::{DEFAULT_GROUP_ROWS, LutMatrix, LutShape};
use anemone_schemas::spec::{Architecture, Linear, ModelSpec, Rope, RopeKind};
use anemone_schemas::store::{DenseElem, Key, MatrixReport, Provenance, Store, StoreWriter};
use half::f16;
use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{RngCore, SeedableRng};

const CHUNKS: usize = 4;
const MAX_CONTEXT: usize = 4096;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let folder = PathBuf::from(args.next().ok_or("usage: full_chunk FOLDER [LAYERS]")?);
    let layers = match args.next() {
        Some(n) => n
            .to_str()
            .and_then(|n| n.parse().ok())
            .ok_or("LAYERS is no number")?,
        None => 9,
    };
    let spec = qwen3_8b();
    let store = folder.join("store");
    if !store.join("store.json").is_file() {
        let start = Instant::now();
        random_store(&store, &spec, layers)?;
        println!("store: {layers} random layers in {:.1?}", start.elapsed());
    }
    let store = Store::open(&store)?;
    let plan = plan_chunks(&spec, CHUNKS, MAX_CONTEXT, &[], false)?;
    let chunk = ChunkPlan {
        layers: 0..layers,
        taps: vec![],
        head: false,
    };
    write_chunk(&folder, &store, &plan, &chunk)
}

fn qwen3_8b() -> ModelSpec {
    ModelSpec {
        architecture: Architecture::Qwen3,
        hidden: 4096,
        layers: 36,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 12288,
        vocab: 151_936,
        max_position: 40960,
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

/// A store with the matrices and norms of the first layers, one matrix in memory at
/// a time.
fn random_store(dir: &Path, spec: &ModelSpec, layers: usize) -> Result<(), Error> {
    let provenance = Provenance {
        source_fingerprint: "none".into(),
        method: "random".into(),
        settings: serde_json::Map::new(),
        calibration: None,
        tool: anemone_convert::PRODUCER.into(),
    };
    let mut writer = StoreWriter::create_or_resume(dir, provenance)?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
    for layer in 0..layers {
        for linear in Linear::ALL {
            let [rows, cols] = linear.shape(spec);
            let matrix = random_matrix(&mut random, rows, cols);
            let name = linear.tensor(layer);
            let report = MatrixReport {
                method: "random".into(),
                fallback: None,
                damping: None,
                plain_error: 0.0,
                weighted_error: 0.0,
                dead_columns: 0,
            };
            let key = Key::of([b"random".as_slice(), name.as_bytes()]);
            writer.put_lut(&name, &key, &matrix, report)?;
        }
        for &norm in Architecture::Qwen3.norms() {
            let (name, width) = (norm.tensor(layer), norm.width(spec));
            let key = Key::of([b"random".as_slice(), name.as_bytes()]);
            let scales = (0..width).flat_map(|_| {
                let unit = (random.next_u32() >> 8) as f32 / (1 << 24) as f32;
                f16::from_f32(0.5 + unit).to_le_bytes()
            });
            let bytes: Vec<u8> = scales.collect();
            let fill = |out: &mut dyn Write| out.write_all(&bytes);
            writer.put_dense(&name, &key, DenseElem::F16, &[width], fill)?;
        }
    }
    writer.finish()?;
    Ok(())
}

fn random_matrix(random: &mut Xoshiro256PlusPlus, rows: usize, cols: usize) -> LutMatrix {
    let shape = LutShape::new(rows, cols, 4, DEFAULT_GROUP_ROWS).expect("a shape of Qwen3-8B");
    let mut indices = vec![0; shape.indices_len()];
    random.fill_bytes(&mut indices);
    let mut tables = Vec::with_capacity(shape.groups() * shape.entries());
    for _ in 0..shape.groups() {
        let mut at = -0.06f32;
        for _ in 0..shape.entries() {
            at += 0.004 + (random.next_u32() >> 8) as f32 / (1 << 24) as f32 * 0.008;
            tables.push(f16::from_f32(at).to_bits());
        }
    }
    LutMatrix::from_parts(shape, tables, indices).expect("parts of the shape's sizes")
}

fn write_chunk(
    folder: &Path,
    store: &Store,
    plan: &TargetPlan,
    chunk: &ChunkPlan,
) -> Result<(), Box<dyn std::error::Error>> {
    let output = folder.join("chunk.aimodel");
    if output.exists() {
        fs::remove_dir_all(&output)?;
    }
    forget_peak();
    let start = Instant::now();
    let module = lower_chunk(store, plan, chunk)?;
    let lowered = start.elapsed();
    let info = write_asset(&output, &module, &Metadata::default())?;
    let whole = start.elapsed();
    let peak = peak_memory();
    println!(
        "program: {} functions, {} bytes; lowered in {lowered:.2?}, written in {:.2?} ({:.0} MB/s)",
        module.graphs().len(),
        info.bytes,
        whole.checked_sub(lowered).unwrap(),
        rate(info.bytes, whole.checked_sub(lowered).unwrap())
    );
    match peak {
        Some(kib) => println!("peak memory {:.1} MB", kib as f64 * 1024.0 / 1e6),
        None => println!("peak memory unknown on this system"),
    }
    plain_copy(&output, &folder.join("copy"), &info)?;
    print!("{}", summarize(&module, info.bytes));

    let mut smaller = module.clone();
    let start = Instant::now();
    let savings = optimize(&mut smaller)?;
    println!("optimizing in {:.2?}: {savings:?}", start.elapsed());
    Ok(())
}

/// What the disk does: the program read and written again, with the same fsync.
fn plain_copy(asset: &Path, to: &Path, info: &AssetInfo) -> std::io::Result<()> {
    let start = Instant::now();
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
    let took = start.elapsed();
    println!(
        "plain copy in {took:.2?} ({:.0} MB/s)",
        rate(info.bytes, took)
    );
    fs::remove_file(to)
}

fn rate(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / took.as_secs_f64() / 1e6
}

/// Linux keeps the peak of the resident memory until told to forget it.
fn forget_peak() {
    let _ = fs::write("/proc/self/clear_refs", "5");
}

fn peak_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
