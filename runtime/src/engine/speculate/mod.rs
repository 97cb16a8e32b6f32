//! Decoding with drafts: guess several tokens ahead, judge them all in one call, keep
//! what the target would have said anyway.
//!
//! A call takes its rows through the model in one go, and costs little more than one
//! row would. So the last token of the text, the *root*, goes in together with guesses
//! at what follows. Each row comes back with the target's choice of the next token. As
//! long as that choice is the guess in the next row, the guess was right, the row saw
//! the right text, and its own choice counts too: the *walk* from row to row ends at
//! the first wrong guess, whose place the target's own choice takes.
//!
//! ```text
//! slot   offset                                              offset + 15
//! row    [replays] [root] [guess 1] ... [guess K] [sides] ... [padding]
//! ```
//!
//! - Replays are tokens that are in the cache already: a cache write starts at a
//!   multiple of a few slots, so up to that many are processed again.
//! - Root and guesses form a chain, each seeing itself and all before it.
//! - A side is another guess at some depth of the chain. It has the position of the
//!   guess it stands in for and sees what that guess sees, but for itself in its place.
//!   A side hit is worth one token.
//!
//! Nothing is ever taken back: how many slots are valid is a number, and what lies
//! beyond is overwritten. A side lies in a slot that is not its position, so after a
//! hit the number ends before it and the next call replays it.
//!
//! # The same text for any drafts
//!
//! A row's result depends on what it sees and on nothing else, bit for bit: not on the
//! other rows, not on its place, not on slots it does not see. Every token of the text
//! is the target's choice in a row that saw exactly the text before it. Where the
//! guesses came from, which rows were spent on what, and whether there were any guesses
//! at all thus decides how many calls a text takes, never what it says. Plain decoding
//! is this loop without guesses.

mod choice;
mod pace;
mod plan;
mod statistics;
mod walk;

pub use statistics::{Depth, Statistics, Switch};

pub(super) use choice::{Calibration, choose};
pub(super) use pace::{Cycle, Pace};
pub(super) use plan::Plan;
pub(super) use walk::walk;
