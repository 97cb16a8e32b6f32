//! `anemone bench --profile`: where the time of a call goes, next to the limits of the
//! machine measured in the same process.

use std::fmt::Write;

use anemone_runtime::engine::{Engine, Row};
use anemone_runtime::kernels::roofline::Roofline;
use anemone_runtime::kernels::{Pool, clock};

use crate::failure::End;

/// Bytes read to measure the bandwidth: more than a last-level cache.
const READ: usize = 512 << 20;

/// A table per call: one live row and a full call of the narrowest width, and a full
/// call of the widest, behind `filled` slots. Each step shows its shortest time of
/// `repeat` calls.
pub(crate) fn tables(
    engine: &Engine,
    threads: usize,
    filled: usize,
    repeat: usize,
    ids: &[u32],
) -> Result<String, End> {
    let limits = Roofline::measure(&Pool::new(threads), READ);
    let mut out = format!(
        "{} threads: {:.1} GB/s, {:.0} GFLOP/s\n",
        limits.threads,
        limits.bytes_per_second / 1e9,
        limits.flops_per_second / 1e9
    );
    let widths = &engine.manifest().widths;
    let (narrow, wide) = (widths[0], widths[widths.len() - 1]);
    let grid = engine.manifest().offset_multiple;
    let offset = filled.min(engine.max_context() - wide) / grid * grid;
    for (rows, width) in [(1, narrow), (narrow, narrow), (wide, wide)] {
        let mut cache = engine.cache_for(offset + width)?;
        let chain = Row::chain(&ids[..rows], offset);
        engine.set_profiling(true);
        let mut best = f64::INFINITY;
        for _ in 0..repeat {
            let start = clock::seconds(limits.threads);
            engine.step(&mut cache, offset, &chain)?;
            best = best.min(clock::seconds(limits.threads) - start);
        }
        engine.set_profiling(false);
        let entries = engine.profile(cache.context(), width)?;
        let bytes = entries.iter().map(|e| e.bytes).sum();
        let weights = entries.iter().map(|e| e.weights).sum();
        let steps: f64 = entries.iter().map(|e| e.seconds).sum();
        let _ = writeln!(
            out,
            "\n{rows} rows in a call of {width} at slot {offset}: {:.3} ms, {:.3} ms in steps, \
             {:.3} ms by the limits",
            best * 1e3,
            steps * 1e3,
            limits.bound(bytes, weights, rows) * 1e3,
        );
        let _ = writeln!(
            out,
            "{:<40} {:>5} {:>9} {:>6} {:>7} {:>8} {:>6}",
            "step", "count", "ms", "share", "GB/s", "GFLOP/s", "limit"
        );
        for e in &entries {
            let _ = write!(
                out,
                "{:<40} {:>5} {:>9.3} {:>5.1}%",
                e.name,
                e.steps,
                e.seconds * 1e3,
                100.0 * e.seconds / steps,
            );
            if e.weights > 0 {
                let flops = 2.0 * (e.weights * rows) as f64;
                let bound = limits.bound(e.bytes, e.weights, rows);
                let _ = write!(
                    out,
                    " {:>7.1} {:>8.0} {:>5.0}%",
                    e.bytes as f64 / e.seconds / 1e9,
                    flops / e.seconds / 1e9,
                    100.0 * bound / e.seconds,
                );
            }
            out.push('\n');
        }
    }
    Ok(out)
}
