//! Outputs appear whole or not at all: everything is written beside its final
//! name and renamed into place.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Suffix of files and folders that are still being written.
pub const PARTIAL_SUFFIX: &str = ".partial";

/// The name under which `path` is built before it is renamed.
pub fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(PARTIAL_SUFFIX);
    path.with_file_name(name)
}

/// Writes a file through `fill` and renames it into place after an fsync.
///
/// # Errors
/// Any I/O error, or the error of `fill`; the partial file is removed then.
pub fn write_file<E: From<io::Error>>(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
) -> Result<(), E> {
    let partial = partial_path(path);
    let written = (|| {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&partial)?);
        fill(&mut out)?;
        out.flush()?;
        out.get_ref().sync_all()?;
        Ok(())
    })();
    match written {
        Ok(()) => fs::rename(&partial, path).map_err(E::from),
        Err(e) => {
            let _ = fs::remove_file(&partial);
            Err(e)
        }
    }
}

/// Writes `bytes` as a whole file.
///
/// # Errors
/// Any I/O error.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_file(path, |out| out.write_all(bytes))
}

/// A folder under construction: `name.partial` until [`AtomicDir::commit`].
/// Dropped without a commit, it is removed.
#[derive(Debug)]
pub struct AtomicDir {
    target: PathBuf,
    partial: PathBuf,
    done: bool,
}

impl AtomicDir {
    /// Starts an empty folder that will become `target`, which must not exist
    /// or be empty. What an interrupted run left under the partial name is removed.
    ///
    /// # Errors
    /// `AlreadyExists` if `target` holds anything, or any I/O error.
    pub fn create(target: &Path) -> io::Result<Self> {
        if target.exists() && fs::read_dir(target)?.next().is_some() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("`{}` exists and is not empty", target.display()),
            ));
        }
        let partial = partial_path(target);
        if partial.exists() {
            fs::remove_dir_all(&partial)?;
        }
        fs::create_dir_all(&partial)?;
        Ok(Self {
            target: target.to_path_buf(),
            partial,
            done: false,
        })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Renames the folder to its final name.
    ///
    /// # Errors
    /// Any I/O error; the folder is removed then.
    pub fn commit(mut self) -> io::Result<()> {
        if self.target.exists() {
            fs::remove_dir(&self.target)?;
        }
        fs::rename(&self.partial, &self.target)?;
        self.done = true;
        Ok(())
    }
}

impl Drop for AtomicDir {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let failed = write_file(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("stop"))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_uncommitted_folder_leaves_nothing_and_a_full_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let staged = AtomicDir::create(&target).unwrap();
        write_bytes(&staged.path().join("x"), b"1").unwrap();
        drop(staged);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let staged = AtomicDir::create(&target).unwrap();
        write_bytes(&staged.path().join("x"), b"1").unwrap();
        staged.commit().unwrap();
        assert_eq!(fs::read(target.join("x")).unwrap(), b"1");
        let refused = AtomicDir::create(&target).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
    }
}
