//! `tune` and `ablate`: planned, kept out of other folders, and gone on with.

mod common;

use std::fs;
use std::path::Path;

use common::{assert_same, contents, fails, ok, store, text, tiny};
use serde_json::Value;

fn tune<'a>(model: &'a str, store: &'a str, output: &'a str) -> Vec<&'a str> {
    let args = ["tune", model, "--store", store, "-o", output];
    let size = ["--tokens", "3000", "--window", "128", "--steps", "2"];
    [&args[..], &size, &["--step-tokens", "256"]].concat()
}

fn ablate<'a>(model: &'a str, output: &'a str) -> Vec<&'a str> {
    let args = ["ablate", model, "-o", output, "--tokens", "512"];
    [&args[..], &["--window", "128", "--eval-tokens", "256"]].concat()
}

fn plan(args: &[&str]) -> Value {
    let text = ok(&[args, &["--dry-run", "--json"]].concat());
    let plan: Value = serde_json::from_str(&text).expect("JSON");
    assert!(plan["peak_memory"].as_u64().unwrap() > 1 << 26, "{plan}");
    assert!(plan["seconds"].as_f64().unwrap() > 0.0, "{plan}");
    plan
}

fn bytes(dir: &Path, ends: &[&str]) -> u64 {
    let files = contents(dir).into_iter();
    let wanted = files.filter(|(name, _)| ends.iter().any(|end| name.ends_with(end)));
    wanted.map(|(_, bytes)| bytes.len() as u64).sum()
}

/// What both do with outputs that are not theirs.
fn refuses(args: &dyn Fn(&str) -> Vec<String>, inputs: &[&Path], dir: &Path) {
    let foreign = dir.join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("report.json"), "mine").unwrap();
    let run = |output: &Path, more: &[&str], words: &[&str]| {
        let args = args(text(output));
        let args: Vec<&str> = args
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        fails(&args, 2, words);
    };
    run(&foreign, &[], &["not empty", "report.json", "hint: "]);
    run(&foreign, &["--overwrite"], &["not empty", "report.json"]);
    assert_eq!(fs::read(foreign.join("report.json")).unwrap(), b"mine");
    for input in inputs {
        run(input, &["--overwrite"], &["in each other"]);
        run(&input.join("deeper"), &["--dry-run"], &["in each other"]);
    }
    fs::remove_dir_all(foreign).unwrap();
}

fn owned(args: &[&str]) -> Vec<String> {
    args.iter().map(ToString::to_string).collect()
}

#[test]
fn a_tuned_store_is_planned_to_the_byte_and_made_once() {
    let dir = tempfile::tempdir().unwrap();
    let (model, from, output) = (tiny(), store(&tiny(), dir.path()), dir.path().join("tuned"));
    let before = contents(&from);
    let args = tune(text(&model), text(&from), text(&output));
    let planned = plan(&args);
    assert!(!output.exists(), "a dry run wrote");
    let (m, s) = (model.clone(), from.clone());
    let with = |output: &str| owned(&tune(text(&m), text(&s), output));
    refuses(&with, &[&model, &from], dir.path());
    ok(&args);
    let exact = [".lut", ".bin"];
    let steps = planned["steps"].as_array().unwrap();
    assert_eq!(steps.last().unwrap()["bytes"], bytes(&from, &[""]));
    assert_eq!(bytes(&output, &exact), bytes(&from, &exact));
    assert!(contents(&from) == before, "it wrote to its input");
    // Once more: noticed before the training; with other settings: refused before it.
    let made = contents(&output);
    assert_eq!(ok(&args), "");
    assert!(contents(&output) == made, "made again");
    let other = [&args[..], &["--rate", "0.5"]].concat();
    fails(&other, 3, &["already holds a complete store"]);
    ok(&[&other[..], &["--overwrite"]].concat());
    assert!(contents(&output) != made, "the rate made no difference");
}

/// The row that `--tune-steps` adds is the command `tune`.
#[test]
fn a_comparison_may_have_a_tuned_row() {
    let dir = tempfile::tempdir().unwrap();
    let (model, output) = (tiny(), dir.path().join("compared"));
    let args = ["ablate", text(&model), "-o", text(&output)];
    let size = [
        "--tokens",
        "3000",
        "--window",
        "128",
        "--eval-tokens",
        "256",
    ];
    let tuned = ["--tune-steps", "2", "--tune-tokens", "256"];
    let args = [&args[..], &size, &tuned].concat();
    let planned = plan(&args);
    let table = ok(&args);
    assert_eq!(planned["output_bytes"], bytes(&output, &[".lut", ".bin"]));
    let rows = table.lines().filter(|l| l.starts_with("| the same, tuned"));
    assert_eq!(rows.count(), 2, "{table}");
    let store = |name: &str| -> Value {
        let path = output.join(name).join("store.json");
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    };
    let matrices = |store: Value| store["matrices"].as_array().unwrap().clone();
    let tuned = store("tuned");
    assert_eq!(tuned["provenance"]["settings"]["tune_steps"], 2);
    // It goes on from the last store, which has no output layer, and takes that of six bits.
    let before = [matrices(store("ordered")), matrices(store("gptq-05"))];
    assert_eq!(matrices(tuned.clone()).len(), before[0].len() + 1);
    for made in matrices(tuned) {
        let head = made["name"] == "lm_head.weight";
        let mut from = before[usize::from(head)].iter();
        let from = from.find(|m| m["name"] == made["name"]).unwrap();
        let method = made["report"]["method"].as_str().unwrap();
        assert_eq!(method.ends_with(", tuned"), !head);
        assert_eq!(made["sha256"] == from["sha256"], head);
    }
}

#[test]
fn a_comparison_is_planned_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (model, output) = (tiny(), dir.path().join("compared"));
    let args = ablate(text(&model), text(&output));
    let planned = plan(&args);
    assert!(!output.exists(), "a dry run wrote");
    let with = |output: &str| owned(&ablate(text(&tiny()), output));
    refuses(&with, &[&model], dir.path());
    let table = ok(&args);
    assert_eq!(planned["output_bytes"], bytes(&output, &[".lut", ".bin"]));
    // Between the passes and the measurements a step for each store.
    let entries = fs::read_dir(&output).unwrap().map(|e| e.unwrap().path());
    let stores = entries.filter(|path| path.is_dir()).count();
    assert_eq!(planned["steps"].as_array().unwrap().len(), stores + 2);

    // What a kill left: a store without its end, and no report.
    let whole = dir.path().join("whole");
    fs::create_dir(&whole).unwrap();
    for (name, bytes) in contents(&output) {
        let path = whole.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    for lost in ["both/store.json", "report.json"] {
        fs::remove_file(output.join(lost)).unwrap();
    }
    assert_eq!(ok(&args), table);
    assert_same(&whole, &output);
    // Something of the user's in one of the stores.
    fs::write(output.join("both/diary.txt"), "mine").unwrap();
    fails(&[&args[..], &["--overwrite"]].concat(), 2, &["diary.txt"]);
    assert_eq!(fs::read(output.join("both/diary.txt")).unwrap(), b"mine");
}
