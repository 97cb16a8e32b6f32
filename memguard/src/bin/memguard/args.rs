//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anemone_memguard::{Amount, Limits, human_bytes};
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
    /// Kill when swap in use has grown by this much
    #[arg(long, value_name = "SIZE|off", default_value = "6G", value_parser = size_or_off)]
    swap_growth: Switch<u64>,

    /// Kill when less memory than this is available: a size or a share of all memory
    #[arg(long, value_name = "SIZE|%|off", default_value = "6%", value_parser = amount_or_off)]
    min_free: Switch<Amount>,

    /// Kill when the anonymous memory of the command and its children reaches this
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_anon: Option<u64>,

    /// Ask with SIGTERM when their anonymous memory reaches this. Swap and available
    /// memory are asked about at three quarters of the way to their limits; `off`
    /// kills without asking
    #[arg(long, value_name = "SIZE|off", value_parser = size_or_off)]
    soft: Option<Switch<u64>>,

    /// Seconds to wait after asking before killing
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    grace: u64,

    /// Longest pause between two looks, in milliseconds; it gets shorter as a limit
    /// comes near
    #[arg(long, value_name = "MS", default_value_t = 500,
          value_parser = clap::value_parser!(u64).range(10..=60_000))]
    interval: u64,

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

/// A limit, or none. (`Option` would mean an optional argument to clap.)
#[derive(Debug, Clone, Copy)]
enum Switch<T> {
    Off,
    At(T),
}

impl<T> Switch<T> {
    fn get(self) -> Option<T> {
        match self {
            Self::Off => None,
            Self::At(value) => Some(value),
        }
    }
}

fn size(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(Amount::Bytes(bytes)) => Ok(bytes),
        Ok(Amount::Percent(_)) => Err("a share is not possible here, give a size".into()),
        Err(e) => Err(e.to_string()),
    }
}

fn size_or_off(text: &str) -> Result<Switch<u64>, String> {
    if text == "off" {
        return Ok(Switch::Off);
    }
    size(text).map(Switch::At)
}

fn amount_or_off(text: &str) -> Result<Switch<Amount>, String> {
    if text == "off" {
        return Ok(Switch::Off);
    }
    text.parse()
        .map(Switch::At)
        .map_err(|e: anemone_memguard::ParseAmountError| e.to_string())
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
        let soft_anon = self.soft.and_then(Switch::get);
        if let (Some(soft), Some(hard)) = (soft_anon, self.max_anon)
            && soft >= hard
        {
            return Err(format!(
                "`--soft` ({}) must be below `--max-anon` ({})",
                human_bytes(soft),
                human_bytes(hard)
            ));
        }
        Ok(Limits {
            swap_growth: self.swap_growth.get(),
            min_free: self.min_free.get(),
            max_anon: self.max_anon,
            soft_anon,
            ask_first: !matches!(self.soft, Some(Switch::Off)),
            interval: Duration::from_millis(self.interval),
        })
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
