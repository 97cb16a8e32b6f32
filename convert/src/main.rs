//! `anemone-convert`: checkpoint to model folder.

use std::process::ExitCode;

use anemone_convert::cli::{self, Cli};
use anemone_schemas::exit::Exit;
use clap::Parser;

#[allow(clippy::print_stderr, reason = "where errors meet the user")]
fn main() -> ExitCode {
    match cli::run(Cli::parse()) {
        Ok(()) => Exit::Ok.into(),
        Err(e) => {
            eprintln!("error: {e}");
            if let Some(hint) = &e.hint {
                eprintln!("\nhint: {hint}");
            }
            e.exit.into()
        }
    }
}
