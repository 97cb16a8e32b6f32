//! What cannot be used is refused at once, with one error that names it.

mod common;

use std::fs;
use std::path::Path;

use common::{fails, text, tiny, tiny_copy};

/// Rewrites `config.json` of a copied model.
fn edit_config(model: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = model.join("config.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
}

/// Header and data of the model's only shard.
fn shard(model: &Path) -> (serde_json::Map<String, serde_json::Value>, Vec<u8>) {
    let bytes = fs::read(model.join("model.safetensors")).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    (header, bytes[8 + len..].to_vec())
}

fn write_shard(path: &Path, header: &serde_json::Map<String, serde_json::Value>, data: &[u8]) {
    let mut json = serde_json::to_vec(header).unwrap();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
}

fn quantize_fails(model: &Path, dir: &Path, code: i32, words: &[&str]) {
    let store = dir.join("store");
    let args = [
        "quantize",
        text(model),
        "-o",
        text(&store),
        "--method",
        "kmeans-unweighted",
    ];
    fails(&args, code, words);
    assert!(!store.join("store.json").exists(), "left a complete store");
}

#[test]
fn truncated_shard() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let path = model.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    quantize_fails(&model, dir.path(), 3, &["model.safetensors", "incomplete"]);
}

#[test]
fn index_that_names_a_missing_shard() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let (header, data) = shard(&model);
    fs::remove_file(model.join("model.safetensors")).unwrap();
    write_shard(
        &model.join("model-00001-of-00002.safetensors"),
        &header,
        &data,
    );
    let map: serde_json::Map<String, serde_json::Value> = header
        .keys()
        .filter(|k| *k != "__metadata__")
        .map(|k| (k.clone(), "model-00002-of-00002.safetensors".into()))
        .collect();
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(
        model.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    quantize_fails(&model, dir.path(), 3, &["model-00002-of-00002.safetensors"]);
}

#[test]
fn missing_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let (mut header, data) = shard(&model);
    let name = "model.layers.3.mlp.down_proj.weight";
    let entry = header.remove(name).expect("the model has it");
    header.insert("renamed.weight".into(), entry);
    write_shard(&model.join("model.safetensors"), &header, &data);
    quantize_fails(&model, dir.path(), 3, &[name]);
}

#[test]
fn unknown_rope_kind() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    edit_config(&model, |c| {
        c["rope_scaling"] = serde_json::json!({ "rope_type": "spiral", "factor": 2.0 });
    });
    quantize_fails(&model, dir.path(), 3, &["config.json", "rope", "spiral"]);
}

#[test]
fn already_quantized_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    edit_config(&model, |c| {
        c["quantization_config"] = serde_json::json!({ "quant_method": "gptq" });
    });
    quantize_fails(&model, dir.path(), 3, &["quantization_config"]);
}

#[test]
fn nan_weight() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let (header, mut data) = shard(&model);
    let name = "model.layers.2.self_attn.q_proj.weight";
    let offset = header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    data[offset..offset + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    write_shard(&model.join("model.safetensors"), &header, &data);
    quantize_fails(&model, dir.path(), 3, &[name, "NaN"]);
}

#[test]
fn empty_calibration_text() {
    let dir = tempfile::tempdir().unwrap();
    let calib = dir.path().join("calib.txt");
    fs::write(&calib, "").unwrap();
    let (model, store) = (tiny(), dir.path().join("store"));
    let args = [
        "quantize",
        text(&model),
        "-o",
        text(&store),
        "--calib",
        text(&calib),
    ];
    fails(&args, 3, &["calib.txt"]);
}

#[test]
fn non_empty_output_folder() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("precious.txt"), "mine").unwrap();
    let model = tiny();
    let args = ["quantize", text(&model), "-o", text(&out)];
    fails(&args, 2, &["out", "not empty", "hint"]);
    let overwrite = ["quantize", text(&model), "-o", text(&out), "--overwrite"];
    fails(&overwrite, 2, &["out", "precious.txt"]);
    assert_eq!(fs::read(out.join("precious.txt")).unwrap(), b"mine");
}

#[test]
fn output_inside_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let args = ["quantize", text(&model), "-o", text(&model)];
    fails(&args, 2, &["in each other"]);
}

#[test]
fn unfinished_store_is_not_lowered() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    fs::create_dir_all(store.join("matrices")).unwrap();
    let folder = dir.path().join("folder");
    let args = ["target", text(&store), "-o", text(&folder)];
    fails(&args, 3, &["store"]);
    assert!(!folder.exists());
}

#[test]
fn contexts_the_engine_cannot_compile_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    common::ok(&[
        "quantize",
        text(&tiny()),
        "-o",
        text(&store),
        "--method",
        "kmeans-unweighted",
    ]);
    let folder = dir.path().join("folder");
    let args = [
        "target",
        text(&store),
        "-o",
        text(&folder),
        "--max-context",
        "32768",
    ];
    fails(&args, 2, &["32768", "compiler"]);
    assert!(!folder.exists());
}

/// Multiplies a bf16 matrix of a copied model by a power of two.
fn scale_tensor(model: &Path, name: &str, exponent: u16) {
    let (header, mut data) = shard(model);
    let offsets = header[name]["data_offsets"].as_array().unwrap();
    let range = offsets[0].as_u64().unwrap() as usize..offsets[1].as_u64().unwrap() as usize;
    for pair in data[range].chunks_exact_mut(2) {
        let bits = u16::from_le_bytes([pair[0], pair[1]]);
        if bits & 0x7f80 != 0 {
            pair.copy_from_slice(&(bits + (exponent << 7)).to_le_bytes());
        }
    }
    write_shard(&model.join("model.safetensors"), &header, &data);
}

#[test]
fn values_that_fp16_cannot_hold_are_refused_with_their_place() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny_copy(dir.path());
    let report = |store: &str| {
        let store = dir.path().join(store);
        let args = ["quantize", text(&model), "-o", text(&store)];
        let rest = [
            "--method",
            "kmeans-unweighted",
            "--tokens",
            "512",
            "--fp16-report",
        ];
        common::ok(&[&args[..], &rest].concat())
    };
    let before = report("plain");
    assert!(
        before.contains("The squares of all norm inputs fit into fp16."),
        "{before}"
    );
    // The products grow with `up`, and `down` undoes it, so that the model stays what it was.
    let up = "model.layers.1.mlp.up_proj.weight";
    scale_tensor(&model, up, 10);
    scale_tensor(
        &model,
        "model.layers.1.mlp.down_proj.weight",
        (-10i16).cast_unsigned(),
    );
    let after = report("scaled");
    let first = after.lines().nth(4).unwrap();
    assert!(first.starts_with("| layer 1: "), "{after}");
    assert!(first.contains("up"), "{after}");
    scale_tensor(&model, up, 8);
    quantize_fails(
        &model,
        dir.path(),
        5,
        &["layer 1: ", "up", "fp16 holds at most 65504"],
    );
}
