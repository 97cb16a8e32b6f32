//! The watch as a thread inside the job itself.

use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};

use signal_hook::consts::SIGKILL;

use crate::{Breach, Error, Group, Limits, Statistics, Stop, Verdict, Watch};

/// What the guard does, told right before it does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The job is asked to stop.
    Asked(Breach),
    /// The process group is killed as soon as the callback returns.
    Killing(Breach),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked(breach) => write!(f, "{breach}, asking the job to stop"),
            Self::Killing(breach) => write!(f, "{breach}, ending the process group"),
        }
    }
}

/// A thread that watches the process group of this process until it is dropped.
///
/// A soft line sets the [`Stop`], once. A hard line kills the whole group with
/// SIGKILL, this process included: by then there may be no memory left for
/// anything gentler, and finished work is on disk.
#[derive(Debug)]
pub struct Guard {
    quit: Option<Sender<()>>,
    thread: Option<JoinHandle<Statistics>>,
}

impl Guard {
    /// Starts the watch. `on_event` runs on its thread and should be brief.
    ///
    /// # Errors
    /// The errors of [`Watch::new`], or [`Error::Thread`].
    pub fn start(
        limits: &Limits,
        stop: &Stop,
        mut on_event: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self, Error> {
        let mut watch = Watch::new(limits)?;
        let (quit, asked_to_quit) = mpsc::channel::<()>();
        let stop = stop.clone();
        let watching = move || {
            let group = Group::own();
            watch.follow(group);
            let mut asked = false;
            loop {
                match watch.sample() {
                    Verdict::Soft(breach) if !asked => {
                        asked = true;
                        on_event(Event::Asked(breach));
                        stop.request(breach);
                    }
                    Verdict::Hard(breach) => {
                        on_event(Event::Killing(breach));
                        // One's own group can always be signalled.
                        let _ = group.signal(SIGKILL);
                    }
                    Verdict::Soft(_) | Verdict::Fine => {}
                }
                match asked_to_quit.recv_timeout(watch.pause()) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return watch.statistics(),
                }
            }
        };
        let thread = thread::Builder::new()
            .name("memguard".into())
            .spawn(watching)
            .map_err(Error::Thread)?;
        Ok(Self {
            quit: Some(quit),
            thread: Some(thread),
        })
    }

    /// Ends the watch and tells what it saw.
    pub fn finish(mut self) -> Option<Statistics> {
        self.end()
    }

    fn end(&mut self) -> Option<Statistics> {
        // The thread sees its channel close.
        self.quit.take();
        self.thread.take()?.join().ok()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.end();
    }
}
