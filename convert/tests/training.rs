//! What goes on from a store: it gets better on text it was not made from, to the same bytes
//! with any number of threads and after being killed at any point.

mod common;

use std::path::{Path, PathBuf};

use common::{assert_same, command, killed_until_complete, ok, text, tiny};

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

/// The same with one thread and with two, to the same bytes; returns the first store.
fn improved_alike(command: &str, model: &Path, store: &Path, bound: f64) -> PathBuf {
    let [one, two] = ["1", "2"].map(|threads| {
        let output = store.with_file_name(threads);
        improved(&args(command, model, store, &output), threads, bound);
        output
    });
    assert_same(&one, &two);
    one
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
    let one = improved_alike("tune", &model, &store, 0.97);
    // It can be lowered like any other store.
    accepted(&one, &dir.path().join("folder"));

    let output = dir.path().join("killed");
    killed_until_complete(&args("tune", &model, &store, &output), &output, 100);
    assert_same(&one, &output);
}

#[test]
fn refining_lowers_the_divergence_and_goes_on_where_it_was_killed() {
    let dir = tempfile::tempdir().unwrap();
    // As good as each matrix can be for itself in the order of the checkpoint, where there is more
    // to gain. A step that follows no gradient gains 3%.
    let (model, store) = (tiny(), store(dir.path(), "--tokens 6000 --mlp-order given"));
    let one = improved_alike("refine", &model, &store, 0.92);
    accepted(&one, &dir.path().join("folder"));

    let output = dir.path().join("killed");
    let again = args("refine", &model, &store, &output);
    killed_until_complete(&again, &output, 150);
    assert_same(&one, &output);
    assert!(!output.join("refine.partial").exists());
}
