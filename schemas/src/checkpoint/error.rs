//! What can be wrong with a checkpoint.

use std::io;
use std::path::PathBuf;

use safetensors::SafeTensorError;
use thiserror::Error;

use super::Dtype;

/// A reason not to read a model folder.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened or read.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A JSON file is malformed.
    #[error("`{}` is not valid JSON of its kind", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The config lacks a key.
    #[error("`{}` has no `{key}`", path.display())]
    MissingKey {
        /// The config.
        path: PathBuf,
        /// The key, with its parents.
        key: String,
    },
    /// A config value is of the wrong type or outside its range.
    #[error("`{key}` in `{}` is `{found}`, expected {expected}", path.display())]
    BadValue {
        /// The config.
        path: PathBuf,
        /// The key, with its parents.
        key: String,
        /// The value as JSON.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A config asks for something we do not compute.
    #[error("`{key}` in `{}` is `{found}`, which is not supported (only {supported})", path.display())]
    Unsupported {
        /// The config.
        path: PathBuf,
        /// The key, with its parents.
        key: String,
        /// The value as JSON.
        found: String,
        /// What is supported.
        supported: &'static str,
    },
    /// The folder holds no weights.
    #[error(
        "`{}` has neither `model.safetensors` nor `model.safetensors.index.json`; \
         hint: {}", dir.display(), match unfinished {
            Some(path) => incomplete(Some(path)),
            None => "convert other weight formats to safetensors first".to_owned(),
        }
    )]
    NoWeights {
        /// The folder.
        dir: PathBuf,
        /// What a download left.
        unfinished: Option<PathBuf>,
    },
    /// The folder holds both a single file and an index.
    #[error(
        "`{}` has both `model.safetensors` and `model.safetensors.index.json`; \
         hint: remove the one that is not meant", dir.display()
    )]
    TwoWeightSets {
        /// The folder.
        dir: PathBuf,
    },
    /// The index names a shard that is not a plain file name.
    #[error(
        "`{}` names the shard `{shard}`; a shard must be a plain file name that ends in `.safetensors`",
        index.display()
    )]
    ShardName {
        /// The index.
        index: PathBuf,
        /// The name as written, escaped.
        shard: String,
    },
    /// A shard of the index is not in the folder.
    #[error(
        "`{}` is missing but `{}` places {tensors} tensors in it; hint: {}",
        shard.display(), index.display(), incomplete(unfinished.as_ref())
    )]
    ShardMissing {
        /// The index.
        index: PathBuf,
        /// The absent file.
        shard: PathBuf,
        /// How many tensors the index places there.
        tensors: usize,
        /// What a download left.
        unfinished: Option<PathBuf>,
    },
    /// A weight file is shorter than its header says.
    #[error(
        "`{}` has {found} bytes, expected {}{expected}; hint: incomplete download",
        path.display(), if *exact { "" } else { "at least " }
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size by the header.
        expected: u64,
        /// False if the header itself is cut, so that the size is not known in full.
        exact: bool,
        /// Its actual size.
        found: u64,
    },
    /// A weight file is longer than its header says.
    #[error("`{}` has {found} bytes, expected {expected}; the header does not describe the rest", path.display())]
    TrailingBytes {
        /// The file.
        path: PathBuf,
        /// Its size by the header.
        expected: u64,
        /// Its actual size.
        found: u64,
    },
    /// A weight file's header is malformed.
    #[error("the safetensors header of `{}` is invalid", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: SafeTensorError,
    },
    /// The index places a tensor in a shard that does not have it.
    #[error("`{}` places `{tensor}` in `{}`, which does not have it", index.display(), shard.display())]
    ListedButAbsent {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },
    /// A shard has a tensor that the index does not list.
    #[error("`{}` has `{tensor}`, which `{}` does not list", shard.display(), index.display())]
    PresentButUnlisted {
        /// The index.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },
    /// Two shards have the same tensor.
    #[error("`{tensor}` is in both `{}` and `{}`", first.display(), second.display())]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One shard.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A tensor's element type is not a float we read.
    #[error("`{tensor}` in `{}` is {found}, expected BF16, F16 or F32; hint: quantized checkpoints cannot be converted", path.display())]
    UnsupportedDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its safetensors type name.
        found: String,
    },
    /// The model needs a tensor that is in no file.
    #[error("`{}` has no tensor `{tensor}`, which its config calls for", dir.display())]
    MissingTensor {
        /// The folder.
        dir: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor that no part of the model reads.
    #[error(
        "`{}` has a tensor `{tensor}` that this architecture does not use; \
         dropping it could change the model", dir.display()
    )]
    UnknownTensor {
        /// The folder.
        dir: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor's shape is not the one the config implies.
    #[error("`{tensor}` has shape {found:?}, expected {expected:?} by the config")]
    Shape {
        /// The tensor.
        tensor: String,
        /// By the config.
        expected: Vec<usize>,
        /// By the file.
        found: Vec<usize>,
    },
    /// There is no output projection, and the config does not say it is tied.
    #[error(
        "`{}` has no `lm_head.weight` and its config does not set `tie_word_embeddings`; \
         hint: set it to true if the model shares the embedding table", dir.display()
    )]
    HeadMissing {
        /// The folder.
        dir: PathBuf,
    },
    /// A tensor was asked for that the model does not have.
    #[error("the model in `{}` has no tensor `{tensor}`", dir.display())]
    NoSuchTensor {
        /// The folder.
        dir: PathBuf,
        /// The name asked for.
        tensor: String,
    },
    /// A row was asked for that a matrix does not have.
    #[error("row {row} of `{tensor}` was asked for, but it has {rows} rows")]
    RowOutOfRange {
        /// The matrix.
        tensor: String,
        /// The row asked for.
        row: usize,
        /// How many there are.
        rows: usize,
    },
    /// A weight is NaN or infinite.
    #[error("`{tensor}` ({dtype}) is {value} at element {index}; hint: the checkpoint is damaged")]
    NonFinite {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: Dtype,
        /// Row-major index of the first such element.
        index: usize,
        /// The element.
        value: f32,
    },
    /// More layers asked for than there are, or none.
    #[error("{asked} layers asked for of the {found} in `{}`", dir.display())]
    TooManyLayers {
        /// The checkpoint.
        dir: PathBuf,
        /// Layers asked for.
        asked: usize,
        /// Layers there are.
        found: usize,
    },
    /// A shard was replaced or rewritten while it was in use.
    #[error("`{}` changed while it was being read", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A tensor of a kind of drafter that we do not compute.
    #[error("`{tensor}` in `{}` belongs to {variant}, which is not supported", dir.display())]
    DrafterVariant {
        /// The folder.
        dir: PathBuf,
        /// The tensor.
        tensor: String,
        /// What it is a part of.
        variant: &'static str,
    },
}

/// The hint of a download that broke off.
fn incomplete(unfinished: Option<&PathBuf>) -> String {
    let left = unfinished.map(|path| format!(", it left `{}`", path.display()));
    format!("incomplete download{}", left.unwrap_or_default())
}
