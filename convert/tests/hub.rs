//! The Hub from the command line, against a local server that speaks its interface:
//! conversion by name, resumed downloads, refusals with their codes, publishing, and a
//! night of three models with everything going wrong once.
#![cfg(feature = "hub")]

mod common;
#[path = "../hub/tests/server/mod.rs"]
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{assert_same, command, contents, converted, ok, text, tiny};
use server::{COMMIT, Kind, REPO, Server};

/// The tiny model as a repository, with what a real one has beside it.
fn repository() -> BTreeMap<String, Vec<u8>> {
    let mut files: BTreeMap<String, Vec<u8>> = contents(&tiny()).into_iter().collect();
    files.insert("LICENSE".into(), b"Do as you like.\n".to_vec());
    files.insert(
        "README.md".into(),
        b"---\nlicense: apache-2.0\nlanguage:\n- en\n---\n# tiny\n".to_vec(),
    );
    files.insert("pytorch_model.bin".into(), vec![0; 1000]);
    files
}

/// The command with this Hub and a cache of its own.
fn with(server: &Server, home: &Path) -> Command {
    let mut command = command();
    command
        .env("HF_ENDPOINT", server.endpoint())
        .env("HF_HOME", home)
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_HUB_OFFLINE")
        .env_remove("HF_TOKEN_PATH")
        .env("HF_TOKEN", "right")
        .env("NO_PROXY", "127.0.0.1");
    command
}

fn succeeded(out: &Output) -> String {
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{:?}\n{err}", out.status);
    String::from_utf8(out.stdout.clone()).unwrap()
}

fn ended(out: &Output, code: i32, words: &[&str]) {
    let err = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "{err}");
    assert_eq!(err.matches("error: ").count(), 1, "{err}");
    for word in words {
        assert!(err.contains(word), "expected `{word}` in:\n{err}");
    }
}

const QUANTIZE: [&str; 6] = ["--tokens", "512", "--window", "256", "--method", "kmeans"];

#[test]
fn a_model_is_converted_by_name_and_its_licence_travels() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let server = Server::start(repository());
    let home = at("home");
    let by_name = |name: &str, store: &Path, more: &[&str]| {
        with(&server, &home)
            .args(["quantize", name, "-o", text(store)])
            .args(QUANTIZE)
            .args(more)
            .output()
            .unwrap()
    };
    let planned = succeeded(&by_name(REPO, &at("store"), &["--dry-run"]));
    assert!(planned.contains("model.safetensors"), "{planned}");
    assert!(server.seen("resolve").is_empty(), "a dry run downloaded");

    succeeded(&by_name(&format!("{REPO}@main"), &at("store"), &[]));
    assert!(
        server.seen("pytorch_model.bin").is_empty(),
        "fetched more than needed"
    );
    let folder = with(&server, &home)
        .args(["download", REPO])
        .output()
        .unwrap();
    let folder = PathBuf::from(succeeded(&folder).trim());
    assert!(
        folder.ends_with(format!("snapshots/{COMMIT}")),
        "{folder:?}"
    );
    let repeated = at("again");
    let again = [
        &["quantize", text(&folder), "-o", text(&repeated)][..],
        &QUANTIZE,
    ]
    .concat();
    ok(&again);
    assert_same(&at("store"), &repeated);

    ok(&[
        "target",
        text(&at("store")),
        "-o",
        text(&at("folder")),
        "--name",
        "someone/tiny",
    ]);
    ok(&["package", text(&at("folder"))]);
    assert_eq!(
        fs::read(at("folder/LICENSE")).unwrap(),
        b"Do as you like.\n"
    );
    let card = fs::read_to_string(at("folder/README.md")).unwrap();
    for line in [
        "base_model: someone/tiny\n",
        "license: apache-2.0\n",
        "language:\n- en\n",
        "--method kmeans",
    ] {
        assert!(card.contains(line), "expected `{line}` in:\n{card}");
    }
    ok(&["verify", text(&at("folder"))]);
}

#[test]
fn refusals_have_their_codes() {
    let dir = tempfile::tempdir().unwrap();
    for (at, kind, code, words) in [
        (
            "revision",
            Kind::Status(401, None),
            3,
            ["HTTP 401", "HF_TOKEN"],
        ),
        (
            "revision",
            Kind::Status(403, None),
            3,
            ["HTTP 403", "terms must be accepted"],
        ),
        (
            "revision",
            Kind::Status(404, None),
            3,
            ["is not on the Hub", "spelling"],
        ),
        (
            "config.json",
            Kind::Status(404, None),
            3,
            ["config.json", "is not on the Hub"],
        ),
        (
            "model.safetensors",
            Kind::Corrupt,
            6,
            ["model.safetensors", "came damaged"],
        ),
    ] {
        let server = Server::start(repository());
        let home = tempfile::tempdir_in(dir.path()).unwrap();
        server.fault(at, 9, kind);
        let out = with(&server, home.path()).args(["download", REPO]).output();
        ended(&out.unwrap(), code, &words);
    }
    let server = Server::start(repository());
    let home = dir.path().join("home");
    let out = with(&server, &home)
        .env("HF_HUB_OFFLINE", "1")
        .args(["download", REPO])
        .output();
    ended(
        &out.unwrap(),
        3,
        &["not whole in the cache", "HF_HUB_OFFLINE"],
    );
    assert!(server.seen("").is_empty(), "offline, but asked");
    let out = with(&server, &home)
        .args(["download", "no/such/name"])
        .output();
    ended(
        &out.unwrap(),
        3,
        &["`no/such/name` does not exist", "owner/name"],
    );
}

#[test]
fn a_download_killed_anywhere_goes_on_and_is_never_taken_for_whole() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(repository());
    server.state.lock().unwrap().pause = Duration::from_millis(2);
    let clock = Instant::now();
    let whole = dir.path().join("whole");
    let out = with(&server, &whole)
        .args(["download", REPO])
        .output()
        .unwrap();
    let expected = contents(Path::new(succeeded(&out).trim()));
    let time = clock.elapsed();
    assert_eq!(expected.len(), repository().len() - 1);

    let home = dir.path().join("home");
    let (mut random, mut hit) = (17u64, 0);
    for _ in 0..100 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let mut child = with(&server, &home)
            .args(["download", REPO])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(time.mul_f64((random >> 40) as f64 / f64::from(1 << 24)));
        hit += usize::from(child.try_wait().unwrap().is_none());
        let _ = child.kill();
        child.wait().unwrap();
        let out = with(&server, &home)
            .env("HF_HUB_OFFLINE", "1")
            .args(["download", REPO])
            .output()
            .unwrap();
        if out.status.success() {
            let found = contents(Path::new(succeeded(&out).trim()));
            assert!(found == expected, "taken for whole, but is not");
            fs::remove_dir_all(&home).unwrap();
        }
        if hit == 8 {
            break;
        }
    }
    assert_eq!(hit, 8, "the command was hardly ever interrupted");
    let out = with(&server, &home)
        .args(["download", REPO])
        .output()
        .unwrap();
    assert!(contents(Path::new(succeeded(&out).trim())) == expected);
}

#[test]
fn a_packaged_folder_is_published_whole() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (folder, home) = (converted(&tiny(), dir.path()), at("home"));
    let server = Server::start(BTreeMap::new());
    server.state.lock().unwrap().token = Some("right".into());
    let publish = |token: &str, more: &[&str]| {
        with(&server, &home)
            .env("HF_TOKEN", token)
            .args(["package", text(&folder), "--upload", "someone/made"])
            .args(more)
            .output()
            .unwrap()
    };
    let planned = succeeded(&publish("right", &["--dry-run"]));
    assert!(
        planned.contains("go to `someone/made` as a pull request"),
        "{planned}"
    );
    assert!(server.seen("").is_empty(), "a dry run asked the Hub");
    ended(&publish("wrong", &[]), 3, &["HTTP 403", "HF_TOKEN"]);
    let stanza = succeeded(&publish("right", &[]));
    let state = server.state.lock().unwrap();
    let expected: BTreeMap<_, _> = contents(&folder).into_iter().collect();
    assert!(
        state.pushed["made"] == expected,
        "other files than the folder's"
    );
    assert!(state.as_pull_request);
    assert!(
        stanza.contains("owner: someone\n    repo: made\n"),
        "{stanza}"
    );
    for path in expected.keys() {
        assert!(stanza.contains(&format!("path: {path:?}")), "{stanza}");
    }
    drop(state);
    succeeded(&publish("right", &["--direct"]));
    assert!(!server.state.lock().unwrap().as_pull_request);
}

/// A program that stands in for the converter and makes its calls go wrong: the first is
/// killed while it downloads, the sixth (the second model's first) meets a full disk.
fn faulty(dir: &Path) -> PathBuf {
    let path = dir.join("faulty-convert");
    let script = format!(
        "#!/bin/sh\n\
         echo x >> '{calls}'\n\
         case $(($(wc -l < '{calls}'))) in\n\
         1) \"{real}\" \"$@\" & sleep 0.3; kill -9 $!; wait $!; exit $? ;;\n\
         6) ulimit -f 300 ;;\n\
         esac\n\
         exec \"{real}\" \"$@\"\n",
        calls = dir.join("calls").display(),
        real = env!("CARGO_BIN_EXE_anemone-convert"),
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_night_of_three_models_survives_a_kill_a_full_disk_and_a_flaky_hub() {
    let memguard = Path::new(env!("CARGO_BIN_EXE_anemone-convert")).with_file_name("memguard");
    assert!(
        memguard.exists(),
        "`{}` is missing: run `cargo build --release -p anemone-memguard`",
        memguard.display()
    );
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(repository());
    // So slow that the kill always comes first.
    server.state.lock().unwrap().pause = Duration::from_millis(4);
    server.fault("model.safetensors", 1, Kind::Cut(3_000_000));
    server.fault("revision/v1", 1, Kind::Status(503, Some(0)));
    server.fault("commit", 1, Kind::Status(502, None));
    let work = dir.path().join("night");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/night.sh");
    let plain = with(&server, &dir.path().join("home"));
    let mut night = Command::new(&memguard);
    for (key, value) in plain.get_envs() {
        match value {
            Some(value) => night.env(key, value),
            None => night.env_remove(key),
        };
    }
    let out = night
        .args(["--min-free", "off", "--swap-growth", "off", "--"])
        .args(["sh", text(&script), text(&work)])
        .args([REPO, &format!("{REPO}@v1"), &format!("{REPO}@{COMMIT}")])
        .env("ANEMONE_CONVERT", faulty(dir.path()))
        .env("QUANTIZE", QUANTIZE.join(" "))
        .env("UPLOAD_TO", "someone")
        .env("PAUSE", "0")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(
        said.contains("ended with 137"),
        "no kill was injected:\n{said}"
    );
    assert!(
        said.contains("ended with 4"),
        "the disk was never full:\n{said}"
    );
    let state = server.state.lock().unwrap();
    assert_eq!(state.pushed.len(), 3, "{said}");
    for (name, files) in &state.pushed {
        let folder = dir.path().join("published").join(name);
        for (path, bytes) in files {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        ok(&["verify", text(&folder)]);
    }
    assert!(
        state.faults.iter().all(|f| f.times == 0),
        "a fault never came"
    );
}
