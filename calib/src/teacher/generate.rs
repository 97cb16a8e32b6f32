//! The model's own greedy answers to prompts, all of them side by side.
//!
//! Every step takes one more id of each open answer through all blocks, with the keys and
//! values of what came before kept, so that the matrices are read once per step
//! whatever the number of prompts. Blocks stay in memory if all of them are small;
//! else each is loaded again in every step.

use rayon::prelude::*;

use anemone_schemas::spec::{FINAL_NORM, Linear};

use super::attention::Cache;
use super::math::{add_assign, rms_norm, swiglu};
use super::{Block, Teacher};
use crate::Error;

/// Blocks of up to this many bytes in all are kept in memory.
const KEPT: usize = 2 << 30;

/// When an answer ends.
#[derive(Clone, Copy, Debug)]
pub struct AnswerLimits<'a> {
    /// Ids of an answer at most.
    pub tokens: usize,
    /// Ids that may be chosen: those below.
    pub valid: usize,
    /// Ids that end an answer; they are part of it.
    pub ends: &'a [u32],
}

impl Block {
    /// The output of a block for the next positions of some windows: `counts` rows of each.
    fn extend(
        &self,
        eps: f64,
        counts: &[usize],
        mut rows: Vec<f32>,
        caches: &mut [Cache],
    ) -> Result<Vec<f32>, Error> {
        let normed = rms_norm(&rows, &self.input_norm, eps);
        let projected = [
            self.linear(Linear::Q, &normed)?,
            self.linear(Linear::K, &normed)?,
            self.linear(Linear::V, &normed)?,
        ];
        let mixed = self.attention.extend(counts, projected, caches);
        add_assign(&mut rows, &self.linear(Linear::O, &mixed)?);
        let normed = rms_norm(&rows, &self.post_norm, eps);
        let gate = self.linear(Linear::Gate, &normed)?;
        let product = swiglu(&gate, &self.linear(Linear::Up, &normed)?);
        add_assign(&mut rows, &self.linear(Linear::Down, &product)?);
        Ok(rows)
    }
}

impl Teacher<'_> {
    /// The ids that follow each prompt when the most likely is taken every time. `step` is
    /// told of every step and may end the work with an error.
    ///
    /// # Errors
    /// A prompt without ids or too long for the model with its answer, an error of the
    /// weights, or that of `step`.
    pub fn answers<E: From<Error>>(
        &self,
        prompts: &[Vec<u32>],
        limits: AnswerLimits<'_>,
        mut step: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<Vec<u32>>, E> {
        let spec = self.spec();
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + limits.tokens;
        if let Some(window) = prompts.iter().position(Vec::is_empty) {
            return Err(Error::OptionTooSmall {
                name: "ids of a prompt",
                found: prompts[window].len(),
                min: 1,
            }
            .into());
        }
        let kept = self.small_blocks(longest)?;
        let head = self.head()?;
        let norm = self.load(FINAL_NORM, &[spec.hidden])?;
        let mut caches: Vec<Vec<Cache>> = (0..spec.layers)
            .map(|_| prompts.iter().map(|_| Cache::default()).collect())
            .collect();
        let mut answers: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
        let mut open: Vec<usize> = (0..prompts.len()).collect();
        let mut next: Vec<Vec<u32>> = prompts.to_vec();
        for _ in 0..limits.tokens {
            if open.is_empty() {
                break;
            }
            step()?;
            let counts: Vec<usize> = next.iter().map(Vec::len).collect();
            let mut rows = self.embed(&next)?.0.concat();
            for (layer, caches) in caches.iter_mut().enumerate() {
                let loaded;
                let block = if let Some(blocks) = &kept {
                    &blocks[layer]
                } else {
                    loaded = self.load_block(layer, longest)?;
                    &loaded
                };
                rows = block.extend(spec.rms_eps, &counts, rows, caches)?;
            }
            let mut last = Vec::with_capacity(open.len() * spec.hidden);
            let mut end = 0;
            for count in &counts {
                end += count * spec.hidden;
                last.extend_from_slice(&rows[end - spec.hidden..end]);
            }
            let logits = self.logits(&rms_norm(&last, &norm, spec.rms_eps), &head)?;
            let chosen: Vec<u32> = logits
                .par_chunks_exact(spec.vocab)
                .map(|row| largest(&row[..limits.valid.min(spec.vocab)]))
                .collect();
            let mut going = Vec::with_capacity(open.len());
            for (&window, &id) in open.iter().zip(&chosen) {
                answers[window].push(id);
                going.push(!limits.ends.contains(&id));
            }
            next = chosen.iter().map(|&id| vec![id]).collect();
            retain(&mut open, &going);
            retain(&mut next, &going);
            for caches in &mut caches {
                retain(caches, &going);
            }
        }
        Ok(answers)
    }

    /// All blocks, if they are small enough to be kept.
    fn small_blocks(&self, positions: usize) -> Result<Option<Vec<Block>>, Error> {
        let spec = self.spec();
        let weights: usize = Linear::ALL
            .iter()
            .map(|l| l.shape(spec).iter().product::<usize>())
            .sum();
        if 4 * weights * spec.layers > KEPT {
            return Ok(None);
        }
        let blocks = (0..spec.layers).map(|layer| self.load_block(layer, positions));
        blocks.collect::<Result<_, _>>().map(Some)
    }
}

/// The first of the largest.
fn largest(row: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in row.iter().enumerate() {
        if *logit > row[best] {
            best = id;
        }
    }
    best as u32
}

fn retain<T>(items: &mut Vec<T>, keep: &[bool]) {
    let mut keep = keep.iter();
    items.retain(|_| *keep.next().unwrap_or(&false));
}
