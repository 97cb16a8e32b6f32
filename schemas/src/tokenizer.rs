//! Text to ids and back: a folder's `tokenizer.json`, its chat template, and the ids
//! that end a generation.
//!
//! The original files are read as they are and shipped byte for byte; nothing is
//! re-derived from them. Two ways lead from text to ids, and they must not be mixed:
//! raw text is encoded with special tokens added, while a rendered conversation
//! already holds its own and is encoded without.

use std::io;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use thiserror::Error;
use tokenizers::Tokenizer;

mod chat;
mod clock;
mod stream;

#[cfg(test)]
mod tests;

pub use stream::TextStream;

use chat::ChatTemplate;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";

/// Every file that may have a say in tokenization or stopping.
const FILES: [&str; 8] = [
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
];

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

/// A reason not to tokenize.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A JSON file is malformed.
    #[error("`{}` is not valid JSON of its kind", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// `tokenizer.json` is not one that the `tokenizers` library reads.
    #[error("`{}` is not a tokenizer", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What the library says.
        source: tokenizers::Error,
    },
    /// The library failed on a text or ids.
    #[error("the tokenizer failed")]
    Tokenize {
        /// What the library says.
        source: tokenizers::Error,
    },
    /// A token named by the config is unknown to the tokenizer.
    #[error("`{key}` in `{}` is `{token}`, which the tokenizer does not know", path.display())]
    UnknownToken {
        /// The config.
        path: PathBuf,
        /// Its key.
        key: &'static str,
        /// The token.
        token: String,
    },
    /// The tokenizer makes ids for which the model has no embedding.
    #[error("`{}` has {tokens} tokens, but the embedding table only {rows} rows", path.display())]
    TooManyTokens {
        /// `tokenizer.json`.
        path: PathBuf,
        /// One more than the tokenizer's largest id.
        tokens: usize,
        /// Rows of the embedding table.
        rows: usize,
    },
    /// There is no chat template to render.
    #[error("`{}` has no chat template; hint: use plain text", dir.display())]
    NoChatTemplate {
        /// The folder.
        dir: PathBuf,
    },
    /// The chat template does not parse.
    #[error("the chat template in `{}` is invalid", path.display())]
    TemplateSyntax {
        /// The file that holds it.
        path: PathBuf,
        /// Where and why.
        source: minijinja::Error,
    },
    /// The chat template rejects the conversation by `raise_exception`.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRefused {
        /// The template's own words.
        message: String,
    },
    /// The chat template fails while it is rendered.
    #[error("the chat template failed")]
    Template {
        /// Where and why.
        source: minijinja::Error,
    },
}

/// The tokenizer of a model folder.
#[derive(Debug)]
pub struct TokenizerFolder {
    dir: PathBuf,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop_ids: Vec<u32>,
    files: Vec<&'static str>,
}

impl TokenizerFolder {
    /// Loads `tokenizer.json` and, where present, `tokenizer_config.json`,
    /// `chat_template.jinja` and the stop ids of `config.json` and
    /// `generation_config.json`.
    ///
    /// # Errors
    /// A missing or invalid tokenizer, or any invalid file of the others.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(TOKENIZER);
        let bytes = std::fs::read(&path).map_err(|source| Error::Io {
            path: path.clone(),
            source,
        })?;
        let mut tokenizer =
            Tokenizer::from_bytes(bytes).map_err(|source| Error::Load { path, source })?;
        // Settings of a training run that are sometimes saved with the tokenizer.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|source| Error::Tokenize { source })?;

        let config = read_object(&dir.join(TOKENIZER_CONFIG))?.unwrap_or_default();
        let template = ChatTemplate::find(dir, &config)?;
        let stop_ids = stop_ids(dir, &config, &tokenizer)?;
        let files = FILES
            .into_iter()
            .filter(|file| dir.join(file).is_file())
            .collect();
        Ok(Self {
            dir: dir.to_path_buf(),
            tokenizer,
            template,
            stop_ids,
            files,
        })
    }

    /// Ids of a text. `add_special` adds what the tokenizer puts around raw text, such
    /// as a beginning-of-sequence id; rendered conversations are encoded without.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special)
            .map_err(|source| Error::Tokenize { source })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        self.tokenizer
            .decode(ids, skip_special)
            .map_err(|source| Error::Tokenize { source })
    }

    /// The prompt of a conversation. `extra` are further variables of the template,
    /// such as `enable_thinking` or `tools`; they win over our own. Objects among them
    /// are rendered with their keys sorted, as [`Map`] keeps them.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::TemplateRefused`] or [`Error::Template`].
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, Error> {
        match &self.template {
            Some(template) => template.render(messages, add_generation_prompt, extra),
            None => Err(Error::NoChatTemplate {
                dir: self.dir.clone(),
            }),
        }
    }

    /// Whether there is a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Fixes the time that templates see, in seconds since 1970 UTC, so that prompts
    /// with a date are reproducible. Without it they see the clock.
    #[must_use]
    pub fn with_time(mut self, unix_seconds: i64) -> Self {
        if let Some(template) = &mut self.template {
            template.set_time(unix_seconds);
        }
        self
    }

    /// Ids that end a generation: the union of `eos_token_id` in `config.json` and
    /// `generation_config.json` and `eos_token` in `tokenizer_config.json`, ascending.
    pub fn stop_ids(&self) -> Vec<u32> {
        self.stop_ids.clone()
    }

    /// The id that closes an answer in a rendered conversation, if that is a special token.
    /// A model trained on conversations ends its answers with it, whether or not the
    /// configs call it an end.
    pub fn end_of_turn(&self) -> Option<u32> {
        const ANSWER: &str = "An answer.";
        let turn = |role: &str, content: &str| ChatMessage {
            role: role.to_owned(),
            content: content.to_owned(),
        };
        let turns = [turn("user", "A question?"), turn("assistant", ANSWER)];
        let text = self.render_chat(&turns, false, &Map::new()).ok()?;
        let (_, rest) = text.rsplit_once(ANSWER)?;
        let id = *self.encode(rest.trim_start(), false).ok()?.first()?;
        let added = self.tokenizer.get_added_tokens_decoder();
        added.get(&id).filter(|token| token.special).map(|_| id)
    }

    /// One more than the largest id. Rows of the embedding table above are padding.
    pub fn size(&self) -> usize {
        let vocab = self.tokenizer.get_vocab(true);
        vocab.values().max().map_or(0, |&id| id as usize + 1)
    }

    /// Confirms that every id has a row in an embedding table of `rows` rows.
    ///
    /// # Errors
    /// [`Error::TooManyTokens`].
    pub fn check_fits(&self, rows: usize) -> Result<(), Error> {
        let tokens = self.size();
        if tokens > rows {
            return Err(Error::TooManyTokens {
                path: self.dir.join(TOKENIZER),
                tokens,
                rows,
            });
        }
        Ok(())
    }

    /// The id of a token, special or not.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Names of the files in the folder that belong to the tokenizer, to be copied
    /// along with a converted model.
    pub fn files(&self) -> &[&'static str] {
        &self.files
    }

    /// A decoder for ids that arrive one by one; special tokens are left out.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(&self.tokenizer)
    }
}

fn stop_ids(
    dir: &Path,
    config: &Map<String, Value>,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, Error> {
    let mut ids = Vec::new();
    for file in ["config.json", "generation_config.json"] {
        let path = dir.join(file);
        if let Some(eos) = read_object(&path)?
            .as_mut()
            .and_then(|map| map.remove("eos_token_id"))
        {
            let read: Result<OneOrMore, _> = serde_json::from_value(eos);
            match read.map_err(|source| Error::Json { path, source })? {
                OneOrMore::None => {}
                OneOrMore::One(id) => ids.push(id),
                OneOrMore::More(more) => ids.extend(more),
            }
        }
    }
    if let Some(token) = special_token(config, "eos_token") {
        let id = tokenizer
            .token_to_id(token)
            .ok_or_else(|| Error::UnknownToken {
                path: dir.join(TOKENIZER_CONFIG),
                key: "eos_token",
                token: token.to_owned(),
            })?;
        ids.push(id);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    None,
    One(u32),
    More(Vec<u32>),
}

/// A token of the config, written either as a string or as an added-token object.
fn special_token<'a>(config: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    let token = config.get(key)?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// The object in a JSON file, or `None` if there is no such file.
fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, Error> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(Error::Io {
                path: path.to_path_buf(),
                source,
            });
        }
    };
    let object = serde_json::from_slice(&bytes).map_err(|source| Error::Json {
        path: path.to_path_buf(),
        source,
    })?;
    Ok(Some(object))
}
