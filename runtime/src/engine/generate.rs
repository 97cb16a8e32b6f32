//! Greedy text, one id after the other.

use std::ops::ControlFlow;

use anemone_schemas::tokenizer::ChatMessage;

use super::{Cache, Engine, EngineError, Row, Step};

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
    /// Processes `tokens[done..]`, with `done` of them in the cache already, and returns
    /// the last call's result with the number of its rows. Calls start at a multiple
    /// of the offset grid, so a few tokens before `done` may be processed again.
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
                start = start.min((max - width) / grid * grid);
            }
            let end = tokens.len().min(start + width);
            let rows = Row::chain(&tokens[start..end], start);
            let step = self.step(cache, start, &rows)?;
            each(start, &step);
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
        mut receive: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let mut cache = self.cache();
        let mut tokens = prompt.to_vec();
        let mut done = 0;
        let finish = loop {
            if tokens.len() - prompt.len() == max_tokens {
                break Finish::Length;
            }
            if tokens.len() > self.max_context() {
                break Finish::Context;
            }
            let mut chosen = None;
            self.feed(&mut cache, &tokens, done, |_, step| {
                chosen = step.ids.last().copied();
            })?;
            done = tokens.len();
            let id = chosen.ok_or(EngineError::NoIds)?;
            if self.manifest.stop.contains(&id) {
                break Finish::Stop;
            }
            tokens.push(id);
            if receive(id).is_break() {
                break Finish::Cancelled;
            }
        };
        Ok(Generated {
            ids: tokens.split_off(prompt.len()),
            finish,
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
