//! The command line: arguments as plain data, one call per command.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anemone_schemas::atomic;
use anemone_schemas::exit::{EXIT_HELP, Exit};
use anemone_schemas::report::QualityReport;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::commands::ablate::{self, AblateOptions};
use crate::commands::demo::{self, DemoOptions};
use crate::commands::eval::{self, EvalOptions};
use crate::commands::package::{self, PackageOptions};
use crate::commands::quantize::{self, BitsRule, QuantizeOptions};
use crate::commands::target::{self, TargetOptions};
use crate::commands::text::TextSource;
use crate::commands::tune::{self, TuneOptions};
use crate::commands::{inspect, lint, verify};
use crate::error::Error;
use crate::lint::LintOptions;
use crate::lower::{ArgmaxForm, AttentionForm, CacheLayout, Chunks, Forms, Prescale};
use crate::quantize::Method;
use crate::stop::Stop;
use crate::synth::{self, Published, SynthOptions};
use crate::ui::Ui;

/// Converts a bf16 Hugging Face checkpoint into a model folder for the Apple Neural
/// Engine: `quantize`, then `target`, `eval` and `package`. `demo` does all of it on a
/// built-in model.
#[derive(Debug, Parser)]
#[command(name = "anemone-convert", version, after_help = EXIT_HELP)]
pub struct Cli {
    /// Print errors only.
    #[arg(short, long, global = true)]
    quiet: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Quantize a checkpoint to 4-bit lookup tables.
    Quantize(QuantizeArgs),
    /// Lower a quantized store to chunk programs: a model folder that runs.
    Target(TargetArgs),
    /// Measure KL divergence and top-1 agreement against the bf16 checkpoint.
    Eval(EvalArgs),
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

#[derive(Clone, Copy, Debug, ValueEnum)]
enum MethodArg {
    /// k-means, every weight counting the same.
    KmeansUnweighted,
    /// k-means weighted by the inputs' sum of squares.
    Kmeans,
    /// Weighted k-means, then GPTQ onto the tables.
    Gptq,
    /// GPTQ, then tables and codes refined in the metric of the model's loss.
    TwoSided,
}

impl From<MethodArg> for Method {
    fn from(arg: MethodArg) -> Self {
        match arg {
            MethodArg::KmeansUnweighted => Self::KMeansUnweighted,
            MethodArg::Kmeans => Self::KMeans,
            MethodArg::Gptq => Self::Gptq,
            MethodArg::TwoSided => Self::TwoSided,
        }
    }
}

#[derive(Debug, Args)]
struct QuantizeArgs {
    /// Checkpoint folder: `config.json`, safetensors, tokenizer.
    model: PathBuf,
    /// Store to make.
    #[arg(short, long)]
    output: PathBuf,
    /// How codes and tables are chosen.
    #[arg(long, value_enum, default_value = "two-sided")]
    method: MethodArg,
    /// Whether calibration inputs count by the gradient of the loss; without gradients
    /// (a method other than `two-sided`, and `false` here) the model runs forward only.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    guided: bool,
    /// Bits per weight: 1, 2, 3, 4, 6 or 8.
    #[arg(long, default_value_t = 4)]
    bits: u8,
    /// Other bits for matrices whose name holds TEXT, such as `lm_head=6`; repeatable.
    #[arg(long = "bits-for", value_name = "TEXT=BITS")]
    rules: Vec<BitsRule>,
    /// Calibration text, `.txt` or chat `.jsonl`, repeatable; a built-in text if absent.
    #[arg(long = "calib", value_name = "FILE")]
    calibration: Vec<PathBuf>,
    /// Calibration tokens at most.
    #[arg(long, default_value_t = 32_768)]
    tokens: usize,
    /// Tokens per calibration window.
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Worker threads; the result does not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    /// Discard what is in the output.
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Args)]
struct TargetArgs {
    /// Quantized store.
    store: PathBuf,
    /// Model folder to make.
    #[arg(short, long)]
    output: PathBuf,
    /// Name of the model, such as `Qwen/Qwen3-8B`.
    #[arg(long, default_value = "model")]
    name: String,
    /// Number of chunk programs.
    #[arg(long, default_value_t = 1, conflicts_with = "max_chunk_mb")]
    chunks: usize,
    /// As few chunk programs as keep each within this many megabytes.
    #[arg(long, value_name = "MB")]
    max_chunk_mb: Option<u64>,
    /// Longest context, a power of two from 256 to 16384.
    #[arg(long, default_value_t = 4096)]
    max_context: usize,
    /// Layers whose hidden states a drafter reads, separated by commas.
    #[arg(long, value_delimiter = ',')]
    taps: Vec<usize>,
    /// Add functions `logits_{context}_{width}` that return the logits.
    #[arg(long)]
    with_logits: bool,
    /// How the last program chooses ids.
    #[arg(long, value_enum, default_value = "sliced-f16")]
    argmax: ArgmaxArg,
    /// Axis of attention's softmax: channels up to a context of 4096, rows above.
    #[arg(long, value_enum, default_value = "auto")]
    attention: AttentionArg,
    /// Scale the hidden states by 2^-K before each norm squares them. By default each
    /// norm's input is scaled as little as keeps twice what calibration saw finite.
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(0..=8))]
    norm_prescale: Option<u32>,
    /// As by default, but with the largest magnitudes of this file: a JSON object of
    /// numbers by the names of norm weights.
    #[arg(long, value_name = "FILE", conflicts_with = "norm_prescale")]
    norm_magnitudes: Option<PathBuf>,
    /// Memory layout of the caches.
    #[arg(long, value_enum, default_value = "plain")]
    cache_layout: CacheArg,
    /// Print what would be written, in bytes, and stop.
    #[arg(long)]
    dry_run: bool,
    /// Discard what is in the output.
    #[arg(long)]
    overwrite: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ArgmaxArg {
    /// In the graph, on f16 scores of slices of the vocabulary.
    SlicedF16,
    /// In the graph, on scores widened to f32.
    F32,
    /// By the host, from the logits.
    Host,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AttentionArg {
    /// By the context.
    Auto,
    /// Keys on the channel axis.
    Channel,
    /// Keys on the last axis.
    Row,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CacheArg {
    /// Row-major.
    Plain,
    /// As Apple's exporter has it.
    Interleaved,
}

impl TargetArgs {
    fn prescale(&self) -> Result<Option<Prescale>, Error> {
        let Some(path) = &self.norm_magnitudes else {
            return Ok(self.norm_prescale.map(|k| match k {
                0 => Prescale::None,
                k => Prescale::Uniform(k),
            }));
        };
        let text = fs::read_to_string(path).map_err(|e| Error::io(path, &e))?;
        let table = serde_json::from_str(&text).map_err(|e| {
            Error::bad_input(format!("`{}`: {e}", path.display()))
                .hint("expected an object of numbers by the names of norm weights")
        })?;
        Ok(Some(Prescale::Magnitudes(table)))
    }

    fn forms(&self) -> Forms {
        Forms {
            argmax: match self.argmax {
                ArgmaxArg::SlicedF16 => ArgmaxForm::SlicedF16,
                ArgmaxArg::F32 => ArgmaxForm::SlicedF32,
                ArgmaxArg::Host => ArgmaxForm::Host,
            },
            valid_vocab: None,
            attention: match self.attention {
                AttentionArg::Auto => AttentionForm::Auto,
                AttentionArg::Channel => AttentionForm::Channel,
                AttentionArg::Row => AttentionForm::Row,
            },
            prescale: Prescale::None,
            cache_layout: match self.cache_layout {
                CacheArg::Plain => CacheLayout::Plain,
                CacheArg::Interleaved => CacheLayout::Interleaved,
            },
        }
    }
}

#[derive(Debug, Args)]
struct EvalArgs {
    /// Checkpoint folder of the bf16 model.
    model: PathBuf,
    /// Quantized store, measured with dequantized weights in the teacher's graph.
    #[arg(long)]
    store: Option<PathBuf>,
    /// Model folder, measured on the programs that ship.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Evaluation text as `NAME=FILE` or `FILE`, repeatable; a built-in text if absent.
    #[arg(long, value_name = "TEXT")]
    text: Vec<TextSource>,
    /// Tokens per window.
    #[arg(long, default_value_t = 256)]
    window: usize,
    /// Tokens of each text set at most.
    #[arg(long, default_value_t = 8192)]
    tokens: usize,
    /// Worker threads.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    /// Report to write.
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// The same as one HTML page with plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct TuneArgs {
    /// Checkpoint folder of the bf16 model.
    model: PathBuf,
    /// Store to start from.
    #[arg(long)]
    store: PathBuf,
    /// Store to make.
    #[arg(short, long)]
    output: PathBuf,
    /// Text to train on, repeatable; a built-in text if absent.
    #[arg(long = "calib", value_name = "FILE")]
    calibration: Vec<PathBuf>,
    /// Tokens of that text at most.
    #[arg(long, default_value_t = 32_768)]
    tokens: usize,
    /// Tokens per window.
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Steps of the optimizer.
    #[arg(long, default_value_t = 32)]
    steps: usize,
    /// Tokens per step.
    #[arg(long, default_value_t = 1536)]
    step_tokens: usize,
    /// Rate of table values, in standard deviations of their table.
    #[arg(long, default_value_t = 1e-3)]
    rate: f64,
}

#[derive(Debug, Args)]
struct AblateArgs {
    /// Checkpoint folder.
    model: PathBuf,
    /// Folder for the stores and `report.json`; stores already there are used again.
    #[arg(short, long)]
    output: PathBuf,
    /// Calibration text, repeatable; a built-in text if absent.
    #[arg(long = "calib", value_name = "FILE")]
    calibration: Vec<PathBuf>,
    /// Calibration tokens at most.
    #[arg(long, default_value_t = 32_768)]
    tokens: usize,
    /// Evaluation text as `NAME=FILE` or `FILE`, repeatable; a built-in text if absent.
    #[arg(long, value_name = "TEXT")]
    text: Vec<TextSource>,
    /// Tokens of each evaluation set at most.
    #[arg(long, default_value_t = 8192)]
    eval_tokens: usize,
    /// Tokens per window.
    #[arg(long, default_value_t = 512)]
    window: usize,
    /// Worker threads; the result does not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
}

#[derive(Debug, Args)]
struct PackageArgs {
    /// Model folder.
    folder: PathBuf,
    /// Quality report written by `eval`.
    #[arg(long)]
    report: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct DemoArgs {
    /// Where to leave checkpoint, stores and model folder.
    #[arg(short, long, default_value = "anemone-demo")]
    output: PathBuf,
    /// Worker threads; the files do not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    /// Discard what is in the output.
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Args)]
struct SynthArgs {
    /// Model to imitate, such as `qwen3-8b`, `qwen3-4b`, `qwen3-14b` or `r1-0528-qwen3-8b`.
    #[arg(long, value_name = "NAME")]
    like: Published,
    /// Decoder layers, if not all.
    #[arg(long)]
    layers: Option<usize>,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Folder whose tokenizer files are copied.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Checkpoint folder to make.
    #[arg(short, long)]
    output: PathBuf,
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Runs a parsed command line.
///
/// # Errors
/// The command's failure.
pub fn run(cli: Cli) -> Result<(), Error> {
    let ui = Ui::detect(cli.quiet);
    let stop = Stop::on_signals().map_err(|e| Error::unexpected(&e))?;
    match cli.command {
        Command::Quantize(a) => {
            discard(a.overwrite, &a.output)?;
            let options = QuantizeOptions {
                model: a.model,
                output: a.output,
                method: a.method.into(),
                guided: a.guided,
                bits: a.bits,
                rules: a.rules,
                calibration: a.calibration,
                tokens: a.tokens,
                window: a.window,
                jobs: a.jobs,
            };
            quantize::run(&options, ui, &stop)?;
        }
        Command::Target(a) => {
            let (forms, prescale) = (a.forms(), a.prescale()?);
            let options = TargetOptions {
                store: a.store,
                output: a.output,
                name: a.name,
                chunks: match a.max_chunk_mb {
                    Some(mb) => Chunks::MaxBytes(mb.saturating_mul(1_000_000)),
                    None => Chunks::Count(a.chunks),
                },
                max_context: a.max_context,
                taps: a.taps,
                with_logits: a.with_logits,
                forms,
                prescale,
            };
            if a.dry_run {
                print(&target::dry_run(&options)?)?;
            } else {
                discard(a.overwrite, &options.output)?;
                target::run(&options, ui, &stop)?;
            }
        }
        Command::Eval(a) => {
            let options = EvalOptions {
                model: a.model,
                store: a.store,
                folder: a.folder,
                text: a.text,
                window: a.window,
                tokens: a.tokens,
                threads: a.jobs,
            };
            let report = eval::run(&options, ui, &stop)?;
            if let Some(path) = &a.output {
                report.write(path).map_err(|e| Error::io(path, &e))?;
            }
            if let Some(path) = &a.html {
                write_page(path, &report)?;
            }
            print(&if a.json {
                serde_json::to_string_pretty(&report).map_err(|e| Error::unexpected(&e))?
            } else {
                report.markdown()
            })?;
        }
        Command::Tune(a) => {
            let options = TuneOptions {
                model: a.model,
                store: a.store,
                output: a.output,
                calibration: a.calibration,
                tokens: a.tokens,
                window: a.window,
                steps: a.steps,
                step_tokens: a.step_tokens,
                rate: a.rate,
            };
            let tuned = tune::run(&options, ui, &stop)?;
            print(&format!(
                "KL on text kept out of training: {:.4} before, {:.4} after",
                tuned.before, tuned.after
            ))?;
        }
        Command::Ablate(a) => {
            let options = AblateOptions {
                model: a.model,
                output: a.output,
                calibration: a.calibration,
                tokens: a.tokens,
                text: a.text,
                eval_tokens: a.eval_tokens,
                window: a.window,
                jobs: a.jobs,
            };
            let (table, report) = ablate::run(&options, ui, &stop)?;
            let path = options.output.join("report.json");
            report.write(&path).map_err(|e| Error::io(&path, &e))?;
            write_page(&options.output.join("report.html"), &report)?;
            print(&table)?;
        }
        Command::Package(a) => {
            let options = PackageOptions {
                folder: a.folder,
                report: a.report,
            };
            package::run(&options, ui)?;
        }
        Command::Verify { folder } => {
            let manifest = verify::run(&folder, ui)?;
            print(&format!(
                "`{}` is whole: {} programs, {} files",
                folder.display(),
                manifest.chunks.len(),
                manifest.files.len()
            ))?;
        }
        Command::Lint { path, json, allow } => {
            let report = lint::run(&path, &LintOptions { allow })?;
            print(&if json {
                serde_json::to_string_pretty(&report).map_err(|e| Error::unexpected(&e))?
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
        } => print(&inspect::run_json(&path)?)?,
        Command::Inspect { path, full, .. } => print(&inspect::run(&path, full)?)?,
        Command::Demo(a) => {
            discard(a.overwrite, &a.output)?;
            let options = DemoOptions {
                output: a.output,
                jobs: a.jobs,
            };
            print(&demo::run(&options, ui, &stop)?)?;
        }
        Command::Synth(a) => {
            let options = SynthOptions {
                like: a.like,
                layers: a.layers,
                seed: a.seed,
                tokenizer: a.tokenizer,
                output: a.output,
            };
            synth::run(&options, ui, &stop)?;
        }
    }
    Ok(())
}

fn write_page(path: &Path, report: &QualityReport) -> Result<(), Error> {
    atomic::write_bytes(path, report.html().as_bytes()).map_err(|e| Error::io(path, &e))
}

/// With `--overwrite`, removes an output that is ours.
fn discard(overwrite: bool, output: &Path) -> Result<(), Error> {
    if !overwrite || !output.exists() {
        return Ok(());
    }
    let ours = [
        "anemone.json",
        "store.json",
        "matrices",
        "folder",
        "two-sided.store",
    ];
    let empty = fs::read_dir(output).is_ok_and(|mut d| d.next().is_none());
    if !empty && !ours.iter().any(|name| output.join(name).exists()) {
        return Err(Error::usage(format!(
            "`{}` was not made by anemone-convert",
            output.display()
        ))
        .hint("remove it yourself, or choose another output folder"));
    }
    fs::remove_dir_all(output).map_err(|e| Error::io(output, &e))
}

/// Prints to standard output; a reader that went away is no failure.
fn print(text: &str) -> Result<(), Error> {
    match writeln!(std::io::stdout(), "{}", text.trim_end()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::unexpected(&e)),
    }
}
