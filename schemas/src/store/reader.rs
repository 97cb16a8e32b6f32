//! Opening and checking a complete store.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use half::f16;
use sha2::{Digest, Sha256};

use super::manifest::{FORMAT, Record};
use super::{DenseElem, DenseRecord, LutRecord, MANIFEST, Manifest, StoreError, at};
use crate::hex;
use crate::lut::{HEADER_LEN, LutMatrix, LutShape};
use crate::mapped::MappedFile;

/// A complete store.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    manifest: Manifest,
}

/// Where the parts of a matrix lie, for readers that copy or map them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLut {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Bits per index.
    pub bits: u8,
    /// Rows per table.
    pub group_rows: usize,
    /// Rows that an index stands for.
    pub vector: usize,
    /// The file.
    pub path: PathBuf,
    /// Offset and length in bytes of the f16 tables.
    pub tables: (u64, u64),
    /// Offset and length in bytes of the packed indices.
    pub indices: (u64, u64),
}

/// Where a dense tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredDense {
    /// Element type.
    pub elem: DenseElem,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The file.
    pub path: PathBuf,
    /// Offset in bytes of the data.
    pub offset: u64,
    /// Length in bytes of the data.
    pub len: u64,
}

impl Store {
    /// Opens a complete store and checks that every file is there with its recorded
    /// length, and that the headers of the matrices agree with the manifest. The
    /// contents are checked by [`Store::verify`].
    ///
    /// # Errors
    /// [`StoreError::Incomplete`] for an unfinished store; otherwise the first file that
    /// is missing or not what the manifest says.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join(MANIFEST);
        let manifest = match fs::read(&path) {
            Ok(json) => parse_manifest(&path, &json)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound && dir.is_dir() => {
                return Err(StoreError::Incomplete {
                    dir: dir.to_path_buf(),
                });
            }
            Err(e) => return Err(at(path)(e)),
        };
        for record in &manifest.matrices {
            check_lut(dir, record)?;
        }
        for record in &manifest.dense {
            check_record(dir, record, &path)?;
        }
        for file in &manifest.files {
            check_file_name(&file.name)?;
            check_len(&dir.join(&file.name), file.bytes)?;
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            manifest,
        })
    }

    /// Compares the contents of every file with its recorded digest.
    ///
    /// # Errors
    /// [`StoreError::Digest`] for the first file that was changed.
    pub fn verify(&self) -> Result<(), StoreError> {
        let matrices = self.manifest.matrices.iter();
        let dense = self.manifest.dense.iter();
        let files = self.manifest.files.iter();
        matrices
            .map(|r| (data_path(&self.dir, r), &r.sha256))
            .chain(dense.map(|r| (data_path(&self.dir, r), &r.sha256)))
            .chain(files.map(|f| (self.dir.join(&f.name), &f.sha256)))
            .try_for_each(|(path, sha256)| check_digest(&path, sha256))
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// All that `store.json` says.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where the matrix `name` lies.
    ///
    /// # Errors
    /// [`StoreError::Missing`].
    pub fn lut(&self, name: &str) -> Result<StoredLut, StoreError> {
        let record = self.find(&self.manifest.matrices, "matrix", name)?;
        let path = data_path(&self.dir, record);
        let shape = record.shape().map_err(|source| StoreError::Lut {
            path: path.clone(),
            source,
        })?;
        Ok(StoredLut {
            rows: shape.rows,
            cols: shape.cols,
            bits: shape.bits,
            group_rows: shape.group_rows,
            vector: shape.vector,
            path,
            tables: (shape.tables_offset(), shape.tables_len() as u64),
            indices: (shape.indices_offset(), shape.indices_len() as u64),
        })
    }

    /// Reads the matrix `name`.
    ///
    /// # Errors
    /// [`StoreError::Missing`], or a file that is not a matrix any more.
    pub fn load_lut(&self, name: &str) -> Result<LutMatrix, StoreError> {
        let record = self.find(&self.manifest.matrices, "matrix", name)?;
        let path = data_path(&self.dir, record);
        let bytes = MappedFile::open(&path).map_err(at(&path))?;
        LutMatrix::from_bytes(&bytes).map_err(|source| StoreError::Lut { path, source })
    }

    /// Where the dense tensor `name` lies.
    ///
    /// # Errors
    /// [`StoreError::Missing`].
    pub fn dense(&self, name: &str) -> Result<StoredDense, StoreError> {
        let record = self.find(&self.manifest.dense, "dense tensor", name)?;
        Ok(StoredDense {
            elem: record.elem,
            shape: record.shape.clone(),
            path: data_path(&self.dir, record),
            offset: 0,
            len: record.bytes,
        })
    }

    /// Reads the dense tensor `name`, widened to f32; returns its shape too. Integers are
    /// multiplied by the factors of their rows, [`DenseRecord::scales`].
    ///
    /// # Errors
    /// [`StoreError::Missing`], or any I/O error.
    pub fn dense_f32(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), StoreError> {
        let stored = self.dense(name)?;
        let bytes = MappedFile::open(&stored.path).map_err(at(&stored.path))?;
        let values = match stored.elem {
            DenseElem::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            DenseElem::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            DenseElem::I8 => {
                let scales = self.scales(name, &stored)?;
                let cols = stored.shape.iter().skip(1).product::<usize>().max(1);
                let rows = bytes.chunks_exact(cols).zip(&scales);
                let scaled = |b: &u8, scale: &f32| f32::from(b.cast_signed()) * scale;
                rows.flat_map(|(row, scale)| row.iter().map(move |b| scaled(b, scale)))
                    .collect()
            }
        };
        Ok((stored.shape, values))
    }

    /// The factors of the rows of a tensor of integers.
    fn scales(&self, name: &str, of: &StoredDense) -> Result<Vec<f32>, StoreError> {
        let scales = DenseRecord::scales(name);
        let stored = self.dense(&scales)?;
        let rows = of.shape.first().copied().unwrap_or(0);
        if stored.elem != DenseElem::F16 || stored.shape != [rows] {
            return Err(StoreError::Record {
                name: scales,
                path: stored.path,
                what: format!(
                    "expected {rows} f16 factors for the rows of `{name}`, found {:?} of {:?}",
                    stored.elem, stored.shape
                ),
            });
        }
        Ok(self.dense_f32(&scales)?.1)
    }

    fn find<'a, R: Record>(
        &self,
        sorted: &'a [R],
        kind: &'static str,
        name: &str,
    ) -> Result<&'a R, StoreError> {
        match sorted.binary_search_by(|r| r.name().cmp(name)) {
            Ok(at) => Ok(&sorted[at]),
            Err(_) => Err(StoreError::Missing {
                dir: self.dir.clone(),
                kind,
                name: name.to_string(),
            }),
        }
    }
}

pub(super) fn parse_manifest(path: &Path, json: &[u8]) -> Result<Manifest, StoreError> {
    let as_json = |source| StoreError::Json {
        path: path.to_path_buf(),
        source,
    };
    // The format first: a later version may have other fields.
    let value: serde_json::Value = serde_json::from_slice(json).map_err(as_json)?;
    let found = value.get("format").and_then(serde_json::Value::as_str);
    if found != Some(FORMAT) {
        return Err(StoreError::Format {
            path: path.to_path_buf(),
            expected: FORMAT.to_string(),
            found: found.unwrap_or("none").to_string(),
        });
    }
    let manifest: Manifest = serde_json::from_value(value).map_err(as_json)?;
    check_sorted(path, manifest.matrices.iter().map(|r| r.name.as_str()))?;
    check_sorted(path, manifest.dense.iter().map(|r| r.name.as_str()))?;
    check_sorted(path, manifest.files.iter().map(|r| r.name.as_str()))?;
    Ok(manifest)
}

fn check_sorted<'a>(
    path: &Path,
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), StoreError> {
    let mut pairs = names.clone().zip(names.skip(1));
    match pairs.find(|(a, b)| a >= b) {
        None => Ok(()),
        Some((before, name)) => Err(StoreError::Record {
            name: name.to_string(),
            path: path.to_path_buf(),
            what: format!("listed after `{before}`, names must be sorted and unique"),
        }),
    }
}

pub(super) fn data_path<R: Record>(dir: &Path, record: &R) -> PathBuf {
    dir.join(R::FOLDER)
        .join(format!("{}.{}", record.key().as_str(), R::EXTENSION))
}

pub(super) fn check_record<R: Record>(
    dir: &Path,
    record: &R,
    recorded_in: &Path,
) -> Result<(), StoreError> {
    if let Some(what) = record.contradiction() {
        return Err(StoreError::Record {
            name: record.name().to_string(),
            path: recorded_in.to_path_buf(),
            what,
        });
    }
    check_len(&data_path(dir, record), record.bytes())
}

fn check_lut(dir: &Path, record: &LutRecord) -> Result<(), StoreError> {
    check_record(dir, record, &dir.join(MANIFEST))?;
    let path = data_path(dir, record);
    let mut header = [0; HEADER_LEN];
    File::open(&path)
        .and_then(|mut file| file.read_exact(&mut header))
        .map_err(at(&path))?;
    let as_lut = |source| StoreError::Lut {
        path: path.clone(),
        source,
    };
    let found = LutShape::read_header(&header, record.bytes).map_err(as_lut)?;
    let expected = record.shape().map_err(as_lut)?;
    if found == expected {
        Ok(())
    } else {
        Err(StoreError::Record {
            name: record.name.clone(),
            path,
            what: format!("the manifest says {expected:?}, the file {found:?}"),
        })
    }
}

fn check_len(path: &Path, expected: u64) -> Result<(), StoreError> {
    let meta = fs::metadata(path).map_err(at(path))?;
    if meta.is_file() && meta.len() == expected {
        Ok(())
    } else {
        Err(StoreError::Length {
            path: path.to_path_buf(),
            expected,
            found: meta.len(),
        })
    }
}

pub(super) fn check_digest(path: &Path, expected: &str) -> Result<(), StoreError> {
    let mut file = File::open(path).map_err(at(path))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(at(path))? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    let found = hex(&hash.finalize());
    if found == expected {
        Ok(())
    } else {
        Err(StoreError::Digest {
            path: path.to_path_buf(),
            expected: expected.to_string(),
            found,
        })
    }
}

/// Refuses names that would leave the folder or hide one of the store's own files.
pub(super) fn check_file_name(name: &str) -> Result<(), StoreError> {
    let why = if name.is_empty() || name.starts_with('.') {
        "it is empty or starts with a dot"
    } else if !name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    {
        "only letters, digits, `.`, `_` and `-` are allowed"
    } else if [MANIFEST, LutRecord::FOLDER, DenseRecord::FOLDER].contains(&name)
        || name.ends_with(crate::atomic::PARTIAL_SUFFIX)
    {
        "the store uses it itself"
    } else {
        return Ok(());
    };
    Err(StoreError::Name {
        kind: "file",
        name: name.to_string(),
        why,
    })
}
