//! What can go wrong between a model folder and its text.

use std::io;
use std::path::PathBuf;

use anemone_schemas::manifest::ManifestError;
use anemone_schemas::tokenizer;
use thiserror::Error;

use crate::error::{ProgramError, RunError};

/// A folder cannot be opened, or a call fails.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The manifest is absent or wrong: the folder is not whole.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] tokenizer::Error),
    /// A program cannot be opened or compiled.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A program failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A file cannot be read.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The embedding table is not as long as its shape says.
    #[error("`{}` has {found} bytes, expected {rows} x {cols} fp16 values", path.display())]
    Embedding {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: usize,
        /// Rows expected.
        rows: usize,
        /// Columns expected.
        cols: usize,
    },
    /// A chunk lacks a function its manifest promised.
    #[error("`{chunk}` has no function for context {context} and width {width}")]
    NoFunction {
        /// The chunk.
        chunk: String,
        /// Slots.
        context: usize,
        /// Rows.
        width: usize,
    },
    /// The last chunk gave no ids.
    #[error("the last chunk has neither an output `out_ids` that an argmax feeds nor `out_logits`")]
    NoIds,
    /// A call of no rows or of more than the widest function takes.
    #[error("a call of {rows} rows, expected 1 to {max}")]
    Rows {
        /// Rows of the call.
        rows: usize,
        /// Rows of the widest function.
        max: usize,
    },
    /// The conversation is longer than the largest context.
    #[error("the text needs {needed} slots, the folder's largest context has {max}")]
    ContextFull {
        /// Slots needed.
        needed: usize,
        /// Slots there are.
        max: usize,
    },
    /// An id that the embedding table has no row for.
    #[error("id {id} is outside the vocabulary of {vocab}")]
    Id {
        /// The id.
        id: u32,
        /// Rows of the table.
        vocab: usize,
    },
    /// A drafter whose guesses are hardly ever right.
    #[error(
        "this drafter does not match this target: {accepted:.2} of its tokens were accepted \
         per cycle on a fixed prompt, at least {floor} expected"
    )]
    Mismatch {
        /// Accepted tokens per cycle.
        accepted: f64,
        /// What a drafter must reach.
        floor: f64,
    },
    /// Nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The model gives out no hidden states where the drafter reads them.
    #[error("the drafter reads the hidden states after layer {layer}, which the call did not give")]
    NoTap {
        /// The layer.
        layer: usize,
    },
    /// A drafter was given a token without those before it.
    #[error("the drafter was given position {position}, but has only {have} positions")]
    MissingRows {
        /// The position.
        position: usize,
        /// Positions it has.
        have: usize,
    },
    /// A drafter's program gave no guesses.
    #[error("the drafter's program has not the outputs `out_ids` and `out_probabilities`")]
    NoGuesses,
}
