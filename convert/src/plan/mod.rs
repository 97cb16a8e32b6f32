//! What a command would do: its steps with their bytes, the peak of memory, the time
//! on this machine, and whether disk and memory suffice. Nothing is written for it.
//!
//! Bytes are exact where the formats fix them (matrices, programs, tables). Memory is a
//! sum over what is alive at the dearest moment. Time is work divided by speed, and
//! speed is measured for a second or two with the very routines that will do the work.

mod cost;
mod refine;
mod speed;
mod studies;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anemone_memguard::{Budget, human_bytes, require_disk};
use anemone_schemas::atomic::partial_path;
use serde::Serialize;

pub use cost::{demo, drafter, eval, package, quantize, synth, target};

use crate::commands::files::list;
use crate::error::Error;
pub use refine::refine;
use speed::Speed;
pub use studies::{ablate, tune};

/// What a command would do.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The command.
    pub command: &'static str,
    /// Its steps in order.
    pub steps: Vec<Step>,
    /// Where it writes.
    pub output: Option<PathBuf>,
    /// Bytes it writes in all.
    pub output_bytes: u64,
    /// Bytes it needs beside the output while it runs.
    pub scratch_bytes: u64,
    /// Anonymous memory at the dearest moment, bytes.
    pub peak_memory: u64,
    /// Memory that may be used now, bytes; the tightest of machine, cgroup and limits.
    pub available_memory: u64,
    /// Estimated duration, if the command takes long enough to ask.
    pub seconds: Option<f64>,
    /// What the reader should know.
    pub notes: Vec<String>,
}

/// A step.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// What is done.
    pub what: String,
    /// Bytes written.
    pub bytes: u64,
    /// Estimated duration.
    pub seconds: Option<f64>,
    #[serde(skip)]
    work: Work,
}

/// Work in units of which speed is measured.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Multiply-adds of matrix products in f32.
    products: f64,
    /// Weights that go through k-means.
    points: f64,
    /// Multiply-adds of GPTQ.
    feedback: f64,
    /// Rows times squared columns of matrices that are refined in the loss's metric.
    refinement: f64,
    /// Cubes of the widths of factored Hessians.
    factors: f64,
    /// Bytes read and hashed.
    hashed: f64,
}

impl Work {
    fn add(&mut self, other: &Self) {
        self.products += other.products;
        self.points += other.points;
        self.feedback += other.feedback;
        self.refinement += other.refinement;
        self.factors += other.factors;
        self.hashed += other.hashed;
    }

    fn is_none(&self) -> bool {
        let Self {
            products,
            points,
            feedback,
            refinement,
            factors,
            hashed,
        } = self;
        products + points + feedback + refinement + factors + hashed == 0.0
    }
}

impl Step {
    fn new(what: impl Into<String>, bytes: u64, work: Work) -> Self {
        Self {
            what: what.into(),
            bytes,
            seconds: None,
            work,
        }
    }
}

impl Plan {
    fn new(command: &'static str, steps: Vec<Step>) -> Result<Self, Error> {
        Ok(Self {
            command,
            output: None,
            output_bytes: steps.iter().map(|s| s.bytes).sum(),
            steps,
            scratch_bytes: 0,
            peak_memory: 0,
            available_memory: Budget::now()?.available,
            seconds: None,
            notes: Vec::new(),
        })
    }

    /// The plan of a download of `files` to the cache, `bytes` of which are missing.
    ///
    /// # Errors
    /// If the machine's memory cannot be read.
    pub fn download(
        files: impl Iterator<Item = (String, u64)>,
        cache: &Path,
        bytes: u64,
    ) -> Result<Self, Error> {
        let steps = files.map(|(name, bytes)| Step::new(name, bytes, Work::default()));
        let mut plan = Self::new("download", steps.collect())?;
        plan.output = Some(cache.to_path_buf());
        plan.output_bytes = bytes;
        plan.peak_memory = 64 << 20;
        plan.notes
            .push("what comes after the download is planned once the files are here".into());
        Ok(plan)
    }

    /// Measures this machine and fills in the times.
    ///
    /// # Errors
    /// A failure of the measured routines.
    pub fn estimate(&mut self) -> Result<(), Error> {
        if self.steps.iter().all(|step| step.work.is_none()) {
            return Ok(());
        }
        let speed = Speed::measure()?;
        for step in &mut self.steps {
            step.seconds = Some(speed.seconds(&step.work));
        }
        self.seconds = Some(self.steps.iter().filter_map(|s| s.seconds).sum());
        Ok(())
    }

    /// Refuses what cannot fit, with the numbers.
    ///
    /// # Errors
    /// Too little memory or disk (code 4).
    pub fn require(&self) -> Result<(), Error> {
        Budget::now()?.require(self.peak_memory)?;
        if let Some(output) = &self.output {
            // What an interrupted run has written already needs no more room.
            let there = match self.command {
                "download" => 0,
                _ => bytes_below(output) + bytes_below(&partial_path(output)),
            };
            let needed = self.output_bytes.saturating_sub(there) + self.scratch_bytes;
            require_disk(output, needed)?;
        }
        Ok(())
    }

    /// The plan as people read it.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let width = self.steps.iter().map(|s| s.what.chars().count()).max();
        let width = width.unwrap_or(0).clamp(20, 60);
        for step in &self.steps {
            let time = step.seconds.map(duration).unwrap_or_default();
            let _ = writeln!(out, "{:<width$} {:>15} {time:>12}", step.what, step.bytes);
        }
        let _ = writeln!(
            out,
            "\nwrites    {} bytes ({})",
            self.output_bytes,
            human_bytes(self.output_bytes)
        );
        if self.scratch_bytes > 0 {
            let scratch = human_bytes(self.scratch_bytes);
            let _ = writeln!(out, "scratch   {scratch}, removed at the end");
        }
        let _ = writeln!(
            out,
            "memory    {} at most, {} available",
            human_bytes(self.peak_memory),
            human_bytes(self.available_memory)
        );
        if let Some(seconds) = self.seconds {
            let _ = writeln!(out, "time      about {}", duration(seconds));
        }
        for note in &self.notes {
            let _ = writeln!(out, "note      {note}");
        }
        out
    }
}

/// Bytes of all files below a folder, 0 if there is none.
fn bytes_below(folder: &Path) -> u64 {
    let files = list(folder).unwrap_or_default();
    let sizes = files.iter().filter_map(|f| folder.join(f).metadata().ok());
    sizes.map(|meta| meta.len()).sum()
}

/// `35 s`, `12 min`, `3 h 20 min`.
fn duration(seconds: f64) -> String {
    if seconds < 9.95 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    match whole {
        0..100 => format!("{whole} s"),
        100..6000 => format!("{} min", (whole + 30) / 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_at_a_glance() {
        for (seconds, text) in [
            (0.04, "0.0 s"),
            (9.94, "9.9 s"),
            (35.0, "35 s"),
            (720.0, "12 min"),
            (12_010.0, "3 h 20 min"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
