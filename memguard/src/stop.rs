//! The clean stop: a token that a job polls between two steps.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::SigId;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{Breach, Error};

/// Why a job should stop.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Reason {
    /// SIGINT: the user pressed Ctrl-C.
    Interrupted,
    /// SIGTERM: someone, perhaps `memguard`, asked.
    Terminated,
    /// The guard in this process: memory runs short.
    Memory(Breach),
}

impl Reason {
    /// The exit code of a job that stopped for this reason and can be resumed:
    /// 130 after Ctrl-C, else 75 (`EX_TEMPFAIL`).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Interrupted => 130,
            Self::Terminated | Self::Memory(_) => 75,
        }
    }
}

impl std::error::Error for Reason {}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupted => f.write_str("interrupted"),
            Self::Terminated => f.write_str("asked to terminate"),
            Self::Memory(breach) => write!(f, "stopped for memory: {breach}"),
        }
    }
}

/// Those of `signals` that this process was not started to ignore. A handler on the
/// others would undo `nohup`. Systems without `/proc` do not tell, so all are heeded.
pub fn heeded_signals(signals: &[i32]) -> Vec<i32> {
    let ignored = crate::platform::ignored_signals();
    signals
        .iter()
        .copied()
        .filter(|signal| ignored >> (signal - 1) & 1 == 0)
        .collect()
}

/// Set once, by whoever wants the job to stop; clones share it. Polling costs two
/// atomic loads.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// The first signal that came, 0 before. Its own `Arc` because the handler owns
    /// a share.
    signal: Arc<AtomicUsize>,
    memory: OnceLock<Breach>,
    handlers: Vec<SigId>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        for id in self.handlers.drain(..) {
            signal_hook::low_level::unregister(id);
        }
    }
}

impl Stop {
    /// A token that only the guard sets.
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that SIGINT and SIGTERM set too. The first one asks: the job finishes
    /// its step and exits resumable. The second one ends the process at once with
    /// code 130. A signal that this process was started to ignore stays ignored (a
    /// shell does that for SIGINT and jobs in the background). The handlers go with
    /// the last clone.
    ///
    /// # Errors
    /// [`Error::Signals`] if the handlers cannot be installed.
    pub fn on_signals() -> Result<Self, Error> {
        let mut shared = Shared::default();
        let asked = Arc::new(AtomicBool::new(false));
        for signal in heeded_signals(&[SIGINT, SIGTERM]) {
            // Handlers run in the order of registration: the shutdown looks at the
            // flag before this very signal sets it.
            let ids = [
                signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&asked)),
                signal_hook::flag::register(signal, Arc::clone(&asked)),
                signal_hook::flag::register_usize(
                    signal,
                    Arc::clone(&shared.signal),
                    signal as usize,
                ),
            ];
            for id in ids {
                shared.handlers.push(id.map_err(Error::Signals)?);
            }
        }
        Ok(Self(Arc::new(shared)))
    }

    /// Why the job should stop, `None` while it should go on.
    pub fn requested(&self) -> Option<Reason> {
        match self.0.signal.load(Ordering::Relaxed) as i32 {
            0 => self.0.memory.get().copied().map(Reason::Memory),
            SIGINT => Some(Reason::Interrupted),
            _ => Some(Reason::Terminated),
        }
    }

    /// Fails once the job should stop: `stop.check()?` between two steps.
    ///
    /// # Errors
    /// The reason.
    pub fn check(&self) -> Result<(), Reason> {
        self.requested().map_or(Ok(()), Err)
    }

    /// Asks the job to stop because memory runs short. Only the first call counts.
    pub fn request(&self, breach: Breach) {
        // A later breach is the same story.
        let _ = self.0.memory.set(breach);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Measure;

    const BREACH: Breach = Breach {
        measure: Measure::Anonymous,
        value: 310 << 20,
        limit: 300 << 20,
    };

    #[test]
    fn the_guards_request_reaches_every_clone_and_says_why() {
        let stop = Stop::new();
        let seen_by_the_job = stop.clone();
        assert_eq!(seen_by_the_job.requested(), None);
        stop.request(BREACH);
        let reason = seen_by_the_job.requested().unwrap();
        assert_eq!(seen_by_the_job.check(), Err(reason));
        assert_eq!(reason.exit_code(), 75);
        assert_eq!(
            reason.to_string(),
            "stopped for memory: anonymous memory reached 310 MiB (limit 300 MiB)"
        );
    }
}
