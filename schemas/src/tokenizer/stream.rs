//! Decoding ids that arrive one by one.
//!
//! A character may be spread over several tokens, so the text of a single id is not
//! defined; and decoding everything again for each id is quadratic. This keeps a
//! window of ids: text is decoded from the window's start, what was already given out
//! is cut off its front, and a window whose text ends in a whole character becomes
//! the context of the next one. (Context is needed because decoders may treat the
//! first token differently, for instance strip its space.)
//!
//! An unfinished character decodes as exactly one U+FFFD at the end, since decoding
//! replaces a maximal prefix of a sequence at once (Unicode 3.9, D93b). Holding back
//! one final U+FFFD is therefore enough, and what precedes it can never change.

use tokenizers::Tokenizer;

use super::Error;

const REPLACEMENT: char = '\u{FFFD}';

/// Turns ids into text piece by piece. The pieces of [`TextStream::push`] and
/// [`TextStream::finish`], put together, are the text of all ids at once.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids from the start of the context.
    window: Vec<u32>,
    /// How many of them are context only.
    context: usize,
    /// Bytes of the window's text that were given out.
    given: usize,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self {
            tokenizer,
            window: Vec::new(),
            context: 0,
            given: 0,
        }
    }

    /// Takes the next id and returns the text that is now certain, possibly none.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn push(&mut self, id: u32) -> Result<String, Error> {
        self.window.push(id);
        let text = self.decode()?;
        let certain = text.strip_suffix(REPLACEMENT).unwrap_or(&text);
        let new = certain.get(self.given..).unwrap_or_default().to_owned();
        if certain.len() < text.len() {
            self.given = self.given.max(certain.len());
        } else if !new.is_empty() {
            self.window.drain(..self.context);
            self.context = self.window.len();
            self.given = self.decode()?.len();
        }
        Ok(new)
    }

    /// The text held back, an unfinished character as U+FFFD.
    ///
    /// # Errors
    /// [`Error::Tokenize`].
    pub fn finish(self) -> Result<String, Error> {
        let text = self.decode()?;
        Ok(text.get(self.given..).unwrap_or_default().to_owned())
    }

    fn decode(&self) -> Result<String, Error> {
        self.tokenizer
            .decode(&self.window, true)
            .map_err(|source| Error::Tokenize { source })
    }
}
