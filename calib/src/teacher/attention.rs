//! Causal grouped-query attention (arXiv:2305.13245) with RMSNorm and rotation of
//! queries and keys.
//!
//! For every window and query head: `softmax(q kᵀ / sqrt(head_dim)) v`, where a
//! position sees itself and those before. Queries are taken in blocks of
//! [`QUERY_BLOCK`], each against the keys up to its own end, so that scores take
//! little memory and only the blocks on the diagonal compute what the mask discards.

use anemone_schemas::spec::ModelSpec;
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::math::{rms_norm_row, rotate, softmax};
use crate::Error;
use crate::matmul::{elements, matrix};

const QUERY_BLOCK: usize = 256;

pub(super) struct Attention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    /// `[positions, head_dim / 2]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Attention {
    pub(super) fn new(
        spec: &ModelSpec,
        q_norm: Vec<f32>,
        k_norm: Vec<f32>,
        positions: usize,
    ) -> Self {
        let (cos, sin) = spec.rope.cos_sin(spec.head_dim, 0..positions);
        Self {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            eps: spec.rms_eps,
            q_norm,
            k_norm,
            cos,
            sin,
        }
    }

    /// The weighted values, row-major `[positions, heads * head_dim]`, of windows of
    /// the given lengths that lie one after the other in `q`, `k` and `v`.
    pub(super) fn run(
        &self,
        lengths: &[usize],
        mut q: Vec<f32>,
        mut k: Vec<f32>,
        v: Vec<f32>,
    ) -> Result<Vec<f32>, Error> {
        let rows: usize = lengths.iter().sum();
        let positions: Vec<usize> = lengths.iter().flat_map(|&n| 0..n).collect();
        self.prepare(&mut q, self.heads, &self.q_norm, &positions);
        self.prepare(&mut k, self.kv_heads, &self.k_norm, &positions);
        let by_head = |x: Vec<f32>, heads: usize| {
            Tensor::from_vec(x, (rows, heads, self.head_dim), &Device::Cpu)
        };
        let (q, k, v) = (
            by_head(q, self.heads)?,
            by_head(k, self.kv_heads)?,
            by_head(v, self.kv_heads)?,
        );
        let mut tasks = Vec::new();
        let mut start = 0;
        for &length in lengths {
            for head in 0..self.heads {
                for first in (0..length).step_by(QUERY_BLOCK) {
                    let count = QUERY_BLOCK.min(length - first);
                    tasks.push(Task {
                        start,
                        head,
                        first,
                        count,
                    });
                }
            }
            start += length;
        }
        let outputs: Vec<Vec<f32>> = tasks
            .par_iter()
            .map(|task| self.attend(task, &q, &k, &v))
            .collect::<Result<_, _>>()?;
        let width = self.heads * self.head_dim;
        let mut mixed = vec![0.0; rows * width];
        for (task, output) in tasks.iter().zip(&outputs) {
            for (row, output) in output.chunks_exact(self.head_dim).enumerate() {
                let at = (task.start + task.first + row) * width + task.head * self.head_dim;
                mixed[at..at + self.head_dim].copy_from_slice(output);
            }
        }
        Ok(mixed)
    }

    /// Normalizes and rotates every head of `x`, `[positions, heads * head_dim]`.
    fn prepare(&self, x: &mut [f32], heads: usize, norm: &[f32], positions: &[usize]) {
        let half = self.head_dim / 2;
        x.par_chunks_exact_mut(heads * self.head_dim)
            .zip(positions)
            .for_each(|(row, &position)| {
                let angles = position * half..(position + 1) * half;
                for head in row.chunks_exact_mut(self.head_dim) {
                    rms_norm_row(head, norm, self.eps);
                    rotate(head, &self.cos[angles.clone()], &self.sin[angles.clone()]);
                }
            });
    }

    fn attend(&self, task: &Task, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Vec<f32>, Error> {
        let kv_head = task.head / (self.heads / self.kv_heads);
        let keys = task.first + task.count;
        let q = q.narrow(1, task.head, 1)?.squeeze(1)?.narrow(
            0,
            task.start + task.first,
            task.count,
        )?;
        let [k, v] = [k, v].map(|x| {
            x.narrow(1, kv_head, 1)?
                .squeeze(1)?
                .narrow(0, task.start, keys)
        });
        let mut scores = elements(&q.matmul(&k?.t()?)?)?;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
            let (seen, unseen) = scores.split_at_mut(task.first + row + 1);
            for score in seen.iter_mut() {
                *score *= scale;
            }
            softmax(seen);
            unseen.fill(0.0);
        }
        elements(&matrix(scores, task.count, keys)?.matmul(&v?)?)
    }
}

/// A block of queries of one head in one window.
struct Task {
    /// First row of the window.
    start: usize,
    head: usize,
    /// First query, and how many, within the window.
    first: usize,
    count: usize,
}
