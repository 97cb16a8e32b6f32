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

    fn check(&self) -> Result<(), String> {
        if self.format != MANIFEST_VERSION {
            return Err(format!(
                "manifest version {}, this program reads {MANIFEST_VERSION}",
                self.format
            ));
        }
        let paths = self.chunks.iter().map(|c| &c.path);
        for path in paths.chain([&self.embedding.path]).chain(self.files.keys()) {
            if !is_relative(path) {
                return Err(format!("`{path}` does not stay inside the folder"));
            }
        }
        let m = &self.model;
        for (what, n) in [
            ("hidden", m.hidden),
            ("layers", m.layers),
            ("vocab", m.vocab),
            ("head_dim", m.head_dim),
            ("kv_channels", m.kv_channels),
            ("offset_multiple", self.offset_multiple),
        ] {
            if n == 0 || n > 1 << 24 {
                return Err(format!("`{what}` is {n}"));
            }
        }
        if self.embedding.shape != [m.vocab, m.hidden] {
            return Err(format!(
                "embedding of shape {:?}, expected [{}, {}]",
                self.embedding.shape, m.vocab, m.hidden
            ));
        }
        if m.tokenizer_vocab > m.vocab {
            return Err(format!(
                "tokenizer of {} ids for {} rows",
                m.tokenizer_vocab, m.vocab
            ));
        }
        if self.rope.inv_freq.len() * 2 != m.head_dim {
            return Err(format!(
                "{} rotary frequencies for heads of width {}",
                self.rope.inv_freq.len(),
                m.head_dim
            ));
        }
        for (what, sizes) in [("contexts", &self.contexts), ("widths", &self.widths)] {
            let ascending = sizes.windows(2).all(|w| w[0] < w[1]);
            let sane = sizes
                .iter()
                .all(|&n| n > 0 && n <= 1 << 20 && n % self.offset_multiple == 0);
            if sizes.is_empty() || !ascending || !sane {
                return Err(format!("`{what}` is {sizes:?}"));
            }
        }
        self.check_chunks()?;
        self.drafter.as_ref().map_or(Ok(()), |d| {
            d.check(self).map_err(|e| format!("drafter: {e}"))
        })
    }

    fn check_chunks(&self) -> Result<(), String> {
        let mut next = 0;
        for (i, chunk) in self.chunks.iter().enumerate() {
            let [first, end] = chunk.layers;
            if first != next || end <= first {
                return Err(format!(
                    "chunk {i} holds layers {first}..{end}, expected to start at {next}"
                ));
            }
            next = end;
            let last = i + 1 == self.chunks.len();
            if chunk.head != last {
                return Err(format!("chunk {i}: `head` is {}", chunk.head));
            }
            for &context in &self.contexts {
                for &width in &self.widths {
                    if chunk.function(context, width).is_none() {
                        return Err(format!(
                            "chunk {i} has no function for context {context}, width {width}"
                        ));
                    }
                }
            }
        }
        if next != self.model.layers {
            return Err(format!(
                "chunks end at layer {next}, expected {}",
                self.model.layers
            ));
        }
        Ok(())
    }
}

impl Drafter {
    fn check(&self, folder: &Manifest) -> Result<(), String> {
        for path in [&self.path, &self.embedding.path] {
            if !is_relative(path) {
                return Err(format!("`{path}` does not stay inside the folder"));
            }
        }
        for (what, n) in [
            ("block", self.block),
            ("guesses", self.guesses),
            ("rows", self.rows),
            ("prefill_rows", self.prefill_rows),
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
        ] {
            if n == 0 || n > 1 << 12 {
                return Err(format!("`{what}` is {n}"));
            }
        }
        if self.guesses > self.block {
            return Err(format!(
                "{} guesses of a block of {}",
                self.guesses, self.block
            ));
        }
        let widest = self.rows.max(self.prefill_rows);
        if self.spare_slots < widest || self.spare_slots > 1 << 12 {
            return Err(format!(
                "{} spare slots for calls of {widest} rows",
                self.spare_slots
            ));
        }
        let m = &folder.model;
        if self.mask_id as usize >= m.vocab {
            return Err(format!("mask id {} of {} rows", self.mask_id, m.vocab));
        }
        if self.embedding.shape != [m.vocab, m.hidden] {
            let shape = self.embedding.shape;
            return Err(format!("embedding of shape {shape:?}"));
        }
        if self.rope.inv_freq.len() * 2 != self.head_dim {
            return Err(format!(
                "{} rotary frequencies for heads of width {}",
                self.rope.inv_freq.len(),
                self.head_dim
            ));
        }
        let ascending = |v: &[usize]| !v.is_empty() && v.windows(2).all(|w| w[0] < w[1]);
        if !ascending(&self.contexts) || self.contexts.iter().any(|&c| c == 0 || c > 1 << 20) {
            return Err(format!("`contexts` is {:?}", self.contexts));
        }
        let exported = |t: &usize| folder.chunks.iter().any(|c| c.taps.contains(t));
        if !ascending(&self.taps) || !self.taps.iter().all(exported) {
            return Err(format!(
                "it reads the layers {:?}, not all of which the chunks give out",
                self.taps
            ));
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        Manifest {
            format: MANIFEST_VERSION,
            producer: "test".into(),
            model: ModelInfo {
                name: "m".into(),
                architecture: "Qwen3ForCausalLM".into(),
                hidden: 8,
                layers: 2,
                vocab: 16,
                tokenizer_vocab: 15,
                head_dim: 4,
                kv_channels: 4,
                tied_head: true,
                source_fingerprint: "00".into(),
                quantization: "lut4-g32".into(),
            },
            embedding: TableFile {
                path: "embedding.f16".into(),
                shape: [16, 8],
            },
            rope: RopeTable {
                inv_freq: vec![1.0, 0.1],
                attention_factor: 1.0,
            },
            mask_value: -40000.0,
            stop: vec![1],
            chunks: vec![Chunk {
                path: "chunk_0.aimodel".into(),
                layers: [0, 2],
                functions: vec![FunctionInfo {
                    name: "extend_256_16".into(),
                    context: 256,
                    width: 16,
                }],
                taps: vec![],
                head: true,
            }],
            contexts: vec![256],
            widths: vec![16],
            offset_multiple: 4,
            drafter: None,
            files: BTreeMap::new(),
        }
    }

    #[test]
    fn a_written_manifest_reads_back_equal() {
        let dir = tempfile::tempdir().unwrap();
        sample().write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), sample());
    }

    #[test]
    fn wrong_manifests_are_refused_with_the_reason() {
        type Change = fn(&mut Manifest);
        let cases: [(Change, &str); 7] = [
            (|m| m.format = 9, "manifest version 9"),
            (|m| m.chunks[0].path = "../x".into(), "does not stay inside"),
            (|m| m.embedding.path = "/etc/passwd".into(), "does not stay"),
            (|m| m.chunks[0].layers = [0, 1], "chunks end at layer 1"),
            (|m| m.contexts = vec![512], "no function for context 512"),
            (|m| m.rope.inv_freq = vec![1.0], "1 rotary frequencies"),
            (|m| m.model.tokenizer_vocab = 17, "tokenizer of 17 ids"),
        ];
        for (change, expected) in cases {
            let dir = tempfile::tempdir().unwrap();
            let mut m = sample();
            change(&mut m);
            m.write(dir.path()).unwrap();
            let message = Manifest::read(dir.path()).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    /// A folder with a drafter that reads layer 0.
    fn drafting() -> Manifest {
        let mut m = sample();
        m.chunks[0].taps = vec![0];
        m.drafter = Some(Drafter {
            path: "drafter.aimodel".into(),
            kind: DrafterKind::DSpark,
            taps: vec![0],
            block: 7,
            guesses: 7,
            mask_id: 15,
            confidences: true,
            contexts: vec![256],
            rows: 16,
            prefill_rows: 64,
            spare_slots: 64,
            layers: 1,
            kv_heads: 1,
            head_dim: 4,
            rope: m.rope.clone(),
            embedding: m.embedding.clone(),
            head: DrafterHead::Own,
            weights: "f16".into(),
            source_fingerprint: "00".into(),
        });
        m
    }

    #[test]
    fn a_drafter_is_read_back_and_checked() {
        type Change = fn(&mut Drafter);
        let dir = tempfile::tempdir().unwrap();
        drafting().write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap(), drafting());
        let cases: [(Change, &str); 8] = [
            (|d| d.path = "../x".into(), "does not stay inside"),
            (|d| d.taps = vec![1], "not all of which"),
            (|d| d.mask_id = 16, "mask id 16"),
            (|d| d.guesses = 8, "8 guesses"),
            (|d| d.spare_slots = 16, "16 spare slots"),
            (|d| d.contexts = vec![512, 256], "`contexts`"),
            (|d| d.layers = 1 << 20, "`layers`"),
            (|d| d.rope.inv_freq.clear(), "0 rotary"),
        ];
        for (change, expected) in cases {
            let mut m = drafting();
            change(m.drafter.as_mut().unwrap());
            m.write(dir.path()).unwrap();
            let message = Manifest::read(dir.path()).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
