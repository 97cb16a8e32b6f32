//! Downloads and uploads against a local Hub, whole and with every fault we know.

mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anemone_hub::{Error, Hub, LocalFile, Repo, Settings, Snapshot, Upload};
use server::{COMMIT, Kind, REPO, Server};

const WEIGHTS: &str = "model.safetensors";

fn files() -> BTreeMap<String, Vec<u8>> {
    let weights = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    BTreeMap::from([
        (WEIGHTS.into(), weights),
        ("config.json".into(), b"{}\n".to_vec()),
        ("original/big.pth".into(), vec![1; 1000]),
        (".gitattributes".into(), vec![2; 10]),
        ("../../escape".into(), vec![3; 10]),
    ])
}

fn settings(server: &Server, cache: &Path) -> Settings {
    Settings {
        endpoint: server.endpoint(),
        token: None,
        cache: cache.to_path_buf(),
        offline: false,
        pause: Duration::from_millis(5),
        tries: 4,
    }
}

fn repo() -> Repo {
    Repo::parse(REPO).unwrap()
}

/// Looks up and fetches everything; gives what came over the line.
fn fetch(settings: Settings) -> Result<(Snapshot, u64), Error> {
    let hub = Hub::new(settings)?;
    let snapshot = hub.look_up(&repo(), |_| true)?;
    let mut came = 0;
    hub.fetch(&snapshot, &|| false, &mut |_, n| came += n)?;
    Ok((snapshot, came))
}

fn assert_whole(snapshot: &Snapshot) {
    for (name, bytes) in files() {
        let plain = ["model.safetensors", "config.json"].contains(&name.as_str());
        let found = fs::read(snapshot.folder.join(&name));
        if plain {
            assert!(found.unwrap() == bytes, "`{name}` differs");
        } else {
            assert!(
                !snapshot.folder.join(&name).exists(),
                "`{name}` was fetched"
            );
        }
    }
}

#[test]
fn a_snapshot_lies_in_the_cache_as_other_tools_expect_it_and_is_reused() {
    let server = Server::start(files());
    let cache = tempfile::tempdir().unwrap();
    let (snapshot, came) = fetch(settings(&server, cache.path())).unwrap();
    assert_whole(&snapshot);
    assert_eq!(came, 1_200_003);
    let root = cache.path().join("models--someone--tiny");
    assert_eq!(snapshot.folder, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let link = fs::read_link(snapshot.folder.join(WEIGHTS)).unwrap();
    assert!(link.starts_with("../../blobs"), "{link:?}");

    let (_, again) = fetch(settings(&server, cache.path())).unwrap();
    assert_eq!(again, 0);
    assert_eq!(server.seen("resolve").len(), 2);

    let before = server.seen("").len();
    let offline = Settings {
        offline: true,
        ..settings(&server, cache.path())
    };
    let (snapshot, _) = fetch(offline.clone()).unwrap();
    assert_whole(&snapshot);
    assert_eq!(server.seen("").len(), before, "offline asked the network");
    let empty = tempfile::tempdir().unwrap();
    let offline = Settings {
        cache: empty.path().into(),
        ..offline
    };
    assert!(matches!(fetch(offline), Err(Error::Offline { .. })));
}

#[test]
fn a_cut_connection_is_continued_where_it_broke() {
    let server = Server::start(files());
    let cache = tempfile::tempdir().unwrap();
    server.fault(WEIGHTS, 1, Kind::Cut(500_000));
    server.fault(WEIGHTS, 1, Kind::Cut(100_000));
    let (snapshot, came) = fetch(settings(&server, cache.path())).unwrap();
    assert_whole(&snapshot);
    assert_eq!(came, 1_200_003, "bytes were fetched twice");
    let ranges: Vec<_> = server.seen(WEIGHTS).into_iter().map(|s| s.range).collect();
    assert_eq!(
        ranges,
        [
            None,
            Some("bytes=500000-".into()),
            Some("bytes=600000-".into())
        ]
    );
}

#[test]
fn a_stopped_download_goes_on_in_another_process() {
    let server = Server::start(files());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(settings(&server, cache.path())).unwrap();
    let snapshot = hub.look_up(&repo(), |_| true).unwrap();
    let all = snapshot.missing_bytes();
    let came = std::cell::Cell::new(0);
    let stopped = hub.fetch(&snapshot, &|| came.get() > 300_000, &mut |_, n| {
        came.set(came.get() + n);
    });
    assert!(matches!(stopped, Err(Error::Stopped)));
    assert!(!snapshot.folder.join(WEIGHTS).exists());
    let hub = Hub::new(settings(&server, cache.path())).unwrap();
    let snapshot = hub.look_up(&repo(), |_| true).unwrap();
    assert_eq!(snapshot.missing_bytes() + came.get(), all);
    hub.fetch(&snapshot, &|| false, &mut |_, _| {}).unwrap();
    assert_whole(&snapshot);
}

#[test]
fn a_server_that_ignores_ranges_is_heard_from_the_start() {
    let server = Server::start(files());
    let cache = tempfile::tempdir().unwrap();
    server.fault(WEIGHTS, 1, Kind::Cut(500_000));
    server.fault(WEIGHTS, 1, Kind::Whole);
    let (snapshot, _) = fetch(settings(&server, cache.path())).unwrap();
    assert_whole(&snapshot);
}

#[test]
fn damaged_contents_are_fetched_again_once_and_never_kept() {
    for name in [WEIGHTS, "config.json"] {
        let server = Server::start(files());
        let cache = tempfile::tempdir().unwrap();
        server.fault(name, 1, Kind::Corrupt);
        let (snapshot, _) = fetch(settings(&server, cache.path())).unwrap();
        assert_whole(&snapshot);

        let server = Server::start(files());
        let cache = tempfile::tempdir().unwrap();
        server.fault(name, 9, Kind::Corrupt);
        let error = fetch(settings(&server, cache.path())).unwrap_err();
        assert!(
            matches!(&error, Error::Damaged { file, .. } if file == name),
            "{error}"
        );
        let root = cache.path().join("models--someone--tiny");
        assert!(!root.join("snapshots").join(COMMIT).join(name).exists());
        assert!(!root.join("refs/main").exists(), "called whole");
    }
}

#[test]
fn the_hubs_refusals_are_told_apart() {
    let cache = tempfile::tempdir().unwrap();
    for (status, part) in [
        (401, "HTTP 401"),
        (403, "HTTP 403"),
        (404, "is not on the Hub"),
    ] {
        for at in ["revision", WEIGHTS] {
            let server = Server::start(files());
            let cache = tempfile::tempdir().unwrap();
            server.fault(at, 1, Kind::Status(status, None));
            let error = fetch(settings(&server, cache.path())).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
            assert!(error.hint().is_some());
            assert_eq!(server.seen(at).len(), 1, "asked again after {status}");
        }
    }
    let server = Server::start(files());
    server.state.lock().unwrap().token = Some("right".into());
    let with = |token: &str| Settings {
        token: Some(token.into()),
        ..settings(&server, cache.path())
    };
    let denied = |result: Result<_, Error>| matches!(result, Err(Error::Denied { .. }));
    assert!(denied(fetch(settings(&server, cache.path())).map(|_| ())));
    assert!(denied(fetch(with("wrong")).map(|_| ())));
    fetch(with("right")).unwrap();
}

#[test]
fn a_busy_hub_is_waited_for_and_given_up_after_some_tries() {
    for status in [429, 500, 502, 503, 504] {
        let server = Server::start(files());
        let cache = tempfile::tempdir().unwrap();
        server.fault("revision", 2, Kind::Status(status, Some(0)));
        server.fault(WEIGHTS, 2, Kind::Status(status, None));
        let (snapshot, _) = fetch(settings(&server, cache.path())).unwrap();
        assert_whole(&snapshot);
        server.fault("revision", 99, Kind::Status(status, None));
        let error = fetch(settings(&server, cache.path())).unwrap_err();
        assert!(
            matches!(error, Error::Unavailable { tries: 4, .. }),
            "{error}"
        );
    }
    let server = Server::start(files());
    let cache = tempfile::tempdir().unwrap();
    server.fault(WEIGHTS, 99, Kind::Cut(0));
    let error = fetch(settings(&server, cache.path())).unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
}

fn local(path: &str, size: u64) -> LocalFile {
    LocalFile {
        path: path.into(),
        size,
        sha256: "0".repeat(64),
    }
}

#[test]
fn a_large_file_that_the_hub_would_take_only_inside_the_commit_is_not_sent() {
    let folder = tempfile::tempdir().unwrap();
    let size = 51 << 20;
    let file = fs::File::create(folder.path().join("big.bin")).unwrap();
    file.set_len(size).unwrap();
    let server = Server::start(BTreeMap::new());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(settings(&server, cache.path())).unwrap();
    let upload = Upload {
        folder: folder.path().into(),
        files: vec![local("big.bin", size)],
        message: "big".into(),
        as_pull_request: false,
        private: false,
    };
    let made = Repo::parse("someone/made").unwrap();
    let refused = hub.publish(&made, &upload).unwrap_err().to_string();
    assert!(
        refused.contains("`big.bin` (53477376 bytes) by `basic`"),
        "{refused}"
    );
    assert!(server.seen("preupload").is_empty() && server.seen("commit").is_empty());
}

#[test]
fn a_folder_is_published_as_one_commit_or_pull_request() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("a.aimodel")).unwrap();
    let files = [
        ("README.md", b"# card\n".to_vec()),
        ("a.aimodel/main.mlirb", (0..=255).collect::<Vec<u8>>()),
    ];
    for (name, bytes) in &files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let server = Server::start(BTreeMap::new());
    server.state.lock().unwrap().token = Some("right".into());
    let cache = tempfile::tempdir().unwrap();
    let hub = |token: Option<&str>| {
        Hub::new(Settings {
            token: token.map(Into::into),
            ..settings(&server, cache.path())
        })
        .unwrap()
    };
    let made = Repo::parse("someone/made").unwrap();
    let upload = |as_pull_request| Upload {
        folder: folder.path().into(),
        files: files.iter().map(|f| local(f.0, f.1.len() as u64)).collect(),
        message: "tiny for Core AI".into(),
        as_pull_request,
        private: true,
    };
    let refused = hub(None).publish(&made, &upload(false));
    assert!(matches!(refused, Err(Error::Denied { .. })), "{refused:?}");
    assert!(server.state.lock().unwrap().pushed.is_empty());

    server.fault("commit", 1, Kind::Status(503, None));
    let published = hub(Some("right")).publish(&made, &upload(false)).unwrap();
    assert!(published.commit.unwrap().ends_with(COMMIT));
    {
        let state = server.state.lock().unwrap();
        let expected = files.iter().map(|f| (f.0.to_string(), f.1.clone()));
        assert_eq!(state.pushed["made"], expected.collect());
        assert!(!state.as_pull_request);
        assert_eq!(state.summary, "tiny for Core AI");
        let created = &state.created["made"];
        assert_eq!(created["name"], "made");
        assert_eq!(created["organization"], "someone");
        assert_eq!(created["private"], true);
    }
    // The repository is there by now, which is no failure.
    let proposed = hub(Some("right")).publish(&made, &upload(true)).unwrap();
    let address = proposed.pull_request.unwrap();
    assert!(address.ends_with("someone/made/discussions"), "{address}");
    assert!(server.state.lock().unwrap().as_pull_request);
}
