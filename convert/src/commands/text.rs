//! Calibration and evaluation text of a command: files of the user, or the built-in
//! text.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anemone_calib::{Corpus, CorpusOptions};
use anemone_schemas::tokenizer::TokenizerFolder;

use crate::embedded;
use crate::error::Error;

/// Order in which windows are taken from a file; fixed, so that a budget always means
/// the same text.
pub(super) const SEED: u64 = 0;

/// A named text file, `NAME=FILE` or `FILE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextSource {
    /// Name in reports.
    pub name: String,
    /// A `.txt` file, or `.jsonl` with a conversation on each line.
    pub path: PathBuf,
}

impl FromStr for TextSource {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let (name, path) = match text.split_once('=') {
            Some((name, path)) => (Some(name.to_string()), PathBuf::from(path)),
            None => (None, PathBuf::from(text)),
        };
        let stem = || path.file_stem().map(|s| s.to_string_lossy().into_owned());
        Ok(Self {
            name: name.or_else(stem).unwrap_or_default(),
            path,
        })
    }
}

/// Windows of one evaluation set.
#[derive(Clone, Debug)]
pub struct TextSet {
    /// Name in reports.
    pub name: String,
    /// Its windows.
    pub corpus: Corpus,
}

/// How much text to take.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Tokens at most.
    pub tokens: usize,
    /// Tokens per window.
    pub window: usize,
}

impl Budget {
    fn options(self) -> CorpusOptions {
        CorpusOptions {
            tokens: self.tokens,
            sequence: self.window,
            seed: SEED,
        }
    }
}

/// The tokenizer of a checkpoint, store or tokenizer folder.
pub(super) fn open_tokenizer(dir: &Path) -> Result<TokenizerFolder, Error> {
    Ok(TokenizerFolder::open(dir)?)
}

/// Calibration windows from all files together, or from the built-in text.
pub(super) fn calibration(
    tokenizer: &TokenizerFolder,
    files: &[PathBuf],
    budget: Budget,
) -> Result<Corpus, Error> {
    if !files.is_empty() {
        return Ok(Corpus::load(files, tokenizer, budget.options())?);
    }
    let (_dir, texts) = embedded::write_text(&embedded::CALIBRATION)?;
    let paths: Vec<PathBuf> = texts.into_iter().map(|t| t.1).collect();
    Ok(Corpus::load(&paths, tokenizer, budget.options())?)
}

/// Evaluation sets, each with its own budget.
pub(super) fn evaluation(
    tokenizer: &TokenizerFolder,
    sources: &[TextSource],
    budget: Budget,
) -> Result<Vec<TextSet>, Error> {
    let load = |name: String, path: PathBuf| -> Result<TextSet, Error> {
        let corpus = Corpus::load(&[path], tokenizer, budget.options())?;
        Ok(TextSet { name, corpus })
    };
    if sources.is_empty() {
        let (_dir, texts) = embedded::write_text(&embedded::EVALUATION)?;
        return texts.into_iter().map(|(n, p)| load(n.into(), p)).collect();
    }
    sources
        .iter()
        .map(|s| load(s.name.clone(), s.path.clone()))
        .collect()
}
