//! What a model is, apart from its weights: dimensions, rotary embedding, special
//! ids, and the names and shapes of its tensors.
//!
//! Names follow Hugging Face's Qwen3 layout, whose forward pass is
//! Qwen3 Technical Report (arXiv:2505.09388) section 2: pre-norm decoder blocks
//! with grouped-query attention, RMSNorm on each head's query and key, and SwiGLU.
//! Llama (arXiv:2307.09288, section 2.2) is the same without the norms on heads.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod rope;

pub use rope::{Rope, RopeKind};

/// The embedding table, `[vocab, hidden]`.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The output projection, `[vocab, hidden]`. A tied model has no such tensor.
pub const LM_HEAD: &str = "lm_head.weight";
/// The norm before the output projection, `[hidden]`.
pub const FINAL_NORM: &str = "model.norm.weight";

/// A forward pass we know how to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Architecture {
    /// `Qwen3ForCausalLM` (dense).
    Qwen3,
    /// `LlamaForCausalLM`: no norms on queries and keys.
    Llama,
}

impl Architecture {
    /// The norms of a decoder block, in the order of the forward pass.
    pub fn norms(self) -> &'static [Norm] {
        match self {
            Self::Qwen3 => &[Norm::Input, Norm::Q, Norm::K, Norm::PostAttention],
            Self::Llama => &[Norm::Input, Norm::PostAttention],
        }
    }
}

/// The dimensions and constants of a model, read from its `config.json` and
/// `generation_config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Which forward pass.
    pub architecture: Architecture,
    /// Width of the residual stream (`hidden_size`).
    pub hidden: usize,
    /// Decoder blocks (`num_hidden_layers`).
    pub layers: usize,
    /// Query heads (`num_attention_heads`).
    pub heads: usize,
    /// Key and value heads (`num_key_value_heads`); divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; even. `heads * head_dim` need not equal `hidden`.
    pub head_dim: usize,
    /// Width of the MLP (`intermediate_size`).
    pub intermediate: usize,
    /// Rows of the embedding table; the tokenizer may know fewer.
    pub vocab: usize,
    /// Positions the model was made for (`max_position_embeddings`).
    pub max_position: usize,
    /// Added to the mean square in every RMSNorm.
    pub rms_eps: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Whether logits use the embedding table. A [`Checkpoint`] sets it by the
    /// tensors it finds, which may overrule the flag in `config.json`.
    ///
    /// [`Checkpoint`]: crate::checkpoint::Checkpoint
    pub tie_word_embeddings: bool,
    /// Beginning-of-sequence id, if any.
    pub bos: Option<u32>,
    /// Ids that end a generation: those of `config.json`, then those that only
    /// `generation_config.json` names.
    pub eos: Vec<u32>,
}

/// One of the seven matrices of a decoder block; `y = W x`, `W` is `[out, in]`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Linear {
    /// `self_attn.q_proj`
    Q,
    /// `self_attn.k_proj`
    K,
    /// `self_attn.v_proj`
    V,
    /// `self_attn.o_proj`
    O,
    /// `mlp.gate_proj`
    Gate,
    /// `mlp.up_proj`
    Up,
    /// `mlp.down_proj`
    Down,
}

/// A point of the forward pass where a linear layer reads its input.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Site {
    /// After the input norm: read by q, k and v. `hidden` wide.
    AttnIn,
    /// The attention's weighted values: read by o. `heads * head_dim` wide.
    AttnOut,
    /// After the post-attention norm: read by gate and up. `hidden` wide.
    MlpIn,
    /// `silu(gate) * up`: read by down. `intermediate` wide.
    MlpMid,
    /// After the final norm: read by the output projection. `hidden` wide.
    HeadIn,
}

/// A norm of a decoder block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Norm {
    /// Before attention, `[hidden]`.
    Input,
    /// Before the MLP, `[hidden]`.
    PostAttention,
    /// On every query head, `[head_dim]`.
    Q,
    /// On every key head, `[head_dim]`.
    K,
}

impl Linear {
    /// All seven, in the order of the forward pass.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// The checkpoint's name of this matrix in block `layer`.
    pub fn tensor(self, layer: usize) -> String {
        format!("model.layers.{layer}.{self}.weight")
    }

    /// Where its input is taken.
    pub fn site(self) -> Site {
        match self {
            Self::Q | Self::K | Self::V => Site::AttnIn,
            Self::O => Site::AttnOut,
            Self::Gate | Self::Up => Site::MlpIn,
            Self::Down => Site::MlpMid,
        }
    }

    /// `[out, in]`.
    pub fn shape(self, spec: &ModelSpec) -> [usize; 2] {
        let out = match self {
            Self::Q => spec.heads * spec.head_dim,
            Self::K | Self::V => spec.kv_heads * spec.head_dim,
            Self::O | Self::Down => spec.hidden,
            Self::Gate | Self::Up => spec.intermediate,
        };
        [out, self.site().width(spec)]
    }
}

impl fmt::Display for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        })
    }
}

impl Site {
    /// The places of a layer, in the order of its computation.
    pub const OF_LAYER: [Self; 4] = [Self::AttnIn, Self::AttnOut, Self::MlpIn, Self::MlpMid];

    /// Number of activations per token.
    pub fn width(self, spec: &ModelSpec) -> usize {
        match self {
            Self::AttnIn | Self::MlpIn | Self::HeadIn => spec.hidden,
            Self::AttnOut => spec.heads * spec.head_dim,
            Self::MlpMid => spec.intermediate,
        }
    }
}

impl Norm {
    /// The checkpoint's name of this norm in block `layer`.
    pub fn tensor(self, layer: usize) -> String {
        let part = match self {
            Self::Input => "input_layernorm",
            Self::PostAttention => "post_attention_layernorm",
            Self::Q => "self_attn.q_norm",
            Self::K => "self_attn.k_norm",
        };
        format!("model.layers.{layer}.{part}.weight")
    }

    /// Length of the weight.
    pub fn width(self, spec: &ModelSpec) -> usize {
        match self {
            Self::Input | Self::PostAttention => spec.hidden,
            Self::Q | Self::K => spec.head_dim,
        }
    }
}

impl ModelSpec {
    /// Name and shape of every tensor the forward pass reads: the embedding, each
    /// block's norms and matrices, the final norm, and `lm_head.weight` unless tied.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = vec![(EMBEDDING.to_owned(), vec![self.vocab, self.hidden])];
        for layer in 0..self.layers {
            let norms = self.architecture.norms().iter();
            all.extend(norms.map(|n| (n.tensor(layer), vec![n.width(self)])));
            all.extend(Linear::ALL.map(|m| (m.tensor(layer), m.shape(self).to_vec())));
        }
        all.push((FINAL_NORM.to_owned(), vec![self.hidden]));
        if !self.tie_word_embeddings {
            all.push((LM_HEAD.to_owned(), vec![self.vocab, self.hidden]));
        }
        all
    }
}
