//! Disk full, memory short, a second job, a file limit, a folder that cannot be written,
//! an interruption, a checkpoint that changes: each ends with its message and exit code,
//! and the same command completes the work afterwards.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use common::{PROGRAM, alone, assert_same, command, ok, text, tiny, tiny_copy};

fn quantize<'a>(model: &'a str, store: &'a str) -> Vec<&'a str> {
    let args = ["quantize", model, "-o", store, "--tokens", "2048"];
    let method = ["--method", "gptq", "--guided", "false"];
    [&args[..], &["--window", "256", "--jobs", "2"], &method].concat()
}

/// Expects a code and words in what was said, once.
fn ended(out: &Output, code: i32, words: &[&str]) {
    let err = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{err}");
    assert!(!err.contains("panicked"), "{err}");
    assert_eq!(err.matches("error: ").count(), 1, "{err}");
    for word in words {
        assert!(err.contains(word), "expected `{word}` in:\n{err}");
    }
}

/// The command under a limit of the shell.
fn limited(limit: &str, args: &[&str]) -> Output {
    let mut shell = alone(Command::new("sh"));
    shell
        .arg("-c")
        .arg(format!("{limit} && exec \"$0\" \"$@\""))
        .arg(PROGRAM)
        .args(args);
    shell.output().unwrap()
}

/// The command as it answers to Ctrl-C, which what a script starts in the background ignores.
fn interruptible() -> Command {
    let mut command = alone(Command::new("env"));
    command.args(["--default-signal=INT", PROGRAM]);
    command
}

/// The command running, once it has said `word`.
fn running(command: &mut Command, args: &[&str], word: &str) -> (Child, BufReader<ChildStderr>) {
    let mut child = command
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while said.read_line(&mut line).unwrap() > 0 {
        if line.contains(word) {
            return (child, said);
        }
    }
    let status = child.wait().unwrap();
    panic!("`{word}` never came in, {status}:\n{line}");
}

/// What a command started by [`running`] ended with.
fn rest(mut child: Child, mut said: BufReader<ChildStderr>) -> Output {
    let mut stderr = Vec::new();
    std::io::Read::read_to_end(&mut said, &mut stderr).unwrap();
    Output {
        status: child.wait().unwrap(),
        stdout: Vec::new(),
        stderr,
    }
}

fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    let sent = Command::new("kill").args(["-s", name, &pid]).status();
    assert!(sent.unwrap().success());
}

/// The store that an undisturbed run makes.
fn whole(dir: &Path) -> std::path::PathBuf {
    let store = dir.join("whole");
    ok(&quantize(text(&tiny()), text(&store)));
    store
}

#[test]
fn a_full_disk_is_code_4_and_the_same_command_completes_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (tiny(), dir.path().join("store"));
    let args = quantize(text(&model), text(&store));
    // The embedding has a megabyte; blocks have 512 bytes.
    let out = limited("ulimit -f 1000", &args);
    ended(
        &out,
        4,
        &["dense/", "File too large", "hint: free some room"],
    );
    assert!(!store.join("store.json").exists());
    ok(&args);
    assert_same(&whole(dir.path()), &store);
    let folder = dir.path().join("folder");
    let args = ["target", text(&store), "-o", text(&folder)];
    let out = limited("ulimit -f 1000", &args);
    ended(&out, 4, &["folder.partial", "hint: free some room"]);
    assert!(!folder.exists());
    ok(&args);
    ok(&["verify", text(&folder)]);
}

#[test]
fn memory_over_the_soft_line_is_code_75_and_over_the_hard_line_code_4() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (tiny(), dir.path().join("store"));
    let plain = quantize(text(&model), text(&store));
    let with = |more: &[&str]| {
        let args = [&plain, more].concat();
        command().args(args).output().unwrap()
    };
    let out = with(&["--max-anon", "2M", "--soft", "off"]);
    ended(
        &out,
        4,
        &[
            "ended for memory",
            "anonymous memory reached",
            "(limit 2.00 MiB)",
        ],
    );
    let out = with(&["--soft", "2M"]);
    ended(
        &out,
        75,
        &["stopped for memory", "the same command goes on"],
    );
    let mut by_environment = command();
    let out = by_environment
        .args(&plain)
        .env("MEMGUARD_SOFT", "2M")
        .output();
    ended(&out.unwrap(), 75, &["stopped for memory"]);
    let out = with(&["--max-anon", "1G", "--soft", "2G"]);
    ended(
        &out,
        2,
        &["`--soft` (2.00 GiB) must be below `--max-anon` (1.00 GiB)"],
    );
    ok(&plain);
    assert_same(&whole(dir.path()), &store);
}

#[test]
fn a_job_that_cannot_fit_is_refused_before_it_starts() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (tiny(), dir.path().join("store"));
    let out = limited("ulimit -v 300000", &quantize(text(&model), text(&store)));
    ended(
        &out,
        4,
        &["needs ", "of memory, but only", "resource limit"],
    );
    assert!(!store.exists());
}

#[test]
fn a_second_heavy_job_is_refused_by_name_or_waits_and_the_lock_dies_with_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = dir.path().join("runtime");
    fs::create_dir(&runtime).unwrap();
    let model = tiny();
    let [first, second] = ["first", "second"].map(|n| dir.path().join(n));
    let one = |lock: &str| {
        let mut command = command();
        command
            .env("ANEMONE_RUNTIME_DIR", &runtime)
            .env("ANEMONE_LOCK", lock);
        command
    };
    let args = quantize(text(&model), text(&first));
    let (mut holder, _said) = running(&mut one("fail"), &args, "quantize: 1/");
    let args = quantize(text(&model), text(&second));
    let out = one("fail").args(&args).output().unwrap();
    let pid = format!("process {}", holder.id());
    ended(
        &out,
        4,
        &[
            "another heavy job is running",
            &pid,
            "`anemone-convert quantize ",
            "--wait",
        ],
    );
    assert!(!second.exists(), "refused, but began");
    let (waiting, said) = running(&mut one("wait"), &args, &format!("waiting for {pid}"));
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(rest(waiting, said).status.success());
    assert_same(&whole(dir.path()), &second);
}

#[test]
fn signals_end_it_resumable() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (tiny(), dir.path().join("store"));
    let args = quantize(text(&model), text(&store));
    for (name, code, word) in [
        ("INT", 130, "interrupted"),
        ("TERM", 75, "asked to terminate"),
    ] {
        let (child, said) = running(&mut interruptible(), &args, "quantize: ");
        signal(&child, name);
        ended(
            &rest(child, said),
            code,
            &[word, "the same command goes on"],
        );
        assert!(!store.join("store.json").exists());
    }
    ok(&args);
    assert_same(&whole(dir.path()), &store);
}

#[test]
fn a_checkpoint_that_changes_while_it_is_read_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let shard = model.join("model.safetensors");
    let store = dir.path().join("store");
    let args = quantize(text(&model), text(&store));
    let (child, said) = running(&mut command(), &args, "quantize: 1/");
    // Another file under the same name: what is mapped stays readable.
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let other = model.join("other");
    fs::write(&other, bytes).unwrap();
    fs::rename(&other, &shard).unwrap();
    ended(&rest(child, said), 3, &["model.safetensors", "changed"]);
    assert!(!store.join("store.json").exists(), "called complete");
}

#[test]
fn an_output_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny();
    // Not even root may make folders there.
    let store = Path::new("/proc/anemone/store");
    let out = command().args(quantize(text(&model), text(store))).output();
    let out = out.unwrap();
    let err = String::from_utf8_lossy(&out.stderr);
    assert!([Some(3), Some(4)].contains(&out.status.code()), "{err}");
    assert!(err.contains("/proc/anemone/store"), "{err}");
    let file = dir.path().join("file");
    fs::write(&file, "mine").unwrap();
    let out = command().args(quantize(text(&model), text(&file))).output();
    ended(&out.unwrap(), 2, &["is a file, not a folder"]);
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn dry_runs_write_nothing_and_tell_the_bytes_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store, folder) = (tiny(), dir.path().join("store"), dir.path().join("folder"));
    let plan = |args: &[&str]| -> serde_json::Value {
        let text = ok(&[args, &["--dry-run", "--json"]].concat());
        serde_json::from_str(&text).expect("JSON")
    };
    let sum = |dir: &Path, ends: &[&str]| -> u64 {
        let files = common::contents(dir);
        files
            .iter()
            .filter(|(name, _)| ends.iter().any(|end| name.ends_with(end)))
            .map(|(_, bytes)| bytes.len() as u64)
            .sum()
    };
    let args = quantize(text(&model), text(&store));
    let planned = plan(&args);
    assert!(!store.exists());
    ok(&args);
    assert_eq!(planned["output_bytes"], sum(&store, &[".lut", ".bin"]));
    assert!(planned["seconds"].as_f64().unwrap() > 0.0);

    let args = ["target", text(&store), "-o", text(&folder), "--chunks", "2"];
    let planned = plan(&args);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    ok(&args);
    assert_eq!(
        planned["output_bytes"],
        sum(&folder, &["main.mlirb", "embedding.f16"])
    );

    let before = common::contents(&folder);
    plan(&["package", text(&folder)]);
    assert!(before == common::contents(&folder), "a dry run wrote");
}

#[test]
fn fresh_and_overwrite_discard_what_they_name() {
    let dir = tempfile::tempdir().unwrap();
    let (model, store) = (tiny(), dir.path().join("store"));
    let plain = quantize(text(&model), text(&store));
    ok(&plain);
    let mut others = plain.clone();
    others[11] = "kmeans";
    let out = command().args(&others).output().unwrap();
    ended(&out, 3, &["already holds a complete store"]);
    ok(&[&others[..], &["--overwrite"]].concat());
    ok(&[&plain[..], &["--overwrite"]].concat());
    assert_same(&whole(dir.path()), &store);
    fs::write(store.join("diary.txt"), "mine").unwrap();
    let out = command()
        .args([&others[..], &["--overwrite"]].concat())
        .output()
        .unwrap();
    ended(&out, 2, &["diary.txt"]);
    assert_eq!(fs::read(store.join("diary.txt")).unwrap(), b"mine");
}

#[test]
fn progress_is_lines_events_or_nothing_and_the_log_gets_it_all() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny();
    let log = dir.path().join("night.log");
    let run = |name: &str, more: &[&str]| {
        let store = dir.path().join(name);
        let args = [&quantize(text(&model), text(&store))[..], more].concat();
        let out = command()
            .args(args)
            .env("NO_COLOR", "1")
            .env("ANEMONE_LOG", &log)
            .output()
            .unwrap();
        assert!(out.status.success());
        assert!(out.stdout.is_empty(), "progress on standard output");
        String::from_utf8(out.stderr).unwrap()
    };
    let lines = run("lines", &[]);
    assert_eq!(
        lines
            .lines()
            .filter(|l| l.starts_with("quantize: "))
            .count(),
        57
    );
    assert!(!lines.contains('\u{1b}'), "escape codes in a file");
    let events = run("json", &["--progress", "json"]);
    let events: Vec<serde_json::Value> = events
        .lines()
        .map(|l| serde_json::from_str(l).expect("a line is an event"))
        .collect();
    let steps: Vec<u64> = events
        .iter()
        .filter(|e| e["event"] == "step")
        .map(|e| e["done"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, (1..=57).collect::<Vec<_>>());
    assert_eq!(run("quiet", &["--quiet"]), "");
    let logged = fs::read_to_string(&log).unwrap();
    assert_eq!(logged.matches("quantize: 57/57").count(), 3, "{logged}");
    let fails = ["quantize", "nowhere", "-o", "x", "--progress", "json"];
    let out = command().args(fails).output().unwrap();
    let event = String::from_utf8(out.stderr).unwrap();
    let event: serde_json::Value = serde_json::from_str(event.trim()).expect("one event");
    assert_eq!(
        (&event["event"], &event["exit_code"]),
        (&"error".into(), &3.into())
    );
}
