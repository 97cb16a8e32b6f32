//! Stores of random matrices and norms.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use anemone_convert::error::Error;
use anemone_convert::lower::ChunkPlan;
use anemone_schemas::lut::{DEFAULT_GROUP_ROWS, LutMatrix, LutShape};
use anemone_schemas::spec::{Architecture, EMBEDDING, FINAL_NORM, LM_HEAD, Linear, ModelSpec};
use anemone_schemas::store::{DenseElem, Key, MatrixReport, Provenance, StoreWriter};
use half::f16;

/// splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }
}

/// Largest norm input that calibration is said to have seen, in the range of Qwen3-8B's.
const MAGNITUDE: f32 = 9000.0;

/// Writes a store with what one chunk reads, one matrix in memory at a time.
pub(crate) fn random(dir: &Path, spec: &ModelSpec, chunk: &ChunkPlan) -> Result<(), Error> {
    let mut writer = create(dir)?;
    fill(&mut writer, spec, chunk)?;
    writer.finish()?;
    Ok(())
}

/// Writes a store with all that `target` reads; `tokenizer` is the folder of its files.
pub(crate) fn whole(
    dir: &Path,
    spec: &ModelSpec,
    chunk: &ChunkPlan,
    tokenizer: &Path,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut writer = create(dir)?;
    fill(&mut writer, spec, chunk)?;
    let row: Vec<u8> = (0..spec.hidden)
        .flat_map(|i| f16::from_f32(i as f32 / spec.hidden as f32).to_le_bytes())
        .collect();
    let rows = |out: &mut dyn Write| (0..spec.vocab).try_for_each(|_| out.write_all(&row));
    let shape = [spec.vocab, spec.hidden];
    writer.put_dense(EMBEDDING, &key(EMBEDDING), DenseElem::F16, &shape, rows)?;
    let norms = chunk.layers.clone().flat_map(|layer| {
        let kinds = Architecture::Qwen3.norms().iter();
        let hidden = kinds.filter(|kind| kind.width(spec) == spec.hidden);
        hidden.map(move |kind| kind.tensor(layer))
    });
    let magnitudes: BTreeMap<String, f32> = norms
        .chain([FINAL_NORM.into()])
        .map(|n| (n, MAGNITUDE))
        .collect();
    writer.put_file("model_spec.json", &serde_json::to_vec(spec)?)?;
    writer.put_file("norm_magnitudes.json", &serde_json::to_vec(&magnitudes)?)?;
    for entry in fs::read_dir(tokenizer)? {
        let entry = entry?;
        if let Some(name) = entry.file_name().to_str() {
            writer.put_file(name, &fs::read(entry.path())?)?;
        }
    }
    writer.finish()?;
    Ok(())
}

fn create(dir: &Path) -> Result<StoreWriter, Error> {
    let provenance = Provenance {
        source_fingerprint: "none".into(),
        method: "random".into(),
        settings: serde_json::Map::new(),
        calibration: None,
        tool: anemone_convert::PRODUCER.into(),
    };
    Ok(StoreWriter::create_or_resume(dir, provenance)?)
}

fn fill(writer: &mut StoreWriter, spec: &ModelSpec, chunk: &ChunkPlan) -> Result<(), Error> {
    let mut random = Random(chunk.layers.start as u64 + 1);
    for layer in chunk.layers.clone() {
        for linear in Linear::ALL {
            matrix(
                writer,
                &mut random,
                &linear.tensor(layer),
                linear.shape(spec),
            )?;
        }
        for &kind in Architecture::Qwen3.norms() {
            norm(writer, &mut random, &kind.tensor(layer), kind.width(spec))?;
        }
    }
    if chunk.head {
        matrix(writer, &mut random, LM_HEAD, [spec.vocab, spec.hidden])?;
        norm(writer, &mut random, FINAL_NORM, spec.hidden)?;
    }
    Ok(())
}

fn key(name: &str) -> Key {
    Key::of([b"random".as_slice(), name.as_bytes()])
}

fn matrix(
    writer: &mut StoreWriter,
    random: &mut Random,
    name: &str,
    [rows, cols]: [usize; 2],
) -> Result<(), Error> {
    let shape = LutShape::new(rows, cols, 4, DEFAULT_GROUP_ROWS).expect("a shape of Qwen3");
    let mut indices = Vec::with_capacity(shape.indices_len());
    while indices.len() < shape.indices_len() {
        indices.extend_from_slice(&random.next().to_le_bytes());
    }
    indices.truncate(shape.indices_len());
    let mut tables = Vec::with_capacity(shape.groups() * shape.entries());
    for _ in 0..shape.groups() {
        let mut at = -0.06f32;
        for _ in 0..shape.entries() {
            at += 0.004 + 0.008 * random.unit();
            tables.push(f16::from_f32(at).to_bits());
        }
    }
    let matrix = LutMatrix::from_parts(shape, tables, indices).expect("parts of these sizes");
    let report = MatrixReport {
        method: "random".into(),
        fallback: None,
        damping: None,
        plain_error: 0.0,
        weighted_error: 0.0,
        dead_columns: 0,
    };
    writer.put_lut(name, &key(name), &matrix, report)?;
    Ok(())
}

fn norm(
    writer: &mut StoreWriter,
    random: &mut Random,
    name: &str,
    width: usize,
) -> Result<(), Error> {
    let scales = (0..width).flat_map(|_| f16::from_f32(0.5 + random.unit()).to_le_bytes());
    let bytes: Vec<u8> = scales.collect();
    let fill = |out: &mut dyn Write| out.write_all(&bytes);
    writer.put_dense(name, &key(name), DenseElem::F16, &[width], fill)?;
    Ok(())
}
