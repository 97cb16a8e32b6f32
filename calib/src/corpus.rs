//! Windows of ids from text files.
//!
//! A `.txt` file is one text: it is encoded whole, as raw text, and cut into
//! consecutive windows of the wanted length; a rest shorter than a quarter of it is
//! dropped. A `.jsonl` file has a conversation on each line,
//! `{"messages": [{"role": …, "content": …}, …]}`, which becomes a window of its own:
//! rendered by the chat template, with the prompt for an answer if it ends with the
//! user's turn, and cut off at the window length.
//!
//! Files take turns so that each contributes about the same number of tokens, until the
//! budget is used up; a file that runs out leaves its share to the others. Within a
//! file, windows are taken in an order shuffled by the seed, so that a small budget
//! still sees all of the file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anemone_schemas::tokenizer::{ChatMessage, TokenizerFolder};
use serde::{Deserialize, Serialize};
use serde_json::Map;
use sha2::{Digest, Sha256};

use crate::Error;

/// How much text to take, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorpusOptions {
    /// Tokens in all; the last window is cut to fit.
    pub tokens: usize,
    /// Longest window.
    pub sequence: usize,
    /// Order of windows within a file.
    pub seed: u64,
}

/// What was taken from a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceUse {
    /// The file.
    pub path: PathBuf,
    /// Windows taken.
    pub windows: usize,
    /// Tokens taken.
    pub tokens: usize,
    /// Tokens it would have had.
    pub available: usize,
}

/// Windows of ids. See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    windows: Vec<Vec<u32>>,
    /// Index of the source of each window.
    origins: Vec<usize>,
    sources: Vec<SourceUse>,
}

impl Corpus {
    /// Reads, cuts and chooses.
    ///
    /// # Errors
    /// A file that cannot be read, has no text, or is neither `.txt` nor `.jsonl`;
    /// a bad line; or options too small to make a window.
    pub fn load(
        files: &[PathBuf],
        tokenizer: &TokenizerFolder,
        options: CorpusOptions,
    ) -> Result<Self, Error> {
        // A window needs a position and what follows it.
        for (name, found) in [("tokens", options.tokens), ("sequence", options.sequence)] {
            if found < 2 {
                return Err(Error::OptionTooSmall {
                    name,
                    found,
                    min: 2,
                });
            }
        }
        if files.is_empty() {
            return Err(Error::NoText);
        }
        let mut queues = Vec::new();
        let mut sources = Vec::new();
        for path in files {
            let mut windows = read(path, tokenizer, options.sequence)?;
            if windows.is_empty() {
                return Err(Error::EmptyText { path: path.clone() });
            }
            sources.push(SourceUse {
                path: path.clone(),
                windows: 0,
                tokens: 0,
                available: windows.iter().map(Vec::len).sum(),
            });
            shuffle(&mut windows, options.seed);
            queues.push(windows.into_iter());
        }
        let mut windows = Vec::new();
        let mut origins = Vec::new();
        let mut left = options.tokens;
        let mut open: Vec<usize> = (0..queues.len()).collect();
        while left >= 2 {
            let Some(&next) = open
                .iter()
                .min_by_key(|&&file| (sources[file].tokens, file))
            else {
                break;
            };
            let Some(mut window) = queues[next].next() else {
                open.retain(|&file| file != next);
                continue;
            };
            window.truncate(left);
            left -= window.len();
            sources[next].windows += 1;
            sources[next].tokens += window.len();
            windows.push(window);
            origins.push(next);
        }
        Ok(Self {
            windows,
            origins,
            sources,
        })
    }

    /// The windows, in the order they were taken; each has at least two ids.
    pub fn windows(&self) -> &[Vec<u32>] {
        &self.windows
    }

    /// For each window, its file's place among [`Self::sources`].
    pub fn origins(&self) -> &[usize] {
        &self.origins
    }

    /// What each file contributed.
    pub fn sources(&self) -> &[SourceUse] {
        &self.sources
    }

    /// Tokens in all windows.
    pub fn tokens(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    /// SHA-256, in hex, of the windows: what a result was measured on.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        for window in &self.windows {
            hash.update((window.len() as u64).to_le_bytes());
            for id in window {
                hash.update(id.to_le_bytes());
            }
        }
        hash.finalize().iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }
}

/// A conversation that ends with the user's turn.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Its turns.
    pub messages: Vec<ChatMessage>,
    /// The ids that an answer follows.
    pub ids: Vec<u32>,
}

/// At most `count` conversations of a `.jsonl` file that end with the user's turn, in an order
/// shuffled by the seed.
///
/// # Errors
/// A file that cannot be read or has no such conversation, or a bad line.
pub fn prompts(
    path: &Path,
    tokenizer: &TokenizerFolder,
    count: usize,
    seed: u64,
) -> Result<Vec<Prompt>, Error> {
    let mut found = conversations(path)?;
    found.retain(|messages| messages.last().is_some_and(|last| last.role == "user"));
    if found.is_empty() {
        return Err(Error::EmptyText {
            path: path.to_path_buf(),
        });
    }
    shuffle(&mut found, seed);
    found.truncate(count);
    let prompt = |messages: Vec<ChatMessage>| {
        let text = tokenizer.render_chat(&messages, true, &Map::new())?;
        let ids = tokenizer.encode(&text, false)?;
        Ok(Prompt { messages, ids })
    };
    found.into_iter().map(prompt).collect()
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<ChatMessage>,
}

/// The conversations of a `.jsonl` file that have a turn.
fn conversations(path: &Path) -> Result<Vec<Vec<ChatMessage>>, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
        path: path.to_path_buf(),
        source,
    })?;
    let lines = text.lines().enumerate().filter(|l| !l.1.trim().is_empty());
    let parsed = lines.map(|(line, text)| {
        let conversation: Conversation =
            serde_json::from_str(text).map_err(|source| Error::BadLine {
                path: path.to_path_buf(),
                line: line + 1,
                source,
            })?;
        Ok::<_, Error>(conversation.messages)
    });
    let mut all: Vec<Vec<ChatMessage>> = parsed.collect::<Result<_, Error>>()?;
    all.retain(|messages| !messages.is_empty());
    Ok(all)
}

fn read(path: &Path, tokenizer: &TokenizerFolder, sequence: usize) -> Result<Vec<Vec<u32>>, Error> {
    let extension = path.extension().and_then(|e| e.to_str());
    match extension {
        Some("txt") => {
            let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
                path: path.to_path_buf(),
                source,
            })?;
            if text.trim().is_empty() {
                return Ok(Vec::new());
            }
            let ids = tokenizer.encode(&text, true)?;
            let shortest = (sequence / 4).max(2);
            let mut windows: Vec<Vec<u32>> = ids.chunks(sequence).map(<[u32]>::to_vec).collect();
            // A short text is better than none.
            if windows.len() > 1 {
                windows.retain(|window| window.len() >= shortest);
            }
            windows.retain(|window| window.len() >= 2);
            Ok(windows)
        }
        Some("jsonl") => {
            let mut windows = Vec::new();
            for messages in conversations(path)? {
                let answer_next = messages.last().is_some_and(|last| last.role != "assistant");
                let prompt = tokenizer.render_chat(&messages, answer_next, &Map::new())?;
                let mut ids = tokenizer.encode(&prompt, false)?;
                ids.truncate(sequence);
                if ids.len() >= 2 {
                    windows.push(ids);
                }
            }
            Ok(windows)
        }
        _ => Err(Error::UnknownText {
            path: path.to_path_buf(),
        }),
    }
}

/// Fisher–Yates with SplitMix64 (Steele, Lea and Flood, 2014).
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for i in (1..items.len()).rev() {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        items.swap(i, (z % (i as u64 + 1)) as usize);
    }
}
