//! Reading MLIR bytecode.
//!
//! The file is not trusted: every number is compared with what is there before it
//! is used, nothing recurses on the input, and an error says at which byte.
//!
//! Three passes: the sections are found and their tables read (`tables`); the
//! attributes and types, which refer to one another in any order, are resolved
//! with a worklist (`entries`); the operations are read with a stack of open
//! regions (`body`). Blobs stay where they are in the map.

mod body;
mod cursor;
mod entries;
mod tables;

use std::fmt;

use self::cursor::Cursor;
use super::ids;
use super::ir::{BlobData, Module};
use crate::mapped::MappedFile;

/// What is wrong with a file, and at which byte.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("at byte {offset}: {problem}")]
pub struct DecodeError {
    /// Offset in the file of what could not be read.
    pub offset: u64,
    /// What is wrong there.
    pub problem: Problem,
}

/// What can be wrong with a file.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// Not MLIR bytecode.
    #[error("not MLIR bytecode, which starts with `ML\\xefR`")]
    Magic,
    /// Another version.
    #[error("{what} version {found} is not supported, expected {expected}")]
    Version {
        /// Of what.
        what: &'static str,
        /// The one read.
        found: u64,
        /// The one supported.
        expected: u64,
    },
    /// The file or the section ends too early.
    #[error("{needed} more bytes are needed, {left} are left")]
    Truncated {
        /// Bytes needed.
        needed: u64,
        /// Bytes there.
        left: u64,
    },
    /// Something ends before its bytes do.
    #[error("{left} bytes are left over at the end of the {what}")]
    Trailing {
        /// Of what.
        what: &'static str,
        /// Bytes there.
        left: u64,
    },
    /// A number points outside its table.
    #[error("{what} {index} does not exist, there are {count}")]
    Index {
        /// Of what.
        what: &'static str,
        /// The number.
        index: u64,
        /// Entries of the table.
        count: u64,
    },
    /// A number is larger than anything supported.
    #[error("{what} is {value}, at most {max} is supported")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// The number.
        value: u64,
        /// The bound.
        max: u64,
    },
    /// A section is missing.
    #[error("there is no {0} section")]
    MissingSection(&'static str),
    /// A section appears twice or is of an unknown kind.
    #[error("unexpected section {0}")]
    Section(u8),
    /// A string is not UTF-8.
    #[error("a string is not valid UTF-8")]
    Utf8,
    /// Attributes or types that contain themselves.
    #[error("{0} refers to itself")]
    Cycle(&'static str),
    /// Two blobs have one key.
    #[error("two blobs are called `{0}`")]
    DuplicateKey(String),
    /// An operation cannot be understood.
    #[error("operation `{op}` {problem}")]
    Op {
        /// Its name.
        op: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Anything else.
    #[error("{0}")]
    Malformed(String),
}

type Result<T> = std::result::Result<T, DecodeError>;

fn malformed(offset: usize, problem: impl fmt::Display) -> DecodeError {
    DecodeError {
        offset: offset as u64,
        problem: Problem::Malformed(problem.to_string()),
    }
}

/// Decodes a mapped program. The blobs of the module refer to the map.
pub fn decode(file: &MappedFile) -> Result<Module> {
    decode_with(file, |offset, len| BlobData::Mapped {
        file: file.clone(),
        offset,
        len,
    })
}

/// Decodes a program in memory. The blobs are copied.
pub fn decode_bytes(bytes: &[u8]) -> Result<Module> {
    decode_with(bytes, |offset, len| {
        BlobData::Bytes(bytes[offset..offset + len].to_vec())
    })
}

/// `blob` makes the data of a range that lies within `bytes`.
fn decode_with(bytes: &[u8], blob: impl Fn(usize, usize) -> BlobData) -> Result<Module> {
    let mut file = Cursor::new(bytes);
    if !bytes.starts_with(&ids::MAGIC) {
        return Err(DecodeError {
            offset: 0,
            problem: Problem::Magic,
        });
    }
    file.take(ids::MAGIC.len())?;
    file.version("bytecode", ids::BYTECODE_VERSION)?;
    file.c_string()?;
    let tables = tables::Tables::read(file)?;
    let mut module = Module::default();
    let blobs = tables.read_blobs(&mut module, blob)?;
    let entries = entries::resolve(&tables, &blobs, &mut module)?;
    body::read(&tables, &entries, &mut module)?;
    Ok(module)
}
