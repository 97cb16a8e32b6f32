//! `refine`: codes and tables of a store chosen again, with the gradient of the whole model.
//!
//! `quantize` takes each matrix for itself, as if all others were exact. Here they are not: in each
//! round the quantized model runs over some of the text, forward and backward, and the gradient of
//! `KL(teacher || student)` at each matrix says what the errors of all of them do
//! together. [`crate::quantize::Quantizer::refine`] follows it a little in the metric that
//! `quantize` used.
//!
//! ```text
//! text --teacher--> statistics of all layers (once) --+
//! text --student--> gradients (each round) -----------+--> codes, tables, pulls of the round
//! ```
//!
//! A step that went too far does harm, and its own text cannot tell: the gradient of a few
//! thousand tokens fits those far better than any others. The next round's text can. If the
//! divergence there is higher than it was before the step, the step is undone and all further ones
//! are half as large.
//!
//! The files of the work lie in a folder of the new store: the statistics, and of the last two
//! steps the matrices and their pulls. A round that is complete is not computed again: an
//! interrupted run goes on after it and ends in the same bytes.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anemone_calib::{Error as CalibError, Weights};
use anemone_schemas::lut::LutMatrix;
use anemone_schemas::spec::{LM_HEAD, ModelSpec};
use anemone_schemas::store::{Key, LutRecord, MatrixReport, Store};

use super::origin::{Origin, begin};
use super::quantize::{Statistics, read_order};
use super::rewrite::{Replace, rewrite};
use super::text::Budget;
use super::training::{Change, Text, Training};
use crate::error::Error;
use crate::lower::StoreWeights;
use crate::ordered::Ordered;
use crate::stop::Stop;
use crate::ui::Ui;

mod rounds;

use rounds::Job;

/// Folder of the work in that of the new store.
pub(crate) const SCRATCH: &str = "refine.partial";

/// What to refine and how long.
#[derive(Clone, Debug)]
pub struct RefineOptions {
    /// The teacher's checkpoint.
    pub model: PathBuf,
    /// Store to start from.
    pub store: PathBuf,
    /// Store whose output layer the student has; that of `store` if absent.
    pub head: Option<PathBuf>,
    /// Store to make.
    pub output: PathBuf,
    /// Calibration text; empty for the built-in one.
    pub calibration: Vec<PathBuf>,
    /// At most this many tokens of it.
    pub tokens: usize,
    /// Tokens per window.
    pub window: usize,
    /// Rounds.
    pub rounds: usize,
    /// Tokens per round.
    pub round_tokens: usize,
    /// How far the first round goes; later ones less. See [`crate::quantize::Round::rate`].
    pub rate: f64,
    /// Worker threads; the result does not depend on them.
    pub jobs: usize,
}

/// Runs the command; nothing is returned if it had been done before.
///
/// # Errors
/// Bad input, too little text, or an interruption.
pub fn run(options: &RefineOptions, ui: Ui, stop: &Stop) -> Result<Option<Change>, Error> {
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
        ("rounds", options.rounds.into()),
        ("round_tokens", options.round_tokens.into()),
        ("rate", options.rate.into()),
    ];
    let provenance = origin.provenance("refine", &settings);
    let Some(writer) = begin(&options.output, &provenance, ui)? else {
        return Ok(None);
    };
    let Origin {
        checkpoint,
        store,
        spec,
        head,
        valid,
        corpus,
    } = &origin;
    let scratch = options.output.join(SCRATCH);
    let text_key = corpus.fingerprint();
    let order = read_order(store, checkpoint)?;
    let order_key = order.as_ref().map_or("", |order| &order.key);
    let parts = [&checkpoint.fingerprint(), &text_key, order_key];
    let known = Key::of(parts.map(str::as_bytes));
    let weights = Ordered::new(checkpoint, order);
    let statistics = Statistics::gather(
        &weights,
        text.windows(),
        *valid,
        &scratch.join(format!("statistics-{}", &known.as_str()[..16])),
        ui,
        stop,
    )?;
    let training = Training::new(checkpoint, text, *valid, ui, stop)?;
    let mut job = Job {
        options,
        weights: &weights,
        spec,
        store,
        head: head.as_ref(),
        provenance: &provenance,
        scratch: &scratch,
        statistics: &statistics,
        training: &training,
        quantizers: BTreeMap::new(),
    };
    let mut student = job.student(0)?;
    let before = training.held_out(&student)?;
    let stage = ui.stage("refine", options.rounds);
    let mut batches = training.batches(options.round_tokens);
    let mut progress = job.progress()?;
    for round in 1..=options.rounds {
        let batch = batches.next();
        if round <= progress.round {
            stage.step("done before");
            continue;
        }
        stage.step(&job.round(round, &batch, &mut progress)?);
    }
    let refined = job.student(progress.current)?;
    let after = training.held_out(&refined)?;
    if after < before {
        student = refined;
    } else {
        ui.note(&format!(
            "KL on text kept out went from {before:.4} to {after:.4}: the matrices stay as they were"
        ));
    }
    rewrite(
        store,
        head.as_ref(),
        writer,
        &provenance,
        "refined",
        &student,
    )?;
    checkpoint.unchanged()?;
    fs::remove_dir_all(&scratch).map_err(|e| Error::io(&scratch, &e))?;
    Ok(Some(Change {
        before,
        after: after.min(before),
    }))
}

/// The quantized model after a round.
struct Student<'a> {
    stored: StoreWeights<'a>,
    /// Where the output layer is, if not there.
    head: Option<StoreWeights<'a>>,
    /// Where the other matrices are after a round.
    round: Option<Store>,
}

impl Weights for Student<'_> {
    fn spec(&self) -> &ModelSpec {
        self.stored.spec
    }

    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), CalibError> {
        if let Some(store) = self.round.as_ref().filter(|s| s.lut(name).is_ok()) {
            let spec = self.stored.spec;
            return StoreWeights { store, spec }.load(name);
        }
        let head = self.head.as_ref().filter(|_| name == LM_HEAD);
        head.unwrap_or(&self.stored).load(name)
    }
}

impl Replace for Student<'_> {
    fn matrix(&self, old: &LutRecord) -> Result<Option<(LutMatrix, MatrixReport)>, Error> {
        let Some(store) = &self.round else {
            return Ok(None);
        };
        let mut records = store.manifest().matrices.iter();
        let Some(record) = records.find(|m| m.name == old.name) else {
            return Ok(None);
        };
        Ok(Some((store.load_lut(&record.name)?, record.report.clone())))
    }

    fn dense(&self, _: &str) -> Option<&[f32]> {
        None
    }
}
