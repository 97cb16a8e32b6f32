//! `anemone bench`: how fast.
//!
//! A trial takes in a prompt of pseudo-random ids and then decodes; stop ids do not
//! end it. The first trial of each kind warms up and does not count.

use std::fmt::Write;
use std::time::Instant;

use anemone_runtime::engine::{Cache, Engine, Row};
use anemone_schemas::exit::Exit;
use clap::Args;
use serde::Serialize;

use crate::ModelArgs;
use crate::failure::End;
use crate::{output, profile};

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt tokens.
    #[arg(short, long, default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens to decode.
    #[arg(short = 'n', long, default_value_t = 64)]
    new_tokens: usize,
    /// Trials.
    #[arg(short, long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Seed of the prompt.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
    /// Print where the time of a call goes instead, behind as many slots as prompt
    /// tokens; every step shows its shortest time.
    #[arg(long)]
    profile: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    quantization: String,
    prompt_tokens: usize,
    new_tokens: usize,
    seed: u64,
    /// Tokens per second of the prompt.
    prefill: Series,
    /// Tokens per second after it.
    decode: Series,
    /// Milliseconds from the prompt to the first token.
    first_token_ms: Series,
    /// Milliseconds of one full call, by width.
    calls: Vec<CallTime>,
    /// Highest resident size of the process, where the system tells.
    peak_rss_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct CallTime {
    width: usize,
    context: usize,
    milliseconds: Series,
}

/// Raw trials with their median and standard deviation.
#[derive(Debug, Serialize)]
struct Series {
    median: f64,
    standard_deviation: f64,
    trials: Vec<f64>,
}

impl Series {
    fn new(trials: Vec<f64>) -> Self {
        let n = trials.len() as f64;
        let mean = trials.iter().sum::<f64>() / n;
        let variance = trials.iter().map(|t| (t - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        let mut sorted = trials.clone();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Self {
            median: f64::midpoint(low, high),
            standard_deviation: variance.sqrt(),
            trials,
        }
    }
}

pub(crate) fn bench(args: &BenchArgs) -> Result<Exit, End> {
    let engine = Engine::open(&args.model.model, args.model.threads)?;
    let (p, n) = (args.prompt_tokens.max(1), args.new_tokens.max(1));
    if p + n > engine.max_context() {
        return Err(End::bad_input(
            format!(
                "{p} + {n} tokens do not fit the context of {}",
                engine.max_context()
            ),
            Some("lower `--prompt-tokens` or `--new-tokens`"),
        ));
    }
    if args.profile {
        let widest = engine.manifest().widths.last().copied().unwrap_or(1);
        let rows = ids(&engine, widest, args.seed);
        let repeat = args.repeat.max(3) as usize;
        let profile = profile::measure(&engine, args.model.threads, p, repeat, &rows)?;
        if args.json {
            output::print_json(&profile)?;
        } else {
            output::print(&profile.render())?;
        }
        return Ok(Exit::Ok);
    }
    let prompt = ids(&engine, p, args.seed);
    let (mut prefill, mut decode, mut first) = (Vec::new(), Vec::new(), Vec::new());
    for trial in 0..=args.repeat {
        let mut cache = engine.cache();
        let mut tokens = prompt.clone();
        let start = Instant::now();
        let mut next = feed(&engine, &mut cache, &tokens, 0)?;
        let prompt_time = start.elapsed().as_secs_f64();
        let start = Instant::now();
        for _ in 0..n {
            tokens.push(next);
            next = feed(&engine, &mut cache, &tokens, tokens.len() - 1)?;
        }
        let decode_time = start.elapsed().as_secs_f64();
        if trial > 0 {
            prefill.push(p as f64 / prompt_time);
            decode.push(n as f64 / decode_time);
            first.push(prompt_time * 1e3);
        }
    }
    let widths = engine.manifest().widths.clone();
    let calls = widths
        .into_iter()
        .map(|width| call_time(&engine, width, args))
        .collect::<Result<_, End>>()?;
    let model = &engine.manifest().model;
    let report = Report {
        model: model.name.clone(),
        quantization: model.quantization.clone(),
        prompt_tokens: p,
        new_tokens: n,
        seed: args.seed,
        prefill: Series::new(prefill),
        decode: Series::new(decode),
        first_token_ms: Series::new(first),
        calls,
        peak_rss_bytes: peak_rss(),
    };
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&render(&report))?;
    }
    Ok(Exit::Ok)
}

fn feed(engine: &Engine, cache: &mut Cache, tokens: &[u32], done: usize) -> Result<u32, End> {
    let mut next = 0;
    engine.feed(cache, tokens, done, |_, step| {
        next = step.ids.last().copied().unwrap_or(0);
    })?;
    Ok(next)
}

/// Times full calls of a width at the start of a cache.
fn call_time(engine: &Engine, width: usize, args: &BenchArgs) -> Result<CallTime, End> {
    let rows = Row::chain(&ids(engine, width, args.seed), 0);
    let mut cache = engine.cache();
    let mut times = Vec::new();
    for trial in 0..=args.repeat {
        let start = Instant::now();
        engine.step(&mut cache, 0, &rows)?;
        if trial > 0 {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(CallTime {
        width,
        context: cache.context(),
        milliseconds: Series::new(times),
    })
}

/// Pseudo-random ids of the tokenizer (splitmix64).
fn ids(engine: &Engine, n: usize, seed: u64) -> Vec<u32> {
    let known = engine.manifest().model.tokenizer_vocab.max(1) as u64;
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % known) as u32
        })
        .collect()
}

/// `VmHWM` of `/proc/self/status`, in bytes.
fn peak_rss() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn render(r: &Report) -> String {
    let mut out = format!("{} ({})\n", r.model, r.quantization);
    let mut line = |name: String, s: &Series, unit: &str| {
        let _ = writeln!(
            out,
            "{name:<24} {:>10.2} ± {:.2} {unit}",
            s.median, s.standard_deviation
        );
    };
    line(
        format!("prefill {}", r.prompt_tokens),
        &r.prefill,
        "tokens/s",
    );
    line(format!("decode {}", r.new_tokens), &r.decode, "tokens/s");
    line("first token".into(), &r.first_token_ms, "ms");
    for c in &r.calls {
        line(format!("call of {} rows", c.width), &c.milliseconds, "ms");
    }
    if let Some(bytes) = r.peak_rss_bytes {
        let _ = writeln!(
            out,
            "{:<24} {:>10.1} MiB",
            "peak memory",
            bytes as f64 / f64::from(1 << 20)
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_has_the_median_and_the_sample_deviation() {
        let s = Series::new(vec![4.0, 1.0, 3.0, 2.0]);
        assert!((s.median - 2.5).abs() < 1e-12);
        assert!((s.standard_deviation - (5.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert!(Series::new(vec![7.0]).standard_deviation.abs() < 1e-12);
    }
}
