//! What a command says, and where.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::error::Error;
use crate::ui::{Style, Ui};

/// What is said, and where.
#[derive(Debug, Args)]
#[command(next_help_heading = "Messages")]
pub(super) struct MessageArgs {
    /// Print errors only.
    #[arg(short, long, global = true)]
    quiet: bool,
    /// Print more, such as the peak of memory.
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    verbose: bool,
    /// How progress is shown.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "auto",
        value_name = "HOW"
    )]
    progress: ProgressArg,
    /// File that all messages are appended to.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "ANEMONE_LOG",
        hide_env_values = true
    )]
    log: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProgressArg {
    /// A bar on a terminal, lines elsewhere.
    Auto,
    /// A bar with the time left.
    Bar,
    /// A line per step.
    Lines,
    /// A JSON object per line, on standard error.
    Json,
}

impl MessageArgs {
    pub(super) fn ui(&self) -> Result<Ui, Error> {
        let style = match self.progress {
            _ if self.quiet => Some(Style::None),
            ProgressArg::Auto => None,
            ProgressArg::Bar => Some(Style::Bar),
            ProgressArg::Lines => Some(Style::Lines),
            ProgressArg::Json => Some(Style::Json),
        };
        Ui::new(style, self.verbose, self.log.as_deref())
    }
}
