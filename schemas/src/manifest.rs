//! The model folder and its manifest `anemone.json`.
//!
//! ```text
//! FOLDER/
//!   anemone.json            this manifest, written last
//!   metadata.json           Apple's bundle description
//!   chunk_0.aimodel/ ...    Core AI programs of consecutive layers
//!   drafter.aimodel/        the drafter's program, if there is one
//!   embedding.f16           token embedding table, row-major little-endian fp16
//!   tokenizer/              tokenizer files of the base model, byte for byte
//!   README.md, report.json  model card and quality report
//! ```
//!
//! A folder without a manifest is not a model folder: writers build it under
//! another name and rename it, so a manifest always describes a whole folder.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::atomic;
use crate::drafter::DrafterKind;

mod check;
#[cfg(test)]
mod tests;

/// Name of the manifest in its folder.
pub const MANIFEST_FILE: &str = "anemone.json";
/// Version of the manifest this code writes, and the only one it reads.
pub const MANIFEST_VERSION: u32 = 1;
/// Manifests larger than this are refused before they are parsed.
const MAX_MANIFEST_BYTES: u64 = 16 << 20;

/// What `anemone.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`MANIFEST_VERSION`].
    pub format: u32,
    /// Program and version that wrote the folder.
    pub producer: String,
    /// The model's dimensions.
    pub model: ModelInfo,
    /// The embedding table, gathered by the host.
    pub embedding: TableFile,
    /// How the host computes the rotary inputs.
    pub rope: RopeTable,
    /// Additive mask value of a hidden key; visible keys have 0.
    pub mask_value: f32,
    /// Token ids that end a generation.
    pub stop: Vec<u32>,
    /// Chunk programs in order of their layers.
    pub chunks: Vec<Chunk>,
    /// Context sizes, ascending; every chunk has a function for each.
    pub contexts: Vec<usize>,
    /// Call widths, ascending; every chunk has a function for each.
    pub widths: Vec<usize>,
    /// Cache writes start at multiples of this many slots.
    pub offset_multiple: usize,
    /// The drafter, if the folder has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter: Option<Drafter>,
    /// Every other file of the folder by its relative path with `/`.
    pub files: BTreeMap<String, FileInfo>,
}

/// Dimensions and origin of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelInfo {
    /// Display name.
    pub name: String,
    /// Hugging Face architecture, such as `Qwen3ForCausalLM`.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Rows of the embedding and of the output layer.
    pub vocab: usize,
    /// Ids the tokenizer knows; rows from here on are padding and never chosen.
    pub tokenizer_vocab: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Channels of the key (and value) cache: kv heads times head width.
    pub kv_channels: usize,
    /// Whether output layer and embedding come from one tensor.
    pub tied_head: bool,
    /// Fingerprint of the checkpoint the folder was made from.
    pub source_fingerprint: String,
    /// Quantization in words, such as `lut4-g32 gptq`.
    pub quantization: String,
}

/// A two-dimensional fp16 table in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TableFile {
    /// Relative path.
    pub path: String,
    /// Rows and columns.
    pub shape: [usize; 2],
}

/// Rotary position embedding: `cos` and `sin` of `position * inv_freq[i]`, both
/// times `attention_factor`, for each half of the head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RopeTable {
    /// Radians per position, half a head long.
    pub inv_freq: Vec<f32>,
    /// Factor on cosine and sine (1 but for YaRN).
    pub attention_factor: f32,
}

/// One chunk program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// Relative path of the `.aimodel` folder.
    pub path: String,
    /// First layer and the one after the last.
    pub layers: [usize; 2],
    /// Functions of the program that the engine calls.
    pub functions: Vec<FunctionInfo>,
    /// Layers after which the hidden state is an output `tap_{layer}`.
    pub taps: Vec<usize>,
    /// Whether final norm, output layer and argmax are in this chunk.
    pub head: bool,
}

/// One function of a chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionInfo {
    /// Function name, `extend_{context}_{width}`.
    pub name: String,
    /// Cache slots.
    pub context: usize,
    /// Rows of one call.
    pub width: usize,
}

/// A drafter program: what guesses the next tokens from the chunks' taps.
///
/// `draft_{context}` takes the taps of up to `rows` new rows, the embeddings of a block
/// of one known token and masks, and returns `guesses` tokens; `extend_{context}` takes
/// the taps of up to `prefill_rows` rows and returns nothing. Both write the rows' keys
/// and values into the states at a slot that is an input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Drafter {
    /// Relative path of the `.aimodel` folder.
    pub path: String,
    /// Which family, and with it which rows guess what.
    pub kind: DrafterKind,
    /// Layers of the model whose taps it reads, ascending.
    pub taps: Vec<usize>,
    /// Rows of a block: the known token and the masks.
    pub block: usize,
    /// Guesses of one call.
    pub guesses: usize,
    /// Id whose embedding is a mask.
    pub mask_id: u32,
    /// Whether the program returns confidences beside probabilities.
    pub confidences: bool,
    /// Context sizes, ascending, with a function of each kind for each.
    pub contexts: Vec<usize>,
    /// New rows that a `draft` call takes.
    pub rows: usize,
    /// New rows that an `extend` call takes.
    pub prefill_rows: usize,
    /// Slots of the states beyond the context, so that padding rows have a place.
    pub spare_slots: usize,
    /// Decoder layers of the drafter: the first axis of its states.
    pub layers: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// How the host computes the rotary inputs.
    pub rope: RopeTable,
    /// The embedding table of the block's tokens: the model's own where they are equal.
    pub embedding: TableFile,
    /// Where the output layer comes from.
    pub head: DrafterHead,
    /// Form of the weights in words, such as `f16` or `lut4-g32`.
    pub weights: String,
    /// Fingerprint of the drafter's checkpoint.
    pub source_fingerprint: String,
}

/// Where a drafter's output layer comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DrafterHead {
    /// The drafter's checkpoint, which has another than the model, or one that could
    /// not be compared.
    Own,
    /// The model's as its checkpoint has it.
    Model,
    /// The model's as its last chunk has it, quantized.
    Chunk,
}

/// Size and digest of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileInfo {
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
}

/// Why a folder cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The manifest is absent or unreadable.
    #[error("cannot read `{path}`: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The manifest is not what this version writes.
    #[error("`{path}`: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl Manifest {
    /// Reads and checks the manifest of `folder`: version, relative paths,
    /// ascending sizes, and chunks that cover all layers in order.
    ///
    /// # Errors
    /// [`ManifestError`] naming the file.
    pub fn read(folder: &Path) -> Result<Self, ManifestError> {
        let path = folder.join(MANIFEST_FILE);
        let io = |source| ManifestError::Io {
            path: path.clone(),
            source,
        };
        let invalid = |reason: String| ManifestError::Invalid {
            path: path.clone(),
            reason,
        };
        let bytes = fs::metadata(&path).map_err(io)?.len();
        if bytes > MAX_MANIFEST_BYTES {
            return Err(invalid(format!("{bytes} bytes is no manifest")));
        }
        let text = fs::read_to_string(&path).map_err(io)?;
        let manifest: Self =
            serde_json::from_str(&text).map_err(|e| invalid(format!("not a manifest: {e}")))?;
        manifest.check().map_err(invalid)?;
        Ok(manifest)
    }

    /// Writes the manifest into `folder`, atomically.
    ///
    /// # Errors
    /// Any I/O error.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let mut text = serde_json::to_string_pretty(self).map_err(io::Error::other)?;
        text.push('\n');
        atomic::write_bytes(&folder.join(MANIFEST_FILE), text.as_bytes())
    }
}

impl Chunk {
    /// The function for a context and a width.
    pub fn function(&self, context: usize, width: usize) -> Option<&FunctionInfo> {
        self.functions
            .iter()
            .find(|f| f.context == context && f.width == width)
    }
}

/// Whether a path from a manifest stays inside its folder: not empty, relative,
/// plain components only, no backslash.
pub fn is_relative(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\\', '\0'])
        && Path::new(path)
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
}
