//! Weight files: the single `model.safetensors`, or the shards of an index.
//!
//! The format (github.com/huggingface/safetensors) is a little-endian u64 header
//! length, a JSON header with each tensor's type, shape and byte range, and the data.

use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};
use serde::Deserialize;
use serde_json::Value;

use super::{Dtype, Error, Shard, TensorView};
use crate::mapped::MappedFile;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Where a tensor lies.
#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) shape: Vec<usize>,
    dtype: Dtype,
    shard: usize,
    /// Byte range within the file, checked against its length.
    begin: usize,
    end: usize,
}

impl Located {
    pub(crate) fn view<'a>(&'a self, shards: &'a [Shard]) -> TensorView<'a> {
        TensorView {
            dtype: self.dtype,
            shape: &self.shape,
            bytes: &shards[self.shard].map[self.begin..self.end],
        }
    }
}

/// The weights of a folder.
pub(crate) struct Found {
    pub(crate) shards: Vec<Shard>,
    pub(crate) tensors: BTreeMap<String, Located>,
    pub(crate) notes: Vec<String>,
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: IndexMetadata,
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
struct IndexMetadata {
    total_size: Option<f64>,
}

pub(crate) fn open(dir: &Path) -> Result<Found, Error> {
    let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
    match (single.exists(), index.exists()) {
        (true, true) => Err(Error::TwoWeightSets {
            dir: dir.to_path_buf(),
        }),
        (false, false) => Err(Error::NoWeights {
            dir: dir.to_path_buf(),
            unfinished: unfinished(dir),
        }),
        (true, false) => open_files(&[single]),
        (false, true) => open_indexed(dir, &index),
    }
}

fn open_indexed(dir: &Path, path: &Path) -> Result<Found, Error> {
    let index: Index = super::config::read_json(path)?;
    // Shard files in name order, each with the number of tensors placed there.
    let mut placed = BTreeMap::<&str, usize>::new();
    for shard in index.weight_map.values() {
        if !is_shard_name(shard) {
            return Err(Error::ShardName {
                index: path.to_path_buf(),
                shard: shard.escape_debug().to_string(),
            });
        }
        *placed.entry(shard).or_default() += 1;
    }
    for (name, &tensors) in &placed {
        let shard = dir.join(name);
        if !shard.exists() {
            return Err(Error::ShardMissing {
                index: path.to_path_buf(),
                shard,
                tensors,
                unfinished: unfinished(dir),
            });
        }
    }
    let files: Vec<PathBuf> = placed.keys().map(|name| dir.join(name)).collect();
    let mut found = open_files(&files)?;
    for (tensor, shard) in &index.weight_map {
        let shard = dir.join(shard);
        let there = found
            .tensors
            .get(tensor)
            .is_some_and(|at| files[at.shard] == shard);
        if !there {
            return Err(Error::ListedButAbsent {
                index: path.to_path_buf(),
                tensor: tensor.clone(),
                shard,
            });
        }
    }
    let unlisted = found
        .tensors
        .iter()
        .find(|(tensor, _)| !index.weight_map.contains_key(*tensor));
    if let Some((tensor, at)) = unlisted {
        return Err(Error::PresentButUnlisted {
            index: path.to_path_buf(),
            tensor: tensor.clone(),
            shard: files[at.shard].clone(),
        });
    }
    let actual: usize = found.tensors.values().map(|at| at.end - at.begin).sum();
    if let Some(total) = index.metadata.total_size
        && (total - actual as f64).abs() >= 1.0
    {
        found.notes.push(format!(
            "`{INDEX}` says `total_size` is {total}, but the tensors have {actual} bytes"
        ));
    }
    Ok(found)
}

/// What a download that broke off left: in the folder, where `hf download --local-dir` keeps
/// it, or among the blobs of the cache that the folder is a snapshot of.
fn unfinished(dir: &Path) -> Option<PathBuf> {
    let places = [
        dir.to_path_buf(),
        dir.join(".cache/huggingface/download"),
        dir.join("../../blobs"),
    ];
    let entries = places.iter().filter_map(|place| place.read_dir().ok());
    let files = entries.flatten().flatten().map(|entry| entry.path());
    files
        .filter(|path| path.extension().is_some_and(|e| e == "incomplete"))
        .min()
}

/// An index is untrusted: its names must not lead out of the folder. Shards may be
/// symlinks, as in the Hugging Face cache.
fn is_shard_name(name: &str) -> bool {
    let path = Path::new(name);
    let mut parts = path.components();
    let plain = matches!(parts.next(), Some(Component::Normal(part)) if part == name);
    plain
        && parts.next().is_none()
        && !name.contains(['/', '\\', '\0'])
        && path.extension().is_some_and(|e| e == "safetensors")
}

fn open_files(files: &[PathBuf]) -> Result<Found, Error> {
    let mut shards = Vec::new();
    let mut tensors = BTreeMap::<String, Located>::new();
    for (shard, path) in files.iter().enumerate() {
        let io_error = |source: io::Error| Error::Io {
            path: path.clone(),
            source,
        };
        let map = MappedFile::open(path).map_err(io_error)?;
        let state = std::fs::metadata(path)
            .and_then(|meta| super::state(&meta))
            .map_err(io_error)?;
        let (data_start, header) = read_header(path, &map)?;
        // In name order, so that of several errors always the same one is reported.
        for (name, info) in header.tensors().into_iter().collect::<BTreeMap<_, _>>() {
            let located = locate(path, &name, info, shard, data_start)?;
            if let Some(first) = tensors.insert(name.clone(), located) {
                return Err(Error::Duplicate {
                    tensor: name,
                    first: files[first.shard].clone(),
                    second: path.clone(),
                });
            }
        }
        shards.push(Shard { map, state });
    }
    Ok(Found {
        shards,
        tensors,
        notes: Vec::new(),
    })
}

fn locate(
    path: &Path,
    name: &str,
    info: &TensorInfo,
    shard: usize,
    data_start: usize,
) -> Result<Located, Error> {
    let dtype = match info.dtype {
        safetensors::Dtype::BF16 => Dtype::Bf16,
        safetensors::Dtype::F16 => Dtype::F16,
        safetensors::Dtype::F32 => Dtype::F32,
        other => {
            return Err(Error::UnsupportedDtype {
                path: path.to_path_buf(),
                tensor: name.to_owned(),
                found: other.to_string(),
            });
        }
    };
    // In range: `read_metadata` checked that the offsets tile the file exactly.
    let (begin, end) = info.data_offsets;
    Ok(Located {
        shape: info.shape.clone(),
        dtype,
        shard,
        begin: data_start + begin,
        end: data_start + end,
    })
}

/// The offset of the data and the header. The crate's own length check names neither
/// file nor sizes, so a wrong length is measured here.
fn read_header(path: &Path, map: &MappedFile) -> Result<(usize, Metadata), Error> {
    let found = map.len() as u64;
    let truncated = |expected: u64, exact: bool| Error::Truncated {
        path: path.to_path_buf(),
        expected,
        exact,
        found,
    };
    let Some((length, rest)) = map.split_first_chunk::<8>() else {
        return Err(truncated(8, false));
    };
    match SafeTensors::read_metadata(map) {
        Ok((header_len, metadata)) => Ok((8 + header_len, metadata)),
        Err(SafeTensorError::InvalidHeaderLength) => Err(truncated(
            u64::from_le_bytes(*length).saturating_add(8),
            false,
        )),
        Err(source @ SafeTensorError::MetadataIncompleteBuffer) => {
            let header_len = u64::from_le_bytes(*length);
            let data = usize::try_from(header_len)
                .ok()
                .and_then(|n| rest.get(..n))
                .and_then(last_offset);
            match data.map(|end| end.saturating_add(header_len).saturating_add(8)) {
                Some(expected) if expected > found => Err(truncated(expected, true)),
                Some(expected) if expected < found => Err(Error::TrailingBytes {
                    path: path.to_path_buf(),
                    expected,
                    found,
                }),
                _ => Err(Error::Header {
                    path: path.to_path_buf(),
                    source,
                }),
            }
        }
        Err(source) => Err(Error::Header {
            path: path.to_path_buf(),
            source,
        }),
    }
}

fn last_offset(header: &[u8]) -> Option<u64> {
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).ok()?;
    header
        .values()
        .filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64())
        .max()
}
