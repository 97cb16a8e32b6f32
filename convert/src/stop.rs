//! Clean interruption: the first Ctrl-C or SIGTERM lets the step in hand finish, the
//! second ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anemone_schemas::exit::Exit;

use crate::error::Error;

/// A flag that a signal or another thread raises.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// A flag raised by SIGINT and SIGTERM.
    ///
    /// # Errors
    /// If the handlers cannot be installed.
    pub fn on_signals() -> std::io::Result<Self> {
        let stop = Self::default();
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            // Order matters: a second signal finds the flag raised and ends the process.
            signal_hook::flag::register_conditional_shutdown(
                signal,
                i32::from(Exit::Interrupted as u8),
                Arc::clone(&stop.0),
            )?;
            signal_hook::flag::register(signal, Arc::clone(&stop.0))?;
        }
        Ok(stop)
    }

    /// Raises the flag.
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Fails with exit code 130 once the flag is raised.
    ///
    /// # Errors
    /// The interruption.
    pub fn check(&self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) {
            return Err(Error::new(Exit::Interrupted, "interrupted")
                .hint("the same command goes on where this one stopped"));
        }
        Ok(())
    }
}
