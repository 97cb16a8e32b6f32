//! A heavy job: one at a time on this machine, and under guard.

use anemone_memguard::{Event, Guard, LimitArgs, Lock, Stop, human_bytes};
use anemone_schemas::exit::Exit;
use clap::{Args, ValueEnum};

use crate::error::Error;
use crate::ui::Ui;

/// What happens where another heavy job runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Other jobs")]
pub(super) struct LockArgs {
    /// What to do while another heavy job runs.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value = "fail",
        value_name = "HOW",
        env = "ANEMONE_LOCK",
        hide_env_values = true
    )]
    lock: LockArg,
    /// Wait for it: `--lock wait`.
    #[arg(long, global = true)]
    wait: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LockArg {
    /// Exit with code 4, naming it.
    Fail,
    /// Wait until it ends.
    Wait,
    /// Run beside it.
    Off,
}

/// Lock and guard of a command, for as long as it runs.
pub(super) struct Job {
    guard: Option<Guard>,
    _lock: Option<Lock>,
    ui: Ui,
}

impl Job {
    /// Takes the lock and starts the guard.
    ///
    /// # Errors
    /// Another job (code 4), memory that is short already (4), or an interruption
    /// while waiting.
    pub(super) fn start(
        name: &str,
        limits: &LimitArgs,
        lock: &LockArgs,
        ui: Ui,
        stop: &Stop,
    ) -> Result<Self, Error> {
        let limits = limits.limits().map_err(Error::usage)?;
        let name = format!("anemone-convert {name}");
        let lock = match lock.lock {
            LockArg::Off => None,
            _ if lock.wait || lock.lock == LockArg::Wait => {
                let lock = Lock::wait(&name, stop, |holder| {
                    ui.note(&format!("waiting for {holder}"));
                })?;
                stop.check()?;
                lock
            }
            LockArg::Fail | LockArg::Wait => Some(Lock::acquire(&name)?),
        };
        let guard = Guard::start(&limits, stop, move |event| {
            if let Event::Killing(breach) = event {
                let error = Error::new(Exit::Resources, format!("ended for memory: {breach}"))
                    .hint("what is finished is kept; the same command goes on");
                ui.error(&error);
                // This command has no children, so ending itself frees all there is,
                // and a script around it gets a code instead of a signal.
                signal_hook::low_level::exit(i32::from(Exit::Resources as u8));
            }
            ui.note(&event.to_string());
        })?;
        Ok(Self {
            guard: Some(guard),
            _lock: lock,
            ui,
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if let Some(seen) = self.guard.take().and_then(Guard::finish) {
            self.ui.detail(&format!(
                "at most {} of anonymous memory, at least {} available, swap grown by {}",
                human_bytes(seen.peak_anonymous),
                human_bytes(seen.least_available),
                human_bytes(seen.peak_swap_growth),
            ));
        }
    }
}

/// A file over the limit of `ulimit -f` shall be an error of the write, with a message
/// and a code, not a signal that ends the process.
pub(super) fn heed_file_size_limit() {
    // Without the handler the worst is an end without a message.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
}
