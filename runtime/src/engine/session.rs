//! A conversation: a cache, the tokens in it, a source of drafts, and the one loop that
//! all text comes from.

use std::fmt;
use std::ops::ControlFlow;
use std::time::Instant;

use super::speculate::{Calibration, Cycle, Pace, Plan, Statistics, choose, walk};
use super::{Cache, Draft, Engine, EngineError, Finish, Guess};

/// Rows of a verify call, if the folder has a call of that width.
const VERIFY_ROWS: usize = 16;

/// What a request asks for.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// New ids at most.
    pub max_tokens: usize,
    /// Guesses per cycle at most; 0 is plain decoding.
    pub max_draft: usize,
    /// Whether rows may go to the drafter's second and third choices.
    pub sides: bool,
    /// Whether drafting follows what is measured: fewer rows where they cost more than
    /// they promise, none where drafts do not pay. Changes the times, never the text.
    pub adapt: bool,
    /// Whether the model's stop ids end the text.
    pub stop: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            max_draft: VERIFY_ROWS - 1,
            sides: true,
            adapt: true,
            stop: true,
        }
    }
}

/// A finished request.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The new ids, without the stop id.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// What it cost.
    pub statistics: Statistics,
}

/// A text that grows by prompts and answers. What the cache holds of the next prompt is
/// not processed again.
pub struct Session {
    cache: Cache,
    /// The tokens in the cache, from slot 0.
    tokens: Vec<u32>,
    draft: Option<Box<dyn Draft + Send>>,
    calibration: Calibration,
    pace: Pace,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("tokens", &self.tokens.len())
            .field("context", &self.cache.context())
            .field("drafts", &self.draft.is_some())
            .finish_non_exhaustive()
    }
}

/// A request under way.
struct Request<'a> {
    engine: &'a Engine,
    options: Options,
    /// Known tokens; the last one is not processed.
    text: Vec<u32>,
    /// The token after them, if the last cycle ended at a side.
    presumed: Option<u32>,
    statistics: Statistics,
}

impl Session {
    /// An empty conversation. Drafts may come from anywhere: they change the number of
    /// calls, never the text.
    pub fn new(engine: &Engine, draft: Option<Box<dyn Draft + Send>>) -> Self {
        Self {
            cache: engine.cache(),
            tokens: Vec::new(),
            draft,
            calibration: Calibration::default(),
            pace: Pace::default(),
        }
    }

    /// The cache; slots beyond the text hold whatever was left there.
    pub fn cache_mut(&mut self) -> &mut Cache {
        &mut self.cache
    }

    /// Continues `prompt` greedily; `receive` sees each new id as soon as it is known
    /// and may end the request. `engine` is the one the session was made for.
    ///
    /// # Errors
    /// An empty prompt, or one that does not fit; failures of [`Engine::step`] and of
    /// the drafter.
    pub fn answer(
        &mut self,
        engine: &Engine,
        prompt: &[u32],
        options: &Options,
        receive: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Answer, EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let answer = self.continued(engine, prompt, options, receive);
        if answer.is_err() {
            // A call that failed leaves no cache to rely on.
            self.tokens.clear();
        }
        answer
    }

    fn continued(
        &mut self,
        engine: &Engine,
        prompt: &[u32],
        options: &Options,
        mut receive: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Answer, EngineError> {
        let mut ids = Vec::new();
        let mut request = Request {
            engine,
            options: *options,
            text: prompt.to_vec(),
            presumed: None,
            statistics: Statistics::default(),
        };
        if options.max_tokens == 0 {
            return Ok(request.end(ids, Finish::Length));
        }
        let mut new = vec![self.prefill(&mut request)?];
        let stop: &[u32] = if options.stop {
            &engine.manifest.stop
        } else {
            &[]
        };
        loop {
            for (i, &id) in new.iter().enumerate() {
                let finish = if stop.contains(&id) {
                    Finish::Stop
                } else {
                    ids.push(id);
                    if receive(id).is_break() {
                        Finish::Cancelled
                    } else if ids.len() == options.max_tokens {
                        Finish::Length
                    } else {
                        continue;
                    }
                };
                request.statistics.cut(new.len(), i + 1);
                return Ok(request.end(ids, finish));
            }
            if request.text.len() > engine.max_context() {
                return Ok(request.end(ids, Finish::Context));
            }
            new = self.cycle(&mut request, options.max_tokens - ids.len())?;
        }
    }

    /// Processes the prompt, but for what the cache holds, and returns the first new id.
    fn prefill(&mut self, request: &mut Request<'_>) -> Result<u32, EngineError> {
        let start = Instant::now();
        let text = &mut request.text;
        let common = self.tokens.iter().zip(&*text).take_while(|(a, b)| a == b);
        // The last token's row chooses the first id, so it is always processed.
        let done = common.count().min(text.len() - 1);
        self.tokens.truncate(done);
        let mut chosen = None;
        let (draft, tokens) = (&mut self.draft, &mut self.tokens);
        request
            .engine
            .try_feed(&mut self.cache, text, done, |first, step| {
                let new = tokens.len()..first + step.ids.len();
                tokens.extend_from_slice(&text[new.clone()]);
                chosen = step.ids.last().copied();
                let Some(draft) = draft else { return Ok(()) };
                let rows: Vec<_> = new.map(|position| (position - first, position)).collect();
                draft.extend(&step.taps, &rows)
            })?;
        let id = chosen.ok_or(EngineError::NoIds)?;
        request.statistics.prompt_tokens = text.len() - done;
        request.statistics.cached_tokens = done;
        request.statistics.prompt_time = start.elapsed();
        text.push(id);
        Ok(id)
    }

    /// Drafts, verifies and walks once; `wanted` more ids are of use. Returns new ids,
    /// which are at the end of the text then.
    fn cycle(&mut self, request: &mut Request<'_>, wanted: usize) -> Result<Vec<u32>, EngineError> {
        let start = Instant::now();
        let context = self.cache.context();
        let Request {
            engine,
            options,
            text,
            presumed,
            statistics,
        } = request;
        let root = text.len() - 1;
        let Place { offset, free } = engine.place(root);
        // What a side told is the first guess, and drafts go on from there.
        let room = free.min(wanted - 1);
        let first = presumed.take().filter(|_| room > 0);
        let lead = usize::from(first.is_some());
        let most = (room - lead).min(options.max_draft);
        let drafted = most > 0 && (!options.adapt || self.pace.drafts());
        let guesses = match &mut self.draft {
            Some(draft) if drafted => {
                text.extend(first);
                let guesses = draft.propose(text, most)?;
                text.truncate(root + 1);
                known(guesses, most, engine)
            }
            _ => Vec::new(),
        };
        statistics.draft_time += start.elapsed();

        let least = if options.adapt {
            self.pace.least()
        } else {
            0.0
        };
        let calibration = &mut self.calibration;
        let choice = choose(&guesses, calibration, options.sides, free - lead, least);
        let chain = first.into_iter().chain(choice.chain).collect();
        let mut sides = choice.sides;
        for side in &mut sides {
            side.depth += lead;
        }
        let plan = Plan::new(text, offset, chain, sides);
        let step = engine.step(&mut self.cache, plan.offset, &plan.rows)?;
        let walk = walk(&plan, &step.ids);

        let drafting = Instant::now();
        if let Some(draft) = &mut self.draft {
            let rows: Vec<_> = walk.used.iter().copied().zip(root..).collect();
            draft.extend(&step.taps, &rows)?;
        }
        statistics.draft_time += drafting.elapsed();
        if let Some(right) = walk.right.checked_sub(lead) {
            calibration.record(&guesses, right, walk.new[walk.right]);
        }
        // Root and right guesses are where they belong; the last new token is the next
        // root.
        text.extend(&walk.new);
        self.tokens.extend_from_slice(&text[root..text.len() - 1]);
        *presumed = walk.presumed;

        statistics.count(&plan, &walk, lead);
        statistics.plain_cycles += usize::from(!drafted || self.draft.is_none());
        let whole = start.elapsed();
        statistics.verify_time += step.programs;
        statistics.decode_time += whole;
        // A first call, or the first of a context, is not like those after it.
        let usual = statistics.cycles > 1 && context == self.cache.context();
        if options.adapt && self.draft.is_some() && most > 0 && usual {
            let switch = self.pace.record(&Cycle {
                drafted,
                rows: plan.rows.len(),
                tokens: walk.new.len() - lead.min(walk.right) + walk.side.iter().count(),
                most: guesses.len() + 1,
                verify: step.programs.as_secs_f64() * 1e3,
                whole: whole.as_secs_f64() * 1e3,
            });
            if let Some((on, reason)) = switch {
                statistics.switched(on, reason);
            }
        }
        Ok(walk.new)
    }
}

impl Request<'_> {
    fn end(self, ids: Vec<u32>, finish: Finish) -> Answer {
        Answer {
            ids,
            finish,
            statistics: self.statistics,
        }
    }
}

/// Guesses up to `most`, or to the first that is no id the target could choose.
fn known(mut guesses: Vec<Guess>, most: usize, engine: &Engine) -> Vec<Guess> {
    let known = |id: u32| (id as usize) < engine.manifest.model.tokenizer_vocab;
    guesses.truncate(most);
    let unknown = guesses.iter().position(|g| !known(g.id));
    guesses.truncate(unknown.unwrap_or(guesses.len()));
    for other in guesses.iter_mut().flat_map(|g| &mut g.others) {
        if !known(other.0) {
            other.1 = 0.0;
        }
    }
    guesses
}

/// Where a verify call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    offset: usize,
    /// Rows for guesses.
    free: usize,
}

impl Engine {
    /// The verify call that processes the token at `root`. On the Neural Engine it starts at the
    /// last multiple of the grid, and is narrower or starts earlier where the largest context ends;
    /// that says how many rows are left for guesses. Here it starts at the root, unless that took
    /// a larger context: the tokens before are in the cache, and come out the same if they are
    /// computed again.
    fn place(&self, root: usize) -> Place {
        let (grid, max) = (self.manifest.offset_multiple, self.max_context());
        let widths = &self.manifest.widths;
        let wide = widths.iter().copied().find(|&w| w >= VERIFY_ROWS);
        let wide = wide.or(widths.last().copied()).unwrap_or(1);
        let offset = root / grid * grid;
        let fits = |w: &usize| *w <= wide && offset + w <= max;
        let (offset, width) = match widths.iter().copied().rev().find(fits) {
            Some(width) => (offset, width),
            None => (max.saturating_sub(wide) / grid * grid, wide),
        };
        let context = self.context_for(offset + width);
        Place {
            offset: match context {
                Ok(context) if root + width <= context => root,
                _ => offset,
            },
            free: width.min(64) - (root + 1 - offset),
        }
    }
}
