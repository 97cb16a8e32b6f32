//! The corpora and findings of the fuzz targets, without the fuzzer: what holds for
//! any bytes holds for these. One test, since memory is counted for the process.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "../fuzz/src/checks.rs"]
mod checks;

/// The files of a folder in `fuzz`, by name.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz")
        .join(folder);
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("`{}`: {e}", folder.display()))
        .map(|e| e.expect("the folder can be listed").path())
        .collect();
    files.sort();
    assert!(!files.is_empty(), "`{}` is empty", folder.display());
    files
}

#[test]
fn corpus_files_are_answered_within_the_bounds() {
    for (folder, check) in [
        ("corpus/reader", checks::reader as fn(&[u8])),
        ("corpus/asset", checks::asset),
    ] {
        let files = files(folder);
        let mut sizes = 0;
        for file in &files {
            let bytes = fs::read(file).expect("the file can be read");
            sizes += bytes.len();
            let answered = std::panic::catch_unwind(|| check(&bytes)).is_ok();
            assert!(
                answered,
                "`{}` breaks the bounds, see above",
                file.display()
            );
        }
        assert!(sizes < 2 << 20, "`{folder}` has grown to {sizes} bytes");
    }
}
