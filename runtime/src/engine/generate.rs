//! Ids in, ids out: prompts, greedy text, logits.

use std::ops::ControlFlow;

use anemone_schemas::tokenizer::ChatMessage;

use super::{Cache, Engine, EngineError, Options, Row, Session, Step};

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop id.
    Stop,
    /// As many ids as asked for.
    Length,
    /// No slot left in the largest context.
    Context,
    /// The receiver asked for it.
    Cancelled,
}

/// A finished generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new ids, without the stop id.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

impl Engine {
    /// Processes `tokens[done..]`, with `done` of them in the cache already; `each` sees
    /// the result of every call with the place of its first row. Calls start at a
    /// multiple of the offset grid, so a few tokens before `done` may be processed again.
    ///
    /// # Errors
    /// As [`Engine::step`]; [`EngineError::ContextFull`] if the tokens do not fit.
    pub fn feed(
        &self,
        cache: &mut Cache,
        tokens: &[u32],
        done: usize,
        mut each: impl FnMut(usize, &Step),
    ) -> Result<(), EngineError> {
        self.try_feed(cache, tokens, done, |start, step| {
            each(start, step);
            Ok(())
        })
    }

    /// [`Engine::feed`] with a receiver that can fail.
    pub(super) fn try_feed(
        &self,
        cache: &mut Cache,
        tokens: &[u32],
        done: usize,
        mut each: impl FnMut(usize, &Step) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let max = self.max_context();
        if tokens.len() > max {
            return Err(EngineError::ContextFull {
                needed: tokens.len(),
                max,
            });
        }
        let mut next = done;
        while next < tokens.len() {
            let grid = self.manifest.offset_multiple;
            let mut start = next / grid * grid;
            let widths = &self.manifest.widths;
            let wanted = widths.iter().find(|&&w| w >= tokens.len() - start);
            let mut width = *wanted.or(widths.last()).expect("checked when read");
            // The padding of the last call must stay within the largest context: take a
            // narrower call there, and if none fits start it early enough.
            if start + width > max {
                let narrower = widths.iter().rev().find(|&&w| start + w <= max);
                width = *narrower.or(widths.first()).expect("checked when read");
                start = start.min(max.saturating_sub(width) / grid * grid);
            }
            let end = tokens.len().min(start + width);
            let rows = Row::chain(&tokens[start..end], start);
            let step = self.step(cache, start, &rows)?;
            each(start, &step)?;
            next = end;
        }
        Ok(())
    }

    /// Continues `prompt` greedily by at most `max_tokens` ids; `receive` sees each new
    /// id at once and may end the generation.
    ///
    /// # Errors
    /// An empty prompt, or one that does not fit; failures of [`Engine::step`].
    pub fn generate(
        &self,
        prompt: &[u32],
        max_tokens: usize,
        receive: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, EngineError> {
        let options = Options {
            max_tokens,
            ..Options::default()
        };
        let answer = Session::new(self, None).answer(self, prompt, &options, receive)?;
        Ok(Generated {
            ids: answer.ids,
            finish: answer.finish,
        })
    }

    /// The ids of a conversation, rendered by the folder's chat template and ready for
    /// an answer.
    ///
    /// # Errors
    /// A template that fails.
    pub fn chat_prompt(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, EngineError> {
        let text = self
            .tokenizer
            .render_chat(messages, true, &serde_json::Map::new())?;
        Ok(self.tokenizer.encode(&text, false)?)
    }

    /// Logits of every token of `window`, `[window.len(), vocab]`, through the programs
    /// that ship, from an empty cache. Rows of the output layer that the programs leave
    /// out are `-inf`.
    ///
    /// # Errors
    /// As [`Engine::feed`].
    pub fn logits(&self, window: &[u32]) -> Result<Vec<f32>, EngineError> {
        let vocab = self.manifest.model.vocab;
        let mut logits = vec![f32::NEG_INFINITY; window.len() * vocab];
        let mut cache = self.cache();
        self.feed(&mut cache, window, 0, |start, step| {
            for row in 0..step.ids.len() {
                let at = (start + row) * vocab;
                let values = step.logits(row);
                let n = values.len().min(vocab);
                logits[at..at + n].copy_from_slice(&values[..n]);
            }
        })?;
        Ok(logits)
    }
}
