//! One module per command; each takes plain options and returns what it made.

pub mod ablate;
mod affine;
pub mod answers;
mod card;
pub mod demo;
pub mod doctor;
pub mod drafter;
pub mod eval;
pub(crate) mod files;
pub mod findings;
pub mod inspect;
pub mod lint;
mod notices;
mod origin;
pub mod package;
pub mod quantize;
mod recipe;
pub mod refine;
mod rewrite;
pub mod target;
pub mod text;
pub(crate) mod training;
pub mod tune;
pub mod verify;

pub(crate) use notices::travels as travels_with_model;
pub use training::Change;
