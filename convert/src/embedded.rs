//! What the binary carries: a small trained Qwen3, and calibration and evaluation
//! text. Origin and licences of the text are in `tests/data/text/SOURCES.md`.

use std::fs;
use std::io;
use std::path::Path;

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
