//! One module per command; each takes plain options and returns what it made.

pub mod ablate;
mod affine;
mod card;
pub mod demo;
pub mod eval;
mod files;
pub mod inspect;
pub mod lint;
pub mod package;
pub mod quantize;
pub mod target;
pub mod text;
pub mod tune;
pub mod verify;
