//! Where a drafter's files are made and how they come into a model folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anemone_schemas::atomic::{AtomicDir, PARTIAL_SUFFIX};
use anemone_schemas::manifest::{MANIFEST_FILE, Manifest};

use super::super::files::{file_info, list};
use super::{EMBEDDING_FILE, PROGRAM};
use crate::error::Error;

/// A model folder about to get a drafter.
#[derive(Debug)]
pub(super) struct Place {
    folder: PathBuf,
    /// The new folder, if the model folder is not changed in place.
    staged: Option<(AtomicDir, PathBuf)>,
    scratch: Scratch,
}

/// A folder beside the model folder, removed in the end.
#[derive(Debug)]
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Place {
    /// Makes the scratch folder and, for another output, a copy of the model folder
    /// without its drafter: hard links where the file system has them, since no file of
    /// a folder is ever changed in place.
    pub(super) fn prepare(target: &Path, output: Option<&Path>) -> Result<Self, Error> {
        let beside = output.unwrap_or(target);
        let mut name = beside.file_name().unwrap_or_default().to_os_string();
        name.push(".drafter");
        name.push(PARTIAL_SUFFIX);
        let scratch = beside.with_file_name(name);
        if scratch.exists() {
            fs::remove_dir_all(&scratch).map_err(|e| Error::io(&scratch, &e))?;
        }
        fs::create_dir_all(&scratch).map_err(|e| Error::io(&scratch, &e))?;
        let scratch = Scratch(scratch);
        let Some(output) = output else {
            return Ok(Self {
                folder: target.to_path_buf(),
                staged: None,
                scratch,
            });
        };
        let staged = AtomicDir::create(output).map_err(|e| {
            Error::usage(e.to_string()).hint("choose another output folder, or pass `--overwrite`")
        })?;
        let files = list(target).map_err(|e| Error::io(target, &e))?;
        for file in files
            .iter()
            .filter(|f| !is_drafters(f) && *f != MANIFEST_FILE)
        {
            let (from, to) = (target.join(file), staged.path().join(file));
            link(&from, &to).map_err(|e| Error::io(&from, &e))?;
        }
        Ok(Self {
            folder: staged.path().to_path_buf(),
            staged: Some((staged, output.to_path_buf())),
            scratch,
        })
    }

    /// Where the new files are made, under the names they will have.
    pub(super) fn scratch(&self) -> &Path {
        &self.scratch.0
    }

    /// Moves the new files in and replaces the manifest. If that is interrupted, the
    /// folder has no drafter, or does not verify.
    pub(super) fn install(self, mut manifest: Manifest) -> Result<Manifest, Error> {
        let folder = &self.folder;
        manifest.files.retain(|path, _| !is_drafters(path));
        if self.staged.is_none() {
            let without = Manifest {
                drafter: None,
                ..manifest.clone()
            };
            without.write(folder).map_err(|e| Error::io(folder, &e))?;
        }
        let old = [folder.join(PROGRAM), folder.join(EMBEDDING_FILE)];
        for path in &old {
            let removed = if path.is_dir() {
                fs::remove_dir_all(path)
            } else if path.exists() {
                fs::remove_file(path)
            } else {
                Ok(())
            };
            removed.map_err(|e| Error::io(path, &e))?;
        }
        for name in [PROGRAM, EMBEDDING_FILE] {
            let made = self.scratch.0.join(name);
            if made.exists() {
                fs::rename(&made, folder.join(name)).map_err(|e| Error::io(&made, &e))?;
            }
        }
        for path in list(folder).map_err(|e| Error::io(folder, &e))? {
            if is_drafters(&path) {
                let file = folder.join(&path);
                let info = file_info(&file).map_err(|e| Error::io(&file, &e))?;
                manifest.files.insert(path, info);
            }
        }
        manifest.write(folder).map_err(|e| Error::io(folder, &e))?;
        if let Some((staged, output)) = self.staged {
            staged.commit().map_err(|e| Error::io(&output, &e))?;
        }
        Ok(manifest)
    }
}

/// Whether a file of a model folder belongs to its drafter.
fn is_drafters(path: &str) -> bool {
    path == EMBEDDING_FILE || path.split('/').next() == Some(PROGRAM)
}

fn link(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop))
}
