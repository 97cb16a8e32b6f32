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
//! of all windows, and one layer's weights: layers are computed again on the way back. After every
//! step the state lies in a file of the new store (`tune/state.rs`): an interrupted training goes on
//! after its last step and ends in the same bytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anemone_schemas::spec::{FINAL_NORM, Linear, Norm};
use anemone_schemas::store::Key;

use super::origin::{Origin, begin};
use super::rewrite::rewrite;
use super::text::Budget;
use super::training::{Change, Found, Text, Training};
use crate::error::Error;
use crate::stop::Stop;
use crate::ui::Ui;

mod state;
mod student;

use student::Student;

/// File of the new store with the state after the last step, until the store is complete.
pub(crate) const STATE: &str = "tune.partial";

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

/// Runs the command; nothing is returned if it had been done before.
///
/// # Errors
/// Bad input, too little text, or an interruption.
pub fn run(options: &TuneOptions, ui: Ui, stop: &Stop) -> Result<Option<Change>, Error> {
    let budget = Budget {
        tokens: options.tokens,
        window: options.window,
    };
    let origin = Origin::open(
        &options.model,
        &options.store,
        options.head.as_deref(),
        &options.calibration,
        budget,
    )?;
    let text = Text::divide(&origin.corpus)?;
    let settings = [
        ("steps", options.steps.into()),
        ("step_tokens", options.step_tokens.into()),
        ("rate", options.rate.into()),
    ];
    let provenance = origin.provenance("tune", &settings);
    let Some(writer) = begin(&options.output, &provenance, ui)? else {
        return Ok(None);
    };
    let Origin {
        checkpoint,
        store,
        spec,
        head,
        valid,
        ..
    } = &origin;
    let new_student = || Student::new(store, head.as_ref(), spec);

    let training = Training::new(checkpoint, text, *valid, ui, stop)?;
    let mut student = new_student()?;
    let before = training.held_out(&student)?;
    let path = options.output.join(STATE);
    let known = serde_json::to_string(&provenance).map_err(|e| Error::unexpected(&e))?;
    let key = Key::of([b"tune".as_slice(), known.as_bytes()]);
    state::resume(&path, &key, &mut student);
    let stage = ui.stage("tune", options.steps);
    let mut batches = training.batches(options.step_tokens);
    for step in 0..options.steps {
        stop.check()?;
        let batch = batches.next();
        if step < student.steps() {
            stage.step("done before");
            continue;
        }
        let warm = ((step + 1) as f64 / WARM_UP as f64).min(1.0);
        let angle = std::f64::consts::PI * step as f64 / options.steps as f64;
        let rate = options.rate * warm * (0.5 + 0.5 * angle.cos());
        let loss = self::step(&training, &mut student, &batch, rate)?;
        state::write(&path, &key, &student)?;
        stage.step(&format!("KL {loss:.4}"));
    }
    student.round();
    let after = training.held_out(&student)?;
    if after >= before {
        ui.note(&format!(
            "KL on text kept out went from {before:.4} to {after:.4}: the tables stay as they were"
        ));
        student = new_student()?;
    }
    rewrite(store, head.as_ref(), writer, &provenance, "tuned", &student)?;
    checkpoint.unchanged()?;
    let _ = fs::remove_file(&path);
    Ok(Some(Change {
        before,
        after: after.min(before),
    }))
}

/// One step of the optimizer; returns the mean divergence before it.
fn step(
    training: &Training<'_>,
    student: &mut Student<'_>,
    batch: &[usize],
    rate: f64,
) -> Result<f64, Error> {
    let mut gradients: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let loss = training.gradients(student, batch, &mut |found| {
        match found {
            Found::FinalNorm(gradient) => {
                gradients.insert(FINAL_NORM.to_string(), gradient);
            }
            Found::Matrix(layer, linear, gradient) => {
                student.add_gradient(&linear.tensor(layer), &gradient, &mut gradients);
            }
            Found::Layer(layer, norms) => {
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
        }
        Ok(())
    })?;
    student.update(&gradients, rate);
    Ok(loss)
}

/// Names of all matrices of the layers.
fn matrices(layers: usize) -> impl Iterator<Item = String> {
    (0..layers).flat_map(|layer| Linear::ALL.map(|linear| linear.tensor(layer)))
}
