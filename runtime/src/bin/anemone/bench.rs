//! `anemone bench`: how fast.
//!
//! A trial takes in a prompt of pseudo-random ids, or of a file, and then decodes, once
//! plain and once with drafts; stop ids do not end it. The first trial of each kind
//! warms up and does not count. Both kinds run in turn, so that a busy machine is busy
//! for both.

use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anemone_runtime::engine::{Answer, DrafterProgram, Engine, Options, Row, Session, Statistics};
use anemone_schemas::exit::Exit;
use clap::Args;
use serde::Serialize;

use crate::ModelArgs;
use crate::drafts::{DraftArgs, Summary};
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
    /// Text to take the prompt from; pseudo-random ids are no text that drafts could
    /// foresee.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    #[command(flatten)]
    drafts: DraftArgs,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
    /// Print where the time of a call goes instead, behind as many slots as prompt
    /// tokens, and of a draft, if the folder has a drafter; every step shows its shortest
    /// time.
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
    /// Tokens per second after it, without drafts.
    decode: Series,
    /// Milliseconds of a cycle outside the programs, without drafts.
    host_ms: Series,
    /// The same prompt with drafts.
    drafts: Option<DraftReport>,
    /// Milliseconds from the prompt to the first token.
    first_token_ms: Series,
    /// Milliseconds of one call, by width and rows in use.
    calls: Vec<CallTime>,
    /// Highest resident size of the process, where the system tells.
    peak_rss_bytes: Option<u64>,
}

/// Decoding with drafts: `(accepted + 1) / (draft + verify + host)` tokens per second.
#[derive(Debug, Serialize)]
struct DraftReport {
    /// Tokens per second.
    decode: Series,
    /// Median speed over that without drafts.
    speedup: f64,
    /// Accepted tokens per cycle, the target's own not counted.
    accepted: Series,
    /// Milliseconds per cycle in the drafter.
    draft_ms: Series,
    /// Milliseconds per cycle in the target's programs.
    verify_ms: Series,
    /// Milliseconds per cycle outside both.
    host_ms: Series,
    /// All counts of the last trial.
    last: Summary,
}

#[derive(Debug, Serialize)]
struct CallTime {
    width: usize,
    rows: usize,
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
    output::warn(engine.warning());
    let (p, n) = (args.prompt_tokens.max(1), args.new_tokens.max(1));
    if p + n >= engine.max_context() {
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
        let mut profile = profile::measure(&engine, args.model.threads, p, repeat, &rows)?;
        if let Some(drafter) = DrafterProgram::open(&args.model.model, args.model.threads)? {
            let ids = ids(&engine, p + 1, args.seed);
            profile.draft(&engine, &drafter, &ids, repeat)?;
        }
        if args.json {
            output::print_json(&profile)?;
        } else {
            output::print(&profile.render())?;
        }
        return Ok(Exit::Ok);
    }
    let prompt = match &args.text {
        None => ids(&engine, p, args.seed),
        Some(path) => text_ids(&engine, path, p)?,
    };
    let (mut plain, mut drafted) = (Vec::new(), Vec::new());
    let drafts = args.drafts.open(&args.model, &engine)?;
    for trial in 0..=args.repeat {
        let answer = decode(&engine, Session::new(&engine, None), &prompt, args)?;
        let with = (drafts.name != "off")
            .then(|| decode(&engine, drafts.session(&engine), &prompt, args))
            .transpose()?;
        if trial > 0 {
            plain.push(answer.statistics);
            drafted.extend(with.map(|a| a.statistics));
        }
    }
    let series = |of: fn(&Statistics) -> f64| Series::new(plain.iter().map(of).collect());
    let decode = series(Statistics::tokens_per_second);
    let drafts = DraftReport::new(drafts.name, &drafted, decode.median);
    let widths = engine.manifest().widths.clone();
    let full = widths.iter().map(|&w| (w, w));
    let part = [1, 2, 4, 8, 12].into_iter().filter(|n| *n < widths[0]);
    let calls = part
        .map(|n| (widths[0], n))
        .chain(full)
        .map(|(width, rows)| call_time(&engine, width, rows, args))
        .collect::<Result<_, End>>()?;
    let model = &engine.manifest().model;
    let report = Report {
        model: model.name.clone(),
        quantization: model.quantization.clone(),
        prompt_tokens: p,
        new_tokens: n,
        seed: args.seed,
        prefill: series(|s| s.prompt_tokens as f64 / s.prompt_time.as_secs_f64()),
        decode,
        host_ms: series(|s| per_cycle(s, s.host_time())),
        drafts,
        first_token_ms: series(|s| s.prompt_time.as_secs_f64() * 1e3),
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

/// One trial: the prompt and `new_tokens` cycles' worth of ids, past any stop id.
fn decode(
    engine: &Engine,
    mut session: Session,
    prompt: &[u32],
    args: &BenchArgs,
) -> Result<Answer, End> {
    let options = Options {
        stop: false,
        ..args.drafts.options(args.new_tokens.max(1) + 1)
    };
    let receive = |_| ControlFlow::Continue(());
    Ok(session.answer(engine, prompt, &options, receive)?)
}

fn per_cycle(s: &Statistics, time: Duration) -> f64 {
    time.as_secs_f64() * 1e3 / s.cycles.max(1) as f64
}

impl DraftReport {
    fn new(source: &'static str, trials: &[Statistics], plain: f64) -> Option<Self> {
        let series = |of: fn(&Statistics) -> f64| Series::new(trials.iter().map(of).collect());
        let decode = series(Statistics::tokens_per_second);
        Some(Self {
            speedup: decode.median / plain,
            decode,
            accepted: series(Statistics::accepted_per_cycle),
            draft_ms: series(|s| per_cycle(s, s.draft_time)),
            verify_ms: series(|s| per_cycle(s, s.verify_time)),
            host_ms: series(|s| per_cycle(s, s.host_time())),
            last: Summary::new(source, trials.last()?.clone()),
        })
    }
}

/// The first ids of a text.
fn text_ids(engine: &Engine, path: &PathBuf, n: usize) -> Result<Vec<u32>, End> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| End::bad_input(format!("cannot read `{}`: {e}", path.display()), None))?;
    let mut ids = engine.tokenizer().encode(&text, true)?;
    if ids.len() < n {
        return Err(End::bad_input(
            format!("`{}` has {} tokens, {n} wanted", path.display(), ids.len()),
            Some("lower `--prompt-tokens`"),
        ));
    }
    ids.truncate(n);
    Ok(ids)
}

/// Times calls of `rows` rows at the start of a cache.
fn call_time(
    engine: &Engine,
    width: usize,
    rows: usize,
    args: &BenchArgs,
) -> Result<CallTime, End> {
    let chain = Row::chain(&ids(engine, rows, args.seed), 0);
    let mut cache = engine.cache();
    let mut times = Vec::new();
    for trial in 0..=args.repeat {
        let start = Instant::now();
        engine.step(&mut cache, 0, &chain)?;
        if trial > 0 {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(CallTime {
        width,
        rows,
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
    if let Some(d) = &r.drafts {
        line("  with drafts".into(), &d.decode, "tokens/s");
        line(
            "  accepted per cycle".into(),
            &d.accepted,
            "(own token not counted)",
        );
        line("  draft".into(), &d.draft_ms, "ms per cycle");
        line("  verify".into(), &d.verify_ms, "ms per cycle");
        line("  host".into(), &d.host_ms, "ms per cycle");
    }
    line("host without drafts".into(), &r.host_ms, "ms per cycle");
    line("first token".into(), &r.first_token_ms, "ms");
    for c in &r.calls {
        let name = format!("call of {} rows of {}", c.rows, c.width);
        line(name, &c.milliseconds, "ms");
    }
    if let Some(d) = &r.drafts {
        let _ = writeln!(out, "{:.2} times the speed without drafts", d.speedup);
        out.push_str(&d.last.render());
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
