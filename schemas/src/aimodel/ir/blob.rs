//! Resources: the weights of a program.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use crate::mapped::MappedFile;

/// Bytes of a resource: in memory, in another file, or in the mapped program.
#[derive(Clone, Debug)]
pub enum BlobData {
    /// Owned bytes.
    Bytes(Vec<u8>),
    /// A range of a file, copied only when the program is written.
    File {
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A range of a map, as the decoder leaves it.
    Mapped {
        /// The map.
        file: MappedFile,
        /// First byte.
        offset: usize,
        /// Length in bytes.
        len: usize,
    },
}

/// A blob whose bytes could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the {len} bytes{place} of blob `{key}`: {source}")]
pub struct BlobError {
    /// Resource key.
    pub key: String,
    /// Length in bytes.
    pub len: u64,
    /// Where they are, if not in memory.
    place: String,
    /// What went wrong.
    pub source: io::Error,
}

/// A named resource; keys are unique in a module.
#[derive(Clone, Debug)]
pub struct Blob {
    /// Resource key.
    pub key: String,
    /// Contents.
    pub data: BlobData,
}

impl Blob {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match &self.data {
            BlobData::Bytes(b) => b.len() as u64,
            BlobData::File { len, .. } => *len,
            BlobData::Mapped { len, .. } => *len as u64,
        }
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The error of a failed read.
    pub(crate) fn unreadable(&self, source: io::Error) -> BlobError {
        BlobError {
            key: self.key.clone(),
            len: self.len(),
            place: match &self.data {
                BlobData::File { path, offset, .. } => {
                    format!(" at offset {offset} of `{}`", path.display())
                }
                BlobData::Bytes(_) | BlobData::Mapped { .. } => String::new(),
            },
            source,
        }
    }

    /// The bytes one after another, wherever they are.
    pub fn reader(&self) -> io::Result<Box<dyn Read + '_>> {
        if let BlobData::File { path, offset, len } = &self.data {
            let mut file = File::open(path)?;
            file.seek(SeekFrom::Start(*offset))?;
            return Ok(Box::new(file.take(*len)));
        }
        match self.bytes() {
            Some(bytes) => Ok(Box::new(bytes)),
            None => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "it lies outside its map",
            )),
        }
    }

    /// The bytes, if they are in memory or mapped (not for [`BlobData::File`]).
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.data {
            BlobData::Bytes(b) => Some(b),
            BlobData::File { .. } => None,
            BlobData::Mapped { file, offset, len } => file.get(*offset..offset.checked_add(*len)?),
        }
    }
}
