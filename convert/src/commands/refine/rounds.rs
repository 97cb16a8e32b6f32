//! The rounds, and what is kept of them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anemone_calib::Weights;
use anemone_schemas::atomic;
use anemone_schemas::spec::{Linear, ModelSpec};
use anemone_schemas::store::{Key, LutRecord, MatrixReport, Provenance, Store, StoreWriter};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{RefineOptions, Student};
use crate::commands::quantize::{Kept, Statistics, load_matrix, read_f32, write_f32};
use crate::commands::training::{Found, Training};
use crate::error::Error;
use crate::lower::StoreWeights;
use crate::quantize::{Matrix, Method, OUTPUT_ROWS, OutputHessian, Quantizer, Round, Settings};

/// How far the work has come.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Progress {
    /// Rounds that are complete.
    pub(super) round: usize,
    /// The round whose matrices the model has; 0 for those of the store.
    pub(super) current: usize,
    /// The same one step before.
    previous: usize,
    /// How often steps were halved.
    halved: i32,
    /// What the work is for.
    provenance: Provenance,
}

/// What the rounds of a run share.
pub(super) struct Job<'a> {
    pub(super) options: &'a RefineOptions,
    pub(super) weights: &'a dyn Weights,
    pub(super) spec: &'a ModelSpec,
    pub(super) store: &'a Store,
    pub(super) head: Option<&'a Store>,
    pub(super) provenance: &'a Provenance,
    pub(super) scratch: &'a Path,
    pub(super) statistics: &'a Statistics,
    pub(super) training: &'a Training<'a>,
    /// By bits, rows per table, and the bits of the damping.
    pub(super) quantizers: BTreeMap<(u8, usize, u64), Quantizer>,
}

impl<'a> Job<'a> {
    fn folder(&self, round: usize) -> PathBuf {
        self.scratch.join(format!("round-{round}"))
    }

    /// The model with the matrices of a round, or with the store's own for 0.
    pub(super) fn student(&self, round: usize) -> Result<Student<'a>, Error> {
        let spec = self.spec;
        let round = (round > 0).then(|| Store::open(&self.folder(round)));
        Ok(Student {
            stored: StoreWeights {
                store: self.store,
                spec,
            },
            head: self.head.map(|store| StoreWeights { store, spec }),
            round: round.transpose()?,
        })
    }

    fn progress_file(&self) -> PathBuf {
        self.scratch.join("progress.json")
    }

    /// What an earlier run with the same options left, or the beginning.
    pub(super) fn progress(&self) -> Result<Progress, Error> {
        let path = self.progress_file();
        let found = match fs::read(&path) {
            Ok(json) => serde_json::from_slice(&json).ok(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io(&path, &e)),
        };
        let usable = |found: &Progress| {
            let there = |round| round == 0 || Store::open(&self.folder(round)).is_ok();
            found.provenance == *self.provenance && there(found.current) && there(found.previous)
        };
        Ok(found.filter(usable).unwrap_or_else(|| Progress {
            round: 0,
            current: 0,
            previous: 0,
            halved: 0,
            provenance: self.provenance.clone(),
        }))
    }

    /// One round over all layers; returns what to say of it.
    pub(super) fn round(
        &mut self,
        round: usize,
        batch: &[usize],
        progress: &mut Progress,
    ) -> Result<String, Error> {
        let student = self.student(progress.current)?;
        let before = match progress.previous {
            same if same == progress.current => None,
            previous => {
                let student = self.student(previous)?;
                Some(self.training.on_batch(&student, batch)?)
            }
        };
        let rate = self.options.rate * self.decay(round) / 2f64.powi(progress.halved);
        let loss = self.step(round, batch, &student, rate)?;
        let mut said = format!("KL {loss:.4}");
        if before.is_some_and(|before| loss > before) {
            // The step before went too far, and this one started from there.
            progress.current = progress.previous;
            progress.halved += 1;
            said.push_str(", more than before the last step: undone");
        } else {
            progress.previous = progress.current;
            progress.current = round;
        }
        progress.round = round;
        let path = self.progress_file();
        let json = serde_json::to_vec(&progress).map_err(|e| Error::unexpected(&e))?;
        atomic::write_bytes(&path, &json).map_err(|e| Error::io(&path, &e))?;
        for old in (1..=round).filter(|r| ![progress.current, progress.previous].contains(r)) {
            let folder = self.folder(old);
            if folder.exists() {
                fs::remove_dir_all(&folder).map_err(|e| Error::io(&folder, &e))?;
            }
        }
        Ok(said)
    }

    /// Makes the matrices of a round from those of the student; returns its divergence on the
    /// batch.
    fn step(
        &mut self,
        round: usize,
        batch: &[usize],
        student: &Student<'_>,
        rate: f64,
    ) -> Result<f64, Error> {
        let folder = self.folder(round);
        if folder.exists() {
            // Half a round, or one of other options.
            fs::remove_dir_all(&folder).map_err(|e| Error::io(&folder, &e))?;
        }
        let mut writer = StoreWriter::create_or_resume(&folder, self.provenance.clone())?;
        let mut gradients: BTreeMap<Linear, Vec<f32>> = BTreeMap::new();
        let training = self.training;
        let loss = training.gradients(student, batch, &mut |found| {
            match found {
                Found::FinalNorm(_) => {}
                Found::Matrix(_, linear, part) => match gradients.get_mut(&linear) {
                    None => {
                        gradients.insert(linear, part);
                    }
                    Some(sum) => {
                        sum.par_iter_mut()
                            .zip(&part)
                            .for_each(|(sum, part)| *sum += part);
                    }
                },
                Found::Layer(layer, _) => {
                    let found = std::mem::take(&mut gradients);
                    for site in self.statistics.layer(self.spec, layer)? {
                        self.site(layer, &site, student, &found, rate, &folder, &mut writer)?;
                    }
                }
            }
            Ok(())
        })?;
        writer.finish()?;
        Ok(loss)
    }

    /// Puts the matrices of a site after a step, and their pulls, into a round's folder.
    #[allow(
        clippy::too_many_arguments,
        reason = "one caller, and each is a plain thing"
    )]
    fn site(
        &mut self,
        layer: usize,
        site: &Kept,
        student: &Student<'_>,
        gradients: &BTreeMap<Linear, Vec<f32>>,
        rate: f64,
        folder: &Path,
        writer: &mut StoreWriter,
    ) -> Result<(), Error> {
        for (linear, blocks) in &site.outputs {
            let name = linear.tensor(layer);
            let records = &self.store.manifest().matrices;
            let record = records.iter().find(|m| m.name == name && m.vector == 1);
            // Without a record it has no tables, or those of vectors: it stays as it is.
            let (Some(record), Some(gradient)) = (record, gradients.get(linear)) else {
                continue;
            };
            let old = student
                .round
                .as_ref()
                .unwrap_or(self.store)
                .load_lut(&name)?;
            let (rows, cols, data) = load_matrix(self.weights, &name)?;
            let pull_of = |folder: &Path| folder.join(format!("{name}.pull"));
            let mut pull = match &student.round {
                None => vec![0.0; data.len()],
                Some(before) => read_pull(&pull_of(before.dir()), data.len())?,
            };
            let matrix = Matrix {
                name: &name,
                rows,
                cols,
                data: &data,
            };
            let output = OutputHessian {
                blocks,
                rows: OUTPUT_ROWS,
            };
            let quantizer = self.quantizer(record)?;
            let prepared = quantizer.prepare(site.calibration(), Method::KMeans)?;
            let mut round = Round {
                lut: &old,
                gradient,
                pull: &mut pull,
                rate,
            };
            let (lut, found) = quantizer.refine(matrix, &prepared, output, &mut round)?;
            let report = MatrixReport {
                plain_error: found.plain_error,
                weighted_error: found.weighted_error,
                method: format!("{}, refined", record.report.method),
                ..record.report.clone()
            };
            write_pull(&pull_of(folder), &pull)?;
            let key = Key::of([b"round".as_slice(), name.as_bytes()]);
            writer.put_lut(&name, &key, &lut, report)?;
        }
        Ok(())
    }

    /// The part of the rate that a round has: all of it at first, and in the last third less and
    /// less.
    fn decay(&self, round: usize) -> f64 {
        let left = (self.options.rounds + 1 - round) as f64 / self.options.rounds as f64;
        (3.0 * left).min(1.0)
    }

    fn quantizer(&mut self, record: &LutRecord) -> Result<&Quantizer, Error> {
        let damping = record.report.damping;
        let settings = Settings {
            bits: record.bits,
            group_rows: record.group_rows,
            damping: damping.unwrap_or(Settings::default().damping),
            ..Settings::default()
        };
        let key = (record.bits, record.group_rows, settings.damping.to_bits());
        if !self.quantizers.contains_key(&key) {
            let quantizer = Quantizer::new(settings, self.options.jobs)?;
            self.quantizers.insert(key, quantizer);
        }
        Ok(&self.quantizers[&key])
    }
}

fn write_pull(path: &Path, pull: &[f32]) -> Result<(), Error> {
    let write = || {
        let mut out = BufWriter::new(File::create(path)?);
        write_f32(&mut out, pull.iter())?;
        out.flush()
    };
    write().map_err(|e| Error::io(path, &e))
}

fn read_pull(path: &Path, count: usize) -> Result<Vec<f32>, Error> {
    let at = |e| Error::io(path, &e);
    let mut file = File::open(path).map_err(at)?;
    let found = file.metadata().map_err(at)?.len();
    let expected = count as u64 * 4;
    if found != expected {
        return Err(Error::bad_input(format!(
            "`{}` has {found} bytes, expected {expected}",
            path.display(),
        ))
        .hint("remove the folder to begin anew"));
    }
    read_f32(&mut file, count).map_err(at)
}
