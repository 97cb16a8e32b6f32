//! `anemone-convert`: checkpoint to model folder.

use std::process::ExitCode;

use anemone_convert::cli::{self, Cli};
use clap::Parser;

fn main() -> ExitCode {
    cli::main(Cli::parse()).into()
}
