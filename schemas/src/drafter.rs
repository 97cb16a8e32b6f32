//! A drafter's checkpoint: a small decoder that guesses the next tokens from the hidden
//! states of a larger one.
//!
//! Two kinds share their backbone, a few Qwen3 layers that read the target's hidden
//! states as keys and values and run once over a block of one known token, the anchor,
//! and masks:
//!
//! | kind | block | who guesses | heads |
//! |---|---|---|---|
//! | DSpark | 7 rows | every row, the token *after* its position | Markov bias on the previous guess, confidence |
//! | DFlash | 16 rows | the masks, the token *at* their position | none |
//!
//! A row convention read wrongly shifts every guess by one: the text stays right and
//! almost nothing is accepted. So everything about a checkpoint is read strictly, and
//! the variants others publish under the same names are refused by name.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::checkpoint::shards::{self, Located};
use crate::checkpoint::{Error, Shard, TensorView, values};
use crate::spec::Rope;

mod config;

#[cfg(test)]
mod tests;

/// The drafter's embedding table, `[vocab, hidden]`, if it brings its own.
pub const EMBEDDING: &str = "embed_tokens.weight";
/// The drafter's output layer, `[vocab, hidden]`, if it brings its own.
pub const LM_HEAD: &str = "lm_head.weight";
/// Projects the concatenated taps, `[hidden, taps * hidden]`.
pub const FUSE: &str = "fc.weight";
/// The norm of the projected taps, `[hidden]`.
pub const FUSE_NORM: &str = "hidden_norm.weight";
/// The norm before the output layer, `[hidden]`.
pub const FINAL_NORM: &str = "norm.weight";
/// Rows of the previous token in the Markov head, `[vocab, rank]`.
pub const MARKOV_IN: &str = "markov_head.markov_w1.weight";
/// Rows of the next token in the Markov head, `[vocab, rank]`.
pub const MARKOV_OUT: &str = "markov_head.markov_w2.weight";
/// Weights of the confidence head, `[1, hidden + rank]` or `[1, hidden]`.
pub const CONFIDENCE: &str = "confidence_head.proj.weight";
/// Bias of the confidence head, `[1]`.
pub const CONFIDENCE_BIAS: &str = "confidence_head.proj.bias";

/// Which family a drafter is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DrafterKind {
    /// DeepSpec's layout: every row of the block guesses the token after its position.
    DSpark,
    /// z-lab's layout: every row but the first guesses the token at its position.
    DFlash,
}

/// What a drafter is, apart from its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct DrafterSpec {
    /// The family, which sets the row convention.
    pub kind: DrafterKind,
    /// Width of the residual stream, that of the target.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Rows of embedding and output layer, those of the target.
    pub vocab: usize,
    /// Added to the mean square in every RMSNorm.
    pub rms_eps: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Decoder layers of the target.
    pub target_layers: usize,
    /// Layers of the target after which the hidden state is read, ascending.
    pub taps: Vec<usize>,
    /// Rows of one block: the anchor and the masks.
    pub block: usize,
    /// Id of a mask; a spare row of the embedding.
    pub mask_id: u32,
    /// Width of the Markov head; 0 if there is none.
    pub markov_rank: usize,
    /// What the confidence head reads, if there is one.
    pub confidence: Option<Confidence>,
}

/// What a confidence head reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confidence {
    /// The hidden state.
    Hidden,
    /// The hidden state, then the Markov head's row of the previous token.
    HiddenAndMarkov,
}

impl DrafterSpec {
    /// Guesses of one call.
    pub fn guesses(&self) -> usize {
        match self.kind {
            DrafterKind::DSpark => self.block,
            DrafterKind::DFlash => self.block - 1,
        }
    }

    /// Name and shape of every tensor that is the drafter's own, in the order of the
    /// forward pass; embedding and output layer may come from the target.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (d, width) = (self.hidden, self.head_dim);
        let (q, kv) = (self.heads * width, self.kv_heads * width);
        let mut all = vec![
            (FUSE.to_owned(), vec![d, self.taps.len() * d]),
            (FUSE_NORM.to_owned(), vec![d]),
        ];
        for layer in 0..self.layers {
            let parts: [(&str, Vec<usize>); 11] = [
                ("input_layernorm", vec![d]),
                ("self_attn.q_proj", vec![q, d]),
                ("self_attn.k_proj", vec![kv, d]),
                ("self_attn.v_proj", vec![kv, d]),
                ("self_attn.q_norm", vec![width]),
                ("self_attn.k_norm", vec![width]),
                ("self_attn.o_proj", vec![d, q]),
                ("post_attention_layernorm", vec![d]),
                ("mlp.gate_proj", vec![self.intermediate, d]),
                ("mlp.up_proj", vec![self.intermediate, d]),
                ("mlp.down_proj", vec![d, self.intermediate]),
            ];
            all.extend(parts.map(|(part, shape)| (layer_tensor(layer, part), shape)));
        }
        all.push((FINAL_NORM.to_owned(), vec![d]));
        if self.markov_rank > 0 {
            let shape = vec![self.vocab, self.markov_rank];
            all.push((MARKOV_IN.to_owned(), shape.clone()));
            all.push((MARKOV_OUT.to_owned(), shape));
        }
        if let Some(reads) = self.confidence {
            let markov = match reads {
                Confidence::Hidden => 0,
                Confidence::HiddenAndMarkov => self.markov_rank,
            };
            all.push((CONFIDENCE.to_owned(), vec![1, d + markov]));
            all.push((CONFIDENCE_BIAS.to_owned(), vec![1]));
        }
        all
    }
}

/// Name of a tensor of a decoder layer, such as `self_attn.q_proj` of layer 0.
pub fn layer_tensor(layer: usize, part: &str) -> String {
    format!("layers.{layer}.{part}.weight")
}

/// The spec of a folder by its `config.json` alone.
///
/// # Errors
/// A config that is absent, malformed, or of a drafter we do not compute.
pub fn read_spec(dir: &Path) -> Result<DrafterSpec, Error> {
    config::read(dir)
}

/// An open, fully checked drafter folder.
#[derive(Debug)]
pub struct DrafterCheckpoint {
    dir: PathBuf,
    spec: DrafterSpec,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Located>,
}

impl DrafterCheckpoint {
    /// Opens a folder and checks all of it but the values: config, names, shapes, and
    /// that nothing else is there.
    ///
    /// # Errors
    /// Whatever is wrong with the folder, naming the file, key or tensor.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let spec = config::read(dir)?;
        let shards::Found {
            shards,
            mut tensors,
            ..
        } = shards::open(dir)?;
        config::refuse_foreign_tensors(dir, tensors.keys())?;
        let mut used = BTreeMap::new();
        let table = vec![spec.vocab, spec.hidden];
        let optional = [
            (EMBEDDING.to_owned(), table.clone()),
            (LM_HEAD.to_owned(), table),
        ];
        for (i, (name, shape)) in optional.into_iter().chain(spec.tensors()).enumerate() {
            let Some(located) = tensors.remove(&name) else {
                if i < 2 {
                    continue;
                }
                return Err(Error::MissingTensor {
                    dir: dir.to_path_buf(),
                    tensor: name,
                });
            };
            if located.shape != shape {
                return Err(Error::Shape {
                    tensor: name,
                    expected: shape,
                    found: located.shape,
                });
            }
            used.insert(name, located);
        }
        let left = tensors.into_keys().find(|n| !n.ends_with(".inv_freq"));
        if let Some(tensor) = left {
            return Err(Error::UnknownTensor {
                dir: dir.to_path_buf(),
                tensor,
            });
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            spec,
            shards,
            tensors: used,
        })
    }

    /// The drafter's dimensions.
    pub fn spec(&self) -> &DrafterSpec {
        &self.spec
    }

    /// The folder it was opened from.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether the folder has a tensor; of interest for [`EMBEDDING`] and [`LM_HEAD`].
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none, which no open checkpoint is.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The raw elements of a tensor.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, Error> {
        let located = self.tensors.get(name).ok_or_else(|| Error::NoSuchTensor {
            dir: self.dir.clone(),
            tensor: name.to_owned(),
        })?;
        Ok(located.view(&self.shards))
    }

    /// A tensor's elements widened to f32, which is exact.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`], or [`Error::NonFinite`] at the first NaN or infinity.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, Error> {
        let mut all = Vec::new();
        self.for_each_block(name, usize::MAX, |block| all.extend_from_slice(block))?;
        Ok(all)
    }

    /// Calls `each` with the elements of a tensor in order, widened to f32, at most
    /// `block` of them at a time.
    ///
    /// # Errors
    /// As [`Self::read_f32`].
    pub fn for_each_block(
        &self,
        name: &str,
        block: usize,
        mut each: impl FnMut(&[f32]),
    ) -> Result<(), Error> {
        let view = self.tensor(name)?;
        values::for_each_block(name, &view, block, &mut each)
    }

    /// SHA-256, in hex, of the drafter: its spec and every tensor's name, type, shape
    /// and bytes. Reads the whole checkpoint.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(format!("{:?}\n", self.spec));
        for (name, located) in &self.tensors {
            let view = located.view(&self.shards);
            hash.update(format!("{name} {} {:?}\n", view.dtype, view.shape));
            hash.update(view.bytes);
        }
        hash.finalize().iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }
}
