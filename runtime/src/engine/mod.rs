//! The engine: a model folder that turns ids into ids.
//!
//! Everything is built on one operation, [`Engine::step`]: up to a call's width of
//! rows, each with an id, a position and the rows it sees, go through all chunk
//! programs at a slot offset and come back as each row's choice of the next id.
//! Prefill, plain decoding, drafts and token trees are callers of it.
//!
//! Two constraints of the Neural Engine shape the callers. Shapes are static, so a
//! call has one of the folder's widths and one of its contexts, and what is not used
//! is padding. And the cache can only be written at offsets that are multiples of
//! [`Manifest::offset_multiple`], so a call there may have to start a few slots early and
//! process tokens again that are already in the cache. They come out the same, since a
//! row's result depends on nothing but what it sees; so here, where any offset will do,
//! decoding leaves them out.

mod cache;
mod draft;
mod drafter;
mod error;
mod generate;
mod inputs;
mod lookup;
mod selftest;
mod session;
mod speculate;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anemone_schemas::manifest::{Chunk, Manifest};
use anemone_schemas::mapped::MappedFile;
use anemone_schemas::tokenizer::TokenizerFolder;

pub use cache::Cache;
pub use draft::{Draft, Guess};
pub use drafter::{DrafterProgram, ProgramDrafter};
pub use error::EngineError;
pub use generate::{Finish, Generated};
pub use inputs::Row;
pub use lookup::Lookup;
pub use session::{Answer, Options, Session};
pub use speculate::{Depth, Statistics, Switch, check_drafts};

use inputs::Buffers;

use crate::kernels::Pool;
use crate::plan::{Argmax, Plan, ProfileEntry, RunOptions};
use crate::program::Program;
use crate::tensor::{Data, Tensor};

/// Folder of the tokenizer files in a model folder.
const TOKENIZER_DIR: &str = "tokenizer";

/// An opened model folder.
#[derive(Debug)]
pub struct Engine {
    manifest: Manifest,
    tokenizer: TokenizerFolder,
    embedding: MappedFile,
    chunks: Vec<LoadedChunk>,
    /// Why the host chooses ids although the programs do, if so.
    host_choice: Option<String>,
}

/// A chunk's program and the functions compiled so far, by context and width.
#[derive(Debug)]
struct LoadedChunk {
    info: Chunk,
    program: Program,
    plans: Mutex<BTreeMap<(usize, usize), Arc<Plan>>>,
}

/// What [`Engine::step`] gives back, by row.
#[derive(Debug)]
pub struct Step {
    /// Each row's choice of the next id.
    pub ids: Vec<u32>,
    /// Hidden states after the tapped layers, `f16[1, w, 1, D]`, by layer.
    pub taps: Vec<(usize, Tensor)>,
    /// Time the programs took, and to compile those that had not been used before; the
    /// rest of the call is the host's.
    pub programs: Duration,
    scores: Scores,
}

impl Step {
    /// The logits of a row over the rows of the output layer, in order. Programs may
    /// leave out those at the end that no token has.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn logits(&self, row: usize) -> Vec<f32> {
        self.scores.row(row)
    }
}

/// The logits of a call.
#[derive(Debug)]
enum Scores {
    /// What the argmax of each slice of the output layer read, in program order.
    Slices(Vec<Argmax>),
    /// The output of a program that leaves the choice to the host, `f16[1, V, 1, w]`.
    Output(Tensor),
}

impl Scores {
    fn row(&self, row: usize) -> Vec<f32> {
        match self {
            Self::Slices(slices) => slices.iter().flat_map(|s| s.row(row)).collect(),
            Self::Output(tensor) => {
                let width = tensor.shape().last().copied().unwrap_or(1);
                let values = tensor.as_f16().unwrap_or_default();
                let column = values.iter().skip(row).step_by(width);
                column.map(|v| v.to_f32()).collect()
            }
        }
    }
}

impl Engine {
    /// Opens a model folder; calls run on `threads` threads, 0 for one per core.
    ///
    /// # Errors
    /// A folder that is not whole, or a program that cannot be read.
    pub fn open(folder: &Path, threads: usize) -> Result<Self, EngineError> {
        let manifest = Manifest::read(folder)?;
        let embedding = inputs::open_table(folder, &manifest.embedding)?;
        let pool = Arc::new(Pool::new(threads));
        let chunks = manifest
            .chunks
            .iter()
            .map(|info| {
                let program = Program::open_with(&folder.join(&info.path), Arc::clone(&pool))?;
                Ok(LoadedChunk {
                    info: info.clone(),
                    program,
                    plans: Mutex::default(),
                })
            })
            .collect::<Result<_, EngineError>>()?;
        let mut engine = Self {
            tokenizer: TokenizerFolder::open(&folder.join(TOKENIZER_DIR))?,
            manifest,
            embedding,
            chunks,
            host_choice: None,
        };
        engine.host_choice = selftest::wrong_choice(&engine)?;
        Ok(engine)
    }

    /// What the user must know of how this folder runs here.
    pub fn warning(&self) -> Option<&str> {
        self.host_choice.as_deref()
    }

    /// What the folder says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The folder's tokenizer.
    pub fn tokenizer(&self) -> &TokenizerFolder {
        &self.tokenizer
    }

    /// The largest number of slots.
    pub fn max_context(&self) -> usize {
        *self.manifest.contexts.last().expect("checked when read")
    }

    /// An empty cache of the smallest context.
    pub fn cache(&self) -> Cache {
        Cache::new(&self.manifest)
    }

    /// An empty cache of the smallest context with at least `slots` slots.
    ///
    /// # Errors
    /// [`EngineError::ContextFull`] if no context is that large.
    pub fn cache_for(&self, slots: usize) -> Result<Cache, EngineError> {
        let mut cache = self.cache();
        cache.grow(self.context_for(slots)?, &self.manifest);
        Ok(cache)
    }

    /// The smallest context with at least `slots` slots.
    fn context_for(&self, slots: usize) -> Result<usize, EngineError> {
        let fits = self.manifest.contexts.iter().copied().find(|&c| c >= slots);
        fits.ok_or(EngineError::ContextFull {
            needed: slots,
            max: self.max_context(),
        })
    }

    /// Takes `rows` through the model: row `i` writes slot `offset + i` and sees the
    /// slots before `offset` and the rows that [`Row::sees`] names. The cache grows to
    /// the smallest context that holds the call.
    ///
    /// # Errors
    /// More rows than the widest call, no context that is large enough, an id without an
    /// embedding, or a failing program.
    pub fn step(
        &self,
        cache: &mut Cache,
        offset: usize,
        rows: &[Row],
    ) -> Result<Step, EngineError> {
        let width = self.width_for(rows.len())?;
        cache.grow(self.context_for(offset + width)?, &self.manifest);
        let context = cache.context();

        let buffers = cache.take_buffers();
        let mut buffers = buffers.unwrap_or_else(|| Buffers::new(&self.manifest));
        buffers.fill(
            &self.manifest,
            &self.embedding,
            rows,
            offset,
            [context, width],
        )?;
        let slot = i32::try_from(offset).expect("contexts fit i32");
        let slot = Tensor::new(&[1], vec![slot]).expect("one element");
        let options = RunOptions {
            live: Some((width, rows.len())),
            keep_argmax_inputs: true,
        };
        let mut taps = Vec::new();
        let (mut ids, mut scores) = (None, None);
        let mut between = None;
        let mut programs = Duration::ZERO;
        for (chunk, [keys, values]) in self.chunks.iter().zip(cache.states_mut()) {
            let start = Instant::now();
            let plan = chunk.plan(context, width)?;
            let outcome = plan.run_with(
                &[
                    (
                        "transformer_input",
                        between.as_ref().unwrap_or(&buffers.embedded),
                    ),
                    ("rope_cos", &buffers.cos),
                    ("rope_sin", &buffers.sin),
                    ("in_step", &slot),
                    ("causal_mask", buffers.mask()),
                ],
                &mut [("key_cache", keys), ("value_cache", values)],
                &options,
            )?;
            programs += start.elapsed();
            for (name, tensor) in outcome.outputs {
                if let Some(layer) = name.strip_prefix("tap_") {
                    taps.extend(layer.parse().ok().map(|l: usize| (l, tensor)));
                } else if name == "out_hidden" {
                    between = Some(tensor);
                } else if name == "out_ids" {
                    ids = Some(tensor);
                } else if name == "out_logits" {
                    scores = Some(Scores::Output(tensor));
                }
            }
            if scores.is_none() && !outcome.argmax.is_empty() {
                scores = Some(Scores::Slices(outcome.argmax));
            }
        }
        cache.put_buffers(buffers);
        taps.sort_by_key(|(layer, _)| *layer);
        let scores = scores.ok_or(EngineError::NoIds)?;
        let known = self.manifest.model.tokenizer_vocab;
        let ids = match ids {
            Some(ids) if self.host_choice.is_none() => {
                let Data::U32(ids) = ids.data() else {
                    return Err(EngineError::NoIds);
                };
                // A program may choose a padding row of its output layer.
                let ids = ids.iter().take(rows.len()).enumerate();
                ids.map(|(row, &id)| {
                    if (id as usize) < known {
                        id
                    } else {
                        best(&scores, row, known)
                    }
                })
                .collect()
            }
            _ => (0..rows.len())
                .map(|row| best(&scores, row, known))
                .collect(),
        };
        Ok(Step {
            ids,
            taps,
            programs,
            scores,
        })
    }

    /// Whether calls measure their steps, for [`Engine::profile`].
    pub fn set_profiling(&self, on: bool) {
        for chunk in &self.chunks {
            chunk.program.set_profiling(on);
        }
    }

    /// Where the time of calls of one context and width goes, all chunks together.
    ///
    /// # Errors
    /// If there is no such call.
    pub fn profile(&self, context: usize, width: usize) -> Result<Vec<ProfileEntry>, EngineError> {
        let mut all: Vec<ProfileEntry> = Vec::new();
        for chunk in &self.chunks {
            for entry in chunk.plan(context, width)?.profile(None) {
                match all.iter_mut().find(|e| e.name == entry.name) {
                    Some(e) => {
                        e.steps += entry.steps;
                        e.seconds += entry.seconds;
                        e.bytes += entry.bytes;
                        e.weights += entry.weights;
                        e.products += entry.products;
                    }
                    None => all.push(entry),
                }
            }
        }
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Ok(all)
    }

    /// The narrowest call that takes `rows` rows.
    fn width_for(&self, rows: usize) -> Result<usize, EngineError> {
        let widths = &self.manifest.widths;
        let fits = widths.iter().copied().find(|&w| rows > 0 && rows <= w);
        fits.ok_or(EngineError::Rows {
            rows,
            max: widths.last().copied().unwrap_or(0),
        })
    }
}

/// The first id with the largest logit of those the tokenizer knows.
fn best(scores: &Scores, row: usize, known: usize) -> u32 {
    let row = scores.row(row);
    let mut best = 0;
    for (i, &logit) in row.iter().take(known).enumerate() {
        if logit > row[best] {
            best = i;
        }
    }
    best as u32
}

impl LoadedChunk {
    /// The function for a context and a width, compiled at its first use.
    fn plan(&self, context: usize, width: usize) -> Result<Arc<Plan>, EngineError> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&(context, width)) {
            return Ok(Arc::clone(plan));
        }
        let function =
            self.info
                .function(context, width)
                .ok_or_else(|| EngineError::NoFunction {
                    chunk: self.info.path.clone(),
                    context,
                    width,
                })?;
        let plan = Arc::new(self.program.plan(&function.name)?);
        plans.insert((context, width), Arc::clone(&plan));
        Ok(plan)
    }
}
