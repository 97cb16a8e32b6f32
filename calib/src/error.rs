//! What can go wrong in calibration.

use std::io;
use std::path::PathBuf;

use anemone_schemas::{checkpoint, tokenizer};
use thiserror::Error;

/// A reason to stop calibrating.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint cannot give a tensor.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// The tokenizer or its template failed.
    #[error(transparent)]
    Tokenizer(#[from] tokenizer::Error),
    /// Other [`Weights`](crate::Weights) than a checkpoint cannot give a tensor.
    #[error("cannot load the weight `{tensor}`")]
    Weight {
        /// The tensor.
        tensor: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A weight is not of the shape that the spec implies.
    #[error("the weight `{tensor}` has shape {found:?}, expected {expected:?}")]
    WeightShape {
        /// The tensor.
        tensor: String,
        /// By the spec.
        expected: Vec<usize>,
        /// As loaded.
        found: Vec<usize>,
    },
    /// The tensor library failed.
    #[error("a matrix product failed")]
    Candle(#[from] candle_core::Error),
    /// A window holds an id outside the vocabulary.
    #[error("window {window} has id {id} at position {position}, but the vocabulary has {vocab}")]
    IdOutOfRange {
        /// Index of the window.
        window: usize,
        /// Position within it.
        position: usize,
        /// The id.
        id: u32,
        /// Rows of the embedding table.
        vocab: usize,
    },
    /// A window is longer than the model's context.
    #[error("window {window} has {length} ids, but the model was made for {max}")]
    WindowTooLong {
        /// Index of the window.
        window: usize,
        /// Its length.
        length: usize,
        /// `max_position_embeddings`.
        max: usize,
    },
    /// The residual stream became NaN or infinite.
    #[error(
        "the output of layer {layer} is {value} in window {window} at position {position}, \
         channel {channel}"
    )]
    NonFiniteActivation {
        /// The block that produced it.
        layer: usize,
        /// Index of the window.
        window: usize,
        /// Position within it.
        position: usize,
        /// Index in the residual stream.
        channel: usize,
        /// NaN or an infinity.
        value: f32,
    },
    /// An activation that statistics were to take in is NaN or infinite.
    #[error("an input of {site:?} is not finite: column {column} of row {row}")]
    NonFiniteInput {
        /// Where.
        site: anemone_schemas::spec::Site,
        /// Row since the first.
        row: u64,
        /// Column.
        column: usize,
    },
    /// Logits to be compared are NaN or infinite.
    #[error("the {model} logits of token {token} are not finite or not comparable")]
    BadLogits {
        /// `teacher` or `student`.
        model: &'static str,
        /// How many tokens were compared before.
        token: usize,
    },
    /// Rows of logits to be compared are not of the promised lengths.
    #[error("{what} has {found} values, expected {expected}")]
    Length {
        /// The slice.
        what: &'static str,
        /// By the other arguments.
        expected: usize,
        /// As given.
        found: usize,
    },
    /// A file could not be read.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A text file is neither plain text nor lines of JSON.
    #[error("`{}` is neither `.txt` nor `.jsonl`", path.display())]
    UnknownText {
        /// The file.
        path: PathBuf,
    },
    /// A line of a `.jsonl` file is not a conversation.
    #[error(
        "line {line} of `{}` is not a conversation; \
         hint: {{\"messages\": [{{\"role\": \"user\", \"content\": \"…\"}}]}}", path.display()
    )]
    BadLine {
        /// The file.
        path: PathBuf,
        /// One-based line number.
        line: usize,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A text file has nothing in it.
    #[error("`{}` has no text to make a window of", path.display())]
    EmptyText {
        /// The file.
        path: PathBuf,
    },
    /// No text was given.
    #[error("no text to calibrate with; hint: give `.txt` or `.jsonl` files")]
    NoText,
    /// The token budget or the window length is too small to mean anything.
    #[error("`{name}` is {found}, expected at least {min}")]
    OptionTooSmall {
        /// The option.
        name: &'static str,
        /// Its value.
        found: usize,
        /// The least that works.
        min: usize,
    },
}
