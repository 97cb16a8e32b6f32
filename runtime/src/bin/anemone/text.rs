//! A text that grows: prompts go in, ids come out, and what the cache already holds
//! is not computed again.

use std::time::{Duration, Instant};

use anemone_runtime::engine::{Cache, Engine, Finish};

use crate::failure::End;
use crate::output::Interrupt;

/// Tokens in the cache.
pub(crate) struct Text {
    cache: Cache,
    tokens: Vec<u32>,
}

/// An answer and its times.
#[derive(Debug)]
pub(crate) struct Answer {
    /// New ids, without the stop id.
    pub(crate) ids: Vec<u32>,
    pub(crate) finish: Finish,
    /// Prompt tokens that had to be processed.
    pub(crate) processed: usize,
    /// From the prompt to the first id.
    pub(crate) first: Duration,
    /// From the first id to the last.
    pub(crate) rest: Duration,
}

impl Text {
    pub(crate) fn new(engine: &Engine) -> Self {
        Self {
            cache: engine.cache(),
            tokens: Vec::new(),
        }
    }

    /// Continues `prompt` greedily by at most `max_tokens` ids, handing each to
    /// `receive` at once.
    pub(crate) fn answer(
        &mut self,
        engine: &Engine,
        prompt: &[u32],
        max_tokens: usize,
        interrupt: &Interrupt,
        mut receive: impl FnMut(u32) -> Result<(), End>,
    ) -> Result<Answer, End> {
        if prompt.is_empty() {
            return Err(End::bad_input("the prompt is empty", None));
        }
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b);
        // The last token's row picks the first id, so it is always processed.
        let mut done = common.count().min(prompt.len() - 1);
        self.tokens.truncate(done);
        let mut text = prompt.to_vec();
        let mut answer = Answer {
            ids: Vec::new(),
            finish: Finish::Length,
            processed: prompt.len() - done,
            first: Duration::ZERO,
            rest: Duration::ZERO,
        };
        let mut clock = Instant::now();
        while answer.ids.len() < max_tokens {
            if text.len() > engine.max_context() && !answer.ids.is_empty() {
                answer.finish = Finish::Context;
                break;
            }
            let mut chosen = None;
            engine.feed(&mut self.cache, &text, done, |_, step| {
                chosen = step.ids.last().copied();
            })?;
            done = text.len();
            self.tokens.clone_from(&text);
            if answer.first.is_zero() {
                answer.first = clock.elapsed();
                clock = Instant::now();
            }
            let Some(id) = chosen else { break };
            if engine.manifest().stop.contains(&id) {
                answer.finish = Finish::Stop;
                break;
            }
            text.push(id);
            answer.ids.push(id);
            receive(id)?;
            if interrupt.raised() {
                answer.finish = Finish::Cancelled;
                break;
            }
        }
        answer.rest = clock.elapsed();
        Ok(answer)
    }
}

/// Name of a finish in reports.
pub(crate) fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Context => "context",
        Finish::Cancelled => "cancelled",
    }
}
