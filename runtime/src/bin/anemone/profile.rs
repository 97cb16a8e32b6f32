//! `anemone bench --profile`: where the time of a call goes, next to the limits of the
//! machine measured in the same process. On one thread all times are processor time,
//! which other work on the machine does not touch.

use std::fmt::Write;

use anemone_runtime::ProfileEntry;
use anemone_runtime::engine::{Engine, Row};
use anemone_runtime::kernels::roofline::Roofline;
use anemone_runtime::kernels::{Pool, clock};
use serde::Serialize;

use crate::failure::End;

/// Bytes read to measure the bandwidth: more than a last-level cache.
const READ: usize = 512 << 20;
/// Live rows of the calls that are measured.
const ROWS: [usize; 5] = [1, 8, 16, 32, 64];

/// The limits and every call.
#[derive(Debug, Serialize)]
pub(crate) struct Profile {
    threads: usize,
    bytes_per_second: f64,
    flops_per_second: f64,
    calls: Vec<Call>,
}

/// One call behind some slots.
#[derive(Debug, Serialize)]
struct Call {
    rows: usize,
    width: usize,
    slot: usize,
    /// The shortest call.
    milliseconds: f64,
    /// The shortest time of each step, added up.
    in_steps: f64,
    /// What reading the weights once, or multiplying with them, takes at least.
    bound: f64,
    steps: Vec<Steps>,
}

/// All steps of one kind.
#[derive(Debug, Serialize)]
struct Steps {
    name: String,
    count: usize,
    milliseconds: f64,
    /// Bytes of weights.
    bytes: usize,
    /// Operations of products with weights.
    flops: f64,
    /// What the limits of the machine allow; 0 for steps without weights.
    bound: f64,
}

/// Calls of few to many rows behind `filled` slots, `repeat` times each.
pub(crate) fn measure(
    engine: &Engine,
    threads: usize,
    filled: usize,
    repeat: usize,
    ids: &[u32],
) -> Result<Profile, End> {
    let limits = Roofline::measure(&Pool::new(threads), READ);
    let manifest = engine.manifest();
    let widest = manifest.widths.last().copied().unwrap_or(1);
    let grid = manifest.offset_multiple;
    let slot = filled.min(engine.max_context() - widest) / grid * grid;
    let mut calls = Vec::new();
    for rows in ROWS.into_iter().filter(|&rows| rows <= widest) {
        let width = manifest.widths.iter().copied().find(|&w| w >= rows);
        let width = width.unwrap_or(widest);
        let mut cache = engine.cache_for(slot + width)?;
        let chain = Row::chain(&ids[..rows], slot);
        engine.set_profiling(true);
        let mut best = f64::INFINITY;
        for _ in 0..repeat {
            let start = clock::seconds(limits.threads);
            engine.step(&mut cache, slot, &chain)?;
            best = best.min(clock::seconds(limits.threads) - start);
        }
        engine.set_profiling(false);
        let entries = engine.profile(cache.context(), width)?;
        let total = |f: fn(&ProfileEntry) -> usize| entries.iter().map(f).sum::<usize>();
        calls.push(Call {
            rows,
            width,
            slot,
            milliseconds: best * 1e3,
            in_steps: entries.iter().map(|e| e.seconds).sum::<f64>() * 1e3,
            bound: limits.bound(total(|e| e.bytes), total(|e| e.weights), rows) * 1e3,
            steps: entries
                .into_iter()
                .map(|e| Steps {
                    name: e.name,
                    count: e.steps,
                    milliseconds: e.seconds * 1e3,
                    bytes: e.bytes,
                    flops: 2.0 * (e.weights * rows) as f64,
                    bound: limits.bound(e.bytes, e.weights, rows) * 1e3,
                })
                .collect(),
        });
    }
    Ok(Profile {
        threads: limits.threads,
        bytes_per_second: limits.bytes_per_second,
        flops_per_second: limits.flops_per_second,
        calls,
    })
}

impl Profile {
    /// The tables for a terminal.
    pub(crate) fn render(&self) -> String {
        let mut out = format!(
            "{} threads: {:.1} GB/s, {:.0} GFLOP/s\n\n",
            self.threads,
            self.bytes_per_second / 1e9,
            self.flops_per_second / 1e9
        );
        out += " rows  width        ms   x 1 row  in steps  by the limits\n";
        let first = self.calls.first().map_or(1.0, |c| c.milliseconds);
        for c in &self.calls {
            let _ = writeln!(
                out,
                "{:>5} {:>6} {:>9.3} {:>9.2} {:>9.3} {:>14.3}",
                c.rows,
                c.width,
                c.milliseconds,
                c.milliseconds / first,
                c.in_steps,
                c.bound
            );
        }
        for c in &self.calls {
            let (rows, width, slot) = (c.rows, c.width, c.slot);
            let _ = writeln!(out, "\n{rows} rows in a call of {width} at slot {slot}");
            let _ = writeln!(
                out,
                "{:<40} {:>5} {:>9} {:>6} {:>7} {:>8} {:>6}",
                "step", "count", "ms", "share", "GB/s", "GFLOP/s", "limit"
            );
            for s in &c.steps {
                out += &s.line(c.in_steps);
            }
        }
        out
    }
}

impl Steps {
    fn line(&self, total: f64) -> String {
        let mut line = format!(
            "{:<40} {:>5} {:>9.3} {:>5.1}%",
            self.name,
            self.count,
            self.milliseconds,
            100.0 * self.milliseconds / total
        );
        if self.bytes > 0 {
            let seconds = self.milliseconds * 1e-3;
            let _ = write!(
                line,
                " {:>7.1} {:>8.0} {:>5.0}%",
                self.bytes as f64 / seconds / 1e9,
                self.flops / seconds / 1e9,
                100.0 * self.bound / self.milliseconds
            );
        }
        line.push('\n');
        line
    }
}
