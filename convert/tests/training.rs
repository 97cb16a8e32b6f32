//! What goes on from a store: it gets better on text it was not made from, to the same bytes
//! with any number of threads and after being killed at any point.

mod common;

use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{assert_same, command, killed, ok, run, text, tiny};

/// A store made with other arguments than the usual.
fn store(dir: &Path, others: &str) -> PathBuf {
    let store = dir.join("store");
    let model = tiny();
    let mut all = vec!["--quiet", "quantize", text(&model), "-o", text(&store)];
    all.extend("--window 128 --set lm_head=bits=6".split(' '));
    all.extend(others.split(' '));
    ok(&all);
    store
}

/// The arguments that make `output` of a store.
fn args<'a>(command: &'a str, model: &'a Path, store: &'a Path, output: &'a Path) -> Vec<&'a str> {
    let mut args = vec!["--quiet", command, text(model), "--store", text(store)];
    args.extend(["-o", text(output), "--tokens", "6000", "--window", "128"]);
    args.extend(match command {
        "tune" => ["--steps", "8", "--step-tokens", "640", "--rate", "0.01"],
        _ => ["--rounds", "8", "--round-tokens", "2048", "--rate", "0.05"],
    });
    args
}

/// Runs it with so many threads and expects a divergence of at most `bound` times that before.
fn improved(args: &[&str], threads: &str, bound: f64) {
    let out = command()
        .args(args)
        .env("RAYON_NUM_THREADS", threads)
        .output()
        .unwrap();
    let said = String::from_utf8(out.stdout).unwrap();
    let failed = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{failed}");
    let numbers = said.split_whitespace().filter_map(|w| w.parse().ok());
    let [before, after] = numbers.collect::<Vec<f64>>()[..] else {
        panic!("{said}");
    };
    assert!(after < bound * before, "{said}");
}

fn accepted(store: &Path, folder: &Path) {
    let args = "--chunks 2 --max-context 512";
    let mut all = vec!["--quiet", "target", text(store), "-o", text(folder)];
    all.extend(args.split(' '));
    ok(&all);
    ok(&["--quiet", "verify", text(folder)]);
}

#[test]
fn tuning_lowers_the_divergence_to_the_same_bytes_with_any_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let others = "--method kmeans --guided false --tokens 2048";
    let (model, store) = (tiny(), store(dir.path(), others));
    let [one, two] = ["1", "2"].map(|threads| {
        let output = dir.path().join(threads);
        improved(&args("tune", &model, &store, &output), threads, 0.97);
        output
    });
    assert_same(&one, &two);
    // It can be lowered like any other store.
    accepted(&one, &dir.path().join("folder"));
}

#[test]
fn refining_lowers_the_divergence_and_goes_on_where_it_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    // As good as each matrix can be for itself. A step that follows no gradient gains 3%.
    let (model, store) = (tiny(), store(dir.path(), "--tokens 6000"));
    let [one, two] = ["1", "2"].map(|threads| {
        let output = dir.path().join(threads);
        improved(&args("refine", &model, &store, &output), threads, 0.92);
        output
    });
    assert_same(&one, &two);
    accepted(&one, &dir.path().join("folder"));

    let output = dir.path().join("killed");
    let again = args("refine", &model, &store, &output);
    let mut interrupted = 0;
    for step in 1..60 {
        interrupted += usize::from(killed(&again, Duration::from_millis(step * 150)));
        let complete = output.join("store.json").exists();
        let opens = run(&["inspect", text(&output)]).status.success();
        assert_eq!(opens, complete, "an unfinished store was accepted");
        if complete {
            break;
        }
    }
    assert!(interrupted > 0, "the command was never interrupted");
    ok(&again);
    assert_same(&one, &output);
    assert!(!output.join("refine.partial").exists());
}
