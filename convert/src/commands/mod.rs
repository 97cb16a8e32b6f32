//! One module per command; each takes plain options and returns what it made.

pub mod ablate;
mod affine;
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
pub mod package;
pub mod quantize;
mod recipe;
pub mod target;
pub mod text;
pub mod verify;

/// Whether a checkpoint's file of this name must be kept with the model: licences and
/// notices.
#[cfg(feature = "hub")]
pub(crate) fn travels_with_model(name: &str) -> bool {
    notices::travels(name)
}
