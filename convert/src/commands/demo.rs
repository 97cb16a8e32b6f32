//! `demo`: the whole line on a built-in model, with the table that shows what each
//! step is worth.

use std::fmt::Write;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anemone_runtime::engine::Engine;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::report::{QualityReport, Student};
use anemone_schemas::store::Store;
use anemone_schemas::tokenizer::ChatMessage;

use super::affine::{AFFINE_GROUP, AffineWeights};
use super::eval::{self, Candidate, Entry};
use super::package::{self, PackageOptions};
use super::quantize::{self, QuantizeOptions};
use super::target::{self, TargetOptions};
use super::text::{self, Budget};
use super::verify;
use crate::embedded;
use crate::error::Error;
use crate::lower::{Chunks, Forms, StoreWeights};
use crate::quantize::Method;
use crate::stop::Stop;
use crate::ui::Ui;

const WINDOW: usize = 256;
const CALIBRATION_TOKENS: usize = 32_768;
const EVALUATION_TOKENS: usize = 4096;
const ANSWER_TOKENS: usize = 48;
const NAME: &str = "anemone-tiny-qwen3";
const PROMPT: &str = "Translate to Pig Latin: zebra mirror engine";

/// Where the demo goes.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// Output folder.
    pub output: PathBuf,
    /// Worker threads.
    pub jobs: usize,
}

/// Runs the line and returns the printed summary.
///
/// # Errors
/// The failure of any stage.
pub fn run(options: &DemoOptions, ui: Ui, stop: &Stop) -> Result<String, Error> {
    let out = &options.output;
    let model = out.join("model");
    let mut clock = Clock::start();
    embedded::write_model(&model).map_err(|e| Error::io(&model, &e))?;
    let checkpoint = Checkpoint::open(&model)?;
    let tokenizer = text::open_tokenizer(&model)?;
    let budget = Budget {
        tokens: EVALUATION_TOKENS,
        window: WINDOW,
    };
    let sets = text::evaluation(&tokenizer, &[], budget)?;

    let mut rows: Vec<Row> = Vec::new();
    let rtn = AffineWeights {
        checkpoint: &checkpoint,
    };
    let entry = Entry {
        name: "affine group 64, round to nearest".into(),
        candidate: Candidate::Weights(&rtn),
    };
    let mut students = eval::measure(&checkpoint, &sets, &tokenizer, vec![entry], ui, stop)?;
    rows.push(Row {
        size: None,
        bits: 4.0 + 32.0 / AFFINE_GROUP as f64,
    });
    clock.lap("affine");

    for (method, dir) in [
        (Method::KMeans, "kmeans"),
        (Method::Gptq, "gptq"),
        (Method::TwoSided, "two-sided"),
    ] {
        let last = method == Method::TwoSided;
        let store_dir = out.join(format!("{dir}.store"));
        let store = quantize::run(
            &QuantizeOptions {
                model: model.clone(),
                output: store_dir.clone(),
                method,
                guided: last,
                bits: 4,
                vector: 1,
                rules: Vec::new(),
                calibration: Vec::new(),
                tokens: CALIBRATION_TOKENS,
                window: WINDOW,
                jobs: options.jobs,
                fit_order: last,
                layers: None,
                target_bpw: None,
            },
            ui,
            stop,
        )?;
        clock.lap(&format!("quantize {dir}"));
        let folder = if last {
            out.join("folder")
        } else {
            out.join(format!("{dir}.folder"))
        };
        if folder.exists() {
            fs::remove_dir_all(&folder).map_err(|e| Error::io(&folder, &e))?;
        }
        target::run(&target_options(store_dir, folder.clone()), ui, stop)?;
        clock.lap(&format!("target {dir}"));
        let spec = target::store_spec(&store)?;
        let simulator = StoreWeights {
            store: &store,
            spec: &spec,
        };
        let engine = Engine::open(&folder, options.jobs)?;
        let name = target::quantization_name(&store);
        let mut entries = vec![Entry {
            name: name.clone(),
            candidate: Candidate::Folder(&engine),
        }];
        if last {
            entries.push(Entry {
                name,
                candidate: Candidate::Weights(&simulator),
            });
        }
        for _ in &entries {
            rows.push(Row::of(&store));
        }
        students.extend(eval::measure(
            &checkpoint,
            &sets,
            &tokenizer,
            entries,
            ui,
            stop,
        )?);
        clock.lap(&format!("eval {dir}"));
    }

    let folder = out.join("folder");
    let report = eval::report(&checkpoint, &sets, students);
    let report_path = out.join("report.json");
    report
        .write(&report_path)
        .map_err(|e| Error::io(&report_path, &e))?;
    package::run(
        &PackageOptions {
            folder: folder.clone(),
            report: Some(report_path),
            ..PackageOptions::default()
        },
        ui,
    )?;
    clock.lap("package");
    verify::run(&folder, ui)?;
    clock.lap("verify");
    let answer = answer(&folder, options.jobs)?;
    clock.lap("answer");
    Ok(summary(&report, &rows, &clock, &folder, &answer))
}

fn target_options(store: PathBuf, output: PathBuf) -> TargetOptions {
    TargetOptions {
        store,
        output,
        name: NAME.into(),
        chunks: Chunks::Count(2),
        max_context: 1024,
        taps: vec![1, 2, 3, 5, 6],
        with_logits: false,
        forms: Forms::default(),
        prescale: None,
    }
}

/// One greedy answer of the packaged folder.
fn answer(folder: &Path, threads: usize) -> Result<String, Error> {
    let engine = Engine::open(folder, threads)?;
    let message = ChatMessage {
        role: "user".into(),
        content: PROMPT.into(),
    };
    let prompt = engine.chat_prompt(&[message])?;
    let generated = engine.generate(&prompt, ANSWER_TOKENS, |_| ControlFlow::Continue(()))?;
    Ok(engine.tokenizer().decode(&generated.ids, true)?)
}

/// Size columns of the table.
struct Row {
    size: Option<u64>,
    bits: f64,
}

impl Row {
    /// Bytes and bits per weight of a store's matrices.
    fn of(store: &Store) -> Self {
        let matrices = &store.manifest().matrices;
        let bytes: u64 = matrices.iter().map(|m| m.bytes).sum();
        let weights: usize = matrices.iter().map(|m| m.rows * m.cols).sum();
        Self {
            size: Some(bytes),
            bits: bytes as f64 * 8.0 / weights as f64,
        }
    }
}

/// Seconds per stage.
struct Clock {
    last: Instant,
    laps: Vec<(String, f64)>,
}

impl Clock {
    fn start() -> Self {
        Self {
            last: Instant::now(),
            laps: Vec::new(),
        }
    }

    fn lap(&mut self, name: &str) {
        let now = Instant::now();
        self.laps
            .push((name.into(), (now - self.last).as_secs_f64()));
        self.last = now;
    }
}

fn summary(
    report: &QualityReport,
    rows: &[Row],
    clock: &Clock,
    folder: &Path,
    answer: &str,
) -> String {
    let mut out = String::from("| weights | measured on | MB | bits/weight |");
    for t in &report.text {
        let _ = write!(out, " KL {0} | top-1 {0} |", t.name);
    }
    out.push_str("\n|---|---|---:|---:|");
    out.push_str(&"---:|---:|".repeat(report.text.len()));
    out.push('\n');
    for (student, row) in report.students.iter().zip(rows) {
        out.push_str(&table_row(student, row));
    }
    out.push_str("\nseconds:");
    for (name, seconds) in &clock.laps {
        let _ = write!(out, " {name} {seconds:.1},");
    }
    out.pop();
    let _ = write!(
        out,
        "\n\n> {PROMPT}\n{answer}\n\nmodel folder: {0}\ntry: anemone run --model {0} \"{PROMPT}\"\n",
        folder.display()
    );
    out
}

fn table_row(student: &Student, row: &Row) -> String {
    let measured = match student.measured {
        anemone_schemas::report::Measured::Simulator => "simulator",
        anemone_schemas::report::Measured::ShippedPrograms => "shipped programs",
    };
    let size = row
        .size
        .map_or("-".to_string(), |b| format!("{:.2}", b as f64 / 1e6));
    let mut out = format!(
        "| {} | {measured} | {size} | {:.3} |",
        student.name, row.bits
    );
    for q in &student.sets {
        let _ = write!(out, " {:.4} | {:.3} |", q.kl_mean, q.top1);
    }
    out.push('\n');
    out
}
