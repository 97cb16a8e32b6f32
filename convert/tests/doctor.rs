//! What `verify`, `doctor` and `package` find in folders with something wrong, how they
//! class it, and what they say to do. Damage is hidden from the digests, so that the
//! checks behind them are reached.

mod common;

use std::fs;
use std::path::Path;

use common::{command, converted, edit_json, fails, lowered, ok, text, tiny, tiny_copy};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Changes the manifest.
fn edit_manifest(folder: &Path, change: impl FnOnce(&mut Value)) {
    edit_json(&folder.join("anemone.json"), change);
}

/// Replaces a file, and its digest in the manifest.
fn replace(folder: &Path, name: &str, bytes: &[u8]) {
    fs::write(folder.join(name), bytes).unwrap();
    let digest = anemone_schemas::hex(&Sha256::digest(bytes));
    edit_manifest(folder, |json| {
        json["files"][name]["sha256"] = digest.into();
        json["files"][name]["bytes"] = bytes.len().into();
    });
}

/// Class and text of all findings, and the exit code.
fn diagnosed(folder: &Path) -> (Vec<(String, String)>, i32) {
    let out = command()
        .args(["--quiet", "doctor", text(folder), "--json"])
        .env("ANEMONE_RUNTIME_DIR", folder.parent().unwrap())
        .output()
        .unwrap();
    let list: Vec<Value> = serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)));
    let text = |v: &Value| v.as_str().unwrap().to_string();
    let found = list.iter().map(|f| {
        assert!(!text(&f["fix"]).is_empty());
        (text(&f["class"]), text(&f["what"]))
    });
    // How busy the machine is does not matter here.
    let found =
        found.filter(|f| !f.1.contains("memory are available") && !f.1.contains("swap are in use"));
    (found.collect(), out.status.code().unwrap())
}

fn assert_found(folder: &Path, class: &str, part: &str) {
    let (found, code) = diagnosed(folder);
    assert!(
        found.iter().any(|f| f.0 == class && f.1.contains(part)),
        "no {class} finding with `{part}` in {found:#?}"
    );
    assert_eq!(code, if class == "performance" { 0 } else { 6 });
}

#[test]
fn a_sound_folder_passes_and_the_model_is_run() {
    let dir = tempfile::tempdir().unwrap();
    let folder = converted(&tiny(), dir.path());
    ok(&["package", text(&folder)]);
    let out = command()
        .args(["doctor", text(&folder)])
        .env("ANEMONE_RUNTIME_DIR", dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("self-test: 8 tokens"), "{said}");
    let (found, _) = diagnosed(&folder);
    assert!(found.iter().all(|f| f.0 == "performance"), "{found:?}");
}

#[test]
fn every_kind_of_damage_is_classed() {
    let dir = tempfile::tempdir().unwrap();
    let folder = converted(&tiny(), dir.path());
    ok(&["package", text(&folder)]);
    let manifest = fs::read(folder.join("anemone.json")).unwrap();
    let restore = |name: &str, bytes: &[u8]| {
        fs::write(folder.join(name), bytes).unwrap();
        fs::write(folder.join("anemone.json"), &manifest).unwrap();
    };
    // Files.
    let table = fs::read(folder.join("embedding.f16")).unwrap();
    fs::remove_file(folder.join("embedding.f16")).unwrap();
    assert_found(&folder, "fatal", "embedding.f16` is missing");
    restore("embedding.f16", &table);
    fs::write(folder.join("extra"), "x").unwrap();
    assert_found(&folder, "silent", "extra` is not in the manifest");
    fs::remove_file(folder.join("extra")).unwrap();
    // The ids of text: probes tell what digests cannot.
    let probes = fs::read_to_string(folder.join("probes.json")).unwrap();
    let list: Vec<Value> = serde_json::from_str(&probes).unwrap();
    assert_eq!(list.len(), 16);
    let mut other = list.clone();
    other[3]["ids"][0] = 1.into();
    replace(&folder, "probes.json", &serde_json::to_vec(&other).unwrap());
    assert_found(&folder, "silent", "probes.json");
    fails(
        &["verify", text(&folder)],
        6,
        &["probes.json", "expected [1,", "hint: "],
    );
    restore("probes.json", probes.as_bytes());
    // Stop ids.
    edit_manifest(&folder, |json| json["stop"] = serde_json::json!([]));
    assert_found(&folder, "silent", "answers never end");
    restore("probes.json", probes.as_bytes());
    edit_manifest(&folder, |json| json["stop"] = serde_json::json!([4095]));
    assert_found(
        &folder,
        "silent",
        "stop id 4095 is beyond the tokenizer's 4090",
    );
    restore("probes.json", probes.as_bytes());
    // Apple's metadata.
    let bundle = fs::read(folder.join("metadata.json")).unwrap();
    replace(&folder, "metadata.json", b"{}");
    assert_found(
        &folder,
        "fatal",
        "does not describe this folder's 1 programs",
    );
    restore("metadata.json", &bundle);
    ok(&["verify", text(&folder)]);
}

#[test]
fn a_template_that_does_not_render_fails_in_package_not_at_the_first_user() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let path = model.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["chat_template"] =
        "{{ raise_exception('roles must alternate') }}{{ messages[0].content }}".into();
    fs::write(&path, config.to_string()).unwrap();
    let _ = fs::remove_file(model.join("chat_template.jinja"));
    let folder = converted(&model, dir.path());
    let before = common::contents(&folder);
    fails(
        &["package", text(&folder)],
        6,
        &["chat template", "roles must alternate", "first request"],
    );
    assert!(common::contents(&folder) == before, "left something behind");
    assert_found(&folder, "fatal", "roles must alternate");
}

#[test]
fn a_trial_on_some_layers_is_marked_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    ok(&[
        "quantize",
        text(&tiny()),
        "-o",
        text(&store),
        "--layers",
        "0..2",
        "--tokens",
        "512",
        "--method",
        "kmeans",
    ]);
    let folder = lowered(&store, dir.path(), &["--name", "tiny"]);
    ok(&["package", text(&folder)]);
    ok(&["verify", text(&folder)]);
    let manifest = fs::read_to_string(folder.join("anemone.json")).unwrap();
    assert!(
        manifest.contains("\"name\": \"tiny (partial: layers 0..2 of 8)\""),
        "{manifest}"
    );
    let card = fs::read_to_string(folder.join("README.md")).unwrap();
    assert!(card.contains("--layers 0..2"), "{card}");
    assert!(card.contains("partial"), "{card}");
    fails(
        &[
            "package",
            text(&folder),
            "--upload",
            "someone/made",
            "--dry-run",
        ],
        2,
        &["only layers 0..2 of 8"],
    );
    fails(
        &["quantize", text(&tiny()), "-o", "x", "--layers", "0..9"],
        3,
        &["9 layers asked for of the 8"],
    );
    fails(
        &["quantize", text(&tiny()), "-o", "x", "--layers", "2..4"],
        2,
        &["0..N"],
    );
}

#[test]
fn a_configuration_file_gives_what_the_command_line_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("night.toml");
    fs::write(&file, "[quantize]\ntokens = 300\nmethod = \"kmeans\"\n").unwrap();
    let store = dir.path().join("store");
    ok(&[
        "--config",
        text(&file),
        "quantize",
        text(&tiny()),
        "-o",
        text(&store),
        "--method",
        "kmeans-unweighted",
    ]);
    let made: Value = serde_json::from_slice(&fs::read(store.join("store.json")).unwrap()).unwrap();
    assert_eq!(made["provenance"]["settings"]["calibration_tokens"], 300);
    assert_eq!(made["provenance"]["method"], "k-means-unweighted");
    fs::write(&file, "[quantize]\ntoken = 300\n").unwrap();
    fails(
        &["--config", text(&file), "quantize", "m", "-o", "x"],
        2,
        &["night.toml", "no option `token`"],
    );
}
