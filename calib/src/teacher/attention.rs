//! Causal grouped-query attention (arXiv:2305.13245) with rotation of queries and
//! keys, and RMSNorm on their heads in architectures that have it.
//!
//! For every window and query head: `softmax(q kᵀ / sqrt(head_dim)) v`, where a
//! position sees itself and those before. Queries are taken in blocks of
//! [`QUERY_BLOCK`], each against the keys up to its own end, so that scores take
//! little memory and only the blocks on the diagonal compute what the mask discards.
//!
//! Backwards, with `P` the softmax of a block and `d…` the gradient of a thing:
//!
//! ```text
//! dP = dO Vᵀ          dS = P ∘ (dP - rowsum(dP ∘ P)) / sqrt(head_dim)
//! dQ = dS K           dK += dSᵀ Q           dV += Pᵀ dO
//! ```
//!
//! A task is a window's key head with all queries that share it, one after the other, so
//! that sums over queries have one order.

use anemone_schemas::spec::ModelSpec;
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use super::math::{rms_norm_backward, rms_norm_row, rotate, softmax};
use crate::Error;
use crate::matmul::{elements, matrix};

const QUERY_BLOCK: usize = 256;

pub(super) struct Attention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    /// Weights of the norms of queries and keys.
    head_norms: Option<[Vec<f32>; 2]>,
    /// `[positions, head_dim / 2]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// The keys, normalized and rotated, and values of a window so far, row-major.
#[derive(Debug, Default)]
pub(super) struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Gradients of the weights of the norms of queries and keys.
pub(super) type HeadNormGradients = [Vec<f32>; 2];

impl Attention {
    pub(super) fn new(
        spec: &ModelSpec,
        head_norms: Option<[Vec<f32>; 2]>,
        positions: usize,
    ) -> Self {
        let (cos, sin) = spec.rope.cos_sin(spec.head_dim, 0..positions);
        Self {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            eps: spec.rms_eps,
            head_norms,
            cos,
            sin,
        }
    }

    /// The weighted values, row-major `[positions, heads * head_dim]`, of windows of
    /// the given lengths that lie one after the other in q, k and v.
    pub(super) fn run(&self, lengths: &[usize], qkv: &[Vec<f32>; 3]) -> Result<Vec<f32>, Error> {
        let rows: usize = lengths.iter().sum();
        let [q, k, v] = self.prepared(lengths, qkv)?;
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
            .map(|task| {
                let weights = self.weights(task, &q, &k)?;
                elements(&weights.matmul(&self.keys(task, &v)?)?)
            })
            .collect::<Result<_, _>>()?;
        let mut mixed = vec![0.0; rows * self.heads * self.head_dim];
        for (task, output) in tasks.iter().zip(&outputs) {
            let at = task.start + task.first;
            self.put(&mut mixed, self.heads, at, task.head, output);
        }
        Ok(mixed)
    }

    /// The weighted values at the next positions of windows that are known up to their
    /// caches, `counts` rows of each, and puts those positions into the caches.
    pub(super) fn extend(
        &self,
        counts: &[usize],
        [mut q, mut k, v]: [Vec<f32>; 3],
        caches: &mut [Cache],
    ) -> Vec<f32> {
        let width = self.kv_heads * self.head_dim;
        let next = |(&count, cache): (&usize, &Cache)| {
            let done = cache.keys.len() / width;
            done..done + count
        };
        let positions: Vec<usize> = counts.iter().zip(caches.iter()).flat_map(next).collect();
        self.prepare(&mut q, 0, &positions);
        self.prepare(&mut k, 1, &positions);
        let mut first = 0;
        let mut tasks = Vec::new();
        for (&count, cache) in counts.iter().zip(caches.iter_mut()) {
            let rows = first * width..(first + count) * width;
            cache.keys.extend_from_slice(&k[rows.clone()]);
            cache.values.extend_from_slice(&v[rows]);
            tasks.extend((first..first + count).map(|row| (row, &*cache)));
            first += count;
        }
        let all = self.heads * self.head_dim;
        let mut mixed = vec![0.0; positions.len() * all];
        mixed
            .par_chunks_exact_mut(all)
            .zip(q.par_chunks_exact(all))
            .zip(&tasks)
            .for_each(|((out, q), &(row, cache))| self.attend(q, cache, positions[row] + 1, out));
        mixed
    }

    /// The weighted values of one position that sees the first `seen` of a cache.
    fn attend(&self, q: &[f32], cache: &Cache, seen: usize, out: &mut [f32]) {
        let (width, dim) = (self.kv_heads * self.head_dim, self.head_dim);
        let scale = self.scale();
        for (head, (q, out)) in q
            .chunks_exact(dim)
            .zip(out.chunks_exact_mut(dim))
            .enumerate()
        {
            let at = head / (self.heads / self.kv_heads) * dim;
            let place = |position: usize| position * width + at..position * width + at + dim;
            let mut weights: Vec<f32> = (0..seen)
                .map(|position| {
                    let key = &cache.keys[place(position)];
                    scale * q.iter().zip(key).map(|(q, k)| q * k).sum::<f32>()
                })
                .collect();
            softmax(&mut weights);
            for (position, weight) in weights.iter().enumerate() {
                let value = &cache.values[place(position)];
                for (out, v) in out.iter_mut().zip(value) {
                    *out += weight * v;
                }
            }
        }
    }

    /// The gradients of q, k and v from that of the weighted values, and of the norms.
    pub(super) fn backward(
        &self,
        lengths: &[usize],
        qkv: &[Vec<f32>; 3],
        gradient: Vec<f32>,
    ) -> Result<([Vec<f32>; 3], HeadNormGradients), Error> {
        let rows: usize = lengths.iter().sum();
        let [q, k, v] = self.prepared(lengths, qkv)?;
        let gradient = self.by_head(gradient, self.heads)?;
        let mut tasks = Vec::new();
        let mut start = 0;
        for &length in lengths {
            tasks.extend((0..self.kv_heads).map(|head| (start, length, head)));
            start += length;
        }
        let shared = self.heads / self.kv_heads;
        let outputs: Vec<_> = tasks
            .par_iter()
            .map(|&(start, length, kv_head)| {
                let mut queries = Vec::with_capacity(shared);
                let [mut dk, mut dv] = [(); 2].map(|()| vec![0.0f32; length * self.head_dim]);
                for head in kv_head * shared..(kv_head + 1) * shared {
                    let mut dq = Vec::with_capacity(length * self.head_dim);
                    for first in (0..length).step_by(QUERY_BLOCK) {
                        let count = QUERY_BLOCK.min(length - first);
                        let task = Task {
                            start,
                            head,
                            first,
                            count,
                        };
                        let part = self.attend_backward(&task, [&q, &k, &v], &gradient)?;
                        dq.extend(part.query);
                        for (sum, part) in [(&mut dk, part.keys), (&mut dv, part.values)] {
                            for (sum, x) in sum.iter_mut().zip(part) {
                                *sum += x;
                            }
                        }
                    }
                    queries.push(dq);
                }
                Ok((queries, dk, dv))
            })
            .collect::<Result<_, Error>>()?;
        let mut dq = vec![0.0; rows * self.heads * self.head_dim];
        let [mut dk, mut dv] = [(); 2].map(|()| vec![0.0; rows * self.kv_heads * self.head_dim]);
        for (&(start, _, kv_head), (queries, keys, values)) in tasks.iter().zip(&outputs) {
            for (at, query) in queries.iter().enumerate() {
                self.put(&mut dq, self.heads, start, kv_head * shared + at, query);
            }
            self.put(&mut dk, self.kv_heads, start, kv_head, keys);
            self.put(&mut dv, self.kv_heads, start, kv_head, values);
        }
        let norms = [
            self.unprepare(&mut dq, &qkv[0], 0, lengths),
            self.unprepare(&mut dk, &qkv[1], 1, lengths),
        ];
        Ok(([dq, dk, dv], norms))
    }

    /// q and k normalized and rotated, and v, by head.
    fn prepared(&self, lengths: &[usize], [q, k, v]: &[Vec<f32>; 3]) -> Result<[Tensor; 3], Error> {
        let positions: Vec<usize> = lengths.iter().flat_map(|&n| 0..n).collect();
        let [mut q, mut k] = [q.clone(), k.clone()];
        self.prepare(&mut q, 0, &positions);
        self.prepare(&mut k, 1, &positions);
        Ok([
            self.by_head(q, self.heads)?,
            self.by_head(k, self.kv_heads)?,
            self.by_head(v.clone(), self.kv_heads)?,
        ])
    }

    fn by_head(&self, x: Vec<f32>, heads: usize) -> Result<Tensor, Error> {
        let rows = x.len() / (heads * self.head_dim);
        Ok(Tensor::from_vec(
            x,
            (rows, heads, self.head_dim),
            &Device::Cpu,
        )?)
    }

    /// Heads of queries (0) or keys (1).
    fn heads(&self, which: usize) -> usize {
        [self.heads, self.kv_heads][which]
    }

    /// Normalizes and rotates every head of queries (0) or keys (1).
    fn prepare(&self, x: &mut [f32], which: usize, positions: &[usize]) {
        let half = self.head_dim / 2;
        x.par_chunks_exact_mut(self.heads(which) * self.head_dim)
            .zip(positions)
            .for_each(|(row, &position)| {
                let angles = position * half..(position + 1) * half;
                for head in row.chunks_exact_mut(self.head_dim) {
                    if let Some(norms) = &self.head_norms {
                        rms_norm_row(head, &norms[which], self.eps);
                    }
                    rotate(head, &self.cos[angles.clone()], &self.sin[angles.clone()]);
                }
            });
    }

    /// Takes a gradient back through [`Self::prepare`]; `x` is what that was given.
    fn unprepare(&self, d: &mut [f32], x: &[f32], which: usize, lengths: &[usize]) -> Vec<f32> {
        let half = self.head_dim / 2;
        let positions = lengths.iter().flat_map(|&n| 0..n);
        let back: Vec<f32> = self.sin.iter().map(|s| -s).collect();
        for (row, position) in d
            .chunks_exact_mut(self.heads(which) * self.head_dim)
            .zip(positions)
        {
            let angles = position * half..(position + 1) * half;
            for head in row.chunks_exact_mut(self.head_dim) {
                rotate(head, &self.cos[angles.clone()], &back[angles.clone()]);
            }
        }
        let Some(norms) = &self.head_norms else {
            return Vec::new();
        };
        let mut gradient = vec![0.0; self.head_dim];
        rms_norm_backward(x, &norms[which], self.eps, d, &mut gradient);
        gradient
    }

    /// Puts rows of one head into a matrix of `heads`, from row `at`.
    fn put(&self, matrix: &mut [f32], heads: usize, at: usize, head: usize, rows: &[f32]) {
        let width = heads * self.head_dim;
        for (row, values) in rows.chunks_exact(self.head_dim).enumerate() {
            let at = (at + row) * width + head * self.head_dim;
            matrix[at..at + self.head_dim].copy_from_slice(values);
        }
    }

    /// The task's rows of queries, or of a tensor shaped like them.
    fn queries(task: &Task, x: &Tensor) -> Result<Tensor, Error> {
        let head = x.narrow(1, task.head, 1)?.squeeze(1)?;
        Ok(head.narrow(0, task.start + task.first, task.count)?)
    }

    /// The keys or values that the task's queries see.
    fn keys(&self, task: &Task, x: &Tensor) -> Result<Tensor, Error> {
        let kv_head = task.head / (self.heads / self.kv_heads);
        let head = x.narrow(1, kv_head, 1)?.squeeze(1)?;
        Ok(head.narrow(0, task.start, task.first + task.count)?)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// The softmax of the task's scores.
    fn weights(&self, task: &Task, q: &Tensor, k: &Tensor) -> Result<Tensor, Error> {
        let keys = task.first + task.count;
        let (q, k) = (Self::queries(task, q)?, self.keys(task, k)?);
        let mut scores = elements(&q.matmul(&k.t()?)?)?;
        let scale = self.scale();
        for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
            let (seen, unseen) = scores.split_at_mut(task.first + row + 1);
            for score in seen.iter_mut() {
                *score *= scale;
            }
            softmax(seen);
            unseen.fill(0.0);
        }
        matrix(scores, task.count, keys)
    }

    fn attend_backward(
        &self,
        task: &Task,
        [q, k, v]: [&Tensor; 3],
        gradient: &Tensor,
    ) -> Result<Part, Error> {
        let weights = self.weights(task, q, k)?;
        let gradient = Self::queries(task, gradient)?;
        let mut scores = elements(&gradient.matmul(&self.keys(task, v)?.t()?)?)?;
        let keys = task.first + task.count;
        let scale = self.scale();
        let p = elements(&weights)?;
        for (d, p) in scores.chunks_exact_mut(keys).zip(p.chunks_exact(keys)) {
            let mean: f32 = d.iter().zip(p).map(|(d, p)| d * p).sum();
            for (d, p) in d.iter_mut().zip(p) {
                *d = p * (*d - mean) * scale;
            }
        }
        let scores = matrix(scores, task.count, keys)?;
        Ok(Part {
            query: elements(&scores.matmul(&self.keys(task, k)?)?)?,
            keys: elements(&scores.t()?.matmul(&Self::queries(task, q)?)?)?,
            values: elements(&weights.t()?.matmul(&gradient)?)?,
        })
    }
}

/// Gradients of a block of queries and of the keys and values they see.
struct Part {
    query: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
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
