//! A folder that is built in steps and survives a kill between any two of them.
//!
//! Everything is written below `NAME.partial`, beside a record of the steps that are
//! finished: their files with sizes and digests, under the key of the whole job (a hash
//! of all that determines the bytes). A later run with the same key takes over every
//! step whose files still have their digests; another key finds nothing of use and
//! begins anew. Only the finished folder gets its final name, without the record.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anemone_schemas::atomic::{self, partial_path};
use anemone_schemas::manifest::FileInfo;
use serde::{Deserialize, Serialize};

use crate::commands::files::{file_info, list};
use crate::error::Error;

/// Record of finished steps in the partial folder.
const RECORD: &str = "steps.json";

/// A folder under construction. Dropped without a commit, it stays for the next run.
#[derive(Debug)]
pub struct Work {
    target: PathBuf,
    partial: PathBuf,
    record: Record,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Record {
    key: String,
    /// Files by step.
    steps: BTreeMap<String, BTreeMap<String, FileInfo>>,
}

impl Work {
    /// Starts a folder that will become `target`, or goes on with one of the same key.
    ///
    /// # Errors
    /// If `target` holds anything, or it cannot be written.
    pub fn open(target: &Path, key: &str) -> Result<Self, Error> {
        let taken = fs::read_dir(target).is_ok_and(|mut d| d.next().is_some());
        if taken {
            return Err(
                Error::usage(format!("`{}` exists and is not empty", target.display()))
                    .hint("choose another output folder, or pass `--overwrite`"),
            );
        }
        let partial = partial_path(target);
        let found: Option<Record> = fs::read(partial.join(RECORD))
            .ok()
            .and_then(|json| serde_json::from_slice(&json).ok());
        let record = if let Some(record) = found.filter(|record| record.key == key) {
            record
        } else {
            if partial.exists() {
                fs::remove_dir_all(&partial).map_err(|e| Error::io(&partial, &e))?;
            }
            fs::create_dir_all(&partial).map_err(|e| Error::io(&partial, &e))?;
            Record {
                key: key.to_string(),
                steps: BTreeMap::new(),
            }
        };
        let work = Self {
            target: target.to_path_buf(),
            partial,
            record,
        };
        work.save()?;
        Ok(work)
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Whether an earlier run finished the step that makes the file or folder `name`.
    /// If not, what it left of it is removed.
    ///
    /// # Errors
    /// If leftovers cannot be removed.
    pub fn has(&mut self, name: &str) -> Result<bool, Error> {
        if let Some(files) = self.record.steps.get(name) {
            let intact = |(path, info): (&String, &FileInfo)| {
                file_info(&self.partial.join(path)).is_ok_and(|found| found == *info)
            };
            if files.iter().all(intact) {
                return Ok(true);
            }
            self.record.steps.remove(name);
            self.save()?;
        }
        let path = self.partial.join(name);
        let removed = match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_dir() => fs::remove_dir_all(&path),
            Ok(_) => fs::remove_file(&path),
            Err(_) => Ok(()),
        };
        removed.map_err(|e| Error::io(&path, &e))?;
        Ok(false)
    }

    /// Records that the file or folder `name` is finished.
    ///
    /// # Errors
    /// If it cannot be read back or the record cannot be written.
    pub fn finished(&mut self, name: &str) -> Result<(), Error> {
        let path = self.partial.join(name);
        let at = |e: io::Error| Error::io(&path, &e);
        let mut files = BTreeMap::new();
        if path.is_dir() {
            for inner in list(&path).map_err(at)? {
                let info = settled(&path.join(&inner)).map_err(at)?;
                files.insert(format!("{name}/{inner}"), info);
            }
        } else {
            files.insert(name.to_string(), settled(&path).map_err(at)?);
        }
        self.record.steps.insert(name.to_string(), files);
        self.save()
    }

    /// Sizes and digests of the files of all finished steps.
    pub fn files(&self) -> BTreeMap<String, FileInfo> {
        let steps = self.record.steps.values();
        steps.flat_map(BTreeMap::clone).collect()
    }

    /// Gives the folder its final name.
    ///
    /// # Errors
    /// Any I/O error.
    pub fn commit(self) -> Result<(), Error> {
        let at = |e: io::Error| Error::io(&self.target, &e);
        let record = self.partial.join(RECORD);
        fs::remove_file(&record).map_err(|e| Error::io(&record, &e))?;
        if self.target.exists() {
            fs::remove_dir(&self.target).map_err(at)?;
        }
        fs::rename(&self.partial, &self.target).map_err(at)?;
        // The rename itself is on disk once the folder around it is.
        if let Some(parent) = self.target.parent().filter(|p| !p.as_os_str().is_empty()) {
            File::open(parent)
                .and_then(|dir| dir.sync_all())
                .map_err(at)?;
        }
        Ok(())
    }

    fn save(&self) -> Result<(), Error> {
        let path = self.partial.join(RECORD);
        let json = serde_json::to_vec(&self.record).map_err(|e| Error::unexpected(&e))?;
        atomic::write_bytes(&path, &json).map_err(|e| Error::io(&path, &e))
    }
}

/// Digest of a file that is on disk for good.
fn settled(path: &Path) -> io::Result<FileInfo> {
    File::open(path)?.sync_all()?;
    file_info(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_steps_are_taken_over_and_damaged_or_unfinished_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let mut work = Work::open(&target, "key").unwrap();
        for name in ["a", "b", "c"] {
            assert!(!work.has(name).unwrap());
            fs::create_dir(work.path().join(name)).unwrap();
            fs::write(work.path().join(name).join("x"), name).unwrap();
            if name != "c" {
                work.finished(name).unwrap();
            }
        }
        drop(work);
        assert!(!target.exists());
        fs::write(partial_path(&target).join("b/x"), "B").unwrap();

        let mut work = Work::open(&target, "key").unwrap();
        let has: Vec<bool> = ["a", "b", "c"].map(|n| work.has(n).unwrap()).into();
        assert_eq!(has, [true, false, false]);
        assert!(!work.path().join("c").exists());
        assert_eq!(work.files().into_keys().collect::<Vec<_>>(), ["a/x"]);
        work.commit().unwrap();
        assert_eq!(fs::read_dir(&target).unwrap().count(), 1);

        let refused = Work::open(&target, "key").unwrap_err();
        assert!(refused.message.contains("not empty"), "{refused}");
    }

    #[test]
    fn another_key_takes_over_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let mut work = Work::open(&target, "key").unwrap();
        fs::write(work.path().join("a"), "1").unwrap();
        work.finished("a").unwrap();
        let mut other = Work::open(&target, "other").unwrap();
        assert!(!other.has("a").unwrap());
        assert!(!other.path().join("a").exists());
    }
}
