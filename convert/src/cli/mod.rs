//! The command line: what each command takes is in `args`, under which guard it runs
//! in `job`.

mod args;
mod config;
mod docs;
mod job;
mod messages;
mod quantize_args;
mod say;
mod studies;
mod target_args;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anemone_memguard::{LimitArgs, Stop};
use anemone_schemas::exit::{EXIT_HELP, Exit};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::commands::findings::{Class, Finding};
use crate::commands::{
    answers, demo, doctor, drafter, eval, inspect, lint, package, quantize, target, verify,
};
use crate::error::Error;
use crate::lint::LintOptions;
use crate::output::Kind;
use crate::plan;
use crate::publish;
use crate::source::{self, Source};
use crate::synth;
use crate::ui::Ui;

use args::{
    AnswersArgs, DemoArgs, DoctorArgs, DownloadArgs, DrafterArgs, EvalArgs, PackageArgs, SynthArgs,
};
use job::{Job, LockArgs};
use messages::MessageArgs;
use quantize_args::QuantizeArgs;
use say::{agreed, dry_package, json, print, show, write_page};
use studies::{AblateArgs, RefineArgs, TuneArgs};
use target_args::{LayoutArg, TargetArgs};

/// Converts a bf16 Hugging Face checkpoint into a model folder for the Apple Neural
/// Engine: `quantize`, then `target`, `eval` and `package`. `demo` does all of it on a
/// built-in model.
#[derive(Debug, Parser)]
#[command(name = "anemone-convert", version, after_help = EXIT_HELP)]
struct Cli {
    /// File with options that the command line does not give, by sections `[all]` and
    /// `[COMMAND]`.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "ANEMONE_CONFIG",
        hide_env_values = true
    )]
    #[allow(dead_code, reason = "read before the arguments are parsed")]
    config: Option<PathBuf>,
    #[command(flatten)]
    messages: MessageArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    lock: LockArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Quantize a checkpoint to 4-bit lookup tables.
    Quantize(QuantizeArgs),
    /// Let a model answer prompts, as calibration text.
    Answers(AnswersArgs),
    /// Lower a quantized store to chunk programs: a model folder that runs.
    Target(TargetArgs),
    /// Add a drafter to a model folder: a program that guesses the next tokens.
    Drafter(DrafterArgs),
    /// Measure KL divergence and top-1 agreement against the bf16 checkpoint.
    Eval(EvalArgs),
    /// Choose codes and tables of a store again, by the gradient of the whole model.
    Refine(RefineArgs),
    /// Train table values and norm weights of a store a little against the bf16 model.
    Tune(TuneArgs),
    /// Measure what each step of the quantizer is worth on a model.
    Ablate(AblateArgs),
    /// Make a model folder publishable: report, model card, bundle metadata.
    Package(PackageArgs),
    /// Check hashes, programs, tokenizer and template of a model folder.
    Verify {
        /// Model folder.
        folder: PathBuf,
    },
    /// Check everything about a model folder and this machine, run it, and say what to do.
    Doctor(DoctorArgs),
    /// Check programs against the rules of the Neural Engine.
    Lint {
        /// An `.aimodel`, or a folder of them.
        path: PathBuf,
        /// Print every finding as JSON.
        #[arg(long)]
        json: bool,
        /// Rules left out, such as `A6,B1`.
        #[arg(long, value_delimiter = ',', value_name = "RULE")]
        allow: Vec<String>,
    },
    /// Dump a checkpoint, quantized store, `.aimodel` or model folder.
    Inspect {
        /// What to dump.
        path: PathBuf,
        /// Print a program's operations as MLIR-like text.
        #[arg(long)]
        full: bool,
        /// Print JSON; its schemas are in `schemas/json`.
        #[arg(long, conflicts_with = "full")]
        json: bool,
    },
    /// Convert, measure and run a small built-in model.
    Demo(DemoArgs),
    /// Make a checkpoint with the configuration of a published model and random weights.
    Synth(SynthArgs),
    /// Fetch a checkpoint from the Hub into its cache; prints the folder.
    Download(DownloadArgs),
    /// Print completions for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write man pages.
    Man {
        /// Folder for them.
        folder: PathBuf,
    },
    /// Print the reference of all commands, `docs/cli.md`.
    #[command(hide = true)]
    Docs,
}

/// Runs the command line of this process and reports how it failed, if it did.
pub fn main() -> Exit {
    let arguments = config::complete(&Cli::command(), std::env::args_os().collect());
    let cli = match arguments.map(Cli::parse_from) {
        Ok(cli) => cli,
        Err(e) => {
            Ui::Quiet.error(&e);
            return e.exit;
        }
    };
    let ui = match cli.messages.ui() {
        Ok(ui) => ui,
        Err(e) => {
            Ui::Quiet.error(&e);
            return e.exit;
        }
    };
    match run(&cli, ui) {
        Ok(()) => Exit::Ok,
        Err(e) => {
            ui.error(&e);
            e.exit
        }
    }
}

fn run(cli: &Cli, ui: Ui) -> Result<(), Error> {
    job::heed_file_size_limit();
    let stop = Stop::on_signals()?;
    let start = |name: &str| Job::start(name, &cli.limits, &cli.lock, ui, &stop);
    match &cli.command {
        Command::Quantize(a) => {
            let Some(model) = checkpoint(&a.model, a.run.dry_run, a.run.json, ui, &stop)? else {
                return Ok(());
            };
            let options = a.options(model);
            let plan = plan::quantize(&options)?;
            if agreed(
                plan,
                &a.run,
                &options.output,
                Kind::Store,
                &[&options.model],
            )? {
                let _job = start(&format!("quantize {}", options.model.display()))?;
                let (store, effort) = quantize::run_timed(&options, ui, &stop)?;
                if let Some(path) = &a.report {
                    let report = effort.report(&store);
                    report.write(path).map_err(|e| Error::io(path, &e))?;
                }
                if a.fp16_report {
                    print(&quantize::fp16_report(&store)?)?;
                }
                if a.strict {
                    say::require_no_fallback(&store)?;
                }
            }
        }
        Command::Answers(a) => {
            let options = a.options();
            let _job = start(&format!("answers {}", options.model.display()))?;
            let (count, tokens) = answers::run(&options, ui, &stop)?;
            ui.note(&format!("{count} answers, {tokens} tokens"));
        }
        Command::Target(a) => {
            let options = a.options()?;
            let kind = match a.layout {
                LayoutArg::Chunks => Kind::Folder,
                LayoutArg::Apple => Kind::Bundle,
            };
            let plan = plan::target(&options)?;
            if agreed(plan, &a.run, &options.output, kind, &[&options.store])? {
                let _job = start(&format!("target {}", options.store.display()))?;
                match a.layout {
                    LayoutArg::Chunks => target::run(&options, ui, &stop).map(drop)?,
                    LayoutArg::Apple => target::run_apple(&options, ui, &stop)?,
                }
            }
        }
        Command::Drafter(a) => {
            let options = a.options();
            let plan = plan::drafter(&options)?;
            let go = match &options.output {
                Some(output) => {
                    let inputs = [&options.target, &options.drafter];
                    agreed(plan, &a.run, output, Kind::Folder, &inputs)?
                }
                None if a.run.dry_run => return show(plan, a.run.json),
                None => plan.require().map(|()| true)?,
            };
            if go {
                let _job = start(&format!("drafter {}", options.drafter.display()))?;
                drafter::run(&options, ui, &stop)?;
            }
        }
        Command::Eval(a) => {
            let Some(model) = checkpoint(&a.model, a.dry_run, a.json, ui, &stop)? else {
                return Ok(());
            };
            let options = a.options(model);
            let plan = plan::eval(&options)?;
            if a.dry_run {
                return show(plan, a.json);
            }
            plan.require()?;
            let _job = start(&format!("eval {}", options.model.display()))?;
            let report = eval::run(&options, ui, &stop)?;
            if let Some(path) = &a.output {
                report.write(path).map_err(|e| Error::io(path, &e))?;
            }
            if let Some(path) = &a.html {
                write_page(path, &report)?;
            }
            print(&if a.json {
                json(&report)?
            } else {
                report.markdown()
            })?;
            if let Some(limit) = a.max_kl {
                say::require_quality(&report, limit)?;
            }
        }
        Command::Refine(a) => {
            if let Some(model) = checkpoint(&a.model, a.run.dry_run, a.run.json, ui, &stop)? {
                studies::refine(a, model, &start, ui, &stop)?;
            }
        }
        Command::Tune(a) => {
            if let Some(model) = checkpoint(&a.model, a.run.dry_run, a.run.json, ui, &stop)? {
                studies::tune(a, model, &start, ui, &stop)?;
            }
        }
        Command::Ablate(a) => {
            if let Some(model) = checkpoint(&a.model, a.run.dry_run, a.run.json, ui, &stop)? {
                studies::ablate(a, model, &start, ui, &stop)?;
            }
        }
        Command::Package(a) => {
            let options = a.options();
            let plan = plan::package(&options)?;
            if a.dry_run {
                return dry_package(a, plan);
            }
            plan.require()?;
            let package = package::run(&options, ui)?;
            print(&if a.json {
                json(&package)?
            } else {
                package.stanza(a.upload.as_deref())
            })?;
            if let Some(publish) = a.publish() {
                let address = publish::run(&publish, &package, ui)?;
                ui.note(&format!("published: {address}"));
            }
        }
        Command::Verify { folder } => {
            let manifest = verify::run(folder, ui)?;
            print(&format!(
                "`{}` is whole: {} programs, {} files",
                folder.display(),
                manifest.chunks.len(),
                manifest.files.len()
            ))?;
        }
        Command::Doctor(a) => {
            let findings = doctor::run(&a.options(), ui)?;
            print(&if a.json {
                json(&findings)?
            } else if findings.is_empty() {
                "nothing found".to_string()
            } else {
                findings.iter().map(Finding::text).collect()
            })?;
            let wrong = findings.iter().filter(|f| f.class != Class::Performance);
            if let wrong @ 1.. = wrong.count() {
                return Err(Error::new(
                    Exit::Verification,
                    format!("{wrong} findings are fatal or silently wrong"),
                ));
            }
        }
        Command::Download(a) => {
            if let Some(folder) = checkpoint(&a.model, a.dry_run, a.json, ui, &stop)? {
                print(&folder.display().to_string())?;
            }
        }
        Command::Completions { shell } => {
            let text = docs::completions(Cli::command(), *shell);
            io::stdout()
                .write_all(&text)
                .map_err(|e| Error::unexpected(&e))?;
        }
        Command::Man { folder } => docs::man(&Cli::command(), folder)?,
        Command::Docs => print(&docs::markdown(&Cli::command()))?,
        Command::Lint {
            path,
            json: as_json,
            allow,
        } => {
            let options = LintOptions {
                allow: allow.clone(),
            };
            let report = lint::run(path, &options)?;
            print(&if *as_json {
                json(&report)?
            } else {
                report.text()
            })?;
            let errors = report.errors();
            if errors > 0 {
                return Err(Error::new(
                    Exit::Verification,
                    format!(
                        "`{}` breaks rules of the engine in {errors} places",
                        path.display()
                    ),
                ));
            }
        }
        Command::Inspect {
            path, json: true, ..
        } => print(&inspect::run_json(path)?)?,
        Command::Inspect { path, full, .. } => print(&inspect::run(path, *full)?)?,
        Command::Demo(a) => {
            let options = a.options();
            let plan = plan::demo(&options)?;
            if agreed(plan, &a.run, &options.output, Kind::Demo, &[])? {
                let _job = start("demo")?;
                print(&demo::run(&options, ui, &stop)?)?;
            }
        }
        Command::Synth(a) if a.drafter => {
            let _job = start("synth")?;
            synth::run_drafter(&a.options(), ui, &stop)?;
        }
        Command::Synth(a) => {
            let options = a.options();
            let plan = plan::synth(&options)?;
            let inputs: Vec<&PathBuf> = options.tokenizer.iter().collect();
            if agreed(plan, &a.run, &options.output, Kind::Checkpoint, &inputs)? {
                let _job = start("synth")?;
                synth::run(&options, ui, &stop)?;
            }
        }
    }
    Ok(())
}

/// The checkpoint's folder, fetched if need be; nothing where a dry run has only shown
/// what would be fetched.
fn checkpoint(
    model: &Path,
    dry: bool,
    as_json: bool,
    ui: Ui,
    stop: &Stop,
) -> Result<Option<PathBuf>, Error> {
    match source::find(model, dry, ui, stop)? {
        Source::Folder(folder) => Ok(Some(folder)),
        Source::Planned(plan) => show(plan, as_json).map(|()| None),
    }
}
