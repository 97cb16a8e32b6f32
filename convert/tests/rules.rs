//! `--set`: other options for some matrices, what is recorded of them, and that nothing
//! made by other rules is taken over.

mod common;

use std::fs;
use std::path::Path;

use anemone_schemas::report::QuantizeReport;
use common::{assert_same, fails, lowered, ok, text, tiny};
use serde_json::Value;

const HEAD: &str = "lm_head=bits=6,method=kmeans";
const FIRST: &str = r"layers\.0\..*(gate|up)_proj=bits=3,damping=0.1";

fn quantize(store: &Path, more: &[&str]) {
    let model = tiny();
    let args = ["quantize", text(&model), "-o", text(store)];
    let how = ["--method", "gptq", "--guided", "false", "--tokens", "512"];
    ok(&[&args[..], &how, more].concat());
}

fn manifest(store: &Path) -> Value {
    serde_json::from_slice(&fs::read(store.join("store.json")).unwrap()).unwrap()
}

#[test]
fn rules_reach_the_matrices_they_match_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let [plain, ruled, again] = ["plain", "ruled", "again"].map(|n| dir.path().join(n));
    quantize(&plain, &[]);
    quantize(&ruled, &["--set", HEAD, "--set", FIRST]);
    let made = manifest(&ruled);
    for matrix in made["matrices"].as_array().unwrap() {
        let name = matrix["name"].as_str().unwrap();
        let (bits, method, damping) = match name {
            "lm_head.weight" => (6, "k-means", Value::Null),
            "model.layers.0.mlp.gate_proj.weight" | "model.layers.0.mlp.up_proj.weight" => {
                (3, "gptq", 0.1.into())
            }
            _ => (4, "gptq", 0.05.into()),
        };
        assert_eq!(matrix["bits"], bits, "{name}");
        assert_eq!(matrix["report"]["method"], method, "{name}");
        assert_eq!(matrix["report"]["damping"], damping, "{name}");
    }
    let digests = |made: &Value| -> Vec<(String, String)> {
        let matrices = made["matrices"].as_array().unwrap().iter();
        let pairs = matrices.map(|m| [&m["name"], &m["sha256"]].map(ToString::to_string));
        pairs.map(|[name, digest]| (name, digest)).collect()
    };
    let (before, after) = (digests(&manifest(&plain)), digests(&made));
    let differ = before.iter().filter(|m| !after.contains(m));
    assert_eq!((before.len(), differ.count()), (57, 3));

    // An unfinished store of other rules: every matrix has another key.
    fs::remove_file(plain.join("store.json")).unwrap();
    quantize(&plain, &["--set", HEAD, "--set", FIRST]);
    assert_same(&ruled, &plain);

    // The recorded command makes the same store.
    assert_eq!(
        made["provenance"]["settings"]["set"],
        serde_json::json!([HEAD, FIRST])
    );
    let folder = lowered(&ruled, dir.path(), &[]);
    let recipe: Value =
        serde_json::from_slice(&fs::read(folder.join("recipe.json")).unwrap()).unwrap();
    let command = recipe["commands"][0].as_str().unwrap();
    assert!(
        command.contains(&format!("--set '{HEAD}' --set '{FIRST}'")),
        "{command}"
    );
    // The same from a configuration file.
    let config = dir.path().join("night.toml");
    fs::write(
        &config,
        format!("[quantize]\nset = ['{HEAD}', '{FIRST}']\n"),
    )
    .unwrap();
    quantize(&again, &["--config", text(&config)]);
    assert_same(&ruled, &again);
}

#[test]
fn a_rule_that_matches_nothing_is_refused_with_the_names_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let model = tiny();
    let refused = |rule: &str, words: &[&str]| {
        let args = ["quantize", text(&model), "-o", text(&store), "--set", rule];
        fails(&args, 2, words);
        assert!(!store.exists());
    };
    refused(
        "lm-head=bits=6",
        &[
            "`lm-head` of `--set lm-head=bits=6` matches no tensor",
            "hint: matrices are `lm_head.weight` and, for N from 0 to 7",
            "`model.layers.N.mlp.down_proj.weight`",
        ],
    );
    refused(r"layers\.8\.=bits=6", &["matches no tensor"]);
    refused(
        "embed=bits=6",
        &["only tensors that stay in fp16, such as `model.embed_tokens"],
    );
    refused(
        "lm_head=bits=5",
        &["--set", "expected 1, 2, 3, 4, 6, 8, int8 or 16"],
    );
    // A trial has only some of the layers its rules are about.
    let args = [
        "quantize",
        text(&model),
        "-o",
        text(&store),
        "--layers",
        "0..1",
    ];
    ok(&[&args[..], &["--set", r"layers\.7\.=bits=6", "--dry-run"]].concat());
}

#[test]
fn a_model_whose_matrices_all_stay_in_fp16_is_the_original() {
    let dir = tempfile::tempdir().unwrap();
    let (store, report) = (dir.path().join("store"), dir.path().join("report.json"));
    let model = tiny();
    quantize(&store, &["--set", ".=bits=16"]);
    let made = manifest(&store);
    assert_eq!(made["matrices"], serde_json::json!([]));
    let args = [
        "quantize",
        text(&model),
        "-o",
        text(&store),
        "--set",
        ".=bits=16",
    ];
    let plan = ok(&[&args[..], &["--dry-run", "--json"]].concat());
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let dense = made["dense"].as_array().unwrap().iter();
    let bytes: u64 = dense.map(|d| d["bytes"].as_u64().unwrap()).sum();
    assert_eq!(plan["output_bytes"], bytes);

    let folder = lowered(&store, dir.path(), &["--chunks", "2"]);
    ok(&["package", text(&folder)]);
    ok(&["verify", text(&folder)]);
    let args = [
        "eval",
        text(&model),
        "--store",
        text(&store),
        "--folder",
        text(&folder),
    ];
    let size = ["--tokens", "1024", "-o", text(&report)];
    ok(&[&args[..], &size].concat());
    ok(&[&args[..], &["--tokens", "256", "--max-kl", "0.001"]].concat());
    let none = [&args[..], &["--tokens", "256", "--max-kl=-1"]].concat();
    fails(&none, 6, &["has a mean KL of ", "more than the -1 allowed"]);
    let report: Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    for student in report["students"].as_array().unwrap() {
        // The teacher's graph on the same weights, and the programs in fp16 arithmetic.
        let most = match student["measured"].as_str().unwrap() {
            "simulator" => 1e-6,
            _ => 1e-3,
        };
        for set in student["sets"].as_array().unwrap() {
            let kl = set["kl_mean"].as_f64().unwrap();
            assert!(kl.abs() < most, "{}: {kl}", student["measured"]);
        }
    }
}

#[test]
fn more_bits_per_weight_lower_the_divergence_within_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny();
    let measure = |bits: &str| -> f64 {
        let store = dir.path().join(bits);
        let report = dir.path().join(format!("{bits}.json"));
        let args = [
            "quantize",
            text(&model),
            "-o",
            text(&store),
            "--tokens",
            "2048",
        ];
        ok(&[&args[..], &["--target-bpw", bits]].concat());
        let opened = anemone_schemas::store::Store::open(&store).unwrap();
        let [mut bytes, mut weights] = [0u64; 2];
        for record in &opened.manifest().matrices {
            let shape = opened.load_lut(&record.name).unwrap().shape();
            let cells = (shape.rows * shape.cols) as u64;
            weights += cells;
            bytes += (cells * u64::from(shape.bits)).div_ceil(8);
            bytes += (shape.groups() * shape.entries() * 2) as u64;
        }
        let found = 8.0 * bytes as f64 / weights as f64;
        let most: f64 = bits.parse().unwrap();
        assert!(found <= most && found > most - 0.25, "{found} of {most}");
        let args = [
            "eval",
            text(&model),
            "--store",
            text(&store),
            "--tokens",
            "1024",
        ];
        ok(&[&args[..], &["-o", text(&report)]].concat());
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        let sets = report["students"][0]["sets"].as_array().unwrap();
        let kl = sets.iter().map(|s| s["kl_mean"].as_f64().unwrap());
        kl.sum::<f64>() / sets.len() as f64
    };
    let (less, more) = (measure("4.0"), measure("4.5"));
    assert!(more < less, "{more} at 4.5 bits, {less} at 4.0");
}

/// Times are in a report and not in the store, which two runs give alike.
#[test]
fn the_report_has_each_matrix_with_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let [store, again] = ["store", "again"].map(|n| dir.path().join(n));
    let report = dir.path().join("report.json");
    let read = || QuantizeReport::read(&report).unwrap();
    quantize(
        &store,
        &["--report", text(&report), "--set", "q_proj=bits=3"],
    );
    let made = read();
    let stored = manifest(&store);
    let stored = stored["matrices"].as_array().unwrap();
    assert_eq!(made.matrices.len(), stored.len());
    for (matrix, stored) in made.matrices.iter().zip(stored) {
        assert_eq!(stored["name"], matrix.name);
        assert_eq!(stored["bits"], matrix.bits);
        let report = serde_json::to_value(&matrix.report).unwrap();
        assert_eq!(stored["report"], report, "{}", matrix.name);
        assert!(matrix.seconds.is_some_and(|s| s > 0.0), "{}", matrix.name);
    }
    let parts: Vec<&str> = made.seconds.keys().map(String::as_str).collect();
    assert_eq!(
        parts,
        ["factorize", "forward", "gptq", "kmeans", "two_sided"]
    );
    assert!(made.seconds["gptq"] > 0.0 && made.seconds["two_sided"] == 0.0);

    // What was there already took no time in this run.
    quantize(
        &store,
        &["--report", text(&report), "--set", "q_proj=bits=3"],
    );
    assert!(read().matrices.iter().all(|m| m.seconds.is_none()));
    quantize(&again, &["--set", "q_proj=bits=3"]);
    assert_same(&store, &again);
}

#[test]
fn vectors_and_integers_are_recorded_and_what_indices_cannot_hold_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let [store, none, copy] = ["store", "none", "copy"].map(|n| dir.path().join(n));
    let rules = [
        "k_proj=bits=int8",
        "gate_proj=bits=2,vector=2,method=two-sided",
    ];
    quantize(&store, &["--set", rules[0], "--set", rules[1]]);
    let made = manifest(&store);
    for matrix in made["matrices"].as_array().unwrap() {
        let name = matrix["name"].as_str().unwrap();
        assert!(!name.contains("k_proj"));
        let vector: Value = if name.contains("gate_proj") {
            2.into()
        } else {
            Value::Null
        };
        assert_eq!((&matrix["bits"], &matrix["vector"]), (&4.into(), &vector));
        assert_eq!(matrix["report"]["method"], "gptq");
    }
    let dense = made["dense"].as_array().unwrap().iter();
    let integers = dense.filter(|d| d["elem"] == "i8").count();
    assert_eq!(integers, 8);

    let model = tiny();
    for (more, words) in [
        (
            ["--bits", "4", "--vector", "4"],
            ["16 bits per index", "hint: it would have 4 bits"],
        ),
        (
            ["--bits", "2", "--vector", "3"],
            ["vectors of 3 rows", "one of [1, 2, 4]"],
        ),
    ] {
        let args = ["quantize", text(&model), "-o", text(&none)];
        fails(&[&args[..], &more].concat(), 2, &words);
        assert!(!none.exists());
    }

    // What follows a store takes such matrices along as they are.
    let [model, from, to] = [&model, &store, &copy].map(|p| text(p));
    let args = [
        "tune", model, "--store", from, "-o", to, "--tokens", "2048", "--steps", "1",
    ];
    ok(&[&args[..], &["--step-tokens", "512"]].concat());
    let digests = |made: &Value, list: &str, kind: &str| -> Vec<String> {
        let all = made[list].as_array().unwrap().iter();
        let kept = all.filter(|m| m["name"].as_str().unwrap().contains(kind));
        kept.map(|m| m["sha256"].to_string()).collect()
    };
    let tuned = manifest(&copy);
    for (list, kind) in [("matrices", "gate_proj"), ("dense", "k_proj")] {
        let before = digests(&made, list, kind);
        assert!(!before.is_empty());
        assert_eq!(before, digests(&tuned, list, kind));
    }
}
