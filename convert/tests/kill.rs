//! `kill -9` at random points of `quantize`, `target`, `drafter` and `package`: the same command
//! goes on and ends in the same bytes, and nothing half-done is ever taken for done.

mod common;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{assert_same, killed, ok, run, text, tiny};

/// A fixed sequence of numbers in `0..1` (Knuth's MMIX generator).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// How long the command takes when nobody disturbs it.
fn timed(args: &[&str]) -> Duration {
    let start = Instant::now();
    ok(args);
    start.elapsed()
}

/// Kills `args` at `points` random moments, beginning anew by `reset` whenever it gets
/// done; `sound` is asked after every kill whether what is there may be there. The
/// moments lie within `whole`, which shrinks where the command was done before.
fn kill_at(
    points: usize,
    seed: u64,
    args: &[&str],
    whole: Duration,
    reset: &dyn Fn(),
    sound: &dyn Fn(),
    same: &dyn Fn(),
) {
    let mut random = Random(seed);
    let mut span = whole;
    let mut hit = 0;
    reset();
    for _ in 0..points * 20 {
        if killed(args, span.mul_f64(random.next())) {
            hit += 1;
            span = span.mul_f64(1.1).min(whole);
            sound();
        } else {
            span = span.mul_f64(0.8);
        }
        // Every third time what is left is completed, so that kills also meet the
        // leavings of earlier kills.
        if random.next() < 0.33 || hit == points {
            ok(args);
            same();
            reset();
        }
        if hit == points {
            return;
        }
    }
    panic!("only {hit} of {points} kills came before the end");
}

fn remove(path: &Path) {
    let _ = fs::remove_dir_all(path);
    let name = path.file_name().unwrap().to_string_lossy();
    let _ = fs::remove_dir_all(path.with_file_name(format!("{name}.partial")));
}

/// Whether `verify` calls the folder whole; anything but yes and a clean no is a failure.
fn accepted(folder: &Path) -> bool {
    let out = run(&["--quiet", "verify", text(folder)]);
    let said = String::from_utf8_lossy(&out.stderr);
    match out.status.code() {
        Some(0) => true,
        Some(3 | 6) => false,
        code => panic!("verify ended with {code:?}: {said}"),
    }
}

const TARGET: [&str; 4] = ["--chunks", "3", "--max-context", "512"];

fn quantize<'a>(model: &'a str, store: &'a str) -> Vec<&'a str> {
    let args = ["--quiet", "quantize", model, "-o", store, "--tokens", "512"];
    [&args[..], &["--window", "256", "--jobs", "2"]].concat()
}

fn target<'a>(store: &'a str, folder: &'a str) -> Vec<&'a str> {
    [&["--quiet", "target", store, "-o", folder][..], &TARGET].concat()
}

fn drafter<'a>(dspark: &'a str, target: &'a str, output: &'a str) -> Vec<&'a str> {
    let args = [
        "--quiet", "drafter", dspark, "--target", target, "-o", output,
    ];
    [&args[..], &["--overwrite"]].concat()
}

#[test]
fn forty_kills_change_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let model = tiny();
    let (whole, store) = (at("whole"), at("store"));
    let time = timed(&quantize(text(&model), text(&whole)));
    kill_at(
        16,
        1,
        &quantize(text(&model), text(&store)),
        time,
        &|| remove(&store),
        &|| {
            let complete = store.join("store.json").exists();
            let opens = run(&["inspect", text(&store)]).status.success();
            assert_eq!(opens, complete, "an unfinished store was accepted");
        },
        &|| assert_same(&whole, &store),
    );

    let (whole_folder, folder) = (at("whole-folder"), at("folder"));
    let time = timed(&target(text(&whole), text(&whole_folder)));
    kill_at(
        10,
        2,
        &target(text(&whole), text(&folder)),
        time,
        &|| remove(&folder),
        &|| {
            assert!(
                !folder.exists() || accepted(&folder),
                "a half-written folder has its name"
            );
        },
        &|| assert_same(&whole_folder, &folder),
    );

    // A drafter needs the hidden states of these layers.
    let tapped = at("tapped");
    let taps = ["--taps", "1,2,3,5,6", "--max-context", "256"];
    ok(&[&["target", text(&whole), "-o", text(&tapped)][..], &taps].concat());
    let (whole_drafter, drafted) = (at("whole-drafter"), at("drafted"));
    let dspark = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-dspark");
    let time = timed(&drafter(text(&dspark), text(&tapped), text(&whole_drafter)));
    kill_at(
        6,
        4,
        &drafter(text(&dspark), text(&tapped), text(&drafted)),
        time,
        &|| remove(&drafted),
        &|| {
            assert!(
                !drafted.exists() || accepted(&drafted),
                "a half-written folder has its name"
            );
        },
        &|| assert_same(&whole_drafter, &drafted),
    );

    let packaged = at("packaged");
    let copy = |to: &Path| {
        remove(to);
        for (name, bytes) in common::contents(&whole_folder) {
            let path = to.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
    };
    copy(&packaged);
    let time = timed(&["--quiet", "package", text(&packaged)]);
    kill_at(
        8,
        3,
        &["--quiet", "package", text(&folder)],
        time,
        &|| copy(&folder),
        &|| {
            // Before, after, or refused; never something else that passes.
            if accepted(&folder) {
                let now = common::contents(&folder);
                let states = [&whole_folder, &packaged].map(|f| common::contents(f));
                assert!(states.contains(&now), "a half-packaged folder was accepted");
            }
        },
        &|| assert_same(&packaged, &folder),
    );
}
