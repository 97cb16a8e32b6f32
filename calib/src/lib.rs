//! Calibration: what a model computes, and how far another is from it.
//!
//! [`Corpus`] cuts text into windows of ids, [`Teacher`] runs them through the model
//! block by block in f32 and shows the inputs of every linear layer, [`StatsBuilder`]
//! sums those up for quantization, and [`Kl`] compares two models' logits.
//!
//! Results do not depend on the number of threads: work is split by the data alone,
//! and every floating-point sum has one order.

mod corpus;
mod error;
mod guided;
mod kl;
mod matmul;
mod overlap;
mod stats;
mod teacher;
mod weights;

pub use corpus::{Corpus, CorpusOptions, Prompt, SourceUse, prompts};
pub use error::Error;
pub use guided::{Guided, GuidedBuilder};
pub use kl::{Kl, KlSummary};
pub use overlap::Shingles;
pub use stats::{Stats, StatsBuilder};
pub use teacher::{
    AnswerLimits, GROUP_ROWS, GradientHook, Hidden, Hook, LOGITS, LinearGradient, LossHook,
    Magnitudes, NormGradients, Teacher, WindowReader, sampled_loss, softmax_rows,
};
pub use weights::Weights;
