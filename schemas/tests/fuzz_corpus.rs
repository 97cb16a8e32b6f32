//! The corpora and findings of the fuzz targets, without the fuzzer: what holds for
//! any bytes holds for these. One test, since memory is counted for the process.

use std::fs;
use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::decode::decode_bytes;
use anemone_schemas::aimodel::encode::encode;
use anemone_schemas::aimodel::ir::{Blob, BlobData, Elem, Module, TensorType};

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

/// A program of 64 matrices of a quarter of a megabyte, some operations on each.
fn weights() -> Vec<u8> {
    let mut m = Module::default();
    let inputs = [(
        "x",
        Input::Tensor(TensorType::new(Elem::F16, &[1, 256, 1, 16])),
    )];
    let mut g = GraphBuilder::new(&mut m, "main", &inputs);
    let mut x = g.arg(0);
    for i in 0..64u8 {
        let blob = g.module().add_blob(Blob {
            key: format!("w{i}"),
            data: BlobData::Bytes(vec![i; 2 * 256 * 256]),
        });
        let w = g.constant_blob(TensorType::new(Elem::F16, &[256, 256, 1, 1]), blob);
        x = g.conv1x1(x, w);
        x = g.silu(x);
    }
    g.finish(&[("y", x)], &[]);
    let mut bytes = vec![];
    encode(&m, &mut bytes).expect("a right program");
    bytes
}

#[test]
fn corpus_files_are_answered_within_the_bounds() {
    let program = weights();
    let (read, peak) = checks::with_peak(|| decode_bytes(&program));
    read.expect("a right program");
    assert!(
        peak <= checks::WEIGHTS_FACTOR * program.len(),
        "{peak} bytes for {}",
        program.len()
    );
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
