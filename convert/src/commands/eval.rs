//! `eval`: how far quantized models lie from the bf16 teacher.
//!
//! The final hidden states of all windows are computed layer by layer, for the teacher and each
//! student. Then, window by window, the teacher's logits meet each student's over the
//! whole vocabulary the tokenizer knows, and only the measures are kept.

use std::fs;
use std::path::PathBuf;

use anemone_calib::{Hidden, Kl, Shingles, Teacher, Weights};
use anemone_runtime::engine::Engine;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::report::{
    Measured, QualityReport, REPORT_VERSION, SetQuality, Student, TextSet as ReportedText,
};
use anemone_schemas::store::Store;
use anemone_schemas::tokenizer::TokenizerFolder;

use super::quantize::CALIBRATION_FILE;
use super::target::{quantization_name, store_spec};
use super::text::{self, Budget, TextSet, TextSource};
use crate::error::Error;
use crate::lower::StoreWeights;
use crate::stop::Stop;
use crate::ui::Ui;

mod detail;
use detail::Worst;

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
    /// The same with other output layers than its own: a student for each of them, by name.
    Heads(&'a dyn Weights, Vec<(String, &'a dyn Weights)>),
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
    if let Some(store) = &store {
        note_overlap(store, &sets, ui)?;
    }
    let mut students = measure(&checkpoint, &sets, &tokenizer, entries, ui, stop)?;
    // The store's entry comes first.
    if let (Some(store), Some(student)) = (&store, students.first_mut()) {
        detail::add_store(student, store)?;
    }
    Ok(report(&checkpoint, &sets, students))
}

/// Says so if a store was calibrated on some of the text it is measured on, which makes it look
/// better than it is.
pub(super) fn note_overlap(store: &Store, sets: &[TextSet], ui: Ui) -> Result<(), Error> {
    let path = store.dir().join(CALIBRATION_FILE);
    let Ok(bytes) = fs::read(&path) else {
        return Ok(());
    };
    let calibration: Shingles = serde_json::from_slice(&bytes)
        .map_err(|e| Error::bad_input(format!("`{}`: {e}", path.display())))?;
    for set in sets {
        let share = calibration.share_of(&set.corpus);
        if share > 0.0 {
            ui.note(&format!(
                "{:.1}% of text set `{}` is in the calibration text of the store: its \
                 measures flatter the store",
                100.0 * share,
                set.name
            ));
        }
    }
    Ok(())
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

/// Hidden states of all windows of some weights, and one or more output layers.
struct Pass<'a> {
    teacher: Teacher<'a>,
    hidden: Hidden,
    heads: Vec<Vec<f32>>,
    /// Distance from the teacher's hidden states after each layer.
    errors: Vec<f64>,
}

impl<'a> Pass<'a> {
    fn new(
        weights: &'a dyn Weights,
        heads: &[&dyn Weights],
        windows: &[Vec<u32>],
    ) -> Result<Self, Error> {
        let teacher = Teacher::new(weights);
        let heads = heads.iter().map(|w| Teacher::new(*w).head());
        Ok(Self {
            hidden: teacher.embed(windows)?,
            heads: heads.collect::<Result<_, _>>()?,
            errors: Vec::new(),
            teacher,
        })
    }

    fn logits(&self, window: usize, head: usize) -> Result<Vec<f32>, Error> {
        Ok(self
            .teacher
            .logits(&self.hidden.0[window], &self.heads[head])?)
    }
}

/// Takes the teacher and all students through the layers side by side.
fn run_layers<'a>(
    reference: &mut Pass<'a>,
    ready: &mut [Ready<'a>],
    layers: usize,
    ui: Ui,
    stop: &Stop,
) -> Result<(), Error> {
    let stage = ui.stage("eval", layers);
    for layer in 0..layers {
        stop.check()?;
        reference
            .teacher
            .block(layer, &mut reference.hidden, None)?;
        for student in &mut *ready {
            if let Ready::Weights(pass) = student {
                stop.check()?;
                pass.teacher.block(layer, &mut pass.hidden, None)?;
                let error = detail::relative(&reference.hidden.0, &pass.hidden.0);
                pass.errors.push(error);
            }
        }
        stage.step(&format!("layer {layer}"));
    }
    let passes = ready.iter_mut().filter_map(|r| match r {
        Ready::Weights(pass) => Some(pass),
        Ready::Folder(_) => None,
    });
    for pass in std::iter::once(reference).chain(passes) {
        pass.hidden = pass.teacher.final_norm(&pass.hidden)?;
    }
    Ok(())
}

enum Ready<'a> {
    Weights(Pass<'a>),
    Folder(&'a Engine),
}

/// A student while it is measured.
struct Running {
    name: String,
    measured: Measured,
    /// Which of the entries, and which of its output layers.
    of: (usize, usize),
    sets: Vec<SetQuality>,
    kl: Kl,
    worst: Worst,
}

/// Measures every entry against the teacher on all sets. The teacher's logits of a window are
/// computed once and meet those of all students.
///
/// # Errors
/// Failures of either side, or an interruption.
pub fn measure(
    teacher: &dyn Weights,
    sets: &[TextSet],
    tokenizer: &TokenizerFolder,
    entries: Vec<Entry<'_>>,
    ui: Ui,
    stop: &Stop,
) -> Result<Vec<Student>, Error> {
    let windows: Vec<Vec<u32>> = sets
        .iter()
        .flat_map(|s| s.corpus.windows().to_vec())
        .collect();
    let rows = teacher.spec().vocab;
    let mut reference = Pass::new(teacher, &[teacher], &windows)?;
    let mut ready = Vec::new();
    let mut running = Vec::new();
    for entry in entries {
        let (own, heads) = match &entry.candidate {
            Candidate::Weights(w) => (Some(*w), vec![(entry.name.clone(), *w)]),
            Candidate::Heads(w, heads) => {
                let named = heads.iter();
                let named = named.map(|(head, w)| (format!("{}, {head}", entry.name), *w));
                (Some(*w), named.collect())
            }
            Candidate::Folder(_) => (None, Vec::new()),
        };
        let mut student = |name: String, measured, head| {
            running.push(Running {
                name,
                measured,
                of: (ready.len(), head),
                sets: Vec::new(),
                kl: Kl::new(),
                worst: Worst::default(),
            });
        };
        if let Candidate::Folder(engine) = entry.candidate {
            student(entry.name, Measured::ShippedPrograms, 0);
            ready.push(Ready::Folder(engine));
        } else if let Some(own) = own {
            let tables: Vec<&dyn Weights> = heads.iter().map(|h| h.1).collect();
            for (head, (name, _)) in heads.into_iter().enumerate() {
                student(name, Measured::Simulator, head);
            }
            ready.push(Ready::Weights(Pass::new(own, &tables, &windows)?));
        }
    }
    let layers = teacher.spec().layers;
    run_layers(&mut reference, &mut ready, layers, ui, stop)?;
    let stage = ui.stage("eval", windows.len());
    let mut next = 0;
    for set in sets {
        let mut ends = Vec::new();
        for window in set.corpus.windows() {
            let expected = reference.logits(next, 0)?;
            let next_ids = window[1..].iter().map(|&id| Some(id)).chain([None]);
            let targets: Vec<Option<u32>> = next_ids.collect();
            for student in &mut running {
                stop.check()?;
                let found = match &ready[student.of.0] {
                    Ready::Weights(f) => f.logits(next, student.of.1)?,
                    Ready::Folder(e) => e.logits(window)?,
                };
                let before = student.kl.divergences().len();
                let valid = tokenizer.size();
                student
                    .kl
                    .add_rows(&expected, &found, rows, valid, &targets)?;
                let own = &student.kl.divergences()[before..];
                let logits = (&expected[..], &found[..]);
                student.worst.look(ends.len(), own, logits, rows, valid);
            }
            next += 1;
            ends.push(window.len());
            stage.step(&set.name);
        }
        for student in &mut running {
            let kl = std::mem::take(&mut student.kl);
            let worst = std::mem::take(&mut student.worst);
            student.sets.push(SetQuality {
                worst: worst.read(set.corpus.windows(), tokenizer)?,
                ..quality(&set.name, &kl, &ends)?
            });
        }
    }
    let students = running.into_iter().map(|r| Student {
        name: r.name,
        measured: r.measured,
        sets: r.sets,
        layer_errors: match &ready[r.of.0] {
            Ready::Weights(pass) => pass.errors.clone(),
            Ready::Folder(_) => Vec::new(),
        },
        matrices: Vec::new(),
        tables: Vec::new(),
    });
    Ok(students.collect())
}

fn quality(set: &str, kl: &Kl, windows: &[usize]) -> Result<SetQuality, Error> {
    let s = kl
        .summary()
        .ok_or_else(|| Error::bad_input(format!("text set `{set}` has no tokens")))?;
    let mut rest = kl.divergences();
    let kl_windows: Vec<f64> = windows
        .iter()
        .map(|&length| {
            let (own, others) = rest.split_at(length);
            rest = others;
            own.iter().sum::<f64>() / length as f64
        })
        .collect();
    Ok(SetQuality {
        set: set.to_string(),
        tokens: s.tokens,
        kl_mean: s.mean,
        kl_ci95: over_windows(s.mean, &kl_windows, windows).unwrap_or(s.ci95),
        kl_windows,
        kl_median: s.median,
        kl_p90: s.p90,
        kl_p99: s.p99,
        kl_p999: s.p999,
        kl_max: s.max,
        top1: s.top1,
        ppl_teacher: s.ppl_teacher,
        ppl_student: s.ppl_student,
        kl_positions: detail::positions(kl.divergences(), windows),
        worst: Vec::new(),
    })
}

/// Half width of the 95% interval of a mean over tokens that come in windows: the
/// variance of a ratio of two sums over windows, deviation and length.
fn over_windows(mean: f64, means: &[f64], lengths: &[usize]) -> Option<f64> {
    let n = means.len() as f64;
    if means.len() < 2 {
        return None;
    }
    let tokens: f64 = lengths.iter().map(|&l| l as f64).sum();
    let deviations = means
        .iter()
        .zip(lengths)
        .map(|(m, &l)| (m - mean) * l as f64);
    let variance = deviations.map(|d| d * d).sum::<f64>() * n / (n - 1.0);
    Some(1.96 * variance.sqrt() / tokens)
}
