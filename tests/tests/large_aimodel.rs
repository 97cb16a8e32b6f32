//! Apple's own exports of a small Qwen3: megabytes each, so kept outside the
//! repository, in the directory `ANEMONE_SHARED` (default `../shared`).

use std::env;
use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::asset::{Metadata, open_asset, write_asset};
use anemone_schemas::aimodel::check::check;
use anemone_schemas::aimodel::ir::Module;
use anemone_schemas::aimodel::same::difference;
use anemone_schemas::aimodel::text::{TextOptions, to_text};
use anemone_tests::oracle::{self, Call, Tensor};

fn golden(name: &str) -> PathBuf {
    let shared = env::var_os("ANEMONE_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let path = shared.join("coreai/golden").join(name);
    assert!(
        path.is_dir(),
        "`{}` is missing; set ANEMONE_SHARED to the directory with the large fixtures",
        path.display()
    );
    path
}

fn survives(name: &str) {
    let original = golden(name);
    let m = open_asset(&original).unwrap();
    check(&m).unwrap();
    assert!(m.graphs().len() > 19);
    let text = to_text(&m, &TextOptions::default());
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.aimodel");
    write_asset(&copy, &m, &Metadata::default()).unwrap();
    let again = open_asset(&copy).unwrap();
    assert_eq!(difference(&m, &again), None);
    // Too long to be shown.
    assert!(
        to_text(&again, &TextOptions::default()) == text,
        "the text differs"
    );
    same_to_apple(&m, &original, &copy);
}

/// Functions, and what the embedding of eight tokens gives.
fn same_to_apple(m: &Module, original: &Path, copy: &Path) {
    assert!(m.graph("gather_embeddings_8").is_some());
    let ids = Tensor::i32(&[1, 8], &[0, 1, 5, 77, 500, 1000, 1022, 1023]);
    let calls = [
        Call::new("load_embeddings"),
        Call::new("gather_embeddings_8")
            .input("in_new_token_ids", ids)
            .carry("embedding_table", 0, "embedding_table"),
    ];
    let [before, after] = [original, copy].map(|p| oracle::report(p, &calls).unwrap());
    assert_eq!(before.functions, after.functions);
    assert_eq!(before.compatibility, after.compatibility);
    let found = after.calls[1].get("gathered_embeddings");
    assert_eq!(found, before.calls[1].get("gathered_embeddings"));
    assert!(found.to_f32().iter().any(|&v| v != 0.0));
}

#[test]
fn an_export_in_f16_survives_being_read_and_written() {
    survives("tiny_qwen3_L1_untied_fp16_b3.aimodel");
}

#[test]
fn an_export_with_tables_survives_being_read_and_written() {
    survives("tiny_qwen3_L1_untied_lut4g32_b3.aimodel");
}

#[test]
fn an_export_with_a_tied_head_survives_being_read_and_written() {
    survives("tiny_qwen3_L2_tied_lut4g32_b3.aimodel");
}
