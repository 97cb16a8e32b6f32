//! Progress on standard error: a bar with time left on a terminal, a line per
//! step otherwise, nothing when quiet.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Where a command's progress goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ui {
    /// Nothing.
    Quiet,
    /// One line per step.
    Lines,
    /// A bar.
    Bar,
}

/// The progress of one stage of known length.
#[derive(Debug)]
pub struct Stage {
    bar: ProgressBar,
    lines: bool,
    name: String,
}

impl Ui {
    /// A bar on a terminal and lines elsewhere, unless `quiet`.
    pub fn detect(quiet: bool) -> Self {
        if quiet {
            Self::Quiet
        } else if std::io::stderr().is_terminal() {
            Self::Bar
        } else {
            Self::Lines
        }
    }

    /// Starts a stage of `steps` steps.
    pub fn stage(self, name: &str, steps: usize) -> Stage {
        let bar = ProgressBar::with_draw_target(
            Some(steps as u64),
            if self == Self::Bar {
                ProgressDrawTarget::stderr()
            } else {
                ProgressDrawTarget::hidden()
            },
        );
        let style = ProgressStyle::with_template(
            "{prefix:>12} [{bar:30}] {pos}/{len} {elapsed} elapsed, {eta} left  {wide_msg}",
        )
        .expect("a valid template")
        .progress_chars("=> ");
        bar.set_style(style);
        bar.set_prefix(name.to_string());
        if self == Self::Bar {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Stage {
            bar,
            lines: self == Self::Lines,
            name: name.to_string(),
        }
    }

    /// A line for the reader, unless quiet.
    #[allow(clippy::print_stderr, reason = "the one place that talks to the user")]
    pub fn note(self, text: &str) {
        if self != Self::Quiet {
            eprintln!("{text}");
        }
    }
}

impl Stage {
    /// One step is done; `what` says which.
    #[allow(clippy::print_stderr, reason = "the one place that talks to the user")]
    pub fn step(&self, what: &str) {
        self.bar.inc(1);
        self.bar.set_message(what.to_string());
        if self.lines {
            let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
            let left = self.bar.eta().as_secs();
            eprintln!("{}: {done}/{all} {what} ({left} s left)", self.name);
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
