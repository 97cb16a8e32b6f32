//! `eval`: how far quantized models lie from the bf16 teacher.
//!
//! The teacher's final hidden states of all windows are computed once, layer by
//! layer. Then, window by window, the teacher's logits meet each student's over the
//! whole vocabulary the tokenizer knows, and only the measures are kept.

use std::path::PathBuf;

use anemone_calib::{Kl, Teacher, Weights};
use anemone_runtime::engine::Engine;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::report::{
    Measured, QualityReport, REPORT_VERSION, SetQuality, Student, TextSet as ReportedText,
};
use anemone_schemas::store::Store;

use super::target::{quantization_name, store_spec};
use super::text::{self, Budget, TextSet, TextSource};
use crate::error::Error;
use crate::lower::StoreWeights;
use crate::stop::Stop;
use crate::ui::Ui;

/// What to compare on which text.
#[derive(Clone, Debug)]
pub struct EvalOptions {
    /// The teacher's checkpoint.
    pub model: PathBuf,
    /// A quantized store, measured in the simulator.
    pub store: Option<PathBuf>,
    /// A model folder, measured on its programs.
    pub folder: Option<PathBuf>,
    /// Evaluation text; empty for the built-in one.
    pub text: Vec<TextSource>,
    /// Tokens per window.
    pub window: usize,
    /// At most this many tokens of each set.
    pub tokens: usize,
    /// Worker threads of the runtime.
    pub threads: usize,
}

/// A model to be measured.
pub enum Candidate<'a> {
    /// Weights run in the teacher's graph.
    Weights(&'a dyn Weights),
    /// A model folder, run on its programs.
    Folder(&'a Engine),
}

/// A named [`Candidate`].
pub struct Entry<'a> {
    /// Name in the report.
    pub name: String,
    /// The model.
    pub candidate: Candidate<'a>,
}

/// Runs the command.
///
/// # Errors
/// Bad input, or nothing to measure.
pub fn run(options: &EvalOptions, ui: Ui, stop: &Stop) -> Result<QualityReport, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let tokenizer = text::open_tokenizer(&options.model)?;
    let sets = text::evaluation(
        &tokenizer,
        &options.text,
        Budget {
            tokens: options.tokens,
            window: options.window.min(checkpoint.spec().max_position),
        },
    )?;
    let store = options.store.as_deref().map(Store::open).transpose()?;
    let spec = store.as_ref().map(store_spec).transpose()?;
    let weights = store
        .as_ref()
        .zip(spec.as_ref())
        .map(|(store, spec)| StoreWeights { store, spec });
    let engine = match &options.folder {
        Some(folder) => Some(Engine::open(folder, options.threads)?),
        None => None,
    };
    let mut entries = Vec::new();
    if let Some(w) = &weights {
        entries.push(Entry {
            name: quantization_name(w.store),
            candidate: Candidate::Weights(w),
        });
    }
    if let Some(e) = &engine {
        entries.push(Entry {
            name: e.manifest().model.quantization.clone(),
            candidate: Candidate::Folder(e),
        });
    }
    if entries.is_empty() {
        return Err(Error::usage("nothing to measure").hint("pass `--store`, `--folder` or both"));
    }
    let students = measure(&checkpoint, &sets, tokenizer.size(), entries, ui, stop)?;
    Ok(report(&checkpoint, &sets, students))
}

/// The report of measured students.
pub(super) fn report(
    checkpoint: &Checkpoint,
    sets: &[TextSet],
    students: Vec<Student>,
) -> QualityReport {
    QualityReport {
        format: REPORT_VERSION,
        producer: crate::PRODUCER.to_string(),
        teacher: checkpoint.fingerprint(),
        text: sets
            .iter()
            .map(|s| ReportedText {
                name: s.name.clone(),
                windows: s.corpus.windows().len(),
                tokens: s.corpus.tokens() as u64,
                sha256: s.corpus.fingerprint(),
            })
            .collect(),
        students,
    }
}

/// Final hidden states of all windows of some weights, and their output layer.
struct Finished<'a> {
    teacher: Teacher<'a>,
    hidden: Vec<Vec<f32>>,
    head: Vec<f32>,
}

impl<'a> Finished<'a> {
    fn run(
        weights: &'a dyn Weights,
        windows: &[Vec<u32>],
        name: &str,
        ui: Ui,
        stop: &Stop,
    ) -> Result<Self, Error> {
        let teacher = Teacher::new(weights);
        let layers = weights.spec().layers;
        let stage = ui.stage("eval", layers);
        let mut hidden = teacher.embed(windows)?;
        for layer in 0..layers {
            stop.check()?;
            teacher.block(layer, &mut hidden, None)?;
            stage.step(&format!("{name}: layer {layer}"));
        }
        let hidden = teacher.final_norm(&hidden)?.0;
        let head = teacher.head()?;
        Ok(Self {
            teacher,
            hidden,
            head,
        })
    }

    fn logits(&self, window: usize) -> Result<Vec<f32>, Error> {
        Ok(self.teacher.logits(&self.hidden[window], &self.head)?)
    }
}

enum Ready<'a> {
    Weights(Finished<'a>),
    Folder(&'a Engine),
}

/// Measures every entry against the teacher on all sets.
///
/// # Errors
/// Failures of either side, or an interruption.
pub fn measure(
    teacher: &dyn Weights,
    sets: &[TextSet],
    tokenizer_vocab: usize,
    entries: Vec<Entry<'_>>,
    ui: Ui,
    stop: &Stop,
) -> Result<Vec<Student>, Error> {
    let windows: Vec<Vec<u32>> = sets
        .iter()
        .flat_map(|s| s.corpus.windows().to_vec())
        .collect();
    let rows = teacher.spec().vocab;
    let reference = Finished::run(teacher, &windows, "teacher", ui, stop)?;
    let mut students = Vec::new();
    for entry in entries {
        let (measured, ready) = match entry.candidate {
            Candidate::Weights(w) => (
                Measured::Simulator,
                Ready::Weights(Finished::run(w, &windows, &entry.name, ui, stop)?),
            ),
            Candidate::Folder(e) => (Measured::ShippedPrograms, Ready::Folder(e)),
        };
        let stage = ui.stage("eval", windows.len());
        let mut next = 0;
        let mut measures = Vec::new();
        for set in sets {
            let mut kl = Kl::new();
            for window in set.corpus.windows() {
                stop.check()?;
                let expected = reference.logits(next)?;
                let found = match &ready {
                    Ready::Weights(f) => f.logits(next)?,
                    Ready::Folder(e) => e.logits(window)?,
                };
                let next_ids = window[1..].iter().map(|&id| Some(id)).chain([None]);
                let targets: Vec<Option<u32>> = next_ids.collect();
                kl.add_rows(&expected, &found, rows, tokenizer_vocab, &targets)?;
                next += 1;
                stage.step(&format!("{}: {}", entry.name, set.name));
            }
            measures.push(quality(&set.name, &kl)?);
        }
        students.push(Student {
            name: entry.name,
            measured,
            sets: measures,
        });
    }
    Ok(students)
}

fn quality(set: &str, kl: &Kl) -> Result<SetQuality, Error> {
    let s = kl
        .summary()
        .ok_or_else(|| Error::bad_input(format!("text set `{set}` has no tokens")))?;
    Ok(SetQuality {
        set: set.to_string(),
        tokens: s.tokens,
        kl_mean: s.mean,
        kl_ci95: s.ci95,
        kl_median: s.median,
        kl_p90: s.p90,
        kl_p99: s.p99,
        kl_p999: s.p999,
        kl_max: s.max,
        top1: s.top1,
        ppl_teacher: s.ppl_teacher,
        ppl_student: s.ppl_student,
    })
}
