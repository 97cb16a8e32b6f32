//! Resources: the weights of a program.

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

    /// The bytes, if they are in memory or mapped (not for [`BlobData::File`]).
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.data {
            BlobData::Bytes(b) => Some(b),
            BlobData::File { .. } => None,
            BlobData::Mapped { file, offset, len } => file.get(*offset..offset.checked_add(*len)?),
        }
    }
}
