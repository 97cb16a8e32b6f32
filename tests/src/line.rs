//! The converter's line as functions on the built-in model, made once per test binary.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anemone_calib::Teacher;
use anemone_convert::commands::quantize::{self, QuantizeOptions};
use anemone_convert::commands::target::{self, TargetOptions};
use anemone_convert::lower::{Chunks, Forms, Prescale, StoreWeights};
use anemone_convert::quantize::Method;
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_schemas::checkpoint::read_spec;
use anemone_schemas::store::Store;
use serde_json::Value;

use crate::reference::data;

/// Layers whose hidden states the test folders export.
pub const TAPS: [usize; 5] = [1, 2, 3, 5, 6];

/// A scratch folder of the test binary, emptied when first asked for.
pub fn scratch(name: &str) -> PathBuf {
    let target = std::env::current_exe().expect("a test binary has a path");
    let root = target
        .parent()
        .and_then(Path::parent)
        .expect("target/release/deps");
    let dir = root
        .join("test-scratch")
        .join(format!("{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("the target folder is writable");
    dir
}

/// Quantizes a checkpoint into `dir/store`.
///
/// # Panics
/// If that fails.
pub fn quantized(model: &Path, dir: &Path, method: Method, tokens: usize) -> PathBuf {
    quantized_by(model, dir, method, tokens, &[])
}

/// [`quantized`] with rules as of `--set`.
///
/// # Panics
/// If a rule is none, or quantizing fails.
pub fn quantized_by(
    model: &Path,
    dir: &Path,
    method: Method,
    tokens: usize,
    rules: &[&str],
) -> PathBuf {
    let store = dir.join("store");
    let options = QuantizeOptions {
        model: model.to_path_buf(),
        output: store.clone(),
        method,
        guided: method == Method::TwoSided,
        bits: 4,
        vector: 1,
        rules: rules.iter().map(|r| r.parse().expect("a rule")).collect(),
        calibration: Vec::new(),
        tokens,
        window: 256,
        jobs: 2,
        fit_order: method == Method::TwoSided,
        layers: None,
        target_bpw: None,
    };
    quantize::run(&options, Ui::Quiet, &Stop::default()).expect("the checkpoint is whole");
    store
}

/// Lowers a store into `dir/folder`: two chunks, contexts up to `max_context`.
///
/// # Panics
/// If that fails.
pub fn lowered(store: &Path, dir: &Path, max_context: usize) -> PathBuf {
    lowered_as(store, dir, max_context, Forms::default())
}

/// [`lowered`] with chosen forms of the graph; scaled by the store's calibration where
/// the forms say nothing of scaling.
///
/// # Panics
/// If that fails.
pub fn lowered_as(store: &Path, dir: &Path, max_context: usize, forms: Forms) -> PathBuf {
    lower(store, dir, max_context, forms, &TAPS)
}

/// [`lowered`] with the hidden states after other layers than [`TAPS`].
///
/// # Panics
/// If that fails.
pub fn lowered_with_taps(store: &Path, dir: &Path, max_context: usize, taps: &[usize]) -> PathBuf {
    lower(store, dir, max_context, Forms::default(), taps)
}

fn lower(store: &Path, dir: &Path, max_context: usize, forms: Forms, taps: &[usize]) -> PathBuf {
    let folder = dir.join("folder");
    let options = TargetOptions {
        store: store.to_path_buf(),
        output: folder.clone(),
        name: "test".into(),
        chunks: Chunks::Count(2),
        max_context,
        taps: taps.to_vec(),
        with_logits: true,
        prescale: (forms.prescale != Prescale::None).then(|| forms.prescale.clone()),
        forms,
    };
    target::run(&options, Ui::Quiet, &Stop::default()).expect("the store is whole");
    folder
}

/// A folder of the tiny model with contexts up to 512, GPTQ weights.
pub fn tiny_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let dir = scratch("tiny");
        let store = quantized(&data("tiny-qwen3"), &dir, Method::Gptq, 8192);
        lowered(&store, &dir, 512)
    })
}

/// What the f32 teacher of a checkpoint says with the dequantized weights of a store:
/// the logits of the rows of a text from `from` on.
///
/// # Panics
/// If the checkpoint or the store is not whole.
pub fn teacher_logits(model: &Path, store: &Path, text: &[u32], from: usize) -> Vec<Vec<f32>> {
    let store = Store::open(store).expect("a whole store");
    let spec = read_spec(model).expect("a whole checkpoint");
    let weights = StoreWeights {
        store: &store,
        spec: &spec,
    };
    let teacher = Teacher::new(&weights);
    let mut hidden = teacher.embed(&[text.to_vec()]).expect("known ids");
    for layer in 0..spec.layers {
        let block = teacher.block(layer, &mut hidden, None);
        block.expect("whole weights");
    }
    let normed = teacher.final_norm(&hidden).expect("whole weights");
    let head = teacher.head().expect("whole weights");
    let rows = &normed.0.concat()[from * spec.hidden..];
    let logits = teacher.logits(rows, &head).expect("whole rows");
    logits
        .chunks_exact(spec.vocab)
        .map(<[f32]>::to_vec)
        .collect()
}

/// User messages of the evaluation conversations, in order.
///
/// # Panics
/// If the file is not what it should be.
pub fn questions() -> Vec<String> {
    let text = fs::read_to_string(data("text/eval_chat.jsonl")).expect("checked in");
    text.lines()
        .map(|line| {
            let json: Value = serde_json::from_str(line).expect("a conversation per line");
            let messages = json["messages"].as_array().expect("messages");
            let user = messages.iter().find(|m| m["role"] == "user");
            user.and_then(|m| m["content"].as_str())
                .expect("a user message")
                .to_string()
        })
        .collect()
}
