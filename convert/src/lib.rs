//! The converter: quantizer, lowering to Core AI chunk programs, evaluation,
//! packaging, and the command line over them.

pub mod cli;
pub mod commands;
mod embedded;
pub mod error;
pub mod lint;
pub mod lower;
mod ordered;
pub mod output;
pub mod plan;
pub mod publish;
pub mod quantize;
pub mod source;
pub mod synth;
pub mod ui;
pub mod work;

/// The clean stop: `memguard`'s token, polled between two steps.
pub mod stop {
    pub use anemone_memguard::Stop;
}

/// Name and version as they appear in the files we write.
pub const PRODUCER: &str = concat!("anemone-convert ", env!("CARGO_PKG_VERSION"));
