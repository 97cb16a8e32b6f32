//! `ablate`: what each step of the quantizer is worth on a model.
//!
//! All stores come from the same passes of the teacher over the same calibration text (the one with
//! another order of the MLP's channels has passes of its own over it), and are measured on the same evaluation text with the same output layers, so that a row differs
//! from the one above in what its name says. Ratios are to the published recipe this
//! converter started from, weighted k-means and then GPTQ with 1% damping; their
//! intervals come from a paired bootstrap over windows (Efron and Tibshirani, *An Introduction
//! to the Bootstrap*, 1993, section 13.3).

use std::fmt::Write as _;
use std::path::PathBuf;

use anemone_calib::Weights;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::report::{QualityReport, Student};
use anemone_schemas::store::Store;

use super::affine::AffineWeights;
use super::eval::{self, Candidate, Entry};
use super::quantize::{self, QuantizeOptions, Recipe};
use super::refine::{self, RefineOptions};
use super::target::store_spec;
use super::text::{self, Budget, TextSource};
use super::tune::{self, TuneOptions};
use crate::error::Error;
use crate::lower::StoreWeights;
use crate::quantize::{Method, OUTPUT_ROWS, Settings};
use crate::stop::Stop;
use crate::ui::Ui;

/// Resamples of the bootstrap.
const RESAMPLES: usize = 4000;

/// The row that ratios refer to.
const BASE: &str = "weighted k-means, GPTQ, damping 0.01";

/// What to compare on which text.
#[derive(Clone, Debug)]
pub struct AblateOptions {
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Folder of the stores; those already there are used again.
    pub output: PathBuf,
    /// Calibration text; empty for the built-in one.
    pub calibration: Vec<PathBuf>,
    /// At most this many calibration tokens.
    pub tokens: usize,
    /// Evaluation text; empty for the built-in one.
    pub text: Vec<TextSource>,
    /// At most this many tokens of each evaluation set.
    pub eval_tokens: usize,
    /// Tokens per window of both.
    pub window: usize,
    /// Worker threads; the result does not depend on them.
    pub jobs: usize,
    /// Rounds of `refine` on the last store, for a row of its own; none if 0.
    pub refine_rounds: usize,
    /// Tokens of each of them.
    pub refine_tokens: usize,
    /// Their rate.
    pub refine_rate: f64,
    /// Steps of `tune` on top of that, for another row; none if 0.
    pub tune_steps: usize,
    /// Tokens of each of them.
    pub tune_tokens: usize,
    /// Their rate.
    pub tune_rate: f64,
}

/// A row of the table.
struct Step {
    name: &'static str,
    dir: &'static str,
    method: Method,
    guided: bool,
    damping: f64,
    /// Rows whose outputs are weighted together.
    output_rows: usize,
    /// Bits of the output layer, if this store has one.
    head: Option<u8>,
    /// Whether the MLP's channels get an order of their own.
    ordered: bool,
}

const fn step(
    name: &'static str,
    dir: &'static str,
    method: Method,
    guided: bool,
    damping: f64,
    head: Option<u8>,
) -> Step {
    Step {
        name,
        dir,
        method,
        guided,
        damping,
        output_rows: OUTPUT_ROWS,
        head,
        ordered: false,
    }
}

const STEPS: [Step; 8] = [
    step(
        "weighted k-means",
        "kmeans",
        Method::KMeans,
        false,
        0.01,
        None,
    ),
    step(BASE, "gptq-01", Method::Gptq, false, 0.01, Some(4)),
    step(
        "GPTQ, damping 0.05",
        "gptq-05",
        Method::Gptq,
        false,
        0.05,
        Some(6),
    ),
    step("the same, guided", "guided", Method::Gptq, true, 0.05, None),
    step(
        "two-sided, not guided",
        "two-sided",
        Method::TwoSided,
        false,
        0.05,
        Some(6),
    ),
    Step {
        output_rows: 32,
        ..step(
            "two-sided, guided, bands of 32 rows",
            "both-32",
            Method::TwoSided,
            true,
            0.05,
            None,
        )
    },
    step(
        "two-sided, guided",
        "both",
        Method::TwoSided,
        true,
        0.05,
        Some(4),
    ),
    Step {
        ordered: true,
        ..step(
            "the same, MLP channels in a fitted order",
            "ordered",
            Method::TwoSided,
            true,
            0.05,
            None,
        )
    },
];

/// The output layers every row is measured with: name and the store it comes from. The last two
/// are measured only with the matrices of the store that the last comes from.
const HEADS: [(&str, &str); 4] = [
    ("LUT6 head", "gptq-05"),
    ("LUT4 head", "gptq-01"),
    ("two-sided LUT6 head", "two-sided"),
    ("two-sided guided LUT4 head", "both"),
];

/// Report of the folder, written last.
pub(crate) const REPORT_FILE: &str = "report.json";
/// The same with plots.
pub(crate) const PAGE_FILE: &str = "report.html";

/// Rows that go on from the last store, where they are asked for: name and folder.
const REFINED: (&str, &str) = ("the same, refined", "refined");
const TUNED: (&str, &str) = ("the same, tuned", "tuned");

/// Folders of the stores in that of the command.
pub(crate) fn store_names() -> impl Iterator<Item = &'static str> {
    let further = [REFINED.1, TUNED.1];
    STEPS.iter().map(|step| step.dir).chain(further)
}

/// The stores that the command makes or uses again.
pub(crate) fn stores(options: &AblateOptions) -> impl Iterator<Item = PathBuf> {
    let further = options.further().map(|(_, dir)| dir);
    let names = STEPS.iter().map(|step| step.dir).chain(further);
    names.map(|name| options.output.join(name))
}

/// Models that are measured, without refined and tuned ones, and output layers of the last;
/// the others have two.
pub(crate) const STUDENTS: [usize; 2] = [STEPS.len() + 1, HEADS.len()];

/// What the stores are made by: those that are made together, in the order of the rows.
pub(crate) fn recipes(options: &AblateOptions) -> Vec<(QuantizeOptions, Vec<Recipe>)> {
    let mut outputs = stores(options);
    let together = STEPS.chunk_by(|a, b| a.ordered == b.ordered);
    let recipes = together.map(|steps| {
        let quantize = QuantizeOptions {
            fit_order: steps[0].ordered,
            ..options.quantize()
        };
        let recipes = steps.iter().zip(&mut outputs);
        (
            quantize,
            recipes.map(|(step, output)| recipe(step, output)).collect(),
        )
    });
    recipes.collect()
}

fn recipe(step: &Step, output: PathBuf) -> Recipe {
    Recipe {
        output,
        method: step.method,
        guided: step.guided,
        settings: Settings {
            damping: step.damping,
            output_rows: step.output_rows,
            ..Settings::default()
        },
        rules: step.head.map_or_else(Vec::new, |bits| {
            let rule = format!("^lm_head=bits={bits}").parse();
            vec![rule.expect("a valid rule")]
        }),
        head: step.head.is_some(),
    }
}

/// Runs the command; returns the table and the report.
///
/// # Errors
/// As `quantize` and `eval`.
pub fn run(options: &AblateOptions, ui: Ui, stop: &Stop) -> Result<(String, QualityReport), Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let mut stores = Vec::new();
    for (quantize, recipes) in recipes(options) {
        stores.extend(quantize::run_all(&quantize, &recipes, ui, stop)?.0);
    }
    let mut further = Vec::new();
    if let Some(refine) = options.refine() {
        refine::run(&refine, ui, stop)?;
        further.push((REFINED.0, Store::open(&refine.output)?));
    }
    if let Some(tune) = options.tune() {
        tune::run(&tune, ui, stop)?;
        further.push((TUNED.0, Store::open(&tune.output)?));
    }
    let tokenizer = text::open_tokenizer(&options.model)?;
    let budget = Budget {
        tokens: options.eval_tokens,
        window: options.window,
    };
    let sets = text::evaluation(&tokenizer, &options.text, budget)?;
    eval::note_overlap(&stores[0], &sets, ui)?;
    let spec = store_spec(&stores[0])?;
    let weights: Vec<StoreWeights<'_>> = stores
        .iter()
        .map(|store: &Store| StoreWeights { store, spec: &spec })
        .collect();
    let further: Vec<(&str, StoreWeights<'_>)> = further
        .iter()
        .map(|(name, store)| (*name, StoreWeights { store, spec: &spec }))
        .collect();
    let affine = AffineWeights {
        checkpoint: &checkpoint,
    };
    let head = |(name, dir): &(&str, &str)| -> (String, &dyn Weights) {
        let at = STEPS.iter().position(|s| s.dir == *dir);
        let at = at.expect("every head names a step");
        (name.to_string(), &weights[at])
    };
    let plain: Vec<(String, &dyn Weights)> = HEADS[..2].iter().map(head).collect();
    let mut entries = vec![Entry {
        name: "affine groups of 64, round to nearest".to_string(),
        candidate: Candidate::Heads(&affine, plain.clone()),
    }];
    for (step, weights) in STEPS.iter().zip(&weights) {
        let mut heads = plain.clone();
        if step.dir == HEADS[HEADS.len() - 1].1 {
            heads.extend(HEADS[2..].iter().map(head));
        }
        entries.push(Entry {
            name: step.name.to_string(),
            candidate: Candidate::Heads(weights, heads),
        });
    }
    for (name, weights) in &further {
        entries.push(Entry {
            name: (*name).to_string(),
            candidate: Candidate::Heads(weights, plain.clone()),
        });
    }
    let students = eval::measure(&checkpoint, &sets, &tokenizer, entries, ui, stop)?;
    let report = eval::report(&checkpoint, &sets, students);
    let lengths: Vec<Vec<usize>> = sets
        .iter()
        .map(|s| s.corpus.windows().iter().map(Vec::len).collect())
        .collect();
    Ok((table(&report, &lengths), report))
}

impl AblateOptions {
    /// Names and folders of the stores that go on from the last.
    fn further(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let refined = (self.refine_rounds > 0).then_some(REFINED);
        let tuned = (self.tune_steps > 0).then_some(TUNED);
        refined.into_iter().chain(tuned)
    }

    /// `refine` on the last store, with the six-bit output layer.
    pub(crate) fn refine(&self) -> Option<RefineOptions> {
        (self.refine_rounds > 0).then(|| RefineOptions {
            model: self.model.clone(),
            store: self.output.join(STEPS[STEPS.len() - 1].dir),
            head: Some(self.output.join(HEADS[0].1)),
            output: self.output.join(REFINED.1),
            calibration: self.calibration.clone(),
            tokens: self.tokens,
            window: self.window,
            rounds: self.refine_rounds,
            round_tokens: self.refine_tokens,
            rate: self.refine_rate,
            jobs: self.jobs,
        })
    }

    /// `tune` on what there is by then, likewise.
    pub(crate) fn tune(&self) -> Option<TuneOptions> {
        let last = STEPS[STEPS.len() - 1].dir;
        let from = self.refine().map_or(last, |_| REFINED.1);
        (self.tune_steps > 0).then(|| TuneOptions {
            model: self.model.clone(),
            store: self.output.join(from),
            head: Some(self.output.join(HEADS[0].1)),
            output: self.output.join(TUNED.1),
            calibration: self.calibration.clone(),
            tokens: self.tokens,
            window: self.window,
            steps: self.tune_steps,
            step_tokens: self.tune_tokens,
            rate: self.tune_rate,
        })
    }

    pub(crate) fn quantize(&self) -> QuantizeOptions {
        QuantizeOptions {
            model: self.model.clone(),
            output: self.output.clone(),
            method: Method::TwoSided,
            guided: true,
            bits: 4,
            vector: 1,
            rules: Vec::new(),
            calibration: self.calibration.clone(),
            tokens: self.tokens,
            window: self.window,
            jobs: self.jobs,
            fit_order: false,
            layers: None,
            target_bpw: None,
        }
    }
}

/// A row per student: KL and top-1 by set, the mean, and its ratio to the base with the
/// same output layer, or with the plain one of the same bits.
fn table(report: &QualityReport, lengths: &[Vec<usize>]) -> String {
    let mut out = String::from("| matrices, output layer |");
    for set in &report.text {
        let _ = write!(out, " {} KL / top-1 |", set.name);
    }
    out.push_str(" mean KL | 99% | ratio [95%] |\n|---|");
    out.push_str(&"---:|".repeat(report.text.len() + 3));
    out.push('\n');
    for student in &report.students {
        let head = usize::from(!student.name.contains("LUT6"));
        let base = format!("{BASE}, {}", HEADS[head].0);
        let base = report.students.iter().find(|s| s.name == base);
        let _ = write!(out, "| {} |", student.name);
        for set in &student.sets {
            let _ = write!(
                out,
                " {:.4} ± {:.4} / {:.3} |",
                set.kl_mean, set.kl_ci95, set.top1
            );
        }
        let p99 = student.sets.iter().map(|s| s.kl_p99).sum::<f64>() / student.sets.len() as f64;
        let _ = write!(out, " {:.4} | {p99:.2} |", student.mean_kl());
        if let Some(base) = base {
            let (low, high) = interval(student, base, lengths);
            let ratio = student.mean_kl() / base.mean_kl();
            let _ = write!(out, " {ratio:.3} [{low:.3}, {high:.3}] |");
        }
        out.push('\n');
    }
    out
}

/// 95% interval of the ratio of two mean KL, by resampling windows within each set.
/// `lengths` has the tokens of each window of each set.
fn interval(student: &Student, base: &Student, lengths: &[Vec<usize>]) -> (f64, f64) {
    let mut state = 1u64;
    let mut draw = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let mut ratios: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let mut means = [0.0; 2];
            for ((a, b), lengths) in student.sets.iter().zip(&base.sets).zip(lengths) {
                let mut sums = [0.0; 3];
                for _ in lengths {
                    let at = draw(lengths.len());
                    let tokens = lengths[at] as f64;
                    sums[0] += a.kl_windows[at] * tokens;
                    sums[1] += b.kl_windows[at] * tokens;
                    sums[2] += tokens;
                }
                means[0] += sums[0] / sums[2];
                means[1] += sums[1] / sums[2];
            }
            means[0] / means[1]
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let at = |q: f64| ratios[(q * (RESAMPLES - 1) as f64).round() as usize];
    (at(0.025), at(0.975))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anemone_schemas::report::{Measured, SetQuality};

    fn student(windows: &[f64]) -> Student {
        let set = SetQuality {
            set: "docs".into(),
            tokens: 0,
            kl_mean: 0.0,
            kl_ci95: 0.0,
            kl_windows: windows.to_vec(),
            kl_median: 0.0,
            kl_p90: 0.0,
            kl_p99: 0.0,
            kl_p999: 0.0,
            kl_max: 0.0,
            top1: 0.0,
            ppl_teacher: None,
            ppl_student: None,
            kl_positions: Vec::new(),
            worst: Vec::new(),
        };
        Student {
            name: String::new(),
            measured: Measured::Simulator,
            sets: vec![set],
            layer_errors: Vec::new(),
            matrices: Vec::new(),
            tables: Vec::new(),
        }
    }

    #[test]
    fn an_interval_holds_what_is_common_to_all_windows_and_spreads_with_the_rest() {
        let lengths = vec![vec![100, 200, 50, 400]];
        let base = student(&[0.1, 0.3, 0.2, 0.7]);
        let half = student(&[0.05, 0.15, 0.1, 0.35]);
        let (low, high) = interval(&half, &base, &lengths);
        assert!((low - 0.5).abs() < 1e-9 && (high - 0.5).abs() < 1e-9);
        let mixed = student(&[0.1, 0.15, 0.2, 0.35]);
        let (low, high) = interval(&mixed, &base, &lengths);
        assert!(
            low >= 0.5 && high <= 1.0 && high - low > 0.1,
            "{low} {high}"
        );
    }
}
