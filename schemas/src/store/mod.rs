//! The quantized store: everything a model folder is made of, in one folder that
//! needs no checkpoint any more.
//!
//! ```text
//! store.json               what the store holds; written last, so its presence means complete
//! config.json, ...         files of the checkpoint, copied unchanged
//! matrices/<key>.lut       a lookup-table matrix (see `lut`)
//! matrices/<key>.json      its record: shape, digest and how well it was approximated
//! dense/<key>.bin          a dense tensor, little-endian and row-major
//! dense/<key>.json         its record
//! ```
//!
//! `key` is a SHA-256 that the caller forms over all that determines the bytes: the
//! inputs, the settings and the version of the code. A run that is repeated after an
//! interruption finds what is finished by key and can use nothing stale, whatever
//! was left in the folder. Every file appears by rename and records are
//! written after what they describe, so a record vouches for its file.

mod manifest;
mod reader;
mod writer;

use std::io;
use std::path::PathBuf;

pub use manifest::{DenseElem, DenseRecord, FileRecord, Key, LutRecord, MatrixReport};
pub use manifest::{Manifest, Provenance};
pub use reader::{Store, StoredDense, StoredLut};
pub use writer::StoreWriter;

use crate::lut::LutError;

/// Name of the manifest in the folder.
pub const MANIFEST: &str = "store.json";

/// Why a store can not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Reading or writing failed.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A folder without a manifest.
    #[error(
        "`{}` is not a complete store: `store.json` is missing; hint: run the same `quantize` command again, finished matrices are kept",
        dir.display()
    )]
    Incomplete {
        /// The folder.
        dir: PathBuf,
    },
    /// JSON that is not a manifest or a record.
    #[error("`{}`: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A manifest of another program or a later version.
    #[error("`{}`: expected format `{expected}`, found `{found}`", path.display())]
    Format {
        /// The manifest.
        path: PathBuf,
        /// What this program writes.
        expected: String,
        /// What the manifest says.
        found: String,
    },
    /// A file whose length is not the recorded one.
    #[error("`{}` is damaged: expected {expected} bytes, found {found}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Recorded length.
        expected: u64,
        /// Length of the file.
        found: u64,
    },
    /// A file whose contents are not the recorded ones.
    #[error("`{}` is damaged: expected SHA-256 {expected}, found {found}", path.display())]
    Digest {
        /// The file.
        path: PathBuf,
        /// Recorded digest.
        expected: String,
        /// Digest of the file.
        found: String,
    },
    /// A matrix file whose header or parts are wrong.
    #[error("`{}` is damaged: {source}", path.display())]
    Lut {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: LutError,
    },
    /// A record that contradicts the file it describes, or itself.
    #[error("tensor `{name}` in `{}`: {what}", path.display())]
    Record {
        /// The tensor.
        name: String,
        /// The manifest or record.
        path: PathBuf,
        /// The contradiction.
        what: String,
    },
    /// A name that is not in the store.
    #[error("the store `{}` has no {kind} `{name}`", dir.display())]
    Missing {
        /// The folder.
        dir: PathBuf,
        /// `matrix` or `dense tensor`.
        kind: &'static str,
        /// The name asked for.
        name: String,
    },
    /// A name that can not be used for a file or tensor.
    #[error("`{name}` can not name a {kind}: {why}")]
    Name {
        /// `tensor` or `file`.
        kind: &'static str,
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A string that is not a key.
    #[error("`{found}` is not a key, expected 64 lower-case hexadecimal digits")]
    Key {
        /// The string.
        found: String,
    },
    /// A folder that holds the finished result of another run.
    #[error(
        "`{}` already holds a complete store made from other inputs or settings; hint: choose another folder or delete this one",
        dir.display()
    )]
    OtherStore {
        /// The folder.
        dir: PathBuf,
    },
}

/// Attaches a path to an I/O error.
fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.into();
    move |source| StoreError::Io { path, source }
}

#[cfg(test)]
mod tests;
