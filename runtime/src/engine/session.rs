//! One text and its cache.
//!
//! # Slots
//!
//! `text` is everything known; the cache holds keys and values of its first `valid`
//! tokens, slot and position being the same. Slots from `valid` on hold whatever
//! earlier calls left; the mask hides them and later calls overwrite them.
//!
//! A call writes `width` neighbouring slots and must start at a multiple of
//! `offset_multiple`, so it takes the last few valid tokens along again (replays).
//! Near the end of a context the start moves back to `context - width`: more
//! replays, and every slot can be used. A row's result does not depend on the
//! others, so replays rewrite the bits that are there.

use anemone_schemas::manifest::Manifest;
use half::f16;

use super::inputs::{Inputs, Row};
use super::{Engine, EngineError};
use crate::plan::{Argmax, RunOptions};
use crate::tensor::{Data, Tensor};

/// Where a call goes and what it should give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// First slot written: a multiple of the manifest's `offset_multiple`.
    pub offset: usize,
    /// Width of the function to use.
    pub width: usize,
}

/// What a call gives for its rows.
#[derive(Debug)]
pub struct StepOutput {
    /// The most likely next token of every row; only ids the tokenizer knows.
    pub ids: Vec<u32>,
    /// Logits, `[row]` of the model's vocabulary.
    pub logits: Option<Argmax>,
    /// Hidden states of the tapped layers.
    pub taps: Vec<Tap>,
}

/// Hidden states after a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Tap {
    /// The layer.
    pub layer: usize,
    /// Row-major `[rows, hidden]`.
    pub values: Vec<f16>,
}

/// A text being read and written by a model.
#[derive(Debug)]
pub struct Session<'e> {
    engine: &'e Engine,
    text: Vec<u32>,
    valid: usize,
    /// Slots of the caches; 0 before the first call.
    context: usize,
    /// Keys and values of every chunk.
    caches: Vec<[Tensor; 2]>,
}

impl<'e> Session<'e> {
    pub(super) fn new(engine: &'e Engine) -> Self {
        Self {
            engine,
            text: Vec::new(),
            valid: 0,
            context: 0,
            caches: Vec::new(),
        }
    }

    /// The engine it runs on.
    pub fn engine(&self) -> &'e Engine {
        self.engine
    }

    /// All tokens so far.
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    /// How many of them are in the cache.
    pub fn valid(&self) -> usize {
        self.valid
    }

    /// Slots of the context in use; 0 before the first call.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Adds tokens to the text; [`Session::process`] takes them in.
    ///
    /// # Errors
    /// If the text becomes longer than the longest context; it is unchanged then.
    pub fn extend(&mut self, ids: &[u32]) -> Result<(), EngineError> {
        let tokens = self.text.len() + ids.len();
        let limit = self.limit();
        if tokens > limit {
            return Err(EngineError::ContextFull { tokens, limit });
        }
        self.text.extend_from_slice(ids);
        Ok(())
    }

    /// Forgets the tokens from `len` on. What the cache holds of the rest stays.
    pub fn truncate(&mut self, len: usize) {
        self.text.truncate(len);
        self.valid = self.valid.min(len);
    }

    /// Declares the first `valid` tokens to be in the cache, after calls of
    /// [`Session::step`] whose rows were those tokens at their own slots.
    pub fn set_valid(&mut self, valid: usize) {
        self.valid = valid.min(self.text.len());
    }

    /// Longest text.
    pub fn limit(&self) -> usize {
        self.manifest().contexts.last().copied().unwrap_or(0)
    }

    fn manifest(&self) -> &'e Manifest {
        &self.engine.manifest
    }

    /// Takes in what is not in the cache yet, and returns the most likely next
    /// token. `each` sees every new row: the call's output and the row in it.
    ///
    /// # Errors
    /// If there is nothing new, or a call fails.
    pub fn process(
        &mut self,
        logits: bool,
        mut each: impl FnMut(&StepOutput, usize),
    ) -> Result<u32, EngineError> {
        let mut next = None;
        while self.valid < self.text.len() {
            let call = self.next_call(self.text.len() - self.valid)?;
            let end = self.text.len().min(call.offset + call.width);
            let rows: Vec<Row> = (call.offset..end)
                .map(|p| Row::chain(self.text[p], p))
                .collect();
            let out = self.step(&rows, call, logits)?;
            for row in self.valid - call.offset..rows.len() {
                each(&out, row);
            }
            self.valid = end;
            next = out.ids.last().copied();
        }
        next.ok_or(EngineError::EmptyPrompt)
    }

    /// The call that takes in the next of `wanted` tokens: the narrowest that holds
    /// them all with the replays, else the widest.
    ///
    /// # Errors
    /// If the longest context is too short for the text.
    pub fn next_call(&mut self, wanted: usize) -> Result<Call, EngineError> {
        self.reserve(self.valid + wanted)?;
        let multiple = self.manifest().offset_multiple;
        let aligned = self.valid / multiple * multiple;
        let widths = self.manifest().widths.iter().copied();
        let mut call = None;
        for width in widths.filter(|&w| w <= self.context) {
            let offset = aligned.min(self.context - width);
            call = Some(Call { offset, width });
            if offset + width >= self.valid + wanted {
                break;
            }
        }
        call.ok_or(EngineError::Call {
            rows: wanted,
            offset: aligned,
            width: 0,
            context: self.context,
            problem: "no width fits the context",
        })
    }

    /// Makes room for `tokens` slots: the smallest context that holds them, with
    /// the cache carried over.
    ///
    /// # Errors
    /// If no context is long enough.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), EngineError> {
        if tokens <= self.context {
            return Ok(());
        }
        let fits = self
            .manifest()
            .contexts
            .iter()
            .copied()
            .find(|&c| c >= tokens);
        let context = fits.ok_or(EngineError::ContextFull {
            tokens,
            limit: self.limit(),
        })?;
        let mut caches = Vec::new();
        for chunk in 0..self.engine.programs.len() {
            let mut pair = [
                self.engine.empty_cache(chunk, context)?,
                self.engine.empty_cache(chunk, context)?,
            ];
            if let Some(old) = self.caches.get(chunk) {
                for (new, old) in pair.iter_mut().zip(old) {
                    carry_over(old, self.context, new, context);
                }
            }
            caches.push(pair);
        }
        self.caches = caches;
        self.context = context;
        Ok(())
    }

    /// Runs one call: `rows` at slots `call.offset..`. Neither the text nor what is
    /// valid changes; that is the caller's to say.
    ///
    /// # Errors
    /// If the rows break a rule of calls, or a program fails.
    pub fn step(
        &mut self,
        rows: &[Row],
        call: Call,
        logits: bool,
    ) -> Result<StepOutput, EngineError> {
        self.check_call(rows, call)?;
        let engine = self.engine;
        let Call { offset, width } = call;
        let inputs = Inputs::new(
            self.manifest(),
            &engine.embedding,
            rows,
            offset,
            (self.context, width),
        )?;
        let mut hidden = inputs.hidden;
        let mut out = StepOutput {
            ids: Vec::new(),
            logits: None,
            taps: Vec::new(),
        };
        for (i, caches) in self.caches.iter_mut().enumerate() {
            let chunk = &engine.manifest.chunks[i];
            let plan = engine.plan(i, self.context, width)?;
            let options = RunOptions {
                live: Some((width, rows.len())),
                keep_argmax_inputs: chunk.head,
            };
            let [keys, values] = caches;
            let outcome = plan
                .run_with(
                    &[
                        ("transformer_input", &hidden),
                        ("rope_cos", &inputs.cos),
                        ("rope_sin", &inputs.sin),
                        ("in_step", &inputs.step),
                        ("causal_mask", &inputs.mask),
                    ],
                    &mut [("key_cache", keys), ("value_cache", values)],
                    &options,
                )
                .map_err(|source| EngineError::Run {
                    chunk: chunk.path.clone(),
                    source,
                })?;
            for (name, tensor) in outcome.outputs {
                match name.as_str() {
                    "out_hidden" => hidden = tensor,
                    "out_ids" => {
                        let ids = tensor.as_u32().unwrap_or_default();
                        out.ids = ids[..rows.len()].to_vec();
                    }
                    _ => out.taps.extend(self::tap(&name, &tensor, rows.len())),
                }
            }
            if chunk.head {
                out.logits = outcome.argmax.into_iter().next();
            }
        }
        self.keep_known_ids(&mut out);
        if !logits {
            out.logits = None;
        }
        Ok(out)
    }

    /// Padding rows of the output layer hold no token. If one wins, the best id the
    /// tokenizer knows takes its place.
    fn keep_known_ids(&self, out: &mut StepOutput) {
        let known = self.manifest().model.tokenizer_vocab;
        for (row, id) in out.ids.iter_mut().enumerate() {
            if *id as usize >= known
                && let Some(logits) = &out.logits
            {
                let scores = logits.row(row);
                *id = crate::ops::rows::argmax_row(&scores[..known.min(scores.len())]);
            }
        }
    }

    fn check_call(&self, rows: &[Row], call: Call) -> Result<(), EngineError> {
        let m = self.manifest();
        let slots = |r: &Row| r.limit <= self.context && r.also.iter().all(|&s| s < self.context);
        let problem = if rows.is_empty() || rows.len() > call.width {
            "a call takes 1 to `width` rows"
        } else if !m.widths.contains(&call.width) {
            "there is no function of this width"
        } else if call.offset % m.offset_multiple != 0 {
            "the first slot is not a multiple of `offset_multiple`"
        } else if call.offset + call.width > self.context {
            "the rows do not fit the context"
        } else if !rows.iter().all(slots) {
            "a row sees slots outside the context"
        } else {
            return Ok(());
        };
        Err(EngineError::Call {
            rows: rows.len(),
            offset: call.offset,
            width: call.width,
            context: self.context,
            problem,
        })
    }
}

/// The live rows of an output `tap_{layer}`.
fn tap(name: &str, tensor: &Tensor, rows: usize) -> Option<Tap> {
    let layer = name.strip_prefix("tap_")?.parse().ok()?;
    let hidden = *tensor.shape().last()?;
    let values = tensor.as_f16()?[..rows * hidden].to_vec();
    Some(Tap { layer, values })
}

/// Copies the channels of a cache of `from` slots into one of `to` slots.
fn carry_over(old: &Tensor, from: usize, new: &mut Tensor, to: usize) {
    let Some(src) = old.as_f16() else { return };
    if let Data::F16(dst) = new.data_mut() {
        for (s, d) in src.chunks_exact(from).zip(dst.chunks_exact_mut(to)) {
            d[..from].copy_from_slice(s);
        }
    }
}
