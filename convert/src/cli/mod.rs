//! The command line: what each command takes is in `args`, under which guard it runs
//! in `job`.

mod args;
mod job;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anemone_memguard::{LimitArgs, Stop};
use anemone_schemas::exit::{EXIT_HELP, Exit};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::commands::{demo, drafter, eval, inspect, lint, package, quantize, target, verify};
use crate::error::Error;
use crate::lint::LintOptions;
use crate::output::{self, Kind};
use crate::plan::{self, Plan};
use crate::synth;
use crate::ui::{Style, Ui};

use args::{
    DemoArgs, DrafterArgs, EvalArgs, LayoutArg, PackageArgs, QuantizeArgs, RunArgs, SynthArgs,
    TargetArgs,
};
use job::{Job, LockArgs};

/// Converts a bf16 Hugging Face checkpoint into a model folder for the Apple Neural
/// Engine: `quantize`, then `target`, `eval` and `package`. `demo` does all of it on a
/// built-in model.
#[derive(Debug, Parser)]
#[command(name = "anemone-convert", version, after_help = EXIT_HELP)]
pub struct Cli {
    #[command(flatten)]
    messages: MessageArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    lock: LockArgs,
    #[command(subcommand)]
    command: Command,
}

/// What is said, and where.
#[derive(Debug, Args)]
#[command(next_help_heading = "Messages")]
struct MessageArgs {
    /// Print errors only.
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Print more, such as the peak of memory.
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    verbose: bool,
    /// How progress is shown.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "auto",
        value_name = "HOW"
    )]
    progress: ProgressArg,
    /// File that all messages are appended to.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "ANEMONE_LOG",
        hide_env_values = true
    )]
    log: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProgressArg {
    /// A bar on a terminal, lines elsewhere.
    Auto,
    /// A bar with the time left.
    Bar,
    /// A line per step.
    Lines,
    /// A JSON object per line, on standard error.
    Json,
}

impl MessageArgs {
    fn ui(&self) -> Result<Ui, Error> {
        let style = match self.progress {
            _ if self.quiet => Some(Style::None),
            ProgressArg::Auto => None,
            ProgressArg::Bar => Some(Style::Bar),
            ProgressArg::Lines => Some(Style::Lines),
            ProgressArg::Json => Some(Style::Json),
        };
        Ui::new(style, self.verbose, self.log.as_deref())
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Quantize a checkpoint to 4-bit lookup tables.
    Quantize(QuantizeArgs),
    /// Lower a quantized store to chunk programs: a model folder that runs.
    Target(TargetArgs),
    /// Add a drafter to a model folder: a program that guesses the next tokens.
    Drafter(DrafterArgs),
    /// Measure KL divergence and top-1 agreement against the bf16 checkpoint.
    Eval(EvalArgs),
    /// Make a model folder publishable: report, model card, bundle metadata.
    Package(PackageArgs),
    /// Check hashes, programs, tokenizer and template of a model folder.
    Verify {
        /// Model folder.
        folder: PathBuf,
    },
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
}

/// Runs a parsed command line and reports how it failed, if it did.
pub fn main(cli: Cli) -> Exit {
    let ui = match cli.messages.ui() {
        Ok(ui) => ui,
        Err(e) => {
            Ui::Quiet.error(&e);
            return e.exit;
        }
    };
    match run(cli, ui) {
        Ok(()) => Exit::Ok,
        Err(e) => {
            ui.error(&e);
            e.exit
        }
    }
}

fn run(cli: Cli, ui: Ui) -> Result<(), Error> {
    job::heed_file_size_limit();
    let stop = Stop::on_signals()?;
    let start = |name: &str| Job::start(name, &cli.limits, &cli.lock, ui, &stop);
    match &cli.command {
        Command::Quantize(a) => {
            let options = a.options();
            let plan = plan::quantize(&options)?;
            if agreed(
                plan,
                &a.run,
                &options.output,
                Kind::Store,
                &[&options.model],
            )? {
                let _job = start(&format!("quantize {}", options.model.display()))?;
                quantize::run(&options, ui, &stop)?;
            }
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
            if let Some(output) = &options.output {
                output::check(output, Kind::Folder, &[&options.target, &options.drafter])?;
                output::discard(output, Kind::Folder, false, options.overwrite)?;
            }
            let _job = start(&format!("drafter {}", options.drafter.display()))?;
            drafter::run(&options, ui, &stop)?;
        }
        Command::Eval(a) => {
            let options = a.options();
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
            print(&if a.json {
                json(&report)?
            } else {
                report.markdown()
            })?;
        }
        Command::Package(a) => {
            let options = a.options();
            let plan = plan::package(&options)?;
            if a.dry_run {
                return show(plan, a.json);
            }
            plan.require()?;
            package::run(&options, ui)?;
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

/// Whether to go ahead: not after a dry run, which only shows the plan; and only where
/// disk and memory suffice and the output may be written.
fn agreed(
    plan: Plan,
    args: &RunArgs,
    output: &Path,
    kind: Kind,
    inputs: &[&PathBuf],
) -> Result<bool, Error> {
    output::check(output, kind, inputs)?;
    if args.dry_run {
        show(plan, args.json)?;
        return Ok(false);
    }
    plan.require()?;
    output::discard(output, kind, args.fresh, args.overwrite)?;
    Ok(true)
}

fn show(mut plan: Plan, as_json: bool) -> Result<(), Error> {
    plan.estimate()?;
    print(&if as_json { json(&plan)? } else { plan.text() })?;
    // A plan that cannot be carried out is shown whole, then refused.
    plan.require()
}

fn json(value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string_pretty(value).map_err(|e| Error::unexpected(&e))
}

/// Prints to standard output; a reader that went away is no failure.
fn print(text: &str) -> Result<(), Error> {
    match writeln!(io::stdout(), "{}", text.trim_end()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::unexpected(&e)),
    }
}
