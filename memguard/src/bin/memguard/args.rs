//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anemone_memguard::{LimitArgs, Limits};
use clap::Parser;

const EXIT_CODES: &str = "\
Exit codes:
  the command's own code   it ended by itself (128 + N when signal N ended it)
  2                        wrong usage
  4                        stopped for memory, not started for lack of it, or
                           another heavy job holds the lock
  125                      memguard itself failed
  126, 127                 the command cannot be run, cannot be found

Sizes: K, M, G, T are powers of 1024, KB, MB, GB, TB powers of 1000. Where `off`
is allowed the limit is not watched.

The command runs in a process group of its own. Only that group is ever
signalled. SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP and SIGCONT
sent to memguard are passed on to it.";

/// Run a command and stop it before the machine runs out of memory
#[derive(Debug, Parser)]
#[command(version, about, after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(flatten)]
    limits: LimitArgs,

    /// Seconds to wait after asking before killing
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    grace: u64,

    /// Hold the lock for heavy jobs while the command runs
    #[arg(long)]
    pub(crate) lock: bool,

    /// Hold the lock, and wait for it if another job has it
    #[arg(long)]
    pub(crate) wait: bool,

    /// Write final statistics as JSON to a file, or to standard error
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true,
          default_missing_value = "-")]
    pub(crate) json: Option<PathBuf>,

    /// Say nothing but why the command could not be started
    #[arg(short, long)]
    pub(crate) quiet: bool,

    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    pub(crate) command: Vec<OsString>,
}

impl Args {
    /// The limits, or what is wrong with the arguments.
    pub(crate) fn limits(&self) -> Result<Limits, String> {
        // clap takes an option it does not know for the start of the command.
        if let Some(program) = self.command.first().and_then(|word| word.to_str())
            && program.starts_with('-')
        {
            return Err(format!("unknown option `{program}`"));
        }
        self.limits.limits()
    }

    pub(crate) fn grace(&self) -> Duration {
        Duration::from_secs(self.grace)
    }

    /// The command as one line.
    pub(crate) fn command_line(&self) -> String {
        let words: Vec<_> = self
            .command
            .iter()
            .map(|word| word.to_string_lossy())
            .collect();
        words.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound_and_its_defaults_are_the_librarys() {
        Args::command().debug_assert();
        let args = Args::try_parse_from(["memguard", "--", "true"]).unwrap();
        assert_eq!(args.limits().unwrap(), Limits::default());
    }

    #[test]
    fn options_after_the_command_are_the_commands() {
        let args = Args::try_parse_from(["memguard", "--quiet", "ls", "--json", "-x"]).unwrap();
        assert_eq!(args.command_line(), "ls --json -x");
        assert!(args.quiet && args.json.is_none());
    }
}
