//! `anemone-convert`: checkpoint to model folder.

use std::process::ExitCode;

fn main() -> ExitCode {
    anemone_convert::cli::main().into()
}
