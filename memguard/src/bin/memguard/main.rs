//! `memguard`: run a command and stop it before the machine runs out of memory.

mod args;
mod report;
mod supervise;

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use anemone_memguard::{Error, Lock, Reason, Stop, Watch};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use signal_hook::consts::{SIGINT, SIGTERM};

use args::Args;

/// Exit codes other than the command's own.
mod code {
    pub(crate) const NO_RESOURCES: u8 = 4;
    pub(crate) const INTERNAL: u8 = 125;
    pub(crate) const CANNOT_RUN: u8 = 126;
    pub(crate) const NOT_FOUND: u8 = 127;
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(code) => code.into(),
        Err(e) => {
            let mut message = format!("error: {e}");
            let mut cause = std::error::Error::source(&e);
            while let Some(inner) = cause {
                let _ = write!(message, "\n  caused by: {inner}");
                cause = inner.source();
            }
            if let Some(hint) = e.hint() {
                let _ = write!(message, "\n\nhint: {hint}");
            }
            say(&message);
            let code = match e {
                Error::Memory { .. } | Error::Exhausted(_) | Error::Busy { .. } => {
                    code::NO_RESOURCES
                }
                _ => code::INTERNAL,
            };
            code.into()
        }
    }
}

fn run(args: &Args) -> Result<u8, Error> {
    let limits = args.limits().unwrap_or_else(|wrong| {
        Args::command()
            .error(ErrorKind::ValueValidation, wrong)
            .exit()
    });
    // Held until the end of this function: while the command runs.
    let lock = if args.wait {
        let stop = Stop::on_signals()?;
        let lock = Lock::wait(&args.command_line(), &stop, |holder| {
            if !args.quiet {
                say(&format!("memguard: waiting for {holder}"));
            }
        })?;
        if let Some(reason) = stop.requested() {
            return Ok(match reason {
                Reason::Interrupted => 128 + SIGINT as u8,
                _ => 128 + SIGTERM as u8,
            });
        }
        lock
    } else if args.lock {
        Some(Lock::acquire(&args.command_line())?)
    } else {
        None
    };
    let watch = Watch::new(&limits)?;
    supervise::run(args, watch, lock.as_ref())
}

/// One message to standard error. That nobody listens is no reason to stop guarding.
fn say(message: &str) {
    let _ = writeln!(std::io::stderr(), "{message}");
}
