//! Drafts from the text itself: what followed the last few tokens when they came up
//! before.
//!
//! An index holds, for every sequence of two, three and four tokens, where it was last
//! followed by what. Drafts are the tokens after the most recent place that the longest
//! sequence at the end of the text leads to; other places with another continuation
//! give the second and third choice of the first guess. The longer the sequence, the
//! more likely the repetition goes on; the index cannot say how likely, so the
//! confidences are rough and left to be corrected by what is seen.

use std::collections::HashMap;

use super::{Draft, EngineError, Guess};
use crate::tensor::Tensor;

/// Lengths of the sequences, longest first, with the stated chance that the first token
/// after them is the same again.
const LENGTHS: [(usize, f32); 3] = [(4, 0.7), (3, 0.5), (2, 0.3)];
/// Stated chance that the repetition goes on by another token.
const GOES_ON: f32 = 0.8;
/// Stated chance of the other continuations.
const OTHERS: [f32; 2] = [0.15, 0.05];
/// No place.
const NONE: u32 = u32::MAX;

/// Prompt lookup: a [`Draft`] that needs no model.
#[derive(Debug, Default)]
pub struct Lookup {
    text: Vec<u32>,
    /// By sequence, padded with [`NONE`]: places after it with different
    /// continuations, most recent first.
    places: HashMap<[u32; 4], [u32; 3]>,
}

impl Lookup {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Brings the index up to `text`; a text that does not go on from the last one
    /// starts a new index.
    fn follow(&mut self, text: &[u32]) {
        if !text.starts_with(&self.text) {
            self.text.clear();
            self.places.clear();
        }
        for at in self.text.len()..text.len() {
            for (length, _) in LENGTHS {
                let Some(key) = key(&text[..at], length) else {
                    continue;
                };
                let places = self.places.entry(key).or_insert([NONE; 3]);
                // The newest place goes to the front, in place of an older one with the
                // same continuation or else of the oldest.
                let same = |p: &u32| *p != NONE && text[*p as usize] == text[at];
                let old = places.iter().position(same).unwrap_or(2);
                places[..=old].rotate_right(1);
                places[0] = at as u32;
            }
        }
        self.text.extend_from_slice(&text[self.text.len()..]);
    }
}

/// The last `length` tokens.
fn key(text: &[u32], length: usize) -> Option<[u32; 4]> {
    let mut key = [NONE; 4];
    let start = text.len().checked_sub(length)?;
    key[..length].copy_from_slice(&text[start..]);
    Some(key)
}

impl Draft for Lookup {
    fn extend(&mut self, _: &[(usize, Tensor)], _: &[(usize, usize)]) -> Result<(), EngineError> {
        Ok(())
    }

    fn propose(&mut self, text: &[u32], most: usize) -> Result<Vec<Guess>, EngineError> {
        self.follow(text);
        let find = |(length, chance)| {
            let places = self.places.get(&key(text, length)?)?;
            Some((*places, chance))
        };
        let Some((places, chance)) = LENGTHS.into_iter().find_map(find) else {
            return Ok(Vec::new());
        };
        // Where the repetition runs into the end of the text it goes on with itself.
        let first = places[0] as usize;
        let period = text.len() - first;
        let guess = |depth: usize| Guess {
            id: text[first + depth % period],
            probability: if depth == 0 { chance } else { GOES_ON },
            others: [(0, 0.0); 2],
            confidence: if depth == 0 { chance } else { GOES_ON },
        };
        let mut guesses: Vec<Guess> = (0..most).map(guess).collect();
        if let Some(first) = guesses.first_mut() {
            let others = places[1..].iter().zip(OTHERS);
            for (other, (&place, chance)) in first.others.iter_mut().zip(others) {
                if place != NONE {
                    *other = (text[place as usize], chance);
                }
            }
        }
        Ok(guesses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(lookup: &mut Lookup, text: &[u32], most: usize) -> Vec<u32> {
        let guesses = lookup.propose(text, most).unwrap();
        guesses.iter().map(|g| g.id).collect()
    }

    #[test]
    fn the_longest_and_most_recent_repetition_counts() {
        let mut lookup = Lookup::new();
        // `1 2` was followed by 3, then by 7; `9 1 2` by 3 only.
        let text = [9, 1, 2, 3, 4, 5, 1, 2, 7, 8, 9, 1, 2];
        assert_eq!(ids(&mut lookup, &text, 4), [3, 4, 5, 1]);
        let text = [9, 1, 2, 3, 4, 5, 1, 2, 7, 8, 9, 1, 2, 3, 0, 1, 2];
        let guesses = lookup.propose(&text, 3).unwrap();
        assert_eq!(guesses.iter().map(|g| g.id).collect::<Vec<_>>(), [3, 0, 1]);
        assert_eq!(guesses[0].others[0].0, 7);
        assert!(guesses[0].others[1].1.abs() < 1e-9);
    }

    #[test]
    fn a_short_cycle_is_drafted_on() {
        let mut lookup = Lookup::new();
        assert_eq!(ids(&mut lookup, &[5, 6, 5, 6], 5), [5, 6, 5, 6, 5]);
    }

    #[test]
    fn nothing_is_drafted_where_nothing_repeats() {
        let mut lookup = Lookup::new();
        assert!(ids(&mut lookup, &[1], 5).is_empty());
        assert!(ids(&mut lookup, &[1, 2, 3, 2, 1], 5).is_empty());
    }

    #[test]
    fn another_text_starts_anew() {
        let mut lookup = Lookup::new();
        let text = [1, 2, 3, 4, 1, 2];
        assert_eq!(ids(&mut lookup, &text, 2), [3, 4]);
        assert!(ids(&mut lookup, &[8, 1, 2], 2).is_empty());
        assert_eq!(ids(&mut lookup, &text, 2), [3, 4]);
        // As does one that was cut.
        assert_eq!(ids(&mut lookup, &[1, 2, 3, 1, 2], 2), [3, 1]);
    }
}
