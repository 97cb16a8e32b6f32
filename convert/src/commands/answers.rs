//! `answers`: a model's own greedy answers to prompts, as calibration text.
//!
//! What a model will write is what its quantized weights should be good at. The answers come from
//! the checkpoint itself or, faster to read for a large model, from a store that was made of it.

use std::path::PathBuf;

use anemone_calib::{AnswerLimits, Teacher, Weights, prompts};
use anemone_schemas::atomic;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::store::Store;
use anemone_schemas::tokenizer::ChatMessage;
use serde_json::json;

use super::target::store_spec;
use super::text;
use crate::error::Error;
use crate::lower::StoreWeights;
use crate::stop::Stop;
use crate::ui::Ui;

/// What to answer.
#[derive(Clone, Debug)]
pub struct AnswersOptions {
    /// Checkpoint folder, or a quantized store.
    pub model: PathBuf,
    /// `.jsonl` file to write.
    pub output: PathBuf,
    /// `.jsonl` file with conversations; those that end with the user's turn are answered.
    pub prompts: PathBuf,
    /// Conversations at most.
    pub count: usize,
    /// Ids of an answer at most.
    pub length: usize,
}

/// Runs the command; returns the number of answers and of their ids.
///
/// # Errors
/// Bad input, no prompt, or an interruption.
pub fn run(options: &AnswersOptions, ui: Ui, stop: &Stop) -> Result<(usize, usize), Error> {
    let tokenizer = text::open_tokenizer(&options.model)?;
    let prompts = prompts(&options.prompts, &tokenizer, options.count, text::SEED)?;
    let store = Store::open(&options.model).ok();
    let spec = store.as_ref().map(store_spec).transpose()?;
    let checkpoint;
    let stored;
    let weights: &dyn Weights = if let (Some(store), Some(spec)) = (&store, &spec) {
        stored = StoreWeights { store, spec };
        &stored
    } else {
        checkpoint = Checkpoint::open(&options.model)?;
        &checkpoint
    };
    let ends = tokenizer.stop_ids();
    let limits = AnswerLimits {
        tokens: options.length,
        valid: tokenizer.size(),
        ends: &ends,
    };
    let stage = ui.stage("answer", options.length);
    let ids: Vec<Vec<u32>> = prompts.iter().map(|p| p.ids.clone()).collect();
    let answers = Teacher::new(weights).answers(&ids, limits, || -> Result<(), Error> {
        stop.check()?;
        stage.step("next ids");
        Ok(())
    })?;
    let mut lines = String::new();
    for (prompt, ids) in prompts.into_iter().zip(&answers) {
        let text: Vec<u32> = ids
            .iter()
            .copied()
            .filter(|id| !ends.contains(id))
            .collect();
        let mut messages = prompt.messages;
        messages.push(ChatMessage {
            role: "assistant".into(),
            content: tokenizer.decode(&text, false)?,
        });
        lines.push_str(&json!({ "messages": messages }).to_string());
        lines.push('\n');
    }
    atomic::write_bytes(&options.output, lines.as_bytes())
        .map_err(|e| Error::io(&options.output, &e))?;
    Ok((answers.len(), answers.iter().map(Vec::len).sum()))
}
