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
//! where it stopped and ends in the same bytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anemone_calib::{Hidden, Stats, Teacher, Weights};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::exit::Exit;
use anemone_schemas::spec::{EMBEDDING, FINAL_NORM, LM_HEAD, Linear, ModelSpec, Norm, Site};
use anemone_schemas::store::{DenseElem, Key, Provenance, Store, StoreWriter};
use half::f16;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::files::hex;
use super::text::{self, TextSource};
use crate::error::Error;
use crate::quantize::{Calibration, Method, Options, quantize_matrix};
use crate::stop::Stop;
use crate::ui::Ui;

/// Bumped by hand whenever the quantizer's results change, so that matrices of an
/// older version are not taken for finished ones.
const CODE_VERSION: u32 = 1;

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
    pub calibration: Vec<TextSource>,
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
    let windows = calibration_windows(options, spec)?;
    let calibration = windows.as_ref().map(|w| text::fingerprint(w));
    let settings = json!({
        "bits": options.bits,
        "group_rows": GROUP_ROWS,
        "calibration_tokens": windows.as_ref().map(|w| w.iter().map(Vec::len).sum::<usize>()),
        "window": options.window,
        "code_version": CODE_VERSION,
    });
    ui.note(&format!(
        "quantizing {} layers of `{}` with {}",
        spec.layers,
        options.model.display(),
        options.method.name(),
    ));
    let provenance = Provenance {
        source_fingerprint: checkpoint.fingerprint(),
        method: options.method.name().to_string(),
        settings: settings.as_object().cloned().unwrap_or_default(),
        calibration,
        tool: crate::PRODUCER.to_string(),
    };
    let writer = StoreWriter::create_or_resume(&options.output, provenance.clone())?;
    let mut job = Job {
        options,
        checkpoint: &checkpoint,
        spec,
        seed: serde_json::to_string(&provenance).map_err(|e| Error::unexpected(&e))?,
        writer,
        stage: ui.stage("quantize", spec.layers * Linear::ALL.len() + 1),
        stop,
    };
    job.matrices(windows.as_deref())?;
    job.dense()?;
    job.copies()?;
    checkpoint.unchanged()?;
    Ok(job.writer.finish()?)
}

const GROUP_ROWS: usize = 32;

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

fn calibration_windows(
    options: &QuantizeOptions,
    spec: &ModelSpec,
) -> Result<Option<Vec<Vec<u32>>>, Error> {
    if !options.method.needs_calibration() {
        return Ok(None);
    }
    let sets = text::read_sets(
        &options.model,
        &options.calibration,
        text::Builtin::Calibration,
        options.window.min(spec.max_position),
        options.tokens,
    )?;
    Ok(Some(sets.into_iter().flat_map(|s| s.windows).collect()))
}

struct Job<'a> {
    options: &'a QuantizeOptions,
    checkpoint: &'a Checkpoint,
    spec: &'a ModelSpec,
    /// All settings as text: part of every key.
    seed: String,
    writer: StoreWriter,
    stage: crate::ui::Stage,
    stop: &'a Stop,
}

impl Job<'_> {
    fn key(&self, name: &str) -> Key {
        Key::of([b"lut".as_slice(), self.seed.as_bytes(), name.as_bytes()])
    }

    /// All matrices, layer by layer, then the output layer.
    fn matrices(&mut self, windows: Option<&[Vec<u32>]>) -> Result<(), Error> {
        let teacher = Teacher::new(self.checkpoint);
        let mut hidden: Option<Hidden> = None;
        for layer in 0..self.spec.layers {
            let missing = self.missing(layer)?;
            // With nothing left to do up to here, the teacher need not run at all;
            // it catches up below once a layer has something missing.
            if missing.is_empty() {
                if let Some(h) = hidden.as_mut() {
                    teacher.block(layer, h, None)?;
                }
                continue;
            }
            let stats = match windows {
                None => BTreeMap::new(),
                Some(windows) => {
                    if hidden.is_none() {
                        hidden = Some(self.catch_up(&teacher, windows, layer)?);
                    }
                    let h = hidden.as_mut().expect("just set");
                    self.layer_stats(&teacher, layer, h)?
                }
            };
            for linear in missing {
                self.stop.check()?;
                self.matrix(&linear.tensor(layer), stats.get(&linear.site()))?;
            }
        }
        if self.writer.has_lut(LM_HEAD, &self.key(LM_HEAD))? {
            self.stage.step(LM_HEAD);
            return Ok(());
        }
        let stats = match windows {
            None => None,
            Some(windows) => {
                let h = match hidden {
                    Some(h) => h,
                    None => self.catch_up(&teacher, windows, self.spec.layers)?,
                };
                let normed = teacher.final_norm(&h)?;
                let mut stats = Stats::new(Site::HeadIn, self.spec.hidden);
                for rows in &normed.0 {
                    stats.add(rows);
                }
                Some(stats)
            }
        };
        self.stop.check()?;
        self.matrix(LM_HEAD, stats.as_ref())
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

    /// Hidden states before `layer`.
    fn catch_up(
        &self,
        teacher: &Teacher<'_>,
        windows: &[Vec<u32>],
        layer: usize,
    ) -> Result<Hidden, Error> {
        let mut hidden = teacher.embed(windows)?;
        for l in 0..layer {
            self.stop.check()?;
            teacher.block(l, &mut hidden, None)?;
        }
        Ok(hidden)
    }

    /// Runs `layer` over all windows and gathers the statistics of its inputs.
    fn layer_stats(
        &self,
        teacher: &Teacher<'_>,
        layer: usize,
        hidden: &mut Hidden,
    ) -> Result<BTreeMap<Site, Stats>, Error> {
        let mut all: BTreeMap<Site, Stats> = BTreeMap::new();
        let spec = self.spec;
        teacher.block(
            layer,
            hidden,
            Some(&mut |site: Site, rows: &[f32]| {
                all.entry(site)
                    .or_insert_with(|| Stats::new(site, site.width(spec)))
                    .add(rows);
            }),
        )?;
        Ok(all)
    }

    /// Quantizes one matrix and puts it into the store.
    fn matrix(&mut self, name: &str, stats: Option<&Stats>) -> Result<(), Error> {
        let (shape, weights) = self.checkpoint.load(name)?;
        let [rows, cols] = shape[..] else {
            return Err(Error::bad_input(format!("`{name}` is no matrix: {shape:?}")));
        };
        let calibration = stats.map(|s| Calibration {
            cols: s.cols,
            hessian: &s.hessian,
            sumsq: &s.sumsq,
            rows: s.rows,
        });
        let options = Options {
            bits: self.options.bits,
            group_rows: GROUP_ROWS,
            jobs: self.options.jobs,
        };
        let (lut, report) = quantize_matrix(
            &weights,
            [rows, cols],
            calibration.as_ref(),
            self.options.method,
            &options,
        )
        .map_err(|e| Error::new(Exit::Numerical, format!("`{name}`: {e}")))?;
        let key = self.key(name);
        self.writer.put_lut(name, &key, &lut, report)?;
        self.stage.step(name);
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
            let width = *shape.last().expect("not empty");
            let rows: u32 = (shape.iter().product::<usize>() / width) as u32;
            let mut failed = None;
            let put = self.writer.put_dense(&name, &key, DenseElem::F16, &shape, |out| {
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
        let mut spec = serde_json::to_string_pretty(self.spec).map_err(|e| Error::unexpected(&e))?;
        spec.push('\n');
        self.writer.put_file(SPEC_FILE, spec.as_bytes())?;
        for name in text::open_tokenizer(&self.options.model)?.files() {
            let path = self.options.model.join(&name);
            let bytes = fs::read(&path).map_err(|e| Error::io(&path, &e))?;
            self.writer.put_file(&name, &bytes)?;
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

/// Digest of everything in a store, in order of names: equal stores, equal digests.
pub fn store_digest(store: &Store) -> String {
    let mut hash = Sha256::new();
    for m in &store.manifest().matrices {
        hash.update(format!("{} {}\n", m.name, m.sha256));
    }
    for d in &store.manifest().dense {
        hash.update(format!("{} {}\n", d.name, d.sha256));
    }
    hex(&hash.finalize())
}
