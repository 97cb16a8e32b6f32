//! Same inputs, same bytes: on a second run, with other thread counts, and after being
//! killed at any point.

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use common::{assert_same, killed, killed_until_complete, ok, run, text, tiny};

fn quantize_args<'a>(model: &'a str, store: &'a str, jobs: &'a str) -> Vec<&'a str> {
    vec![
        "--quiet", "quantize", model, "-o", store, "--tokens", "4096", "--window", "256", "--jobs",
        jobs,
    ]
}

fn target_args<'a>(store: &'a str, folder: &'a str) -> Vec<&'a str> {
    vec![
        "--quiet",
        "target",
        store,
        "-o",
        folder,
        "--chunks",
        "2",
        "--max-context",
        "512",
    ]
}

#[test]
fn bytes_do_not_depend_on_run_or_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny();
    let at = |name: &str| dir.path().join(name);
    for (store, folder, jobs) in [("s1", "f1", "1"), ("s2", "f2", "2"), ("s3", "f3", "3")] {
        let (store, folder) = (at(store), at(folder));
        ok(&quantize_args(text(&model), text(&store), jobs));
        ok(&target_args(text(&store), text(&folder)));
    }
    assert_same(&at("s1"), &at("s2"));
    assert_same(&at("s1"), &at("s3"));
    assert_same(&at("f1"), &at("f2"));
    assert_same(&at("f1"), &at("f3"));
    let again = ok(&quantize_args(text(&model), text(&at("s1")), "2"));
    assert!(again.is_empty());
    assert_same(&at("s1"), &at("s2"));
}

fn accepted(folder: &Path) -> bool {
    run(&["--quiet", "verify", text(folder)]).status.success()
}

#[test]
fn killed_anywhere_it_goes_on_to_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny();
    let (whole, whole_folder) = (dir.path().join("whole"), dir.path().join("whole-folder"));
    ok(&quantize_args(text(&model), text(&whole), "2"));
    ok(&target_args(text(&whole), text(&whole_folder)));

    let (store, folder) = (dir.path().join("store"), dir.path().join("folder"));
    let quantize = quantize_args(text(&model), text(&store), "2");
    let target = target_args(text(&store), text(&folder));
    killed_until_complete(&quantize, &store, 25);
    assert_same(&whole, &store);

    let mut interrupted = 0;
    for step in 0..40 {
        if killed(&target, Duration::from_millis(step * 3)) {
            interrupted += 1;
        }
        if folder.exists() {
            assert!(
                accepted(&folder),
                "a half-written folder has its final name"
            );
            break;
        }
    }
    assert!(interrupted > 0, "the command was never interrupted");
    if !folder.exists() {
        ok(&target);
    }
    assert_same(&whole_folder, &folder);
}

#[test]
fn a_changed_byte_anywhere_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, folder) = (dir.path().join("store"), dir.path().join("folder"));
    ok(&quantize_args(text(&tiny()), text(&store), "2"));
    ok(&target_args(text(&store), text(&folder)));
    assert!(accepted(&folder));
    for (name, bytes) in common::contents(&folder) {
        if bytes.is_empty() {
            continue;
        }
        let path = folder.join(&name);
        let mut changed = bytes.clone();
        let middle = changed.len() / 2;
        changed[middle] ^= 1;
        fs::write(&path, &changed).unwrap();
        assert!(!accepted(&folder), "a change of `{name}` passed");
        // Two bytes, since a final newline is not missed.
        fs::write(&path, &bytes[..bytes.len().saturating_sub(2)]).unwrap();
        assert!(!accepted(&folder), "a truncated `{name}` passed");
        fs::remove_file(&path).unwrap();
        assert!(!accepted(&folder), "a missing `{name}` passed");
        fs::write(&path, &bytes).unwrap();
    }
    assert!(accepted(&folder));
}
