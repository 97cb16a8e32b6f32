//! The forward pass of the original model, in f32, one block at a time.
//!
//! A block is `h += o(attention(norm(h)))`, `h += down(silu(gate(n)) * up(n))` with
//! `n = norm(h)`. All windows go through one block before the next is loaded, so only
//! one block's weights are in memory, however large the model.
//!
//! Windows are processed in groups of about [`GROUP_ROWS`] positions that share each
//! matrix product; attention does not cross windows. The groups follow from the window
//! lengths alone.

use anemone_schemas::spec::{
    Architecture, EMBEDDING, FINAL_NORM, LM_HEAD, Linear, ModelSpec, Norm, Site,
};
use candle_core::Tensor;
use rayon::prelude::*;

use crate::matmul::{linear, matrix};
use crate::{Error, Weights};

mod attention;
mod backward;
mod generate;
mod math;

pub use backward::{
    GradientHook, LOGITS, LinearGradient, LossHook, NormGradients, WindowReader, sampled_loss,
    softmax_rows,
};

pub use generate::AnswerLimits;

use attention::Attention;
use math::{add_assign, rms_norm, swiglu};

/// Positions per group: enough to keep the matrix product busy, few enough that the
/// widest activation of a 10k-wide MLP takes 80 MB.
pub const GROUP_ROWS: usize = 2048;

/// Rows of the output projection per product in [`Teacher::logits`].
const HEAD_PANEL: usize = 8192;

/// The residual stream: for each window, row-major `[positions, hidden]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Hidden(pub Vec<Vec<f32>>);

/// Largest magnitudes of what a block computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Magnitudes {
    /// Of the residual stream before attention.
    pub input: f32,
    /// Of queries as the projection gives them.
    pub q: f32,
    /// Of keys as the projection gives them.
    pub k: f32,
    /// Of values.
    pub v: f32,
    /// Of the weighted values.
    pub attn_out: f32,
    /// Of the residual stream before the MLP.
    pub post_attention: f32,
    /// Of the output of `gate`.
    pub gate: f32,
    /// Of the output of `up`.
    pub up: f32,
    /// Of the input of `down`.
    pub product: f32,
    /// Of the residual stream after the MLP.
    pub output: f32,
}

impl Magnitudes {
    fn join(&mut self, other: &Self) {
        for (largest, found) in [
            (&mut self.input, other.input),
            (&mut self.q, other.q),
            (&mut self.k, other.k),
            (&mut self.v, other.v),
            (&mut self.attn_out, other.attn_out),
            (&mut self.post_attention, other.post_attention),
            (&mut self.gate, other.gate),
            (&mut self.up, other.up),
            (&mut self.product, other.product),
            (&mut self.output, other.output),
        ] {
            *largest = largest.max(found);
        }
    }
}

/// Sees the input of linear layers as it is computed: the site, and row-major
/// activations of [`Site::width`] columns, some whole windows at a time, in order.
pub type Hook<'a> = &'a mut dyn FnMut(Site, &[f32]);

/// The forward pass over some weights. See the module documentation.
pub struct Teacher<'a> {
    weights: &'a dyn Weights,
}

/// One block's weights.
struct Block {
    input_norm: Vec<f32>,
    post_norm: Vec<f32>,
    attention: Attention,
    linears: Vec<Tensor>,
}

/// What a block computes of one group of windows, before the last addition.
struct Trace {
    /// Residual stream at the input.
    before: Vec<f32>,
    /// Input of q, k and v.
    attn_in: Vec<f32>,
    /// q, k and v as the projections give them.
    projected: [Vec<f32>; 3],
    /// Input of o.
    attn_out: Vec<f32>,
    /// Residual stream after attention.
    middle: Vec<f32>,
    /// Input of gate and up.
    mlp_in: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Input of down.
    mlp_mid: Vec<f32>,
}

impl Block {
    fn linear(&self, which: Linear, x: &[f32]) -> Result<Vec<f32>, Error> {
        let weight = &self.linears[which as usize];
        let cols = weight.dim(1)?;
        linear(&matrix(x.to_vec(), x.len() / cols, cols)?, weight)
    }

    /// Everything up to the input of `down`.
    fn trace(&self, eps: f64, lengths: &[usize], before: Vec<f32>) -> Result<Trace, Error> {
        let attn_in = rms_norm(&before, &self.input_norm, eps);
        let projected = [
            self.linear(Linear::Q, &attn_in)?,
            self.linear(Linear::K, &attn_in)?,
            self.linear(Linear::V, &attn_in)?,
        ];
        let attn_out = self.attention.run(lengths, &projected)?;
        let mut middle = before.clone();
        add_assign(&mut middle, &self.linear(Linear::O, &attn_out)?);
        let mlp_in = rms_norm(&middle, &self.post_norm, eps);
        let gate = self.linear(Linear::Gate, &mlp_in)?;
        let up = self.linear(Linear::Up, &mlp_in)?;
        let mlp_mid = swiglu(&gate, &up);
        Ok(Trace {
            before,
            attn_in,
            projected,
            attn_out,
            middle,
            mlp_in,
            gate,
            up,
            mlp_mid,
        })
    }
}

/// How many of the first windows share a group, by their lengths in positions.
fn group(lengths: impl Iterator<Item = usize>) -> usize {
    let mut rows = 0;
    let mut count = 0;
    for length in lengths {
        if count > 0 && rows + length > GROUP_ROWS {
            break;
        }
        rows += length;
        count += 1;
    }
    count
}

impl<'a> Teacher<'a> {
    /// A forward pass over `weights`.
    pub fn new(weights: &'a dyn Weights) -> Self {
        Self { weights }
    }

    /// The weights it runs on.
    pub fn weights(&self) -> &'a dyn Weights {
        self.weights
    }

    /// The model's dimensions.
    pub fn spec(&self) -> &ModelSpec {
        self.weights.spec()
    }

    /// The embeddings of windows of ids.
    ///
    /// # Errors
    /// An id outside the vocabulary, a window longer than the model's context, or an
    /// error of the weights.
    pub fn embed(&self, windows: &[Vec<u32>]) -> Result<Hidden, Error> {
        let spec = self.spec();
        for (window, ids) in windows.iter().enumerate() {
            if ids.len() > spec.max_position {
                return Err(Error::WindowTooLong {
                    window,
                    length: ids.len(),
                    max: spec.max_position,
                });
            }
            let bad = ids.iter().position(|&id| id as usize >= spec.vocab);
            if let Some(position) = bad {
                return Err(Error::IdOutOfRange {
                    window,
                    position,
                    id: ids[position],
                    vocab: spec.vocab,
                });
            }
        }
        // One call: weights that cannot gather rows load the whole table for it.
        let ids = windows.concat();
        let mut rows = self.weights.rows(EMBEDDING, &ids)?;
        let mut hidden = Vec::with_capacity(windows.len());
        for ids in windows.iter().rev() {
            hidden.push(rows.split_off(rows.len() - ids.len() * spec.hidden));
        }
        hidden.reverse();
        Ok(Hidden(hidden))
    }

    /// Takes `hidden` through block `layer`; says how large things got. The hook sees [`Site::AttnIn`],
    /// [`Site::AttnOut`], [`Site::MlpIn`] and [`Site::MlpMid`].
    ///
    /// # Errors
    /// An error of the weights, or [`Error::NonFiniteActivation`].
    pub fn block(
        &self,
        layer: usize,
        hidden: &mut Hidden,
        mut hook: Option<Hook<'_>>,
    ) -> Result<Magnitudes, Error> {
        let spec = self.spec();
        let longest = hidden.0.iter().map(|h| h.len() / spec.hidden).max();
        let block = self.load_block(layer, longest.unwrap_or(0))?;
        let mut see = |site: Site, activations: &[f32]| {
            if let Some(hook) = &mut hook {
                hook(site, activations);
            }
        };
        let mut largest = Magnitudes::default();
        let mut first = 0;
        while first < hidden.0.len() {
            let group = group(hidden.0[first..].iter().map(|h| h.len() / spec.hidden));
            let windows = &mut hidden.0[first..first + group];
            let found = self.block_on_group(&block, windows, &mut see)?;
            largest.join(&found);
            self.check_finite(layer, first, windows)?;
            first += group;
        }
        Ok(largest)
    }

    fn block_on_group(
        &self,
        block: &Block,
        windows: &mut [Vec<f32>],
        see: Hook<'_>,
    ) -> Result<Magnitudes, Error> {
        let spec = self.spec();
        let lengths: Vec<usize> = windows.iter().map(|h| h.len() / spec.hidden).collect();
        if lengths.iter().all(|&length| length == 0) {
            return Ok(Magnitudes::default());
        }
        let trace = block.trace(spec.rms_eps, &lengths, windows.concat())?;
        see(Site::AttnIn, &trace.attn_in);
        see(Site::AttnOut, &trace.attn_out);
        see(Site::MlpIn, &trace.mlp_in);
        see(Site::MlpMid, &trace.mlp_mid);
        let [q, k, v] = [0, 1, 2].map(|at| max_abs(&trace.projected[at]));
        let mut largest = Magnitudes {
            input: max_abs(&trace.before),
            q,
            k,
            v,
            attn_out: max_abs(&trace.attn_out),
            post_attention: max_abs(&trace.middle),
            gate: max_abs(&trace.gate),
            up: max_abs(&trace.up),
            product: max_abs(&trace.mlp_mid),
            output: 0.0,
        };
        let mut residual = trace.middle;
        add_assign(&mut residual, &block.linear(Linear::Down, &trace.mlp_mid)?);
        largest.output = max_abs(&residual);
        scatter(&residual, windows);
        Ok(largest)
    }

    fn check_finite(&self, layer: usize, first: usize, windows: &[Vec<f32>]) -> Result<(), Error> {
        let hidden = self.spec().hidden;
        let bad = windows
            .par_iter()
            .enumerate()
            .find_map_first(|(at, window)| {
                let index = window.iter().position(|x| !x.is_finite())?;
                Some((at, index, window[index]))
            });
        match bad {
            None => Ok(()),
            Some((at, index, value)) => Err(Error::NonFiniteActivation {
                layer,
                window: first + at,
                position: index / hidden,
                channel: index % hidden,
                value,
            }),
        }
    }

    /// `hidden` after the final norm, which the output projection reads
    /// ([`Site::HeadIn`]).
    ///
    /// # Errors
    /// An error of the weights.
    pub fn final_norm(&self, hidden: &Hidden) -> Result<Hidden, Error> {
        let spec = self.spec();
        let weight = self.load(FINAL_NORM, &[spec.hidden])?;
        let norm = |window: &Vec<f32>| rms_norm(window, &weight, spec.rms_eps);
        Ok(Hidden(hidden.0.iter().map(norm).collect()))
    }

    /// The output projection, `[vocab, hidden]`, for [`Teacher::logits`].
    ///
    /// # Errors
    /// An error of the weights.
    pub fn head(&self) -> Result<Vec<f32>, Error> {
        let spec = self.spec();
        self.load(LM_HEAD, &[spec.vocab, spec.hidden])
    }

    /// Logits `[rows, vocab]` of rows after the final norm. Takes `4 * rows * vocab`
    /// bytes, so long windows are better given in parts.
    ///
    /// # Errors
    /// An error of the matrix product.
    ///
    /// # Panics
    /// If the lengths are not multiples of `hidden`.
    pub fn logits(&self, normed: &[f32], head: &[f32]) -> Result<Vec<f32>, Error> {
        let width = self.spec().hidden;
        assert!(normed.len().is_multiple_of(width) && head.len().is_multiple_of(width));
        let (rows, vocab) = (normed.len() / width, head.len() / width);
        let x = matrix(normed.to_vec(), rows, width)?;
        let mut logits = vec![0.0; rows * vocab];
        for (panel, weight) in head.chunks(HEAD_PANEL * width).enumerate() {
            let cols = weight.len() / width;
            let part = linear(&x, &matrix(weight.to_vec(), cols, width)?)?;
            let first = panel * HEAD_PANEL;
            for (to, from) in logits.chunks_exact_mut(vocab).zip(part.chunks_exact(cols)) {
                to[first..first + cols].copy_from_slice(from);
            }
        }
        Ok(logits)
    }

    fn load_block(&self, layer: usize, positions: usize) -> Result<Block, Error> {
        let spec = self.spec();
        let norm = |norm: Norm| self.load(&norm.tensor(layer), &[norm.width(spec)]);
        let head_norms = match spec.architecture {
            Architecture::Llama => None,
            _ => Some([norm(Norm::Q)?, norm(Norm::K)?]),
        };
        let linears = Linear::ALL.map(|which| {
            let [out, input] = which.shape(spec);
            matrix(self.load(&which.tensor(layer), &[out, input])?, out, input)
        });
        Ok(Block {
            input_norm: norm(Norm::Input)?,
            post_norm: norm(Norm::PostAttention)?,
            attention: Attention::new(spec, head_norms, positions),
            linears: linears.into_iter().collect::<Result<_, _>>()?,
        })
    }

    fn load(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, Error> {
        let (found, data) = self.weights.load(name)?;
        if found != expected || data.len() != expected.iter().product::<usize>() {
            return Err(Error::WeightShape {
                tensor: name.to_owned(),
                expected: expected.to_vec(),
                found,
            });
        }
        Ok(data)
    }
}

/// Gives each window its part of the rows.
fn scatter(rows: &[f32], windows: &mut [Vec<f32>]) {
    let mut rest = rows;
    for window in windows {
        let (own, others) = rest.split_at(window.len());
        window.copy_from_slice(own);
        rest = others;
    }
}

/// Largest magnitude of some values, 0 for none.
fn max_abs(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| max.max(x.abs()))
}
