//! Copying and hashing files of a folder.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use anemone_schemas::hex;
use anemone_schemas::manifest::{FileInfo, MANIFEST_FILE};
use sha2::{Digest, Sha256};

const SLAB: usize = 1 << 20;
/// Files of a folder under construction that the finished one does not have.
const NOT_CONTENT: [&str; 3] = ["steps.json", "steps.json.partial", "anemone.json.partial"];

/// Feeds `len` bytes from `offset` of a file to `sink`, a slab at a time.
pub(super) fn stream(
    path: &Path,
    offset: u64,
    len: u64,
    mut sink: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut buffer = vec![0; SLAB.min(usize::try_from(len).unwrap_or(SLAB).max(1))];
    let mut left = len;
    while left > 0 {
        let want = usize::try_from(left).map_or(buffer.len(), |l| l.min(buffer.len()));
        let got = file.read(&mut buffer[..want])?;
        if got == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("`{}` ends {left} bytes early", path.display()),
            ));
        }
        sink(&buffer[..got])?;
        left -= got as u64;
    }
    Ok(())
}

/// Copies a range of a file into a new file.
pub(super) fn copy_range(from: &Path, offset: u64, len: u64, to: &Path) -> io::Result<()> {
    let mut out = File::create_new(to)?;
    stream(from, offset, len, |slab| out.write_all(slab))?;
    out.sync_all()
}

/// Size and SHA-256 of a file.
pub(crate) fn file_info(path: &Path) -> io::Result<FileInfo> {
    let bytes = fs::metadata(path)?.len();
    let mut hash = Sha256::new();
    stream(path, 0, bytes, |slab| {
        hash.update(slab);
        Ok(())
    })?;
    Ok(FileInfo {
        bytes,
        sha256: hex(&hash.finalize()),
    })
}

/// Relative paths of all regular files below `folder`, sorted, with `/` between
/// components.
pub(crate) fn list(folder: &Path) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut open = vec![String::new()];
    while let Some(prefix) = open.pop() {
        for entry in fs::read_dir(folder.join(&prefix))? {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|n| {
                io::Error::other(format!("file name `{}` is not UTF-8", n.display()))
            })?;
            let path = if prefix.is_empty() {
                name
            } else {
                format!("{prefix}/{name}")
            };
            if entry.file_type()?.is_dir() {
                open.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Digests of every file below `folder` but the manifest and what is half-written;
/// those in `known` are taken as they are.
pub(super) fn digest_folder(
    folder: &Path,
    known: &BTreeMap<String, FileInfo>,
) -> io::Result<BTreeMap<String, FileInfo>> {
    list(folder)?
        .into_iter()
        .filter(|path| path != MANIFEST_FILE && !NOT_CONTENT.contains(&path.as_str()))
        .map(|path| {
            let info = match known.get(&path) {
                Some(info) => info.clone(),
                None => file_info(&folder.join(&path))?,
            };
            Ok((path, info))
        })
        .collect()
}
