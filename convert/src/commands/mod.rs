//! One module per command; each takes plain options and returns what it made.

mod card;
pub mod demo;
pub mod drafter;
pub mod eval;
pub(crate) mod files;
pub mod inspect;
pub mod lint;
pub mod package;
pub mod quantize;
mod recipe;
pub mod target;
pub mod text;
pub mod verify;
