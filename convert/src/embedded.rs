//! What the binary carries: a small trained Qwen3, and calibration and evaluation
//! text. Origin and licences of the text are in `tests/data/text/SOURCES.md`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::Error;

macro_rules! data {
    ($path:literal) => {
        include_bytes!(concat!("../../tests/data/", $path))
    };
}

const MODEL: [(&str, &[u8]); 5] = [
    ("config.json", data!("tiny-qwen3/config.json")),
    (
        "generation_config.json",
        data!("tiny-qwen3/generation_config.json"),
    ),
    ("model.safetensors", data!("tiny-qwen3/model.safetensors")),
    ("tokenizer.json", data!("tiny-qwen3/tokenizer.json")),
    (
        "tokenizer_config.json",
        data!("tiny-qwen3/tokenizer_config.json"),
    ),
];

/// Writes the built-in checkpoint into `dir`.
///
/// # Errors
/// Any I/O error.
pub(crate) fn write_model(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    for (name, bytes) in MODEL {
        fs::write(dir.join(name), bytes)?;
    }
    Ok(())
}

/// A text of the repository: its name, the ending that says what it is, its contents.
pub(crate) type Text = (&'static str, &'static str, &'static [u8]);

/// Calibration text; its packages do not occur in [`EVALUATION`].
pub(crate) const CALIBRATION: [Text; 3] = [
    ("docs", "txt", data!("text/calib_docs.txt")),
    ("code", "txt", data!("text/calib_code.txt")),
    ("chat", "jsonl", data!("text/calib_chat.jsonl")),
];

/// Evaluation text.
pub(crate) const EVALUATION: [Text; 3] = [
    ("docs", "txt", data!("text/eval_docs.txt")),
    ("code", "txt", data!("text/eval_code.txt")),
    ("chat", "jsonl", data!("text/eval_chat.jsonl")),
];

/// The folder of written texts, and their names and paths.
type Written = (TempDir, Vec<(&'static str, PathBuf)>);

/// Writes texts into a folder that lives as long as the returned guard; gives their
/// names and paths.
pub(crate) fn write_text(texts: &[Text]) -> Result<Written, Error> {
    let dir = tempfile::tempdir().map_err(|e| Error::unexpected(&e))?;
    let mut paths = Vec::new();
    for (name, ending, bytes) in texts {
        let path = dir.path().join(format!("{name}.{ending}"));
        fs::write(&path, bytes).map_err(|e| Error::io(&path, &e))?;
        paths.push((*name, path));
    }
    Ok((dir, paths))
}
