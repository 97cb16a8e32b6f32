//! What `tune` and `refine` share: a quantized model held against the teacher's distribution.
//!
//! The loss is `KL(teacher || student)`, the mean over positions, over the whole vocabulary. One
//! window in ten is kept out of the training and judges it. In memory are the teacher's
//! final hidden states of all windows, the student's of one step at the input of every layer, and
//! one layer's weights: layers are computed again on the way back.

use anemone_calib::{
    Corpus, Error as CalibError, Hidden, Kl, LinearGradient, NormGradients, Teacher, Weights,
    softmax_rows,
};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::{Linear, Site};
use serde::Serialize;

use crate::error::Error;
use crate::stop::Stop;
use crate::ui::Ui;

/// One window in so many is kept out of the training.
pub(crate) const HELD_OUT: usize = 10;

/// Divergence on the windows kept out, before and after.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Change {
    /// Of the store that went in.
    pub before: f64,
    /// Of the store that came out.
    pub after: f64,
}

/// Windows to train on, and those that judge.
pub(super) struct Text {
    windows: Vec<Vec<u32>>,
    held_out: Vec<Vec<u32>>,
}

impl Text {
    /// Every [`HELD_OUT`]th window is kept out.
    ///
    /// # Errors
    /// Fewer windows than that.
    pub(super) fn divide(corpus: &Corpus) -> Result<Self, Error> {
        let (mut windows, mut held_out) = (Vec::new(), Vec::new());
        for (at, window) in corpus.windows().iter().enumerate() {
            let last = at % HELD_OUT == HELD_OUT - 1;
            let to = if last { &mut held_out } else { &mut windows };
            to.push(window.clone());
        }
        if held_out.is_empty() {
            return Err(Error::bad_input(format!(
                "the text has {} windows, expected at least {HELD_OUT}",
                windows.len()
            )));
        }
        Ok(Self { windows, held_out })
    }

    /// Windows to train on.
    pub(super) fn windows(&self) -> &[Vec<u32>] {
        &self.windows
    }
}

/// A part of the gradient, in the order in which the backward pass finds them.
pub(super) enum Found {
    /// Of the weight of the norm before the output layer.
    FinalNorm(Vec<f32>),
    /// Of a layer's matrix, row-major. A matrix comes more than once, and its gradient
    /// is the sum.
    Matrix(usize, Linear, Vec<f32>),
    /// A layer is through: all of its matrices have come, and these are its norms.
    Layer(usize, NormGradients),
}

/// Gets parts of the gradient.
pub(super) type See<'a> = &'a mut dyn FnMut(Found) -> Result<(), Error>;

/// The teacher, its text, and what it makes of it.
pub(super) struct Training<'a> {
    teacher: Teacher<'a>,
    text: Text,
    /// The teacher's final hidden states of the windows, and of those kept out.
    expected: [Hidden; 2],
    /// The teacher's output layer.
    head: Vec<f32>,
    /// Ids the tokenizer knows.
    valid: usize,
    ui: Ui,
    stop: &'a Stop,
}

impl<'a> Training<'a> {
    /// Runs the teacher over all of the text.
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        text: Text,
        valid: usize,
        ui: Ui,
        stop: &'a Stop,
    ) -> Result<Self, Error> {
        let teacher = Teacher::new(checkpoint);
        let head = teacher.head()?;
        let finish = |windows, name| finish(checkpoint, windows, name, ui, stop);
        let expected = [
            finish(&text.windows, "teacher")?,
            finish(&text.held_out, "teacher, text kept out")?,
        ];
        Ok(Self {
            teacher,
            text,
            expected,
            head,
            valid,
            ui,
            stop,
        })
    }

    /// Batches of windows of at least so many tokens.
    pub(super) fn batches(&self, tokens: usize) -> Batches {
        let lengths = self.text.windows.iter().map(Vec::len).collect();
        Batches {
            lengths,
            tokens,
            next: 0,
        }
    }

    /// Mean divergence of the student on the windows kept out.
    pub(super) fn held_out(&self, student: &dyn Weights) -> Result<f64, Error> {
        let name = "student, text kept out";
        let found = finish(student, &self.text.held_out, name, self.ui, self.stop)?;
        self.divergence(student, &found, self.expected[1].0.iter())
    }

    /// Mean divergence of the student on a batch.
    pub(super) fn on_batch(&self, student: &dyn Weights, batch: &[usize]) -> Result<f64, Error> {
        let windows: Vec<Vec<u32>> = self.windows_of(batch);
        let found = finish(student, &windows, "student", Ui::Quiet, self.stop)?;
        let expected = batch.iter().map(|&at| &self.expected[0].0[at]);
        self.divergence(student, &found, expected)
    }

    fn divergence<'b>(
        &self,
        student: &dyn Weights,
        found: &Hidden,
        expected: impl Iterator<Item = &'b Vec<f32>>,
    ) -> Result<f64, Error> {
        let model = Teacher::new(student);
        let own = model.head()?;
        let vocab = model.spec().vocab;
        let mut kl = Kl::new();
        for (found, expected) in found.0.iter().zip(expected) {
            let p = self.teacher.logits(expected, &self.head)?;
            let q = model.logits(found, &own)?;
            kl.add_rows(&p, &q, vocab, self.valid, &vec![None; p.len() / vocab])?;
        }
        Ok(kl.summary().map_or(0.0, |s| s.mean))
    }

    fn windows_of(&self, batch: &[usize]) -> Vec<Vec<u32>> {
        batch
            .iter()
            .map(|&at| self.text.windows[at].clone())
            .collect()
    }

    /// Shows `see` the gradient of the mean divergence on a batch, from the end of the model to
    /// its beginning; returns that divergence.
    pub(super) fn gradients(
        &self,
        student: &dyn Weights,
        batch: &[usize],
        see: See<'_>,
    ) -> Result<f64, Error> {
        let ids = self.windows_of(batch);
        let tokens: usize = ids.iter().map(Vec::len).sum();
        let model = Teacher::new(student);
        let spec = model.spec();
        let (vocab, valid) = (spec.vocab, self.valid);
        let mut hidden = model.embed(&ids)?;
        let mut inputs = Vec::with_capacity(spec.layers);
        for layer in 0..spec.layers {
            self.stop.check()?;
            inputs.push(hidden.clone());
            model.block(layer, &mut hidden, None)?;
        }
        let mut divergence = 0.0;
        let mut loss = |window: usize, first: usize, _: &[f32], logits: &mut [f32]| {
            let rows = logits.len() / vocab;
            let states = &self.expected[0].0[batch[window]];
            let states = &states[first * spec.hidden..(first + rows) * spec.hidden];
            let mut p = self.teacher.logits(states, &self.head)?;
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
        let (mut gradient, norm) = model.head_backward(hidden, model.head()?, &mut loss)?;
        see(Found::FinalNorm(norm))?;
        for layer in (0..spec.layers).rev() {
            self.stop.check()?;
            let mut failed: Option<Error> = None;
            let mut hook = |_: Site, x: &[f32], outputs: &[LinearGradient<'_>]| {
                for output in outputs {
                    let [rows, _] = output.linear.shape(spec);
                    let found = output.of_weight(x, rows).map_err(CalibError::into);
                    let shown = found.and_then(|dw| see(Found::Matrix(layer, output.linear, dw)));
                    if let Err(e) = shown {
                        failed.get_or_insert(e);
                    }
                }
            };
            let mut input = inputs.pop().expect("an input for each layer");
            let mut read = |window: usize| Ok(std::mem::take(&mut input.0[window]));
            let norms = model.backward(layer, &mut read, &mut gradient, Some(&mut hook))?;
            if let Some(e) = failed {
                return Err(e);
            }
            see(Found::Layer(layer, norms))?;
        }
        Ok(divergence / tokens as f64)
    }
}

/// Final hidden states of windows, after the norm.
fn finish(
    weights: &dyn Weights,
    windows: &[Vec<u32>],
    name: &str,
    ui: Ui,
    stop: &Stop,
) -> Result<Hidden, Error> {
    let model = Teacher::new(weights);
    let layers = model.spec().layers;
    let stage = ui.stage(name, layers);
    let mut hidden = model.embed(windows)?;
    for layer in 0..layers {
        stop.check()?;
        model.block(layer, &mut hidden, None)?;
        stage.step(&format!("layer {layer}"));
    }
    Ok(model.final_norm(&hidden)?)
}

/// Windows in turns, step by step.
pub(super) struct Batches {
    lengths: Vec<usize>,
    /// Tokens of a batch at least.
    tokens: usize,
    next: usize,
}

impl Batches {
    /// The windows of the next batch; none of them twice.
    pub(super) fn next(&mut self) -> Vec<usize> {
        let mut batch = Vec::new();
        let mut tokens = 0;
        while tokens < self.tokens && batch.len() < self.lengths.len() {
            let at = self.next % self.lengths.len();
            batch.push(at);
            tokens += self.lengths[at];
            self.next += 1;
        }
        batch
    }
}
