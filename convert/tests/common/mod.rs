//! Running the command on the tiny model.

#![allow(dead_code, reason = "each test binary uses its own share")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// The trained tiny Qwen3 of the repository.
pub(crate) fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-qwen3")
}

/// A copy of the tiny model to damage.
pub(crate) fn tiny_copy(into: &Path) -> PathBuf {
    let dir = into.join("model");
    fs::create_dir_all(&dir).unwrap();
    for entry in fs::read_dir(tiny()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    dir
}

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_anemone-convert");

/// The command, free of the surroundings.
pub(crate) fn command() -> Command {
    alone(Command::new(PROGRAM))
}

/// A command that runs the program, free of the surroundings: tests run side by side, and
/// what else the machine does is not their subject.
pub(crate) fn alone(mut command: Command) -> Command {
    command
        .env("ANEMONE_LOCK", "off")
        .env("MEMGUARD_MIN_FREE", "off")
        .env("MEMGUARD_SWAP_GROWTH", "off")
        .env_remove("ANEMONE_LOG");
    command
}

pub(crate) fn run(args: &[&str]) -> Output {
    command().args(args).output().expect("the binary runs")
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// Starts the command, kills it after `delay` and says whether it was still running.
pub(crate) fn killed(args: &[&str], delay: Duration) -> bool {
    let mut child = command()
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(delay);
    let running = child.try_wait().unwrap().is_none();
    let _ = child.kill();
    child.wait().unwrap();
    running
}

/// Kills the command that makes a store again and again, after `pause` milliseconds more each time,
/// and lets it end. What is unfinished must not be accepted meanwhile.
pub(crate) fn killed_until_complete(args: &[&str], store: &Path, pause: u64) {
    let mut interrupted = 0;
    for step in 1..60 {
        interrupted += usize::from(killed(args, Duration::from_millis(step * pause)));
        let complete = store.join("store.json").exists();
        let opens = run(&["inspect", text(store)]).status.success();
        assert_eq!(opens, complete, "an unfinished store was accepted");
        if complete {
            break;
        }
    }
    assert!(interrupted > 0, "the command was never interrupted");
    ok(args);
}

/// Runs and expects success.
pub(crate) fn ok(args: &[&str]) -> String {
    let out = run(args);
    assert!(
        out.status.success(),
        "{args:?}: {:?}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8(out.stdout).expect("UTF-8 output")
}

/// Runs and expects one error with this exit code and these words, and no panic.
pub(crate) fn fails(args: &[&str], code: i32, words: &[&str]) {
    let out = run(args);
    let err = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{args:?}\n{err}");
    assert!(!err.contains("panicked"), "{err}");
    assert_eq!(err.matches("error: ").count(), 1, "{err}");
    for word in words {
        assert!(err.contains(word), "expected `{word}` in:\n{err}");
    }
}

/// Relative path and contents of every file below `dir`, sorted.
pub(crate) fn contents(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path
                    .strip_prefix(dir)
                    .unwrap()
                    .to_string_lossy()
                    .into_owned();
                found.push((name, fs::read(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

/// Fails with the first file that differs, not with megabytes of bytes.
pub(crate) fn assert_same(a: &Path, b: &Path) {
    let (a, b) = (contents(a), contents(b));
    let names = |c: &[(String, Vec<u8>)]| c.iter().map(|f| f.0.clone()).collect::<Vec<_>>();
    assert_eq!(names(&a), names(&b));
    for (x, y) in a.iter().zip(&b) {
        assert!(x.1 == y.1, "`{}` differs", x.0);
    }
}

/// A store of a model, made as fast as it can be.
pub(crate) fn store(model: &Path, into: &Path) -> PathBuf {
    let store = into.join("store");
    let args = ["quantize", text(model), "-o", text(&store)];
    // Plain text: no template has to render for it.
    let calibration =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/text/calib_docs.txt");
    let how = ["--method", "kmeans-unweighted", "--guided", "false"];
    let text = ["--tokens", "256", "--calib", text(&calibration)];
    ok(&[&args[..], &how, &text].concat());
    store
}

/// A model folder of a store, lowered with `more` options.
pub(crate) fn lowered(store: &Path, into: &Path, more: &[&str]) -> PathBuf {
    let folder = into.join("folder");
    let args = ["target", text(store), "-o", text(&folder)];
    ok(&[&args[..], &["--max-context", "256"], more].concat());
    folder
}

/// A model folder of a model.
pub(crate) fn converted(model: &Path, into: &Path) -> PathBuf {
    lowered(&store(model, into), into, &[])
}

/// Changes a JSON file.
pub(crate) fn edit_json(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, serde_json::to_vec(&json).unwrap()).unwrap();
}
