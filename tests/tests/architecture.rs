//! The arrows between the crates, read from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Our crates and those of ours each may name, normal dependencies only.
const ARROWS: [(&str, &[&str]); 6] = [
    ("anemone-schemas", &[]),
    ("anemone-memguard", &[]),
    ("anemone-hub", &[]),
    ("anemone-calib", &["anemone-schemas"]),
    ("anemone-runtime", &["anemone-schemas"]),
    (
        "anemone-convert",
        &[
            "anemone-schemas",
            "anemone-calib",
            "anemone-runtime",
            "anemone-memguard",
            "anemone-hub",
        ],
    ),
];

/// Crates that must not be anywhere below the lean ones.
const HEAVY: [&str; 8] = [
    "candle-core",
    "faer",
    "gemm",
    "hf-hub",
    "linfa",
    "linfa-clustering",
    "nalgebra",
    "ndarray",
];

struct Metadata {
    /// Package id by name, for our own crates.
    ours: BTreeMap<String, String>,
    names: BTreeMap<String, String>,
    /// Normal (not dev, not build) dependencies by package id.
    edges: BTreeMap<String, Vec<String>>,
}

fn metadata() -> Metadata {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo metadata runs");
    assert!(
        out.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    let json: Value = serde_json::from_slice(&out.stdout).expect("cargo metadata prints JSON");
    let text = |v: &Value| v.as_str().expect("a string").to_string();
    let mut ours = BTreeMap::new();
    let mut names = BTreeMap::new();
    for p in json["packages"].as_array().expect("packages") {
        names.insert(text(&p["id"]), text(&p["name"]));
        if p["source"].is_null() {
            ours.insert(text(&p["name"]), text(&p["id"]));
        }
    }
    let nodes = json["resolve"]["nodes"].as_array().expect("nodes");
    let edges = nodes
        .iter()
        .map(|n| {
            let deps = n["deps"].as_array().expect("deps");
            let normal = deps.iter().filter(|d| {
                let kinds = d["dep_kinds"].as_array().expect("dep_kinds");
                kinds.iter().any(|k| k["kind"].is_null())
            });
            (text(&n["id"]), normal.map(|d| text(&d["pkg"])).collect())
        })
        .collect();
    Metadata { ours, names, edges }
}

#[test]
fn our_crates_depend_only_along_the_arrows() {
    let meta = metadata();
    for (name, allowed) in ARROWS {
        let id = &meta.ours[name];
        for dep in &meta.edges[id] {
            let dep = &meta.names[dep];
            assert!(
                !meta.ours.contains_key(dep) || allowed.contains(&dep.as_str()),
                "{name} depends on {dep}; allowed: {allowed:?}"
            );
        }
    }
}

#[test]
fn schemas_and_runtime_link_no_heavy_crate() {
    let meta = metadata();
    for name in ["anemone-schemas", "anemone-runtime", "anemone-memguard"] {
        let mut seen = BTreeSet::new();
        let mut open = vec![meta.ours[name].clone()];
        while let Some(id) = open.pop() {
            if !seen.insert(id.clone()) {
                continue;
            }
            let dep = &meta.names[&id];
            assert!(!HEAVY.contains(&dep.as_str()), "{name} links {dep}");
            open.extend(meta.edges[&id].iter().cloned());
        }
        assert!(seen.len() > 5, "{name}: the walk saw only {seen:?}");
    }
}
