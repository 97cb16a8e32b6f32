//! `refine`, `tune` and `ablate`: their arguments, and how they are run.

use std::path::PathBuf;

use anemone_memguard::Stop;
use clap::Args;

use super::args::{CalibrationArgs, RunArgs, threads};
use super::job::Job;
use super::say::{agreed, json, print, write_page};
use crate::commands::Change;
use crate::commands::ablate::{self, AblateOptions};
use crate::commands::refine::{self, RefineOptions};
use crate::commands::text::TextSource;
use crate::commands::tune::{self, TuneOptions};
use crate::error::Error;
use crate::output::{self, Kind};
use crate::plan;
use crate::ui::Ui;

/// What `refine` does unless it is told otherwise.
const REFINE_TOKENS: usize = 16384;
const REFINE_RATE: f64 = 0.012;

#[derive(Debug, Args)]
pub(super) struct RefineArgs {
    /// The bf16 model: checkpoint folder, or `owner/name[@revision]` on the Hub.
    pub(super) model: PathBuf,
    /// Store to start from.
    #[arg(long)]
    store: PathBuf,
    /// Store to make.
    #[arg(short, long)]
    output: PathBuf,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Rounds, each with a gradient of its own.
    #[arg(long, default_value_t = 6)]
    rounds: usize,
    /// Tokens per round.
    #[arg(long, default_value_t = REFINE_TOKENS)]
    round_tokens: usize,
    /// How far the first round goes, relative to what rounding left; later ones less.
    #[arg(long, default_value_t = REFINE_RATE)]
    rate: f64,
    /// Worker threads; the result does not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl RefineArgs {
    fn options(&self, model: PathBuf) -> RefineOptions {
        RefineOptions {
            model,
            store: self.store.clone(),
            head: None,
            output: self.output.clone(),
            calibration: self.calibration.files.clone(),
            tokens: self.calibration.tokens,
            window: self.calibration.window,
            rounds: self.rounds,
            round_tokens: self.round_tokens,
            rate: self.rate,
            jobs: self.jobs,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct TuneArgs {
    /// The bf16 model: checkpoint folder, or `owner/name[@revision]` on the Hub.
    pub(super) model: PathBuf,
    /// Store to start from.
    #[arg(long)]
    store: PathBuf,
    /// Store to make.
    #[arg(short, long)]
    output: PathBuf,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Steps of the optimizer.
    #[arg(long, default_value_t = 32)]
    steps: usize,
    /// Tokens per step.
    #[arg(long, default_value_t = 1536)]
    step_tokens: usize,
    /// Rate of table values, in standard deviations of their table.
    #[arg(long, default_value_t = 1e-3)]
    rate: f64,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl TuneArgs {
    fn options(&self, model: PathBuf) -> TuneOptions {
        TuneOptions {
            model,
            store: self.store.clone(),
            head: None,
            output: self.output.clone(),
            calibration: self.calibration.files.clone(),
            tokens: self.calibration.tokens,
            window: self.calibration.window,
            steps: self.steps,
            step_tokens: self.step_tokens,
            rate: self.rate,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct AblateArgs {
    /// Checkpoint folder, or `owner/name[@revision]` on the Hub.
    pub(super) model: PathBuf,
    /// Folder for the stores and `report.json`; stores already there are used again.
    #[arg(short, long)]
    output: PathBuf,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Evaluation text as `NAME=FILE` or `FILE`, repeatable; a built-in text if absent.
    #[arg(long, value_name = "TEXT")]
    text: Vec<TextSource>,
    /// Tokens of each evaluation set at most.
    #[arg(long, default_value_t = 8192)]
    eval_tokens: usize,
    /// Worker threads; the result does not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    /// Rounds of `refine` on the last store, for a row of its own; 0 for none. The model has
    /// the six-bit output layer meanwhile.
    #[arg(long, value_name = "ROUNDS", default_value_t = 0)]
    refine_rounds: usize,
    /// Tokens of each of these rounds.
    #[arg(long, value_name = "TOKENS", default_value_t = REFINE_TOKENS)]
    refine_tokens: usize,
    /// How far the first of them goes.
    #[arg(long, value_name = "RATE", default_value_t = REFINE_RATE)]
    refine_rate: f64,
    /// Steps of `tune` on top of that, for another row; 0 for none.
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    tune_steps: usize,
    /// Tokens of each of these steps.
    #[arg(long, value_name = "TOKENS", default_value_t = 1536)]
    tune_tokens: usize,
    /// Rate of table values, in standard deviations of their table.
    #[arg(long, value_name = "RATE", default_value_t = 1e-3)]
    tune_rate: f64,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl AblateArgs {
    fn options(&self, model: PathBuf) -> AblateOptions {
        AblateOptions {
            model,
            output: self.output.clone(),
            calibration: self.calibration.files.clone(),
            tokens: self.calibration.tokens,
            text: self.text.clone(),
            eval_tokens: self.eval_tokens,
            window: self.calibration.window,
            jobs: self.jobs,
            refine_rounds: self.refine_rounds,
            refine_tokens: self.refine_tokens,
            refine_rate: self.refine_rate,
            tune_steps: self.tune_steps,
            tune_tokens: self.tune_tokens,
            tune_rate: self.tune_rate,
        }
    }
}

/// Takes the lock and starts the guard for a job of this name.
type Start<'a> = &'a dyn Fn(&str) -> Result<Job, Error>;

/// Prints what a store has gained on text kept out of something.
fn say_change(run: &RunArgs, of: &str, change: &Change) -> Result<(), Error> {
    print(&if run.json {
        json(change)?
    } else {
        format!(
            "KL on text kept out of {of}: {:.4} before, {:.4} after",
            change.before, change.after
        )
    })
}

/// Runs `tune` on a checkpoint that is here.
pub(super) fn tune(
    args: &TuneArgs,
    model: PathBuf,
    start: Start<'_>,
    ui: Ui,
    stop: &Stop,
) -> Result<(), Error> {
    let options = args.options(model);
    let inputs = [&options.model, &options.store];
    let plan = plan::tune(&options)?;
    if !agreed(plan, &args.run, &options.output, Kind::Store, &inputs)? {
        return Ok(());
    }
    let _job = start(&format!("tune {}", options.store.display()))?;
    let Some(tuned) = tune::run(&options, ui, stop)? else {
        return Ok(());
    };
    say_change(&args.run, "training", &tuned)
}

/// Runs `refine` on a checkpoint that is here.
pub(super) fn refine(
    args: &RefineArgs,
    model: PathBuf,
    start: Start<'_>,
    ui: Ui,
    stop: &Stop,
) -> Result<(), Error> {
    let options = args.options(model);
    let inputs = [&options.model, &options.store];
    let plan = plan::refine(&options)?;
    if !agreed(plan, &args.run, &options.output, Kind::Store, &inputs)? {
        return Ok(());
    }
    let _job = start(&format!("refine {}", options.store.display()))?;
    let Some(refined) = refine::run(&options, ui, stop)? else {
        return Ok(());
    };
    say_change(&args.run, "the rounds", &refined)
}

/// Runs `ablate` on a checkpoint that is here.
pub(super) fn ablate(
    args: &AblateArgs,
    model: PathBuf,
    start: Start<'_>,
    ui: Ui,
    stop: &Stop,
) -> Result<(), Error> {
    let options = args.options(model);
    let inputs = [&options.model];
    output::check(&options.output, Kind::Ablation, &inputs)?;
    for store in ablate::stores(&options) {
        output::check(&store, Kind::Store, &inputs)?;
    }
    let plan = plan::ablate(&options)?;
    if !agreed(plan, &args.run, &options.output, Kind::Ablation, &inputs)? {
        return Ok(());
    }
    let _job = start(&format!("ablate {}", options.model.display()))?;
    let (table, report) = ablate::run(&options, ui, stop)?;
    let path = options.output.join(ablate::REPORT_FILE);
    write_page(&options.output.join(ablate::PAGE_FILE), &report)?;
    // The last file: with it the folder is finished.
    report.write(&path).map_err(|e| Error::io(&path, &e))?;
    print(&if args.run.json { json(&report)? } else { table })
}
