//! The converter: quantizer, lowering to Core AI chunk programs, evaluation,
//! packaging, and the command line over them.

pub mod cli;
pub mod commands;
mod embedded;
pub mod error;
pub mod lint;
pub mod lower;
pub mod quantize;
pub mod stop;
pub mod synth;
pub mod ui;

/// Name and version as they appear in the files we write.
pub const PRODUCER: &str = concat!("anemone-convert ", env!("CARGO_PKG_VERSION"));
