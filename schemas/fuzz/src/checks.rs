//! What holds for any bytes, whoever feeds them: the fuzzer, or the test that replays
//! its corpus.
//!
//! No panic; an answer within a second of processor time; and memory in proportion to
//! the input, whatever its length. The factor is that of a file which is all structure:
//! an operation of five bytes becomes a structure of 130 and its lists, an attribute of
//! three an entry of a table and its key. Weights are bytes of the file and stay there,
//! or are copied once where a program is read from memory, so a program that is mostly
//! weights takes far less than [`WEIGHTS_FACTOR`].

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anemone_schemas::aimodel::asset::open_asset;
use anemone_schemas::aimodel::check::check;
use anemone_schemas::aimodel::decode::decode_bytes;
use anemone_schemas::aimodel::encode::encode;
use anemone_schemas::aimodel::ir::Module;
use anemone_schemas::aimodel::same::difference;
use anemone_schemas::aimodel::text::{TextOptions, to_text};
use peak_alloc::PeakAlloc;
use rustix::time::{ClockId, clock_gettime};
use sha2::{Digest, Sha256};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Longest an input may keep the processor.
const TIME: Duration = Duration::from_secs(1);
/// Most bytes alive at once for every byte of a file; 36 is the most seen.
const FACTOR: usize = 48;
/// And for messages and empty tables.
const ALLOWANCE: usize = 4 << 10;
/// How many bytes of a program a byte of `metadata.json` counts for: JSON objects are
/// larger in memory still.
#[allow(dead_code, reason = "each target has one of the two")]
const METADATA_WEIGHT: usize = 6;
/// Most bytes alive at once for every byte of a program of which nine tenths are weights.
#[allow(dead_code, reason = "for the test of the corpus")]
pub(crate) const WEIGHTS_FACTOR: usize = 4;

thread_local! {
    /// Where the asset folders are written.
    static DIR: PathBuf = {
        let dir = std::env::temp_dir().join(format!("anemone-fuzz-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("the folder for temporary files is writable");
        dir
    };
}

/// What a step gives, and the most memory alive during it.
pub(crate) fn with_peak<T>(step: impl FnOnce() -> T) -> (T, usize) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let done = step();
    (done, MEMORY.peak_usage().saturating_sub(before))
}

/// Runs one step, which may allocate in proportion to `len`.
fn bounded<T>(what: &str, len: usize, step: impl FnOnce() -> T) -> T {
    let start = processor_time();
    let (done, peak) = with_peak(step);
    let took = processor_time().saturating_sub(start);
    assert!(took < TIME, "{what} took {took:?} for {len} bytes");
    assert!(
        peak <= FACTOR * len + ALLOWANCE,
        "{what} took {peak} bytes of memory for {len} of input"
    );
    done
}

fn processor_time() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// The bytes of a `main.mlirb`.
#[allow(dead_code, reason = "each target has one of the two")]
pub(crate) fn reader(bytes: &[u8]) {
    if let Ok(m) = bounded("decoding", bytes.len(), || decode_bytes(bytes)) {
        uses(&m, bytes.len());
    }
}

/// An asset folder: its digest (a byte, zero for the right one), the length of
/// `metadata.json` in two bytes, `metadata.json`, and the program.
#[allow(dead_code, reason = "each target has one of the two")]
pub(crate) fn asset(bytes: &[u8]) {
    let [kind, low, high, rest @ ..] = bytes else {
        return;
    };
    let metadata = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
    let (metadata, program) = rest.split_at(metadata);
    let mut digest = Sha256::digest(program).to_vec();
    digest[0] ^= kind;
    digest.truncate(32 - usize::from(*kind).min(32));
    DIR.with(|dir| {
        for (name, bytes) in [
            ("metadata.json", metadata),
            ("main.hash", &digest),
            ("main.mlirb", program),
        ] {
            fs::write(dir.join(name), bytes).expect("the folder is writable");
        }
        let len = program.len() + METADATA_WEIGHT * metadata.len();
        if let Ok(m) = bounded("opening", len, || open_asset(dir)) {
            assert_eq!(*kind, 0, "opened with a wrong digest");
            uses(&m, bytes.len());
        }
    });
}

/// What decodes can be checked, printed and written, and is then read as it was.
fn uses(m: &Module, len: usize) {
    let right = bounded("checking", len, || check(m)).is_ok();
    let options = TextOptions {
        decompositions: true,
        max_elements: 64,
    };
    bounded("printing", len, || to_text(m, &options));
    let mut out = vec![];
    let written = bounded("encoding", len, || encode(m, &mut out));
    if written.is_ok() {
        let again = decode_bytes(&out).expect("what we write decodes");
        assert_eq!(difference(m, &again), None);
        assert_eq!(check(&again).is_ok(), right);
    }
}
