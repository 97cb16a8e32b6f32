//! Filling a store, and resuming one that was interrupted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::manifest::{FORMAT, Record};
use super::reader::{check_digest, check_file_name, check_record, data_path, parse_manifest};
use super::{
    DenseElem, DenseRecord, FileRecord, Key, LutRecord, MANIFEST, Manifest, MatrixReport,
    Provenance, Store, StoreError, at,
};
use crate::atomic;
use crate::hex;
use crate::lut::LutMatrix;

/// A store that is being filled. Nothing but [`StoreWriter::finish`] makes it complete.
#[derive(Debug)]
pub struct StoreWriter {
    dir: PathBuf,
    provenance: Provenance,
    matrices: BTreeMap<String, LutRecord>,
    dense: BTreeMap<String, DenseRecord>,
    files: BTreeMap<String, FileRecord>,
}

impl StoreWriter {
    /// Starts a store in `dir`, which is made if need be. What an earlier run finished
    /// there stays and is found again by its key.
    ///
    /// # Errors
    /// [`StoreError::OtherStore`] if `dir` is complete but of another provenance, a
    /// manifest that can not be read, or any I/O error.
    pub fn create_or_resume(dir: &Path, provenance: Provenance) -> Result<Self, StoreError> {
        for folder in [LutRecord::FOLDER, DenseRecord::FOLDER] {
            let folder = dir.join(folder);
            fs::create_dir_all(&folder).map_err(at(folder))?;
        }
        let path = dir.join(MANIFEST);
        match fs::read(&path) {
            Ok(json) => {
                if parse_manifest(&path, &json)?.provenance != provenance {
                    return Err(StoreError::OtherStore {
                        dir: dir.to_path_buf(),
                    });
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(at(path)(e)),
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            provenance,
            matrices: BTreeMap::new(),
            dense: BTreeMap::new(),
            files: BTreeMap::new(),
        })
    }

    /// Whether an earlier run finished a matrix with this key. If so it is part of
    /// this store as `name`, and need not be put again. The file is hashed: a key that
    /// leads to damaged contents counts as not finished.
    ///
    /// # Errors
    /// An unusable name, or any I/O error but a missing file.
    pub fn has_lut(&mut self, name: &str, key: &Key) -> Result<bool, StoreError> {
        let Some(mut record) = self.find::<LutRecord>(name, key)? else {
            return Ok(false);
        };
        record.name = name.to_string();
        self.matrices.insert(name.to_string(), record);
        Ok(true)
    }

    /// The same for a dense tensor.
    ///
    /// # Errors
    /// As [`StoreWriter::has_lut`].
    pub fn has_dense(&mut self, name: &str, key: &Key) -> Result<bool, StoreError> {
        let Some(mut record) = self.find::<DenseRecord>(name, key)? else {
            return Ok(false);
        };
        record.name = name.to_string();
        self.dense.insert(name.to_string(), record);
        Ok(true)
    }

    /// Writes a matrix. Once this returns, a later run finds it by `key`.
    ///
    /// # Errors
    /// An unusable name, a report with numbers that are not finite, or any I/O error.
    pub fn put_lut(
        &mut self,
        name: &str,
        key: &Key,
        matrix: &LutMatrix,
        report: MatrixReport,
    ) -> Result<(), StoreError> {
        let numbers = [
            report.plain_error,
            report.weighted_error,
            report.damping.unwrap_or(0.0),
        ];
        let mut record = LutRecord {
            name: name.to_string(),
            key: key.clone(),
            bytes: 0,
            sha256: String::new(),
            rows: matrix.rows,
            cols: matrix.cols,
            bits: matrix.bits,
            group_rows: matrix.group_rows,
            vector: matrix.vector,
            report,
        };
        let path = data_path(&self.dir, &record);
        if let Some(number) = numbers.iter().find(|n| !n.is_finite()) {
            return Err(StoreError::Record {
                name: name.to_string(),
                path,
                what: format!("its report holds {number}, expected finite numbers"),
            });
        }
        (record.bytes, record.sha256) = write_hashed(&path, |out| matrix.write_to(out))?;
        self.seal(&record)?;
        self.matrices.insert(name.to_string(), record);
        Ok(())
    }

    /// Writes a dense tensor through `fill`, which hands its little-endian elements to
    /// the writer in as many pieces as it likes.
    ///
    /// # Errors
    /// An unusable name, a `fill` that writes another number of bytes than the shape
    /// asks for, or any I/O error.
    pub fn put_dense(
        &mut self,
        name: &str,
        key: &Key,
        elem: DenseElem,
        shape: &[usize],
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(), StoreError> {
        let mut record = DenseRecord {
            name: name.to_string(),
            key: key.clone(),
            bytes: 0,
            sha256: String::new(),
            elem,
            shape: shape.to_vec(),
        };
        let path = data_path(&self.dir, &record);
        (record.bytes, record.sha256) = write_hashed(&path, |out| fill(out))?;
        if let Err(e) = self.seal(&record) {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        self.dense.insert(name.to_string(), record);
        Ok(())
    }

    /// Copies a file of the checkpoint into the store.
    ///
    /// # Errors
    /// A name with folders in it or one the store uses itself, or any I/O error.
    pub fn put_file(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        check_file_name(name)?;
        let path = self.dir.join(name);
        let (bytes, sha256) = write_hashed(&path, |out| out.write_all(bytes))?;
        let record = FileRecord {
            name: name.to_string(),
            bytes,
            sha256,
        };
        self.files.insert(name.to_string(), record);
        Ok(())
    }

    /// Writes the manifest, drops what other runs left behind and opens the store.
    ///
    /// # Errors
    /// Any I/O error, or whatever [`Store::open`] finds.
    pub fn finish(self) -> Result<Store, StoreError> {
        let manifest = Manifest {
            format: FORMAT.to_string(),
            provenance: self.provenance,
            matrices: self.matrices.into_values().collect(),
            dense: self.dense.into_values().collect(),
            files: self.files.into_values().collect(),
        };
        write_json(&self.dir.join(MANIFEST), &manifest)?;
        remove_others(&self.dir, &manifest.matrices)?;
        remove_others(&self.dir, &manifest.dense)?;
        Store::open(&self.dir)
    }

    fn find<R: Record>(&self, name: &str, key: &Key) -> Result<Option<R>, StoreError> {
        check_tensor_name(name)?;
        let path = record_path::<R>(&self.dir, key);
        let json = match fs::read(&path) {
            Ok(json) => json,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(at(path)(e)),
        };
        let Ok(record) = serde_json::from_slice::<R>(&json) else {
            return Ok(None);
        };
        let intact = record.key() == key
            && check_record(&self.dir, &record, &path).is_ok()
            && check_digest(&data_path(&self.dir, &record), record.sha256()).is_ok();
        Ok(intact.then_some(record))
    }

    /// Checks a record against its file and writes it: from here on the file counts.
    fn seal<R: Record>(&self, record: &R) -> Result<(), StoreError> {
        check_tensor_name(record.name())?;
        let path = record_path::<R>(&self.dir, record.key());
        check_record(&self.dir, record, &path)?;
        write_json(&path, record)
    }
}

fn record_path<R: Record>(dir: &Path, key: &Key) -> PathBuf {
    dir.join(R::FOLDER).join(format!("{}.json", key.as_str()))
}

fn check_tensor_name(name: &str) -> Result<(), StoreError> {
    if !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(());
    }
    Err(StoreError::Name {
        kind: "tensor",
        name: name.to_string(),
        why: "it is empty or has characters that are not visible ASCII",
    })
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), StoreError> {
    let mut json = serde_json::to_vec_pretty(value).map_err(|source| StoreError::Json {
        path: path.to_path_buf(),
        source,
    })?;
    json.push(b'\n');
    atomic::write_bytes(path, &json).map_err(at(path))
}

/// Writes a file and returns its length and SHA-256.
fn write_hashed(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(u64, String), StoreError> {
    let mut digest = (0, String::new());
    atomic::write_file(path, |out| {
        let mut hashing = Hashing {
            out,
            hash: Sha256::new(),
            bytes: 0,
        };
        fill(&mut hashing)?;
        digest = (hashing.bytes, hex(&hashing.hash.finalize()));
        Ok(())
    })
    .map_err(at(path))?;
    Ok(digest)
}

struct Hashing<W> {
    out: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hash.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Removes files of a tensor folder that the manifest does not name: matrices of
/// other settings and what interrupted writes left.
fn remove_others<R: Record>(dir: &Path, records: &[R]) -> Result<(), StoreError> {
    let keys: BTreeSet<&str> = records.iter().map(|r| r.key().as_str()).collect();
    let folder = dir.join(R::FOLDER);
    for entry in fs::read_dir(&folder).map_err(at(&folder))? {
        let path = entry.map_err(at(&folder))?.path();
        let kept = path.file_name().and_then(|n| n.to_str()).is_some_and(|n| {
            n.rsplit_once('.').is_some_and(|(key, extension)| {
                keys.contains(key) && ["json", R::EXTENSION].contains(&extension)
            })
        });
        if !kept {
            fs::remove_file(&path).map_err(at(&path))?;
        }
    }
    Ok(())
}
