//! The backward pass: from the gradient of a loss at the end of the model to its
//! gradient at the output of every matrix, block by block from the last to the first.
//!
//! A block is computed again from the hidden states at its input, so that nothing but
//! those has to be kept of the forward pass. Gradients of matrices are not formed; a
//! hook sees the two factors `x` and `g` of each, `dW = gᵀ x`, and makes of them what it needs.

use anemone_schemas::spec::{FINAL_NORM, Linear, ModelSpec, Site};
use candle_core::Tensor;
use rayon::prelude::*;

use super::math::{add_assign, rms_norm, rms_norm_backward, softmax, swiglu_backward};
use super::{Block, Hidden, Teacher, Trace, group, scatter};
use crate::Error;
use crate::matmul::{elements, matrix};

/// Logits in memory at a time while the gradient of the output layer is computed.
pub const LOGITS: usize = 1 << 25;

/// The gradient at the output of one matrix.
#[derive(Clone, Copy, Debug)]
pub struct LinearGradient<'a> {
    /// Which.
    pub linear: Linear,
    /// Row-major `[positions, out]`.
    pub rows: &'a [f32],
}

impl LinearGradient<'_> {
    /// The gradient of the matrix itself, `gᵀ x`, row-major `[out, in]`, for the inputs that came
    /// with it.
    ///
    /// # Errors
    /// An error of the matrix product.
    pub fn of_weight(&self, inputs: &[f32], out: usize) -> Result<Vec<f32>, Error> {
        let rows = self.rows.len() / out;
        let g = matrix(self.rows.to_vec(), rows, out)?;
        let x = matrix(inputs.to_vec(), rows, inputs.len() / rows.max(1))?;
        elements(&g.t()?.matmul(&x)?)
    }
}

/// Sees the inputs of a site, row-major, with the gradients at the outputs of all matrices that
/// read them: some whole windows at a time, in order.
pub type GradientHook<'a> = &'a mut dyn FnMut(Site, &[f32], &[LinearGradient<'_>]);

/// Gives the input of a block for a window, row-major `[positions, hidden]`. Every window is asked
/// for once, in order.
pub type WindowReader<'a> = &'a mut dyn FnMut(usize) -> Result<Vec<f32>, Error>;

/// Gets a window, its first row, rows after the final norm and their logits, and puts the gradient
/// of the loss in place of the logits.
pub type LossHook<'a> = &'a mut dyn FnMut(usize, usize, &[f32], &mut [f32]) -> Result<(), Error>;

/// Gradients of the weights of a block's norms.
#[derive(Clone, Debug, PartialEq)]
pub struct NormGradients {
    /// Of [`anemone_schemas::spec::Norm::Input`].
    pub input: Vec<f32>,
    /// Of [`anemone_schemas::spec::Norm::PostAttention`].
    pub post_attention: Vec<f32>,
    /// Of the norms of queries and keys; empty in architectures without them.
    pub heads: [Vec<f32>; 2],
}

impl NormGradients {
    fn zero(spec: &ModelSpec) -> Self {
        Self {
            input: vec![0.0; spec.hidden],
            post_attention: vec![0.0; spec.hidden],
            heads: [Vec::new(), Vec::new()],
        }
    }
}

impl Teacher<'_> {
    /// Takes `gradient`, that of the output of block `layer`, to the gradient of its input.
    /// `input` gives what the block was given, which is in memory for a group of windows at a
    /// time. The hook sees the sites from the last to the first.
    ///
    /// # Errors
    /// An error of the weights or of `input`.
    ///
    /// # Panics
    /// If a window of `input` is not as long as that of `gradient`.
    pub fn backward(
        &self,
        layer: usize,
        input: WindowReader<'_>,
        gradient: &mut Hidden,
        mut hook: Option<GradientHook<'_>>,
    ) -> Result<NormGradients, Error> {
        let spec = self.spec();
        let length = |window: &Vec<f32>| window.len() / spec.hidden;
        let longest = gradient.0.iter().map(length).max().unwrap_or(0);
        let block = self.load_block(layer, longest)?;
        let mut see = |site: Site, inputs: &[f32], outputs: &[LinearGradient<'_>]| {
            if let Some(hook) = &mut hook {
                hook(site, inputs, outputs);
            }
        };
        let mut norms = NormGradients::zero(spec);
        let mut first = 0;
        while first < gradient.0.len() {
            let group = group(gradient.0[first..].iter().map(length));
            let gradients = &mut gradient.0[first..first + group];
            let lengths: Vec<usize> = gradients.iter().map(length).collect();
            let mut before = Vec::with_capacity(lengths.iter().sum::<usize>() * spec.hidden);
            for (window, length) in (first..).zip(&lengths) {
                let states = input(window)?;
                assert_eq!(states.len(), length * spec.hidden);
                before.extend(states);
            }
            if !before.is_empty() {
                let trace = block.trace(spec.rms_eps, &lengths, before)?;
                let rows = gradients.concat();
                let rows = block.backward(spec, &lengths, trace, rows, &mut norms, &mut see)?;
                scatter(&rows, gradients);
            }
            first += group;
        }
        Ok(norms)
    }

    /// The gradient at the output of the last block, and of the weight of the final norm. `hidden`
    /// is that output, `head` the [`Teacher::head`]; both are large, and taken so that neither
    /// lies beside a copy.
    ///
    /// # Errors
    /// An error of the weights or of `loss`.
    pub fn head_backward(
        &self,
        mut hidden: Hidden,
        head: Vec<f32>,
        loss: LossHook<'_>,
    ) -> Result<(Hidden, Vec<f32>), Error> {
        let spec = self.spec();
        let norm = self.load(FINAL_NORM, &[spec.hidden])?;
        let mut norm_gradient = vec![0.0; spec.hidden];
        let vocab = head.len() / spec.hidden;
        let rows = (LOGITS / vocab).max(1);
        let weight = matrix(head, vocab, spec.hidden)?;
        for (window, states) in hidden.0.iter_mut().enumerate() {
            for (part, states) in states.chunks_mut(rows * spec.hidden).enumerate() {
                let normed = rms_norm(states, &norm, spec.rms_eps);
                let count = states.len() / spec.hidden;
                let x = matrix(normed, count, spec.hidden)?;
                let mut logits = elements(&x.matmul(&weight.t()?)?)?;
                loss(window, part * rows, &elements(&x)?, &mut logits)?;
                let mut back = elements(&matrix(logits, count, vocab)?.matmul(&weight)?)?;
                rms_norm_backward(states, &norm, spec.rms_eps, &mut back, &mut norm_gradient);
                states.copy_from_slice(&back);
            }
        }
        Ok((hidden, norm_gradient))
    }
}

impl Block {
    /// `g W`: a gradient at the output of a matrix taken to its input.
    fn back(&self, which: Linear, gradient: &[f32]) -> Result<Vec<f32>, Error> {
        let weight: &Tensor = &self.linears[which as usize];
        let width = weight.dim(0)?;
        let rows = gradient.len() / width;
        elements(&matrix(gradient.to_vec(), rows, width)?.matmul(weight)?)
    }

    /// The gradient at the block's input of a group of windows, from that at its output.
    fn backward(
        &self,
        spec: &ModelSpec,
        lengths: &[usize],
        trace: Trace,
        mut gradient: Vec<f32>,
        norms: &mut NormGradients,
        see: GradientHook<'_>,
    ) -> Result<Vec<f32>, Error> {
        let Trace {
            before,
            attn_in,
            projected,
            attn_out,
            middle,
            mlp_in,
            mut gate,
            mut up,
            mlp_mid,
        } = trace;
        see(Site::MlpMid, &mlp_mid, &[of(Linear::Down, &gradient)]);
        drop(mlp_mid);
        swiglu_backward(&mut gate, &mut up, &self.back(Linear::Down, &gradient)?);
        see(
            Site::MlpIn,
            &mlp_in,
            &[of(Linear::Gate, &gate), of(Linear::Up, &up)],
        );
        let mut into = self.back(Linear::Gate, &gate)?;
        add_assign(&mut into, &self.back(Linear::Up, &up)?);
        drop((mlp_in, gate, up));
        let eps = spec.rms_eps;
        rms_norm_backward(
            &middle,
            &self.post_norm,
            eps,
            &mut into,
            &mut norms.post_attention,
        );
        add_assign(&mut gradient, &into);

        see(Site::AttnOut, &attn_out, &[of(Linear::O, &gradient)]);
        let mixed = self.back(Linear::O, &gradient)?;
        let ([q, k, v], heads) = self.attention.backward(lengths, &projected, mixed)?;
        for (sum, part) in norms.heads.iter_mut().zip(heads) {
            if sum.is_empty() {
                *sum = part;
            } else {
                add_assign(sum, &part);
            }
        }
        let all = [of(Linear::Q, &q), of(Linear::K, &k), of(Linear::V, &v)];
        see(Site::AttnIn, &attn_in, &all);
        let mut into = vec![0.0; before.len()];
        for (linear, rows) in [(Linear::Q, &q), (Linear::K, &k), (Linear::V, &v)] {
            add_assign(&mut into, &self.back(linear, rows)?);
        }
        rms_norm_backward(&before, &self.input_norm, eps, &mut into, &mut norms.input);
        add_assign(&mut gradient, &into);
        Ok(gradient)
    }
}

fn of(linear: Linear, rows: &[f32]) -> LinearGradient<'_> {
    LinearGradient { linear, rows }
}

/// Replaces rows of logits by the gradient of `-ln p(y)` for ids y drawn from the model's own
/// distribution p: `p - 1_y`. Over draws, the products of such gradients average to
/// the Hessian of the divergence from the model itself. Rows of the padding after `valid` ids get
/// zero. The draw depends on `seed` and the row's index `first + row` alone.
pub fn sampled_loss(logits: &mut [f32], vocab: usize, valid: usize, seed: u64, first: usize) {
    logits
        .par_chunks_exact_mut(vocab)
        .enumerate()
        .for_each(|(row, logits)| {
            let logits = softmax_of_valid(logits, valid);
            let mut left = uniform(seed, (first + row) as u64);
            let mut drawn = logits.len() - 1;
            for (id, p) in logits.iter().enumerate() {
                left -= f64::from(*p);
                if left < 0.0 {
                    drawn = id;
                    break;
                }
            }
            logits[drawn] -= 1.0;
        });
}

/// Replaces rows of logits by probabilities; the padding after `valid` ids gets zero.
pub fn softmax_rows(logits: &mut [f32], vocab: usize, valid: usize) {
    logits.par_chunks_exact_mut(vocab).for_each(|logits| {
        softmax_of_valid(logits, valid);
    });
}

fn softmax_of_valid(logits: &mut [f32], valid: usize) -> &mut [f32] {
    let valid = valid.min(logits.len());
    let (logits, padding) = logits.split_at_mut(valid);
    padding.fill(0.0);
    softmax(logits);
    logits
}

/// A number in [0, 1) from SplitMix64 (Steele, Lea and Flood, 2014).
fn uniform(seed: u64, index: u64) -> f64 {
    let mut z = seed
        .wrapping_mul(0x2545_f491_4f6c_dd1d)
        .wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
