//! Arguments of `quantize`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::args::{CalibrationArgs, RunArgs, threads};
use crate::commands::quantize::{QuantizeOptions, Rule};
use crate::quantize::Method;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OrderArg {
    /// As in the checkpoint.
    Given,
    /// By how well rows share a table, as the loss and the inputs weigh them.
    Fitted,
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
pub(super) struct QuantizeArgs {
    /// Checkpoint folder (`config.json`, safetensors, tokenizer), or `owner/name[@revision]`
    /// on the Hub.
    pub(super) model: PathBuf,
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
    /// Rows that one index stands for: 1, 2 or 4. Beyond 1 tables hold vectors, an index has
    /// `bits` times as many bits, 8 at most, and `two-sided` gives way to `gptq`. Not known to be
    /// fast on a Neural Engine.
    #[arg(long, default_value_t = 1)]
    vector: usize,
    /// Bits per weight at most, tables included, in place of `--bits`: every matrix gets 2, 3,
    /// 4, 6 or 8 bits, the most where the loss minds its errors most. `--set` goes before.
    #[arg(long, value_name = "BITS", conflicts_with = "bits", value_parser = bits_per_weight)]
    target_bpw: Option<f64>,
    /// Other options for the matrices whose name REGEX matches anywhere, such as
    /// `lm_head=bits=6` or `layers\.0\.=method=gptq,damping=0.1`: `bits` (16 for fp16,
    /// `int8` for integers with a factor for each row), `vector`, `method` and `damping`, by
    /// commas. Repeatable; the last rule that gives an option counts.
    #[arg(long = "set", value_name = "REGEX=OPTIONS")]
    rules: Vec<Rule>,
    /// Order of the MLP's channels: as in the checkpoint, or one in which neighbouring rows
    /// suit one table. By default fitted for `two-sided`, and given for the others.
    #[arg(long, value_enum)]
    mlp_order: Option<OrderArg>,
    #[command(flatten)]
    text: CalibrationArgs,
    /// Worker threads; the result does not depend on them.
    #[arg(short, long, default_value_t = threads())]
    jobs: usize,
    /// Exit with code 5 if calibration was too poor for a matrix and a simpler method took
    /// its place; the store is whole and says where.
    #[arg(long)]
    pub(super) strict: bool,
    /// Only these layers, from the first on: a trial, marked as partial.
    #[arg(long, value_name = "0..N", value_parser = first_layers)]
    layers: Option<usize>,
    /// Print the largest values that a program would hold in fp16, as calibration saw them.
    #[arg(long)]
    pub(super) fp16_report: bool,
    /// Write a JSON report: per matrix method, fallback, errors and seconds, and seconds by step.
    #[arg(long, value_name = "FILE")]
    pub(super) report: Option<PathBuf>,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl QuantizeArgs {
    pub(super) fn options(&self, model: PathBuf) -> QuantizeOptions {
        QuantizeOptions {
            model,
            output: self.output.clone(),
            method: self.method.into(),
            guided: self.guided,
            bits: self.bits,
            vector: self.vector,
            rules: self.rules.clone(),
            calibration: self.text.files.clone(),
            tokens: self.text.tokens,
            window: self.text.window,
            jobs: self.jobs,
            fit_order: match self.mlp_order {
                Some(order) => order == OrderArg::Fitted,
                None => matches!(self.method, MethodArg::TwoSided),
            },
            layers: self.layers,
            target_bpw: self.target_bpw,
        }
    }
}

fn bits_per_weight(text: &str) -> Result<f64, String> {
    let bits = text.parse().ok().filter(|b| (1.0..=16.0).contains(b));
    bits.ok_or_else(|| "expected a number from 1 to 16".to_string())
}

/// `2` of `0..2`.
fn first_layers(text: &str) -> Result<usize, String> {
    let end = text.strip_prefix("0..").and_then(|end| end.parse().ok());
    end.filter(|n| *n > 0)
        .ok_or_else(|| "expected `0..N`: later layers need the earlier ones".to_string())
}
