//! The reference in `docs/cli.md` is what the program says of itself.

mod common;

use std::fs;
use std::path::Path;

use common::{ok, text};

#[test]
fn the_reference_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md");
    let kept = fs::read_to_string(&path).expect("docs/cli.md");
    let now = ok(&["docs"]);
    assert!(
        kept == now,
        "`docs/cli.md` is not current: run `cargo run --release --bin anemone-convert -- docs > \
         docs/cli.md`"
    );
}

#[test]
fn completions_and_man_pages_know_every_command() {
    let reference = ok(&["docs"]);
    let commands: Vec<&str> = reference
        .lines()
        .filter_map(|l| l.strip_prefix("## anemone-convert "))
        .collect();
    assert!(commands.len() > 8, "{commands:?}");
    for shell in ["bash", "zsh", "fish"] {
        let script = ok(&["completions", shell]);
        for command in &commands {
            assert!(script.contains(command), "{shell} lacks {command}");
        }
    }
    let dir = tempfile::tempdir().unwrap();
    ok(&["man", text(dir.path())]);
    for command in &commands {
        let page = dir.path().join(format!("anemone-convert-{command}.1"));
        let page = fs::read_to_string(page).unwrap();
        assert!(page.contains(".SH OPTIONS"), "{command}:\n{page}");
    }
}
