//! `tune`: a short training of table values and norm weights against the teacher.
//!
//! Codes stay as they are. What is trained is what a program holds in fp16 anyway: the values of
//! every table of the layers and the weights of all norms, a few thousandths of the model's
//! parameters. The loss is `KL(teacher || student)` at every position over the whole
//! vocabulary, and the optimizer is Adam (Kingma and Ba, 2014, arXiv:1412.6980) with the
//! rate going down by a half cosine. Table values move in units of their table's standard
//! deviation, norm weights in units of themselves and half as fast.
//!
//! Calibration files take turns, so every step sees about as much of each. One window in ten is
//! kept out of the training; if the divergence there does not go down, the store that comes out
//! has the tables that went in.
//!
//! In memory are the hidden states of one step at the input of every layer, the teacher's final ones
//! of all windows, and one layer's weights: layers are computed again on the way back.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anemone_calib::{
    Error as CalibError, Hidden, Kl, LinearGradient, Teacher, Weights, softmax_rows,
};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::{FINAL_NORM, LM_HEAD, Linear, Norm, Site};
use anemone_schemas::store::{Provenance, Store, StoreWriter};
use serde::Serialize;

use super::target::store_spec;
use super::text::{self, Budget};
use crate::error::Error;
use crate::stop::Stop;
use crate::ui::Ui;

mod student;

use student::Student;

/// One window in so many is kept out of the training.
pub(crate) const HELD_OUT: usize = 10;

/// Steps over which the rate goes up at the start.
const WARM_UP: usize = 4;

/// What to tune and how long.
#[derive(Clone, Debug)]
pub struct TuneOptions {
    /// The teacher's checkpoint.
    pub model: PathBuf,
    /// Store to start from.
    pub store: PathBuf,
    /// Store whose output layer the training sees; that of `store` if absent.
    pub head: Option<PathBuf>,
    /// Store to make.
    pub output: PathBuf,
    /// Text to train on; empty for the built-in one.
    pub calibration: Vec<PathBuf>,
    /// At most this many tokens of it.
    pub tokens: usize,
    /// Tokens per window.
    pub window: usize,
    /// Steps of the optimizer.
    pub steps: usize,
    /// Tokens per step.
    pub step_tokens: usize,
    /// Rate of table values.
    pub rate: f64,
}

/// Divergence on the windows kept out, before and after.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Tuned {
    /// Of the store that went in.
    pub before: f64,
    /// Of the store that came out.
    pub after: f64,
}

/// Runs the command; nothing is returned if it had been done before.
///
/// # Errors
/// Bad input, too little text, or an interruption.
pub fn run(options: &TuneOptions, ui: Ui, stop: &Stop) -> Result<Option<Tuned>, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let store = Store::open(&options.store)?;
    if store.manifest().provenance.source_fingerprint != checkpoint.fingerprint() {
        return Err(Error::bad_input(format!(
            "`{}` was not made from `{}`",
            options.store.display(),
            options.model.display()
        )));
    }
    let spec = store_spec(&store)?;
    let head_store = options.head.as_deref().map(Store::open).transpose()?;
    let new_student = || Student::new(&store, head_store.as_ref(), &spec);
    let tokenizer = text::open_tokenizer(&options.model)?;
    let budget = Budget {
        tokens: options.tokens,
        window: options.window.min(spec.max_position),
    };
    let corpus = text::calibration(&tokenizer, &options.calibration, budget)?;
    let (held_out, windows): (Vec<_>, Vec<_>) = corpus
        .windows()
        .iter()
        .cloned()
        .enumerate()
        .partition(|(at, _)| at % HELD_OUT == HELD_OUT - 1);
    let strip = |all: Vec<(usize, Vec<u32>)>| all.into_iter().map(|w| w.1).collect::<Vec<_>>();
    let (held_out, windows) = (strip(held_out), strip(windows));
    if held_out.is_empty() {
        return Err(Error::bad_input(format!(
            "the text has {} windows, expected at least {HELD_OUT}",
            corpus.windows().len()
        )));
    }

    let mut provenance = store.manifest().provenance.clone();
    for (key, value) in [
        ("tune_steps", options.steps.into()),
        ("tune_step_tokens", options.step_tokens.into()),
        ("tune_rate", options.rate.into()),
        ("tune_tokens", corpus.tokens().into()),
        ("tune_text", corpus.fingerprint().into()),
    ] {
        provenance.settings.insert(key.to_string(), value);
    }
    if let Some(head) = &head_store {
        let record = head.manifest().matrices.iter().find(|m| m.name == LM_HEAD);
        let key = record.map(|m| m.sha256.clone());
        provenance.settings.insert("tune_head".into(), key.into());
    }
    provenance.tool = crate::PRODUCER.to_string();
    if let Ok(done) = Store::open(&options.output)
        && done.manifest().provenance == provenance
    {
        ui.note(&format!(
            "`{}` is complete already",
            options.output.display()
        ));
        return Ok(None);
    }
    // Another store in its place is refused now, not after the training.
    StoreWriter::create_or_resume(&options.output, provenance.clone())?;

    let run = Run {
        teacher: Teacher::new(&checkpoint),
        valid: tokenizer.size(),
        ui,
        stop,
    };
    let head = run.teacher.head()?;
    let mut student = new_student()?;
    let kept = run.finish(&held_out, run.teacher.weights(), "held out")?;
    let before = run.divergence(&student, &held_out, &kept, &head)?;
    let expected = run.finish(&windows, run.teacher.weights(), "teacher")?;
    let stage = ui.stage("tune", options.steps);
    let mut next = 0;
    for step in 0..options.steps {
        stop.check()?;
        let mut batch = Vec::new();
        let mut tokens = 0;
        while tokens < options.step_tokens && batch.len() < windows.len() {
            batch.push(next % windows.len());
            tokens += windows[next % windows.len()].len();
            next += 1;
        }
        let warm = ((step + 1) as f64 / WARM_UP as f64).min(1.0);
        let angle = std::f64::consts::PI * step as f64 / options.steps as f64;
        let rate = options.rate * warm * (0.5 + 0.5 * angle.cos());
        let loss = run.step(&mut student, &batch, &windows, &expected, &head, rate)?;
        stage.step(&format!("KL {loss:.4}"));
    }
    student.round();
    let after = run.divergence(&student, &held_out, &kept, &head)?;
    if after >= before {
        ui.note(&format!(
            "KL on text kept out went from {before:.4} to {after:.4}: the tables stay as they were"
        ));
        student = new_student()?;
    }
    write(&student, &store, provenance, options)?;
    checkpoint.unchanged()?;
    Ok(Some(Tuned {
        before,
        after: after.min(before),
    }))
}

/// Writes the new store: tuned matrices and norms, everything else copied.
fn write(
    student: &Student<'_>,
    store: &Store,
    provenance: Provenance,
    options: &TuneOptions,
) -> Result<(), Error> {
    let seed = serde_json::to_string(&provenance).map_err(|e| Error::unexpected(&e))?;
    let mut writer = StoreWriter::create_or_resume(&options.output, provenance)?;
    student.write(&mut writer, &seed)?;
    for file in &store.manifest().files {
        let path = store.dir().join(&file.name);
        let bytes = fs::read(&path).map_err(|e| Error::io(&path, &e))?;
        writer.put_file(&file.name, &bytes)?;
    }
    writer.finish()?;
    Ok(())
}

/// What the steps of a run share.
struct Run<'a> {
    teacher: Teacher<'a>,
    /// Ids the tokenizer knows.
    valid: usize,
    ui: Ui,
    stop: &'a Stop,
}

impl Run<'_> {
    /// Final hidden states of windows, after the norm.
    fn finish(
        &self,
        windows: &[Vec<u32>],
        weights: &dyn Weights,
        name: &str,
    ) -> Result<Hidden, Error> {
        let model = Teacher::new(weights);
        let layers = model.spec().layers;
        let stage = self.ui.stage("tune", layers);
        let mut hidden = model.embed(windows)?;
        for layer in 0..layers {
            self.stop.check()?;
            model.block(layer, &mut hidden, None)?;
            stage.step(&format!("{name}: layer {layer}"));
        }
        Ok(model.final_norm(&hidden)?)
    }

    /// Mean divergence of the student on windows.
    fn divergence(
        &self,
        student: &Student<'_>,
        windows: &[Vec<u32>],
        expected: &Hidden,
        head: &[f32],
    ) -> Result<f64, Error> {
        let found = self.finish(windows, student, "student")?;
        let model = Teacher::new(student);
        let own = model.head()?;
        let vocab = model.spec().vocab;
        let mut kl = Kl::new();
        for (found, expected) in found.0.iter().zip(&expected.0) {
            let (p, q) = (model.logits(expected, head)?, model.logits(found, &own)?);
            kl.add_rows(&p, &q, vocab, self.valid, &vec![None; p.len() / vocab])?;
        }
        Ok(kl.summary().map_or(0.0, |s| s.mean))
    }

    /// One step of the optimizer; returns the mean divergence before it.
    fn step(
        &self,
        student: &mut Student<'_>,
        batch: &[usize],
        windows: &[Vec<u32>],
        expected: &Hidden,
        head: &[f32],
        rate: f64,
    ) -> Result<f64, Error> {
        let ids: Vec<Vec<u32>> = batch.iter().map(|&at| windows[at].clone()).collect();
        let tokens: usize = ids.iter().map(Vec::len).sum();
        let mut gradients: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        let loss = {
            let (teacher, model) = (&self.teacher, Teacher::new(student));
            let spec = model.spec();
            let (vocab, valid) = (spec.vocab, self.valid);
            let mut hidden = model.embed(&ids)?;
            let mut inputs = Vec::with_capacity(spec.layers);
            for layer in 0..spec.layers {
                self.stop.check()?;
                inputs.push(hidden.clone());
                model.block(layer, &mut hidden, None)?;
            }
            let own = model.head()?;
            let mut divergence = 0.0;
            let mut loss = |window: usize, first: usize, _: &[f32], logits: &mut [f32]| {
                let rows = logits.len() / vocab;
                let states = &expected.0[batch[window]];
                let states = &states[first * spec.hidden..(first + rows) * spec.hidden];
                let mut p = teacher.logits(states, head)?;
                let mut kl = Kl::new();
                kl.add_rows(&p, logits, vocab, valid, &vec![None; rows])?;
                divergence += kl.divergences().iter().sum::<f64>();
                softmax_rows(&mut p, vocab, valid);
                softmax_rows(logits, vocab, valid);
                for (q, p) in logits.iter_mut().zip(&p) {
                    *q = (*q - p) / tokens as f32;
                }
                Ok(())
            };
            let (mut gradient, norm) = model.head_backward(&hidden, &own, &mut loss)?;
            gradients.insert(FINAL_NORM.to_string(), norm);
            for layer in (0..spec.layers).rev() {
                self.stop.check()?;
                let mut failed: Option<CalibError> = None;
                let mut hook = |_: Site, x: &[f32], outputs: &[LinearGradient<'_>]| {
                    for output in outputs {
                        let name = output.linear.tensor(layer);
                        let [rows, _] = output.linear.shape(spec);
                        match output.of_weight(x, rows) {
                            Ok(dw) => student.add_gradient(&name, &dw, &mut gradients),
                            Err(e) => {
                                failed.get_or_insert(e);
                            }
                        }
                    }
                };
                let input = inputs.pop().expect("an input for each layer");
                let norms = model.backward(layer, &input, &mut gradient, Some(&mut hook))?;
                if let Some(e) = failed {
                    return Err(e.into());
                }
                let [q, k] = norms.heads;
                for (norm, gradient) in [
                    (Norm::Input, norms.input),
                    (Norm::PostAttention, norms.post_attention),
                    (Norm::Q, q),
                    (Norm::K, k),
                ] {
                    if !gradient.is_empty() {
                        gradients.insert(norm.tensor(layer), gradient);
                    }
                }
            }
            divergence / tokens as f64
        };
        student.update(&gradients, rate);
        Ok(loss)
    }
}

/// Names of all matrices of the layers.
fn matrices(layers: usize) -> impl Iterator<Item = String> {
    (0..layers).flat_map(|layer| Linear::ALL.map(|linear| linear.tensor(layer)))
}
