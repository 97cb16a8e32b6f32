//! The limits as command line arguments, the same for `memguard` and for commands
//! that guard themselves.

use std::time::Duration;

use clap::Args;

use crate::{Amount, Limits, human_bytes};

/// When to stop for memory. Every option also has an environment variable.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Memory limits")]
pub struct LimitArgs {
    /// Kill when swap in use has grown by this much
    #[arg(long, global = true, value_name = "SIZE|off", default_value = "6G", value_parser = size_or_off,
          env = "MEMGUARD_SWAP_GROWTH", hide_env_values = true)]
    swap_growth: Switch<u64>,

    /// Kill when less memory than this is available: a size or a share of all memory
    #[arg(long, global = true, value_name = "SIZE|%|off", default_value = "6%", value_parser = amount_or_off,
          env = "MEMGUARD_MIN_FREE", hide_env_values = true)]
    min_free: Switch<Amount>,

    /// Kill when the job's anonymous memory, children included, reaches this
    #[arg(long, global = true, value_name = "SIZE", value_parser = size, env = "MEMGUARD_MAX_ANON",
          hide_env_values = true)]
    max_anon: Option<u64>,

    /// Ask the job to stop when its anonymous memory reaches this. Swap and available
    /// memory are asked about at three quarters of the way to their limits; `off`
    /// kills without asking
    #[arg(long, global = true, value_name = "SIZE|off", value_parser = size_or_off, env = "MEMGUARD_SOFT",
          hide_env_values = true)]
    soft: Option<Switch<u64>>,

    /// Longest pause between two looks, in milliseconds; it gets shorter as a limit
    /// comes near
    #[arg(long, global = true, value_name = "MS", default_value_t = 500, hide_short_help = true,
          value_parser = clap::value_parser!(u64).range(10..=60_000))]
    interval: u64,
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
        .map_err(|e: crate::ParseAmountError| e.to_string())
}

impl LimitArgs {
    /// The limits.
    ///
    /// # Errors
    /// What is wrong with the arguments together, in one sentence.
    pub fn limits(&self) -> Result<Limits, String> {
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
}
