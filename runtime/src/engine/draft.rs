//! What a source of drafts is.
//!
//! Decoding guesses several tokens ahead and lets the target judge all of them in one
//! call. Where the guesses come from is the business of a [`Draft`]: a small model that
//! reads the target's hidden states, a search in the text so far, a script in a test.
//! None of them can change the text, only how many calls it takes.

use super::EngineError;
use crate::tensor::Tensor;

/// One drafted token with the drafter's second and third choice at its depth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guess {
    /// The first choice.
    pub id: u32,
    /// Its probability by the drafter.
    pub probability: f32,
    /// Second and third choice with their probabilities, given the guesses before this
    /// one; a probability of 0 means there is none.
    pub others: [(u32, f32); 2],
    /// Chance that the target agrees with this guess if it agreed with those before.
    pub confidence: f32,
}

/// What a source of drafts must do. Drafts never change the text, only its speed.
pub trait Draft {
    /// Takes in the taps of rows that are now part of the text, in order: row `r` of
    /// `taps[t]` (`[1, w, 1, D]` f16, by tapped layer ascending) is the token at
    /// `position`. `rows` holds pairs of row and position. A position may come again:
    /// what was said of it and of those after it no longer holds.
    ///
    /// # Errors
    /// A program that fails.
    fn extend(
        &mut self,
        taps: &[(usize, Tensor)],
        rows: &[(usize, usize)],
    ) -> Result<(), EngineError>;

    /// Guesses what follows `text`, whose last token the target has not processed. At
    /// most `most` guesses, fewer if it has none.
    ///
    /// # Errors
    /// A program that fails.
    fn propose(&mut self, text: &[u32], most: usize) -> Result<Vec<Guess>, EngineError>;
}
