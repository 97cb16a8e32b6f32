//! Read-only memory maps: the one place of the workspace that maps files.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

/// A whole file mapped read-only. Cloning shares the map.
#[derive(Clone)]
pub struct MappedFile {
    map: Option<Arc<Mmap>>,
    path: Arc<PathBuf>,
}

impl MappedFile {
    /// Maps `path`. An empty file gives an empty slice; anything but a regular
    /// file (after following symlinks) is refused.
    ///
    /// # Errors
    /// Any error of opening, inspecting or mapping the file.
    #[allow(unsafe_code, reason = "the one mmap constructor")]
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        let map = if meta.len() == 0 {
            None
        } else {
            // SAFETY: the map is private and read-only, so this process never
            // writes through it. Another process may still truncate the file, in
            // which case a read raises SIGBUS: all our writers therefore replace
            // files by rename and never in place, and long readers compare length
            // and modification time before they trust a result.
            Some(Arc::new(unsafe { Mmap::map(&file)? }))
        };
        Ok(Self {
            map,
            path: Arc::new(path.to_path_buf()),
        })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().map_or(&[], |m| m)
    }
}

impl fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "MappedFile({}, {} bytes)",
            self.path.display(),
            self.len()
        )
    }
}
