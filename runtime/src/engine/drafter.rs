//! A folder's drafter as a source of drafts.
//!
//! The drafter's context is a row of keys and values for every token whose taps it was
//! given, at the slot of the token's position. Rows wait here until a call takes them: a
//! `draft` call takes a few on its way, so an accepted run costs no call of its own, and
//! what is more than that, a prompt for instance, goes through `extend` calls first.
//! Slots beyond the rows hold garbage of padding rows, hidden by the mask and
//! overwritten by the rows to come.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anemone_schemas::aimodel::ir::Elem;
use anemone_schemas::manifest::{self, Manifest, RopeTable};
use anemone_schemas::mapped::MappedFile;
use half::f16;

use super::{Draft, EngineError, Guess, inputs};
use crate::kernels::Pool;
use crate::plan::{Plan, ProfileEntry, RunOptions};
use crate::program::Program;
use crate::tensor::{Data, Tensor};

/// What hides a slot: far below any score, and finite.
const HIDDEN: f32 = -40_000.0;

/// A drafter's program, opened once for all conversations.
#[derive(Debug)]
pub struct DrafterProgram {
    info: manifest::Drafter,
    hidden: usize,
    embedding: MappedFile,
    program: Program,
    plans: Mutex<BTreeMap<String, Arc<Plan>>>,
}

/// A conversation's drafter.
#[derive(Debug)]
pub struct ProgramDrafter {
    program: Arc<DrafterProgram>,
    context: usize,
    /// Keys and values, `f16[L, 1, G, context + spare, d]`.
    states: [Tensor; 2],
    /// Rows in the states.
    stored: usize,
    /// Rows not in them yet, the taps of each one after the other.
    waiting: VecDeque<Vec<Vec<f16>>>,
}

impl DrafterProgram {
    /// Opens the drafter of a model folder, or nothing if it has none; calls run on
    /// `threads` threads, 0 for one per core.
    ///
    /// # Errors
    /// A folder that is not whole, or a program that cannot be read.
    pub fn open(folder: &Path, threads: usize) -> Result<Option<Arc<Self>>, EngineError> {
        let manifest = Manifest::read(folder)?;
        let Some(info) = manifest.drafter else {
            return Ok(None);
        };
        let embedding = inputs::open_table(folder, &info.embedding)?;
        let pool = Arc::new(Pool::new(threads));
        let program = Program::open_with(&folder.join(&info.path), pool)?;
        Ok(Some(Arc::new(Self {
            hidden: info.embedding.shape[1],
            info,
            embedding,
            program,
            plans: Mutex::default(),
        })))
    }

    /// A function, compiled at its first use.
    fn plan(&self, name: String) -> Result<Arc<Plan>, EngineError> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&name) {
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(self.program.plan(&name)?);
        plans.insert(name, Arc::clone(&plan));
        Ok(plan)
    }

    /// Whether calls measure their steps, for [`DrafterProgram::profile`].
    pub fn set_profiling(&self, on: bool) {
        self.program.set_profiling(on);
    }

    /// Where the time of the `draft` calls behind `slots` slots goes, that took in
    /// `new_rows` rows each.
    ///
    /// # Errors
    /// If there is no such call.
    pub fn profile(&self, slots: usize, new_rows: usize) -> Result<Vec<ProfileEntry>, EngineError> {
        let context = self.context_for(slots)?;
        let live = self.live(self.info.rows, new_rows);
        Ok(self.plan(format!("draft_{context}"))?.profile(live))
    }

    /// Of the products over `rows` new rows only those of the `count` that came are
    /// computed; but all where the block has as many rows, and would be taken for them.
    fn live(&self, rows: usize, count: usize) -> Option<(usize, usize)> {
        let apart = rows != self.info.block && rows != self.info.guesses;
        apart.then_some((rows, count))
    }

    /// The smallest context with at least `slots` slots.
    fn context_for(&self, slots: usize) -> Result<usize, EngineError> {
        let contexts = &self.info.contexts;
        let fits = contexts.iter().copied().find(|&c| c >= slots);
        fits.ok_or(EngineError::ContextFull {
            needed: slots,
            max: *contexts.last().expect("checked when read"),
        })
    }

    /// Embeddings of a block, `[1, B, 1, D]`: the newest token, then masks.
    fn embed(&self, anchor: u32) -> Result<Tensor, EngineError> {
        let (d, block) = (self.hidden, self.info.block);
        let mut values = Vec::with_capacity(block * d);
        for row in 0..block {
            let id = if row == 0 { anchor } else { self.info.mask_id };
            let start = id as usize * d * 2;
            let bytes = self.embedding.get(start..start + d * 2);
            let bytes = bytes.ok_or(EngineError::Id {
                id,
                vocab: self.info.embedding.shape[0],
            })?;
            let halves = bytes.chunks_exact(2);
            values.extend(halves.map(|b| f16::from_le_bytes([b[0], b[1]])));
        }
        Ok(tensor(&[1, block, 1, d], values))
    }

    fn states(&self, context: usize) -> [Tensor; 2] {
        let i = &self.info;
        let slots = context + i.spare_slots;
        let shape = [i.layers, 1, i.kv_heads, slots, i.head_dim];
        // Zeroed, since a hidden slot still takes part in the products.
        let zeros = || Tensor::zeros(Elem::F16, &shape).expect("fp16 of a checked size");
        [zeros(), zeros()]
    }
}

impl ProgramDrafter {
    /// A drafter that knows no text yet.
    pub fn new(program: &Arc<DrafterProgram>) -> Self {
        let context = program.info.contexts[0];
        Self {
            states: program.states(context),
            program: Arc::clone(program),
            context,
            stored: 0,
            waiting: VecDeque::new(),
        }
    }

    /// What the folder says of the drafter.
    pub fn info(&self) -> &manifest::Drafter {
        &self.program.info
    }

    /// Tokens whose taps it has.
    pub fn len(&self) -> usize {
        self.stored + self.waiting.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all rows from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.stored = self.stored.min(len);
        self.waiting.truncate(len - self.stored);
    }

    /// Moves to the smallest context with at least `slots` slots, rows in place.
    fn grow(&mut self, slots: usize) -> Result<(), EngineError> {
        if slots <= self.context {
            return Ok(());
        }
        let info = &self.program.info;
        let context = self.program.context_for(slots)?;
        let spare = info.spare_slots;
        let (old, new) = (
            (self.context + spare) * info.head_dim,
            (context + spare) * info.head_dim,
        );
        let mut wide = self.program.states(context);
        for (to, from) in wide.iter_mut().zip(&self.states) {
            if let (Data::F16(to), Data::F16(from)) = (to.data_mut(), from.data()) {
                for (to, from) in to.chunks_mut(new).zip(from.chunks(old)) {
                    to[..old].copy_from_slice(from);
                }
            }
        }
        self.states = wide;
        self.context = context;
        Ok(())
    }

    /// Takes up to `n` waiting rows into tensors of `n` rows; gives how many they are.
    fn take(&mut self, n: usize) -> (usize, Vec<(String, Tensor)>) {
        let (d, taps) = (self.program.hidden, &self.program.info.taps);
        let count = n.min(self.waiting.len());
        let mut values = vec![Vec::with_capacity(n * d); taps.len()];
        for row in self.waiting.drain(..count) {
            for (values, tap) in values.iter_mut().zip(row) {
                values.extend(tap);
            }
        }
        let named = taps.iter().zip(values).map(|(tap, mut values)| {
            values.resize(n * d, f16::ZERO);
            (format!("tap_{tap}"), tensor(&[1, n, 1, d], values))
        });
        (count, named.collect())
    }

    /// Calls a function with the next waiting rows and `more` inputs.
    fn call(
        &mut self,
        kind: &str,
        rows: usize,
        more: &[(&str, Tensor)],
    ) -> Result<Vec<(String, Tensor)>, EngineError> {
        let plan = self.program.plan(format!("{kind}_{}", self.context))?;
        let (count, taps) = self.take(rows);
        let [cos, sin] = rope(&self.program.info.rope, self.stored, rows);
        let step = i32::try_from(self.stored).expect("contexts fit i32");
        let step = tensor(&[1], vec![step]);
        let mut inputs: Vec<(&str, &Tensor)> =
            taps.iter().map(|(name, t)| (name.as_str(), t)).collect();
        inputs.extend([
            ("context_cos", &cos),
            ("context_sin", &sin),
            ("in_step", &step),
        ]);
        inputs.extend(more.iter().map(|(name, t)| (*name, t)));
        let [keys, values] = &mut self.states;
        let states = &mut [("key_cache", keys), ("value_cache", values)];
        let options = RunOptions {
            live: self.program.live(rows, count),
            ..RunOptions::default()
        };
        let outcome = plan.run_with(&inputs, states, &options)?;
        self.stored += count;
        Ok(outcome.outputs)
    }
}

impl Draft for ProgramDrafter {
    fn extend(
        &mut self,
        taps: &[(usize, Tensor)],
        rows: &[(usize, usize)],
    ) -> Result<(), EngineError> {
        let program = Arc::clone(&self.program);
        let wanted = &program.info.taps;
        let mut read = Vec::with_capacity(wanted.len());
        for &layer in wanted {
            let tap = taps
                .iter()
                .find(|t| t.0 == layer)
                .and_then(|t| t.1.as_f16());
            read.push(tap.ok_or(EngineError::NoTap { layer })?);
        }
        let d = program.hidden;
        for &(row, position) in rows {
            if position > self.len() {
                return Err(EngineError::MissingRows {
                    position,
                    have: self.len(),
                });
            }
            self.truncate(position);
            let parts = read.iter().zip(wanted).map(|(tap, &layer)| {
                let values = tap.get(row * d..(row + 1) * d);
                values
                    .map(<[f16]>::to_vec)
                    .ok_or(EngineError::NoTap { layer })
            });
            self.waiting.push_back(parts.collect::<Result<_, _>>()?);
        }
        Ok(())
    }

    fn propose(&mut self, text: &[u32], most: usize) -> Result<Vec<Guess>, EngineError> {
        let Some((&anchor, before)) = text.split_last() else {
            return Ok(Vec::new());
        };
        self.truncate(before.len());
        let largest = *self
            .program
            .info
            .contexts
            .last()
            .expect("checked when read");
        // Without all rows before the anchor, or without room, there is nothing to say.
        if before.is_empty() || self.len() < before.len() || before.len() > largest || most == 0 {
            return Ok(Vec::new());
        }
        self.grow(before.len())?;
        let program = Arc::clone(&self.program);
        let info = &program.info;
        while self.waiting.len() > info.rows {
            self.call("extend", info.prefill_rows, &[])?;
        }
        let a = before.len();
        let slots = self.context + info.spare_slots;
        let mut mask = vec![HIDDEN; slots];
        mask[..a].fill(0.0);
        let [cos, sin] = rope(&info.rope, a, info.block);
        let mut more = vec![
            ("block_input", program.embed(anchor)?),
            ("block_cos", cos),
            ("block_sin", sin),
            ("context_mask", tensor(&[1, 1, 1, slots], mask)),
        ];
        let plan = program.plan(format!("draft_{}", self.context))?;
        if plan.info().inputs.iter().any(|p| p.name == "anchor") {
            more.push(("anchor", tensor(&[1], vec![anchor.cast_signed()])));
        }
        let outputs = self.call("draft", info.rows, &more)?;
        guesses(&outputs, info.guesses.min(most))
    }
}

/// The guesses of a `draft` call.
fn guesses(outputs: &[(String, Tensor)], count: usize) -> Result<Vec<Guess>, EngineError> {
    let find = |name: &str| outputs.iter().find(|o| o.0 == name).map(|o| o.1.data());
    let (Some(Data::U32(ids)), Some(Data::F32(probabilities))) =
        (find("out_ids"), find("out_probabilities"))
    else {
        return Err(EngineError::NoGuesses);
    };
    let confidences = match find("out_confidences") {
        Some(Data::F32(c)) => Some(c),
        _ => None,
    };
    let rows = ids.chunks_exact(3).zip(probabilities.chunks_exact(3));
    let guess = |(j, (ids, p)): (usize, (&[u32], &[f32]))| Guess {
        id: ids[0],
        probability: p[0],
        others: [(ids[1], p[1]), (ids[2], p[2])],
        confidence: confidences.and_then(|c| c.get(j).copied()).unwrap_or(p[0]),
    };
    Ok(rows.enumerate().map(guess).take(count).collect())
}

/// Cosines and sines of `n` positions from `first` on, `[n, d]`, halves repeated.
fn rope(table: &RopeTable, first: usize, n: usize) -> [Tensor; 2] {
    let half = table.inv_freq.len();
    let mut tables = [vec![0.0f32; n * half * 2], vec![0.0f32; n * half * 2]];
    for row in 0..n {
        for (i, frequency) in table.inv_freq.iter().enumerate() {
            let (sin, cos) = ((first + row) as f32 * frequency).sin_cos();
            for (table_of, value) in tables.iter_mut().zip([cos, sin]) {
                let value = value * table.attention_factor;
                table_of[row * half * 2 + i] = value;
                table_of[row * half * 2 + half + i] = value;
            }
        }
    }
    tables.map(|t| tensor(&[n, half * 2], t))
}

fn tensor(shape: &[usize], values: impl Into<Data>) -> Tensor {
    Tensor::new(shape, values).expect("the product of the shape")
}
