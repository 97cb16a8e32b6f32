//! A thousand damaged checkpoints, stores, model folders and tokenizers: every one is
//! read or refused with a message that names the file. No panic, no hang, no memory
//! without bound. The damage is a fixed sequence, so a failure can be repeated.

#![allow(
    clippy::print_stderr,
    reason = "the last words of a test that has to end itself"
)]

mod common;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anemone_convert::commands::quantize::QuantizeOptions;
use anemone_convert::commands::target::TargetOptions;
use anemone_convert::commands::{findings::Class, inspect, lint, verify};
use anemone_convert::error::Error;
use anemone_convert::lint::LintOptions;
use anemone_convert::lower::{Chunks, Forms};
use anemone_convert::plan;
use anemone_convert::quantize::Method;
use anemone_convert::ui::Ui;
use anemone_memguard::{Event, Guard, Limits, Stop};
use anemone_schemas::tokenizer::TokenizerFolder;
use common::{lowered, ok, store, text, tiny_copy};
use serde_json::Value;

/// A fixed sequence of numbers (Knuth's MMIX generator).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 20
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// A damaged form of a file.
fn damage(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    // Heads hold the lengths and counts, so they are hit more often.
    let reach = if random.below(3) == 0 {
        out.len()
    } else {
        out.len().min(4096)
    };
    let at = random.below(reach);
    match random.below(8) {
        0 => out.truncate(at),
        1 => out[at] ^= 1 << random.below(8),
        2 => out[at] = [0, 0xff, 0x7f, 0x80][random.below(4)],
        3 => {
            let end = (at + 8).min(out.len());
            out[at..end].fill([0, 0xff][random.below(2)]);
        }
        4 => {
            let end = (at + random.below(64)).min(out.len());
            out.drain(at..end);
        }
        5 => {
            let end = (at + random.below(64)).min(out.len());
            let again = out[at..end].to_vec();
            out.splice(at..at, again);
        }
        6 => out.extend(std::iter::repeat_n(b'[', 100_000)),
        _ => out.clear(),
    }
    out
}

/// The same for JSON: one value somewhere in it becomes another.
fn damage_json(random: &mut Random, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut json: Value = serde_json::from_slice(bytes).ok()?;
    let deep = format!("{}1{}", "[".repeat(100), "]".repeat(100));
    let others = [
        Value::Null,
        Value::from(-1),
        Value::from(0),
        Value::from(u64::MAX),
        Value::from(1e300),
        Value::from(1u64 << 40),
        Value::from(""),
        Value::from("../../../etc/passwd"),
        Value::from("\u{0}\n\u{202e}"),
        Value::from("x".repeat(1 << 20)),
        Value::Array(Vec::new()),
        Value::Object(serde_json::Map::new()),
        serde_json::from_str(&deep).unwrap(),
    ];
    let mut place = &mut json;
    for _ in 0..random.below(8) {
        let size = match &*place {
            Value::Object(map) => map.len(),
            Value::Array(list) => list.len(),
            _ => 0,
        };
        if size == 0 {
            break;
        }
        let next = random.below(size);
        place = match place {
            Value::Object(map) => map.values_mut().nth(next).unwrap(),
            Value::Array(list) => &mut list[next],
            _ => unreachable!("it has parts"),
        };
    }
    *place = others[random.below(others.len())].clone();
    serde_json::to_vec(&json).ok()
}

/// Reads a folder in every way a command would; the messages of those that refuse.
fn read(kind: &str, dir: &Path) -> Vec<String> {
    let message = |e: Error| e.message;
    let mut said = Vec::new();
    let mut note = |result: Result<(), String>| said.extend(result.err());
    note(inspect::run(dir, true).map(drop).map_err(message));
    note(inspect::run_json(dir).map(drop).map_err(message));
    match kind {
        "checkpoint" => {
            let options = QuantizeOptions {
                model: dir.to_path_buf(),
                output: dir.join("../store-of-it"),
                method: Method::Gptq,
                guided: false,
                bits: 4,
                vector: 1,
                rules: Vec::new(),
                calibration: Vec::new(),
                tokens: 256,
                window: 256,
                jobs: 1,
                fit_order: false,
                layers: None,
                target_bpw: None,
            };
            note(plan::quantize(&options).map(drop).map_err(message));
            note(tokenizer(dir));
        }
        "store" => {
            let options = TargetOptions {
                store: dir.to_path_buf(),
                output: dir.join("../folder-of-it"),
                name: "x".into(),
                chunks: Chunks::Count(2),
                max_context: 256,
                taps: Vec::new(),
                with_logits: false,
                forms: Forms::default(),
                prescale: None,
            };
            note(plan::target(&options).map(drop).map_err(message));
        }
        _ => {
            match verify::check_folder(dir, Ui::Quiet) {
                Ok((_, findings)) => {
                    for f in findings.into_iter().filter(|f| f.class == Class::Fatal) {
                        note(Err(f.what));
                    }
                }
                Err(e) => note(Err(e.message)),
            }
            let linted = lint::run(dir, &LintOptions::default());
            note(linted.map(drop).map_err(message));
        }
    }
    said
}

fn tokenizer(dir: &Path) -> Result<(), String> {
    let path = |e: anemone_schemas::tokenizer::Error| Error::from(e).message;
    let tokenizer = TokenizerFolder::open(dir).map_err(path)?;
    // What it does with text is the model's maker's business, as long as it ends.
    let ids = tokenizer
        .encode("Hello 東京 12345", false)
        .unwrap_or_default();
    let _ = tokenizer.decode(&ids, false);
    Ok(())
}

/// Ends the process, loudly, when memory or time run away.
fn watched(case: &Arc<AtomicUsize>) -> Guard {
    let limits = Limits {
        max_anon: Some(3 << 30),
        min_free: None,
        swap_growth: None,
        ..Limits::default()
    };
    let at = Arc::clone(case);
    let guard = Guard::start(&limits, &Stop::new(), move |event| {
        if let Event::Killing(breach) = event {
            eprintln!("case {}: {breach}", at.load(Ordering::Relaxed));
            std::process::abort();
        }
    });
    let at = Arc::clone(case);
    std::thread::spawn(move || {
        let mut last = usize::MAX;
        loop {
            std::thread::sleep(Duration::from_mins(2));
            let now = at.load(Ordering::Relaxed);
            if now == last {
                eprintln!("case {now} does not end");
                std::process::abort();
            }
            last = now;
        }
    });
    guard.unwrap()
}

#[test]
fn a_thousand_damaged_inputs_are_read_or_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let store = store(&model, dir.path());
    let folder = lowered(&store, dir.path(), &[]);
    ok(&["package", text(&folder)]);

    let case = Arc::new(AtomicUsize::new(0));
    let guard = watched(&case);
    let mut random = Random(8);
    let mut refused = 0;
    for (kind, root, cases) in [
        ("checkpoint", &model, 400),
        ("store", &store, 250),
        ("folder", &folder, 350),
    ] {
        assert!(
            read(kind, root).is_empty(),
            "{kind}: {:?}",
            read(kind, root)
        );
        // Large stores have many matrices that are all alike.
        let mut files: Vec<PathBuf> = Vec::new();
        for (name, _) in common::contents(root) {
            let many = [".lut", "matrices/", "dense/"]
                .iter()
                .any(|p| name.contains(p));
            let end = &name[name.len() - 4..];
            let alike = files.iter().filter(|f| f.to_string_lossy().ends_with(end));
            if !many || alike.count() < 2 {
                files.push(PathBuf::from(name));
            }
        }
        for _ in 0..cases {
            let number = case.fetch_add(1, Ordering::Relaxed);
            let name = &files[random.below(files.len())];
            let path = root.join(name);
            let whole = fs::read(&path).unwrap();
            let json = (random.below(2) == 0).then(|| damage_json(&mut random, &whole));
            let broken = json
                .flatten()
                .unwrap_or_else(|| damage(&mut random, &whole));
            let gone = random.below(20) == 0;
            if gone {
                fs::remove_file(&path).unwrap();
            } else {
                fs::write(&path, &broken).unwrap();
            }
            let said = catch_unwind(AssertUnwindSafe(|| read(kind, root)));
            let what = format!("case {number}, {kind} `{}`", name.display());
            let said = said.unwrap_or_else(|_| panic!("{what}: panicked"));
            refused += usize::from(!said.is_empty());
            for message in said {
                assert!(
                    message.contains(text(dir.path())),
                    "{what} is not named: {message}"
                );
                assert!(
                    message.len() < 20_000,
                    "{what}: {} bytes of message",
                    message.len()
                );
            }
            fs::write(&path, &whole).unwrap();
        }
        assert!(read(kind, root).is_empty(), "{kind} was not restored");
    }
    drop(guard);
    assert_eq!(case.load(Ordering::Relaxed), 1000);
    assert!(
        refused > 500,
        "only {refused} of 1000 were refused: the damage is too mild"
    );
}
