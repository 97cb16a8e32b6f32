//! Arguments of `target`.

use std::fs;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::args::RunArgs;
use crate::commands::target::TargetOptions;
use crate::error::Error;
use crate::lower::{ArgmaxForm, AttentionForm, CacheLayout, Chunks, Forms, Prescale, SiluForm};

#[derive(Debug, Args)]
pub(super) struct TargetArgs {
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
    /// SiLU of the MLP: as one operation, or by tanh for engines whose SiLU errs near zero.
    #[arg(long, value_enum, default_value = "operation")]
    silu: SiluArg,
    /// Memory layout of the caches.
    #[arg(long, value_enum, default_value = "interleaved")]
    cache_layout: CacheArg,
    /// What to make: chunk programs and our manifest, or one program and the bundle that
    /// Apple's own runner expects.
    #[arg(long, value_enum, default_value = "chunks")]
    pub(super) layout: LayoutArg,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum LayoutArg {
    /// A model folder.
    Chunks,
    /// A bundle for Apple's runner.
    Apple,
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
enum SiluArg {
    /// The operation.
    Operation,
    /// x / 2 * (1 + tanh(x / 2)).
    Tanh,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CacheArg {
    /// Eight channels interleaved, as Apple's exporter has it: contexts share a buffer.
    Interleaved,
    /// Row-major.
    Plain,
}

impl TargetArgs {
    pub(super) fn options(&self) -> Result<TargetOptions, Error> {
        Ok(TargetOptions {
            store: self.store.clone(),
            output: self.output.clone(),
            name: self.name.clone(),
            chunks: match self.max_chunk_mb {
                Some(mb) => Chunks::MaxBytes(mb.saturating_mul(1_000_000)),
                None => Chunks::Count(self.chunks),
            },
            max_context: self.max_context,
            taps: self.taps.clone(),
            with_logits: self.with_logits,
            forms: self.forms(),
            prescale: self.prescale()?,
        })
    }

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
            silu: match self.silu {
                SiluArg::Operation => SiluForm::Operation,
                SiluArg::Tanh => SiluForm::Tanh,
            },
            cache_layout: match self.cache_layout {
                CacheArg::Plain => CacheLayout::Plain,
                CacheArg::Interleaved => CacheLayout::Interleaved,
            },
        }
    }
}
