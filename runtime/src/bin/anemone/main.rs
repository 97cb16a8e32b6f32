//! `anemone`: runs a model folder.

mod bench;
mod chat;
mod drafts;
mod failure;
mod output;
mod profile;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use anemone_schemas::exit::{EXIT_HELP, Exit};
use clap::{Args, Parser, Subcommand};

use failure::End;

/// Runs a model folder made by `anemone-convert`.
#[derive(Debug, Parser)]
#[command(name = "anemone", version, after_help = EXIT_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer one prompt.
    Run(run::RunArgs),
    /// Talk, turn by turn.
    Chat(chat::ChatArgs),
    /// Measure prefill, decode and the time of a call.
    Bench(bench::BenchArgs),
}

/// Which model, on how many threads.
#[derive(Debug, Args)]
struct ModelArgs {
    /// Model folder.
    #[arg(short, long, value_name = "DIR", env = "ANEMONE_MODEL")]
    model: PathBuf,
    /// Threads; 0 is one per core. The text does not depend on them.
    #[arg(short, long, default_value_t = 0)]
    threads: usize,
}

#[allow(clippy::print_stderr, reason = "where errors meet the user")]
fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::chat(&args),
        Command::Bench(args) => bench::bench(&args),
    };
    match result {
        Ok(exit) => exit.into(),
        // The reader has seen enough.
        Err(End::BrokenPipe) => Exit::Ok.into(),
        Err(End::Failure(f)) => {
            eprintln!("error: {}", f.message);
            if let Some(hint) = f.hint {
                eprintln!("\nhint: {hint}");
            }
            f.exit.into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
