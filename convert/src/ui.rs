//! Progress and messages on standard error: a bar with time left and throughput on a
//! terminal, a line per step otherwise, one JSON object per line for programs, nothing
//! when quiet. A log file gets the lines whatever the terminal gets.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use serde_json::{Value, json};

use crate::error::Error;

/// Lines about bytes are this far apart at least.
const BYTES_EVERY: Duration = Duration::from_secs(5);

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Not at all.
    None,
    /// A line per step.
    Lines,
    /// A bar.
    Bar,
    /// A JSON object per line.
    Json,
}

/// Where messages go, fixed for the whole process.
#[derive(Debug)]
pub struct Reporter {
    style: Style,
    verbose: bool,
    log: Option<(PathBuf, Mutex<File>)>,
    start: Instant,
}

/// Where a command's progress goes.
#[derive(Clone, Copy, Debug)]
pub enum Ui {
    /// Nowhere.
    Quiet,
    /// To a reporter.
    To(&'static Reporter),
}

/// The progress of one stage of known length. Dropped, it is over.
#[derive(Debug)]
pub struct Stage {
    ui: Ui,
    bar: ProgressBar,
    name: String,
    bytes: bool,
    told: Mutex<Instant>,
}

impl Ui {
    /// A reporter for this process. Without a `style` it is a bar on a terminal and
    /// lines elsewhere. The log file is appended to.
    ///
    /// # Errors
    /// If the log file cannot be opened.
    pub fn new(style: Option<Style>, verbose: bool, log: Option<&Path>) -> Result<Self, Error> {
        let style = style.unwrap_or(if io::stderr().is_terminal() {
            Style::Bar
        } else {
            Style::Lines
        });
        let log = match log {
            Some(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path);
                let file = file.map_err(|e| Error::io(path, &e))?;
                Some((path.to_path_buf(), Mutex::new(file)))
            }
            None => None,
        };
        let reporter = Reporter {
            style,
            verbose,
            log,
            start: Instant::now(),
        };
        // One per process, so that a `Ui` can be passed around as a plain value.
        Ok(Self::To(Box::leak(Box::new(reporter))))
    }

    /// Starts a stage of `steps` steps.
    pub fn stage(self, name: &str, steps: usize) -> Stage {
        self.start(name, steps as u64, false)
    }

    /// Starts a stage of `bytes` bytes.
    pub fn transfer(self, name: &str, bytes: u64) -> Stage {
        self.start(name, bytes, true)
    }

    fn start(self, name: &str, length: u64, bytes: bool) -> Stage {
        let shown = matches!(self, Self::To(r) if r.style == Style::Bar);
        let target = if shown {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(length), target);
        let template = if bytes {
            "{prefix} [{bar:20}] {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, \
             {eta} left  {wide_msg}"
        } else {
            // So short that the name of a matrix has room on 80 columns.
            "{prefix} [{bar:20}] {pos}/{len}, {rate}, {eta} left  {wide_msg}"
        };
        let style = ProgressStyle::with_template(template).expect("a valid template");
        let style = style.with_key("rate", |state: &ProgressState, out: &mut dyn fmt::Write| {
            let _ = out.write_str(&rate(state.per_sec()));
        });
        bar.set_style(style.progress_chars("=> "));
        bar.set_prefix(name.to_string());
        if shown {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        let unit = if bytes { "bytes" } else { "steps" };
        self.event(&json!({ "event": "start", "stage": name, "length": length, "unit": unit }));
        Stage {
            ui: self,
            bar,
            name: name.to_string(),
            bytes,
            told: Mutex::new(Instant::now()),
        }
    }

    /// A line for the reader, unless quiet.
    pub fn note(self, text: &str) {
        self.line(text, Style::None);
        self.event(&json!({ "event": "note", "text": text }));
    }

    /// A line for those who asked for more (`-v`); always in the log.
    pub fn detail(self, text: &str) {
        let Self::To(reporter) = self else { return };
        if reporter.verbose {
            self.note(text);
        } else {
            reporter.log(text);
        }
    }

    /// How the command failed.
    #[allow(clippy::print_stderr, reason = "where errors meet the user")]
    pub fn error(self, error: &Error) {
        let hint = error.hint.as_deref();
        let mut text = format!("error: {error}");
        if let Some(hint) = hint {
            text.push_str("\n\nhint: ");
            text.push_str(hint);
        }
        match self {
            Self::To(reporter) => {
                reporter.log(&text);
                if reporter.style == Style::Json {
                    self.event(&json!({
                        "event": "error", "message": error.message, "hint": hint,
                        "exit_code": error.exit as u8,
                    }));
                    return;
                }
                eprintln!("{text}");
            }
            Self::Quiet => eprintln!("{text}"),
        }
    }

    /// A line on the terminal, not for readers of JSON or where `but` is the style.
    #[allow(clippy::print_stderr, reason = "the one place that talks to the user")]
    fn line(self, text: &str, but: Style) {
        let Self::To(reporter) = self else { return };
        reporter.log(text);
        if ![Style::None, Style::Json, but].contains(&reporter.style) {
            eprintln!("{text}");
        }
    }

    #[allow(clippy::print_stderr, reason = "the one place that talks to the user")]
    fn event(self, event: &Value) {
        if let Self::To(reporter) = self
            && reporter.style == Style::Json
        {
            eprintln!("{event}");
        }
    }
}

impl Reporter {
    /// Appends to the log file. A log that cannot be written stops no job.
    fn log(&self, text: &str) {
        if let Some((_, file)) = &self.log
            && let Ok(mut file) = file.lock()
        {
            let seconds = self.start.elapsed().as_secs_f64();
            let _ = writeln!(file, "[{seconds:9.1} s] {text}");
        }
    }
}

impl Stage {
    /// One step is done; `what` says which.
    pub fn step(&self, what: &str) {
        self.advance(1, what);
    }

    /// So many more steps or bytes are done.
    pub fn advance(&self, amount: u64, what: &str) {
        self.bar.inc(amount);
        self.bar.set_message(what.to_string());
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        if self.bytes && done < all {
            // Pieces of a file come by the thousand.
            let Ok(mut told) = self.told.lock() else {
                return;
            };
            if told.elapsed() < BYTES_EVERY {
                return;
            }
            *told = Instant::now();
        }
        let left = self.bar.eta().as_secs();
        let name = &self.name;
        self.ui.line(
            &format!("{name}: {done}/{all} {what} ({left} s left)"),
            Style::Bar,
        );
        self.ui.event(&json!({
            "event": "step", "stage": name, "done": done, "length": all, "what": what,
            "seconds_left": left,
        }));
    }
}

/// `3.2/s`, or `41 s each` where a step takes longer than a second.
fn rate(per_second: f64) -> String {
    if per_second >= 1.0 {
        format!("{per_second:.1}/s")
    } else if per_second > 0.0 {
        format!("{:.0} s each", 1.0 / per_second)
    } else {
        "-/s".to_string()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        self.ui
            .event(&json!({ "event": "end", "stage": self.name, "done": self.bar.position() }));
    }
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn a_rate_is_per_second_or_seconds_each() {
        assert_eq!(rate(32.53), "32.5/s");
        assert_eq!(rate(0.024), "42 s each");
        assert_eq!(rate(0.0), "-/s");
    }
}
