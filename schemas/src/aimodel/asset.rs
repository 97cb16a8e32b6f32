//! The `.aimodel` folder: the program, its digest and a description.
//!
//! | file | contents |
//! |---|---|
//! | `main.mlirb` | the program as MLIR bytecode |
//! | `main.hash` | SHA-256 of it, 32 raw bytes |
//! | `metadata.json` | version, producer and what the author says |

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::check::{CheckError, check};
use super::decode::{DecodeError, decode};
use super::encode::{EncodeError, encode};
use super::ir::Module;
use super::limits::MAX_METADATA;
use crate::atomic::{self, AtomicDir};
use crate::hex;
use crate::mapped::MappedFile;

const PROGRAM: &str = "main.mlirb";
const DIGEST: &str = "main.hash";
const METADATA: &str = "metadata.json";
/// Bytes of a SHA-256.
const DIGEST_LEN: usize = 32;
/// Version of the folder that this module writes.
const ASSET_VERSION: &str = "2.0";
/// Versions that Apple's loader reads.
const READABLE_VERSIONS: [&str; 2] = ["2.0", "2.1"];

/// Why an asset could not be written or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AssetError {
    /// A file could not be read or written.
    #[error("`{path}`: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// The program breaks a rule of the dialect, so it was not written.
    #[error("the program for `{path}` is wrong: {source}")]
    Check {
        /// The asset.
        path: PathBuf,
        /// The rule.
        source: CheckError,
    },
    /// The program could not be encoded.
    #[error("cannot write `{path}`: {source}")]
    Encode {
        /// The asset.
        path: PathBuf,
        /// What went wrong.
        source: EncodeError,
    },
    /// The program could not be decoded.
    #[error("`{path}`: {source}")]
    Decode {
        /// The program file.
        path: PathBuf,
        /// What is wrong, and where.
        source: DecodeError,
    },
    /// The program is not the one the digest was made of.
    #[error(
        "`{path}`: at byte {offset}: {digest} is not the SHA-256 of `{}`, which is {found}; the \
         asset is damaged, copy it again", program.display()
    )]
    Digest {
        /// The digest file.
        path: PathBuf,
        /// Its first byte that is wrong, missing or too many.
        offset: u64,
        /// What it holds, in hexadecimal.
        digest: String,
        /// The program file.
        program: PathBuf,
        /// SHA-256 of the program file, in hexadecimal.
        found: String,
    },
    /// `metadata.json` cannot be used.
    #[error("`{path}`: {problem}")]
    Metadata {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// `metadata.json` without its version. Every part is optional.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Name and version of the writing program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub producer: Option<String>,
    /// `YYYYMMDDTHHMMSSZ`, in UTC. Left out unless the caller has a date that does
    /// not change from run to run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub creation_date: Option<String>,
    /// Author.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub author: Option<String>,
    /// License.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub license: Option<String>,
    /// Description.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Anything else, by name.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub creator_defined_metadata: serde_json::Map<String, serde_json::Value>,
}

/// The whole of `metadata.json`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct MetadataFile<'a> {
    asset_version: &'static str,
    #[serde(flatten)]
    metadata: &'a Metadata,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssetInfo {
    /// Length of the program file.
    pub bytes: u64,
    /// SHA-256 of the program file, in hexadecimal.
    pub sha256: String,
}

/// Checks a program and writes it as an asset, whole or not at all. `dir` must
/// not exist or be empty; its name should end in `.aimodel`.
pub fn write_asset(dir: &Path, m: &Module, metadata: &Metadata) -> Result<AssetInfo, AssetError> {
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source| AssetError::Io { path, source }
    };
    check(m).map_err(|source| AssetError::Check {
        path: dir.to_path_buf(),
        source,
    })?;
    let staged = AtomicDir::create(dir).map_err(io(dir))?;
    let program = staged.path().join(PROGRAM);
    let mut bytes = 0;
    let mut digest = [0; 32];
    atomic::write_file(&program, |out| {
        let mut out = Hashing {
            inner: out,
            hash: Sha256::new(),
            bytes: 0,
        };
        encode(m, &mut out)?;
        bytes = out.bytes;
        digest = out.hash.finalize().into();
        Ok(())
    })
    .map_err(|source| AssetError::Encode {
        path: dir.to_path_buf(),
        source,
    })?;
    let path = staged.path().join(DIGEST);
    atomic::write_bytes(&path, &digest).map_err(io(&path))?;
    let path = staged.path().join(METADATA);
    let file = MetadataFile {
        asset_version: ASSET_VERSION,
        metadata,
    };
    let json = serde_json::to_vec_pretty(&file).map_err(|e| AssetError::Metadata {
        path: path.clone(),
        problem: e.to_string(),
    })?;
    atomic::write_bytes(&path, &json).map_err(io(&path))?;
    staged.commit().map_err(io(dir))?;
    Ok(AssetInfo {
        bytes,
        sha256: hex(&digest),
    })
}

/// Opens an asset as [`map_asset`] does and compares its digest, which reads the whole
/// program: for commands that check or copy it.
pub fn open_asset(dir: &Path) -> Result<Module, AssetError> {
    open(dir, true)
}

/// Opens an asset: maps the program and decodes it. Blobs stay in the map and are not
/// read, so this takes no longer for a large model than for a small one. A program
/// that is cut short or whose structure is damaged is refused; a flipped bit inside a
/// blob is found by [`open_asset`] only.
pub fn map_asset(dir: &Path) -> Result<Module, AssetError> {
    open(dir, false)
}

fn open(dir: &Path, whole: bool) -> Result<Module, AssetError> {
    read_metadata(dir)?;
    let path = dir.join(PROGRAM);
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source| AssetError::Io { path, source }
    };
    let file = MappedFile::open(&path).map_err(io(&path))?;
    let digest_path = dir.join(DIGEST);
    let digest = read_small(&digest_path, DIGEST_LEN + 1).map_err(io(&digest_path))?;
    if !whole {
        return decode(&file).map_err(|source| AssetError::Decode { path, source });
    }
    let found: [u8; DIGEST_LEN] = Sha256::digest(&file[..]).into();
    if digest != found {
        let same = digest.iter().zip(&found).take_while(|(a, b)| a == b);
        return Err(AssetError::Digest {
            offset: same.count() as u64,
            path: digest_path,
            digest: hex(&digest),
            program: path,
            found: hex(&found),
        });
    }
    decode(&file).map_err(|source| AssetError::Decode { path, source })
}

/// The first `most` bytes of a file.
fn read_small(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    fs::File::open(path)?
        .take(most as u64)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads `metadata.json` and refuses versions Apple's loader would not read.
pub fn read_metadata(dir: &Path) -> Result<Metadata, AssetError> {
    let path = dir.join(METADATA);
    let bytes = read_small(&path, MAX_METADATA + 1).map_err(|source| AssetError::Io {
        path: path.clone(),
        source,
    })?;
    let wrong = |problem: String| AssetError::Metadata {
        path: path.clone(),
        problem,
    };
    if bytes.len() > MAX_METADATA {
        return Err(wrong(format!("longer than {MAX_METADATA} bytes")));
    }
    let json: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| wrong(format!("not valid JSON: {e}")))?;
    match json.get("assetVersion") {
        Some(serde_json::Value::String(v)) if READABLE_VERSIONS.contains(&v.as_str()) => {}
        Some(other) => {
            return Err(wrong(format!(
                "`assetVersion` is {other}, expected one of {READABLE_VERSIONS:?}"
            )));
        }
        None => return Err(wrong("`assetVersion` is missing".into())),
    }
    serde_json::from_value(json).map_err(|e| wrong(e.to_string()))
}

/// Hashes and counts what passes through.
struct Hashing<W> {
    inner: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(buf)?;
        self.hash.update(&buf[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aimodel::build::{GraphBuilder, Input};
    use crate::aimodel::ir::{Attr, Elem, TensorType};
    use crate::aimodel::same::difference;

    fn program() -> Module {
        let mut m = Module::default();
        let x = Input::Tensor(TensorType::new(Elem::F16, &[2]));
        let mut g = GraphBuilder::new(&mut m, "f", &[("x", x)]);
        let y = g.silu(g.arg(0));
        g.finish(&[("y", y)], &[]);
        m
    }

    #[test]
    fn an_asset_opens_as_it_was_written_and_writes_the_same_bytes_again() {
        let dir = tempfile::tempdir().unwrap();
        let metadata = Metadata {
            producer: Some("anemone".into()),
            creation_date: Some("20270101T000000Z".into()),
            author: Some("someone".into()),
            ..Metadata::default()
        };
        let [a, b] = ["a.aimodel", "b.aimodel"].map(|n| dir.path().join(n));
        let info = write_asset(&a, &program(), &metadata).unwrap();
        let opened = open_asset(&a).unwrap();
        assert_eq!(difference(&program(), &opened), None);
        assert_eq!(read_metadata(&a).unwrap(), metadata);
        assert_eq!(info.bytes, fs::metadata(a.join(PROGRAM)).unwrap().len());
        assert_eq!(info.sha256, hex(&fs::read(a.join(DIGEST)).unwrap()));
        assert_eq!(write_asset(&b, &opened, &metadata).unwrap(), info);
        for file in [PROGRAM, DIGEST, METADATA] {
            assert_eq!(
                fs::read(a.join(file)).unwrap(),
                fs::read(b.join(file)).unwrap()
            );
        }
    }

    #[test]
    fn a_damaged_asset_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.aimodel");
        write_asset(&path, &program(), &Metadata::default()).unwrap();
        let good = fs::read(path.join(PROGRAM)).unwrap();
        let mut bad = good.clone();
        bad[100] ^= 1;
        fs::write(path.join(PROGRAM), bad).unwrap();
        let said = open_asset(&path).unwrap_err().to_string();
        assert!(said.contains("is not the SHA-256 of"), "{said}");
        fs::write(path.join(PROGRAM), &good[..good.len() - 1]).unwrap();
        let said = map_asset(&path).unwrap_err();
        assert!(matches!(said, AssetError::Decode { .. }), "{said}");
        fs::write(path.join(PROGRAM), good).unwrap();
        for (json, reason) in [
            ("{}", "`assetVersion` is missing"),
            (r#"{"assetVersion": "3.0"}"#, "expected one of"),
            (r#"{"assetVersion": 2}"#, "expected one of"),
            ("no", "not valid JSON"),
        ] {
            fs::write(path.join(METADATA), json).unwrap();
            let said = open_asset(&path).unwrap_err().to_string();
            assert!(said.contains(reason), "{said}");
        }
    }

    #[test]
    fn a_wrong_program_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.aimodel");
        let mut m = program();
        let graph = m.graphs[0];
        let name = m.add_attr(Attr::Unit);
        m.op_mut(graph).props.retain(|p| p.0 != "name");
        m.op_mut(graph).props.push(("name", name));
        let said = write_asset(&path, &m, &Metadata::default()).unwrap_err();
        assert!(matches!(said, AssetError::Check { .. }), "{said}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
