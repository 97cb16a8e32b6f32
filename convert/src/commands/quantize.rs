//! `quantize`: checkpoint and calibration text in, quantized store out.
//!
//! The teacher runs layer by layer over all calibration windows at once, so only one
//! layer's weights are in memory. Its activations at the four places where a layer
//! reads an input become statistics, the statistics quantize the layer's seven
//! matrices, and the teacher's own (unquantized) hidden states go on to the next
//! layer. The output layer follows with the statistics of the final norm.
//!
//! Every matrix has a key: the hash of all that determines its bytes. A matrix found
//! in the store under its key is not computed again, so an interrupted run goes on
//! where it stopped and ends in the same bytes; only the teacher starts anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anemone_calib::{Corpus, Hidden, Stats, StatsBuilder, Teacher, Weights};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::exit::Exit;
use anemone_schemas::spec::{EMBEDDING, FINAL_NORM, LM_HEAD, Linear, ModelSpec, Norm, Site};
use anemone_schemas::store::{DenseElem, Key, Provenance, Store, StoreWriter};
use half::f16;
use serde_json::{Map, Value};

use super::notices;
use super::text::{self, Budget};
use crate::error::Error;
use crate::quantize::{CODE_VERSION, Calibration, Matrix, Method, Quantizer, Settings};
use crate::stop::Stop;
use crate::ui::{Stage, Ui};

/// File of the store with the largest magnitude at the input of each norm.
pub(super) const MAGNITUDES_FILE: &str = "norm_magnitudes.json";
/// File of the store that holds the model's spec.
pub(super) const SPEC_FILE: &str = "model_spec.json";

/// What to quantize and how.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Store to make.
    pub output: PathBuf,
    /// How codes and tables are chosen.
    pub method: Method,
    /// Bits per weight.
    pub bits: u8,
    /// Calibration text; empty for the built-in one.
    pub calibration: Vec<PathBuf>,
    /// At most this many calibration tokens.
    pub tokens: usize,
    /// Tokens per window.
    pub window: usize,
    /// Worker threads; the result does not depend on them.
    pub jobs: usize,
}

/// Runs the command.
///
/// # Errors
/// Bad input, no calibration text, or an interruption (exit code 130): the store then
/// holds every finished matrix and the same command goes on.
pub fn run(options: &QuantizeOptions, ui: Ui, stop: &Stop) -> Result<Store, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    refuse_foreign_output(&options.model, &options.output)?;
    let spec = checkpoint.spec();
    let corpus = text::calibration(
        &text::open_tokenizer(&options.model)?,
        &options.calibration,
        Budget {
            tokens: options.tokens,
            window: options.window.min(spec.max_position),
        },
    )?;
    let settings = Settings {
        bits: options.bits,
        ..Settings::default()
    };
    ui.note(&format!(
        "quantizing the {} layers of `{}` with {}, {} calibration tokens",
        spec.layers,
        options.model.display(),
        options.method.name(),
        corpus.tokens(),
    ));
    let provenance = Provenance {
        source_fingerprint: checkpoint.fingerprint(),
        method: options.method.name().to_string(),
        settings: recorded(&settings, &corpus)?,
        calibration: Some(corpus.fingerprint()),
        tool: crate::PRODUCER.to_string(),
    };
    if let Ok(store) = Store::open(&options.output)
        && store.manifest().provenance == provenance
    {
        ui.note("the store is complete already");
        return Ok(store);
    }
    let mut job = Job {
        options,
        checkpoint: &checkpoint,
        spec,
        quantizer: Quantizer::new(settings, options.jobs)?,
        seed: serde_json::to_string(&provenance).map_err(|e| Error::unexpected(&e))?,
        writer: StoreWriter::create_or_resume(&options.output, provenance)?,
        magnitudes: BTreeMap::new(),
        stage: ui.stage("quantize", spec.layers * Linear::ALL.len() + 1),
        ui,
        stop,
    };
    job.matrices(corpus.windows())?;
    job.dense()?;
    job.copies()?;
    checkpoint.unchanged()?;
    Ok(job.writer.finish()?)
}

/// All settings that change the result, for the store's provenance.
fn recorded(settings: &Settings, corpus: &Corpus) -> Result<Map<String, Value>, Error> {
    let mut map = match serde_json::to_value(settings) {
        Ok(Value::Object(map)) => map,
        Ok(_) => Map::new(),
        Err(e) => return Err(Error::unexpected(&e)),
    };
    map.insert("calibration_tokens".into(), corpus.tokens().into());
    map.insert("code_version".into(), CODE_VERSION.into());
    Ok(map)
}

/// Refuses an output inside the input, and a folder that is neither empty nor ours.
fn refuse_foreign_output(model: &Path, output: &Path) -> Result<(), Error> {
    let Ok(entries) = fs::read_dir(output) else {
        return Ok(());
    };
    let inside = |a: &Path, b: &Path| match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a.starts_with(b),
        _ => false,
    };
    if inside(output, model) {
        return Err(Error::usage(format!(
            "the output `{}` lies in the checkpoint folder",
            output.display()
        )));
    }
    let ours = output.join("matrices").is_dir();
    if !ours && entries.count() > 0 {
        return Err(Error::usage(format!(
            "`{}` is not empty and no quantized store",
            output.display()
        ))
        .hint("choose another output folder, or pass `--overwrite`"));
    }
    Ok(())
}

struct Job<'a> {
    options: &'a QuantizeOptions,
    checkpoint: &'a Checkpoint,
    spec: &'a ModelSpec,
    quantizer: Quantizer,
    /// The provenance as text: part of every key.
    seed: String,
    writer: StoreWriter,
    /// Largest magnitude at the input of each norm, by the name of its weight.
    magnitudes: BTreeMap<String, f32>,
    stage: Stage,
    ui: Ui,
    stop: &'a Stop,
}

impl Job<'_> {
    fn key(&self, name: &str) -> Key {
        Key::of([b"lut".as_slice(), self.seed.as_bytes(), name.as_bytes()])
    }

    /// All matrices, layer by layer, then the output layer.
    fn matrices(&mut self, windows: &[Vec<u32>]) -> Result<(), Error> {
        let teacher = Teacher::new(self.checkpoint);
        let mut hidden = teacher.embed(windows)?;
        for layer in 0..self.spec.layers {
            self.stop.check()?;
            let missing = self.missing(layer)?;
            let stats = self.layer_stats(&teacher, layer, &mut hidden, !missing.is_empty())?;
            for (site, stats) in &stats {
                let linears: Vec<Linear> = missing
                    .iter()
                    .copied()
                    .filter(|l| l.site() == *site)
                    .collect();
                let names: Vec<String> = linears.iter().map(|l| l.tensor(layer)).collect();
                self.site(stats, &names)?;
            }
        }
        let last = hidden.0.iter().flatten();
        let last = last.fold(0.0f32, |max, x| max.max(x.abs()));
        self.magnitudes.insert(FINAL_NORM.to_string(), last);
        if self.writer.has_lut(LM_HEAD, &self.key(LM_HEAD))? {
            self.stage.step(LM_HEAD);
            return Ok(());
        }
        let mut builder = StatsBuilder::new(Site::HeadIn, self.spec.hidden);
        for rows in &teacher.final_norm(&hidden)?.0 {
            builder.add(rows)?;
        }
        self.site(&builder.finish()?, &[LM_HEAD.to_string()])
    }

    /// The matrices of a layer that are not in the store yet.
    fn missing(&mut self, layer: usize) -> Result<Vec<Linear>, Error> {
        let mut missing = Vec::new();
        for linear in Linear::ALL {
            let name = linear.tensor(layer);
            let key = self.key(&name);
            if self.writer.has_lut(&name, &key)? {
                self.stage.step(&name);
            } else {
                missing.push(linear);
            }
        }
        Ok(missing)
    }

    /// Takes `hidden` through `layer`; notes the largest inputs of its norms and, if
    /// `wanted`, gathers the statistics of its linears' inputs.
    fn layer_stats(
        &mut self,
        teacher: &Teacher<'_>,
        layer: usize,
        hidden: &mut Hidden,
        wanted: bool,
    ) -> Result<BTreeMap<Site, Stats>, Error> {
        let mut builders: BTreeMap<Site, StatsBuilder> = BTreeMap::new();
        let mut failed = None;
        let spec = self.spec;
        let mut hook = |site: Site, rows: &[f32]| {
            let builder = builders
                .entry(site)
                .or_insert_with(|| StatsBuilder::new(site, site.width(spec)));
            if let Err(e) = builder.add(rows) {
                failed.get_or_insert(e);
            }
        };
        let largest = teacher.block(layer, hidden, wanted.then_some(&mut hook))?;
        for (norm, max) in [
            (Norm::Input, largest.input),
            (Norm::PostAttention, largest.post_attention),
        ] {
            self.magnitudes.insert(norm.tensor(layer), max);
        }
        if let Some(e) = failed {
            return Err(e.into());
        }
        let stats = builders
            .into_iter()
            .map(|(site, b)| Ok((site, b.finish()?)));
        stats.collect()
    }

    /// Quantizes the matrices that read from one site and puts them into the store.
    fn site(&mut self, stats: &Stats, names: &[String]) -> Result<(), Error> {
        let Some(first) = names.first() else {
            return Ok(());
        };
        let calibration = Calibration {
            name: first,
            cols: stats.cols,
            hessian: &stats.hessian,
            sumsq: &stats.sumsq,
            rows: stats.rows,
        };
        let prepared = self.quantizer.prepare(calibration, self.options.method)?;
        for name in names {
            self.stop.check()?;
            let (shape, data) = self.checkpoint.load(name)?;
            let [rows, cols] = shape[..] else {
                return Err(Error::bad_input(format!(
                    "`{name}` is no matrix: {shape:?}"
                )));
            };
            let matrix = Matrix {
                name,
                rows,
                cols,
                data: &data,
            };
            let (lut, report) = self.quantizer.quantize(matrix, &prepared, None)?;
            if let Some(why) = &report.fallback {
                self.ui
                    .note(&format!("`{name}`: {why}; used {}", report.method));
            }
            self.writer.put_lut(name, &self.key(name), &lut, report)?;
            self.stage.step(name);
        }
        Ok(())
    }

    /// Norms and the embedding table, in fp16.
    fn dense(&mut self) -> Result<(), Error> {
        let spec = self.spec;
        let mut names = vec![(FINAL_NORM.to_string(), vec![spec.hidden])];
        for layer in 0..spec.layers {
            names.extend(Norm::ALL.map(|n| (n.tensor(layer), vec![n.width(spec)])));
        }
        names.push((EMBEDDING.to_string(), vec![spec.vocab, spec.hidden]));
        for (name, shape) in names {
            self.stop.check()?;
            let key = Key::of([b"f16".as_slice(), self.seed.as_bytes(), name.as_bytes()]);
            if self.writer.has_dense(&name, &key)? {
                continue;
            }
            let rows = shape[0] as u32;
            let mut failed = None;
            let put = self
                .writer
                .put_dense(&name, &key, DenseElem::F16, &shape, |out| {
                    for first in (0..rows).step_by(1024) {
                        let rows: Vec<u32> = (first..rows.min(first + 1024)).collect();
                        match to_f16(self.checkpoint, &name, &rows) {
                            Ok(bytes) => out.write_all(&bytes)?,
                            Err(e) => {
                                let message = e.message.clone();
                                failed = Some(e);
                                return Err(std::io::Error::other(message));
                            }
                        }
                    }
                    Ok(())
                });
            match failed {
                Some(e) => return Err(e),
                None => put?,
            }
        }
        Ok(())
    }

    /// The model's spec and its tokenizer.
    fn copies(&mut self) -> Result<(), Error> {
        let mut spec =
            serde_json::to_string_pretty(self.spec).map_err(|e| Error::unexpected(&e))?;
        spec.push('\n');
        self.writer.put_file(SPEC_FILE, spec.as_bytes())?;
        let mut magnitudes =
            serde_json::to_string_pretty(&self.magnitudes).map_err(|e| Error::unexpected(&e))?;
        magnitudes.push('\n');
        self.writer
            .put_file(MAGNITUDES_FILE, magnitudes.as_bytes())?;
        for (name, bytes) in notices::collect(&self.options.model)? {
            self.writer.put_file(&name, &bytes)?;
        }
        for name in text::open_tokenizer(&self.options.model)?.files() {
            let path = self.options.model.join(name);
            let bytes = fs::read(&path).map_err(|e| Error::io(&path, &e))?;
            self.writer.put_file(name, &bytes)?;
        }
        Ok(())
    }
}

/// Rows of a tensor as little-endian fp16; what fp16 cannot hold is refused.
fn to_f16(checkpoint: &Checkpoint, name: &str, rows: &[u32]) -> Result<Vec<u8>, Error> {
    let values = checkpoint.read_rows_f32(name, rows)?;
    let mut bytes = Vec::with_capacity(values.len() * 2);
    for v in values {
        let h = f16::from_f32(v);
        if h.is_infinite() {
            return Err(Error::new(
                Exit::Numerical,
                format!("`{name}` holds {v}, which fp16 cannot"),
            ));
        }
        bytes.extend_from_slice(&h.to_le_bytes());
    }
    Ok(bytes)
}
