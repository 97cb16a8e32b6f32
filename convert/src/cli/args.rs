//! Arguments of the commands as plain data, and what they mean for the commands.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::commands::answers::AnswersOptions;
use crate::commands::demo::DemoOptions;
use crate::commands::doctor::DoctorOptions;
use crate::commands::drafter::{DrafterOptions, HeadSource, WeightForm};
use crate::commands::eval::EvalOptions;
use crate::commands::package::PackageOptions;
use crate::commands::text::TextSource;
use crate::publish::PublishOptions;
use crate::synth::{Published, SynthOptions};

/// What every command that writes something takes.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command")]
pub(super) struct RunArgs {
    /// Print the steps with their bytes, peak memory and estimated time, and stop.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    pub(super) json: bool,
    /// Do not go on with what an interrupted run left; begin anew.
    #[arg(long)]
    pub(super) fresh: bool,
    /// Replace an output (or a drafter) that is finished.
    #[arg(long)]
    pub(super) overwrite: bool,
}

/// The text that statistics are taken from, or that is trained on.
#[derive(Debug, Args)]
pub(super) struct CalibrationArgs {
    /// Calibration text, `.txt` or chat `.jsonl`, repeatable; a built-in text if absent.
    #[arg(long = "calib", value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,
    /// Calibration tokens at most.
    #[arg(long, default_value_t = 32_768)]
    pub(super) tokens: usize,
    /// Tokens per window.
    #[arg(long, default_value_t = 512)]
    pub(super) window: usize,
}

#[derive(Debug, Args)]
pub(super) struct AnswersArgs {
    /// Checkpoint folder, or a quantized store, which is read faster.
    model: PathBuf,
    /// File to write: conversations for `--calib`.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Chat `.jsonl`; conversations that end with the user's turn are answered.
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Conversations at most, in shuffled order.
    #[arg(long, default_value_t = 48)]
    count: usize,
    /// Tokens of an answer at most.
    #[arg(long, default_value_t = 256)]
    length: usize,
}

impl AnswersArgs {
    pub(super) fn options(&self) -> AnswersOptions {
        AnswersOptions {
            model: self.model.clone(),
            output: self.output.clone(),
            prompts: self.prompts.clone(),
            count: self.count,
            length: self.length,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct DrafterArgs {
    /// Drafter checkpoint (DSpark or DFlash): `config.json` and safetensors.
    drafter: PathBuf,
    /// Model folder, lowered with `--taps` of the drafter's layers.
    #[arg(long, value_name = "FOLDER")]
    target: PathBuf,
    /// Folder to make; without it the model folder itself gets the drafter.
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// The model's bf16 checkpoint: embedding and output layer are compared with it, and
    /// the output layer is taken from it where the drafter has none.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Where the output layer comes from.
    #[arg(long, value_enum, default_value = "auto")]
    head: HeadArg,
    /// Form of the weights.
    #[arg(long, value_enum, default_value = "f16")]
    weights: WeightArg,
    /// Worker threads; the result does not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum HeadArg {
    /// A checkpoint if there is one, else the folder.
    Auto,
    /// The drafter's checkpoint or the model's.
    Exact,
    /// The quantized one of the model folder.
    Chunk,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WeightArg {
    /// Half precision.
    F16,
    /// 4-bit lookup tables, k-means without calibration.
    Lut4,
    /// 8-bit lookup tables, k-means without calibration.
    Lut8,
    /// 8-bit integers with a scale for each row.
    Int8,
}

impl DrafterArgs {
    pub(super) fn options(&self) -> DrafterOptions {
        DrafterOptions {
            drafter: self.drafter.clone(),
            target: self.target.clone(),
            output: self.output.clone(),
            model: self.model.clone(),
            head: match self.head {
                HeadArg::Auto => HeadSource::Auto,
                HeadArg::Exact => HeadSource::Exact,
                HeadArg::Chunk => HeadSource::Chunk,
            },
            weights: match self.weights {
                WeightArg::F16 => WeightForm::F16,
                WeightArg::Lut4 => WeightForm::Lut4,
                WeightArg::Lut8 => WeightForm::Lut8,
                WeightArg::Int8 => WeightForm::Int8,
            },
            jobs: self.jobs,
            overwrite: self.run.overwrite,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct EvalArgs {
    /// The bf16 model: checkpoint folder, or `owner/name[@revision]` on the Hub.
    pub(super) model: PathBuf,
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
    pub(super) output: Option<PathBuf>,
    /// The same as one HTML page with plots.
    #[arg(long, value_name = "FILE")]
    pub(super) html: Option<PathBuf>,
    /// Exit with code 6 if a mean KL is above this, in nats per token.
    #[arg(long, value_name = "NATS")]
    pub(super) max_kl: Option<f64>,
    /// Print the steps with their peak memory and estimated time, and stop.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Print the report (or the steps) as JSON.
    #[arg(long)]
    pub(super) json: bool,
}

impl EvalArgs {
    pub(super) fn options(&self, model: PathBuf) -> EvalOptions {
        EvalOptions {
            model,
            store: self.store.clone(),
            folder: self.folder.clone(),
            text: self.text.clone(),
            window: self.window,
            tokens: self.tokens,
            threads: self.jobs,
        }
    }
}

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "flags of a command")]
pub(super) struct PackageArgs {
    /// Model folder.
    folder: PathBuf,
    /// Quality report written by `eval`.
    #[arg(long)]
    report: Option<PathBuf>,
    /// Checkpoint folder whose licence and notices are copied, if the store had none.
    #[arg(long, value_name = "CHECKPOINT")]
    base: Option<PathBuf>,
    /// Publish the folder there, as a pull request.
    #[arg(long, value_name = "OWNER/NAME")]
    pub(super) upload: Option<String>,
    /// Publish by a commit instead of a pull request.
    #[arg(long, requires = "upload")]
    direct: bool,
    /// Make the repository private if it does not exist yet.
    #[arg(long, requires = "upload")]
    private: bool,
    /// Publish a drafter's weights too; their licence must allow it.
    #[arg(long, requires = "upload")]
    with_drafter: bool,
    /// Print the steps with their bytes, and stop.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    pub(super) json: bool,
}

impl PackageArgs {
    pub(super) fn options(&self) -> PackageOptions {
        PackageOptions {
            folder: self.folder.clone(),
            report: self.report.clone(),
            base: self.base.clone(),
        }
    }

    pub(super) fn publish(&self) -> Option<PublishOptions> {
        Some(PublishOptions {
            folder: self.folder.clone(),
            repo: self.upload.clone()?,
            direct: self.direct,
            private: self.private,
            with_drafter: self.with_drafter,
        })
    }
}

#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Model folder; without one only the machine is looked at.
    folder: Option<PathBuf>,
    /// Do not run the model.
    #[arg(long)]
    no_run: bool,
    /// Worker threads.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    /// Print JSON.
    #[arg(long)]
    pub(super) json: bool,
}

impl DoctorArgs {
    pub(super) fn options(&self) -> DoctorOptions {
        DoctorOptions {
            folder: self.folder.clone(),
            run: !self.no_run,
            threads: self.jobs,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct DownloadArgs {
    /// `owner/name[@revision]` on the Hub.
    pub(super) model: PathBuf,
    /// Print what would be fetched, and stop.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Print JSON.
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct DemoArgs {
    /// Where to leave checkpoint, stores and model folder.
    #[arg(short, long, default_value = "anemone-demo")]
    output: PathBuf,
    /// Worker threads; the files do not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl DemoArgs {
    pub(super) fn options(&self) -> DemoOptions {
        DemoOptions {
            output: self.output.clone(),
            jobs: self.jobs,
        }
    }
}

#[derive(Debug, Args)]
pub(super) struct SynthArgs {
    /// Model to imitate, such as `qwen3-8b`, `qwen3-4b`, `qwen3-14b` or `r1-0528-qwen3-8b`.
    #[arg(long, value_name = "NAME")]
    like: Published,
    /// Make the DSpark drafter published for the model.
    #[arg(long, conflicts_with = "layers")]
    pub(super) drafter: bool,
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
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl SynthArgs {
    pub(super) fn options(&self) -> SynthOptions {
        SynthOptions {
            like: self.like,
            layers: self.layers,
            seed: self.seed,
            tokenizer: self.tokenizer.clone(),
            output: self.output.clone(),
        }
    }
}

pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
