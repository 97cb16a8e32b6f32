//! `anemone bench --profile`: where the time of a call goes, next to the limits of the
//! machine measured in the same process. On one thread all times are processor time,
//! which other work on the machine does not touch.

use std::fmt::Write;
use std::sync::Arc;

use anemone_runtime::ProfileEntry;
use anemone_runtime::engine::{Draft, DrafterProgram, Engine, ProgramDrafter, Row};
use anemone_runtime::kernels::roofline::Roofline;
use anemone_runtime::kernels::{Pool, clock};
use serde::Serialize;

use crate::failure::End;

/// Bytes read to measure the bandwidth: more than a last-level cache.
const READ: usize = 512 << 20;
/// Live rows of the calls that are measured.
const ROWS: [usize; 5] = [1, 8, 16, 32, 64];
/// Rows that a draft takes in: those of a cycle that keeps two guesses.
const NEW_ROWS: usize = 3;

/// The limits and every call.
#[derive(Debug, Serialize)]
pub(crate) struct Profile {
    threads: usize,
    bytes_per_second: f64,
    flops_per_second: f64,
    calls: Vec<Call>,
    /// A draft, if the folder has a drafter.
    draft: Option<Call>,
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
        let products = |e: &ProfileEntry| e.weights * rows;
        calls.push(Call::new(
            [rows, width, slot],
            best,
            &limits,
            entries,
            products,
        ));
    }
    Ok(Profile {
        threads: limits.threads,
        bytes_per_second: limits.bytes_per_second,
        flops_per_second: limits.flops_per_second,
        calls,
        draft: None,
    })
}

impl Call {
    /// A call of `rows` in use of `width` at `slot`, and its steps.
    fn new(
        [rows, width, slot]: [usize; 3],
        seconds: f64,
        limits: &Roofline,
        entries: Vec<ProfileEntry>,
        products: impl Fn(&ProfileEntry) -> usize,
    ) -> Self {
        let all: usize = entries.iter().map(&products).sum();
        let bytes: usize = entries.iter().map(|e| e.bytes).sum();
        Self {
            rows,
            width,
            slot,
            milliseconds: seconds * 1e3,
            in_steps: entries.iter().map(|e| e.seconds).sum::<f64>() * 1e3,
            bound: limits.bound(bytes, all, 1) * 1e3,
            steps: entries
                .into_iter()
                .map(|e| Steps {
                    count: e.steps,
                    milliseconds: e.seconds * 1e3,
                    bytes: e.bytes,
                    flops: 2.0 * products(&e) as f64,
                    bound: limits.bound(e.bytes, products(&e), 1) * 1e3,
                    name: e.name,
                })
                .collect(),
        }
    }

    fn table(&self) -> String {
        let mut out = format!(
            "{:<40} {:>5} {:>9} {:>6} {:>7} {:>8} {:>6}\n",
            "step", "count", "ms", "share", "GB/s", "GFLOP/s", "limit"
        );
        for s in &self.steps {
            out += &s.line(self.in_steps);
        }
        out
    }
}

impl Profile {
    /// Adds a draft after `ids`, `repeat` times.
    pub(crate) fn draft(
        &mut self,
        engine: &Engine,
        program: &Arc<DrafterProgram>,
        ids: &[u32],
        repeat: usize,
    ) -> Result<(), End> {
        let mut drafter = ProgramDrafter::new(program);
        let (mut cache, known) = (engine.cache(), ids.len() - 1);
        let widest = engine.manifest().widths.last().copied().unwrap_or(1);
        let mut last = Vec::new();
        for start in (0..known).step_by(widest) {
            let part = &ids[start..known.min(start + widest)];
            let step = engine.step(&mut cache, start, &Row::chain(part, start))?;
            let rows: Vec<_> = (0..part.len()).map(|i| (i, start + i)).collect();
            drafter.extend(&step.taps, &rows)?;
            last = step.taps;
        }
        let of_last = (known - 1) % widest + 1;
        let new = NEW_ROWS.min(of_last);
        let rows: Vec<_> = (0..new)
            .map(|i| (of_last - new + i, known - new + i))
            .collect();
        let limits = Roofline {
            threads: self.threads,
            bytes_per_second: self.bytes_per_second,
            flops_per_second: self.flops_per_second,
        };
        let guesses = drafter.info().guesses;
        drafter.propose(ids, guesses)?;
        program.set_profiling(true);
        let mut best = f64::INFINITY;
        for _ in 0..repeat {
            drafter.truncate(known - new);
            drafter.extend(&last, &rows)?;
            let start = clock::seconds(limits.threads);
            drafter.propose(ids, guesses)?;
            best = best.min(clock::seconds(limits.threads) - start);
        }
        program.set_profiling(false);
        let entries = program.profile(known, new)?;
        let shape = [guesses, drafter.info().block, known];
        let call = Call::new(shape, best, &limits, entries, |e| e.products);
        self.draft = Some(call);
        Ok(())
    }

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
            out += &c.table();
        }
        if let Some(c) = &self.draft {
            let (guesses, slot, ms) = (c.rows, c.slot, c.milliseconds);
            let _ = writeln!(
                out,
                "\ndraft of {guesses} behind {slot} slots: {ms:.3} ms, {:.3} by the limits",
                c.bound
            );
            out += &c.table();
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
