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
//!   If the walk ends where a side stands, the side's row tells the token after.
//!
//! Nothing is ever taken back: how many slots are valid is a number, and what lies
//! beyond is overwritten. A side lies in a slot that is not its position, so it is not
//! valid; being the last token of the text, it is the root of the next call anyway.
//!
//! # The same text for any drafts
//!
//! A row's result depends on what it sees and on nothing else, bit for bit: not on the
//! other rows, not on its place, not on slots it does not see. Every token of the text
//! is the target's choice in a row that saw exactly the text before it. Where the
//! guesses came from, which rows were spent on what, and whether there were any guesses
//! at all thus decides how many calls a text takes, never what it says. Plain decoding
//! is this loop without guesses.
//!
//! Sides alone are not rows like others: what they see is the same, but it lies in other
//! slots, so sums over slots are taken in another order, and their last bit may differ.
//! So what a side's row says is not text but *presumed*: it is the first guess of the
//! next call, where the same token in its own slot is judged by the root. That is right
//! but for a near tie, costs no call and no row, since the side would have to be
//! computed again in its own slot in any case, and leaves the promise without a
//! condition. A side hit is worth the one token all the same, a call later.

mod check;
mod choice;
mod pace;
mod plan;
mod statistics;
mod walk;

pub use check::check_drafts;
pub use statistics::{Depth, Statistics, Switch};

pub(super) use choice::{Calibration, choose};
pub(super) use pace::{Cycle, Pace};
pub(super) use plan::Plan;
pub(super) use walk::walk;
