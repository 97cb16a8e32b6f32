//! What `transformers` says about a model, as `reference/make_references.py` wrote it
//! to `data/references`.

use std::path::{Path, PathBuf};

use anemone_calib::{Teacher, Weights};
use anemone_schemas::tokenizer::{ChatMessage, TokenizerFolder};
use safetensors::SafeTensors;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// A file or folder of this crate's `data`.
pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(path)
}

/// A folder of the fixtures outside the repository: `$ANEMONE_SHARED/fixtures`, by
/// default `../shared` beside the workspace.
///
/// # Panics
/// If it is not there: a test that needs it must not pass without.
pub fn shared(folder: &str) -> PathBuf {
    let root = std::env::var_os("ANEMONE_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let path = root.join("fixtures").join(folder);
    assert!(
        path.is_dir(),
        "`{}` is missing; set ANEMONE_SHARED to the folder that has `fixtures`",
        path.display()
    );
    path
}

/// Tensors of a reference file.
pub struct Reference {
    bytes: Vec<u8>,
}

impl Reference {
    /// Reads `data/references/<name>.safetensors`.
    pub fn open(name: &str) -> Self {
        let path = data("references").join(format!("{name}.safetensors"));
        Self {
            bytes: std::fs::read(path).unwrap(),
        }
    }

    /// An entry of the file's metadata.
    pub fn metadata(&self, key: &str) -> String {
        let (_, header) = SafeTensors::read_metadata(&self.bytes).unwrap();
        header.metadata().as_ref().unwrap()[key].clone()
    }

    fn elements<T>(&self, name: &str, read: fn([u8; 4]) -> T) -> Vec<T> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(name).unwrap();
        tensor
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|b| read(*b))
            .collect()
    }

    /// A tensor of floats.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.elements(name, f32::from_le_bytes)
    }

    /// A tensor of non-negative integers.
    pub fn ints(&self, name: &str) -> Vec<u32> {
        self.elements(name, u32::from_le_bytes)
    }
}

/// Checks that a reference was made from these very files.
pub(crate) fn check_inputs(inputs: &Value, dir: &Path) {
    for (file, expected) in inputs.as_object().unwrap() {
        let hash = Sha256::digest(std::fs::read(dir.join(file)).unwrap());
        let hex: Vec<String> = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            expected,
            &hex.concat(),
            "`{file}` is not the file the reference was made from; run make_references.py"
        );
    }
}

/// Largest difference of two rows, relative to the largest magnitude of the second.
fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    errors.fold(0.0, f32::max) / scale
}

/// Compares the logits of `weights`, opened from `dir`, with the reference `name`.
///
/// # Panics
/// If any of 2000 positions has another argmax, or any stored logit, maximum or
/// log-sum-exp differs by more than `1e-4`, relative to the row's largest logit.
pub fn check_teacher(weights: &dyn Weights, dir: &Path, name: &str) {
    let reference = Reference::open(name);
    check_inputs(&reference.metadata("inputs").parse().unwrap(), dir);
    let ids = reference.ints("ids");
    let mut rest = ids.as_slice();
    let mut windows = Vec::new();
    for length in reference.ints("lengths") {
        let (window, others) = rest.split_at(length as usize);
        windows.push(window.to_vec());
        rest = others;
    }

    let teacher = Teacher::new(weights);
    let mut hidden = teacher.embed(&windows).unwrap();
    for layer in 0..teacher.spec().layers {
        teacher.block(layer, &mut hidden, None).unwrap();
    }
    let head = teacher.head().unwrap();
    let normed = teacher.final_norm(&hidden).unwrap().0.concat();
    let logits = teacher.logits(&normed, &head).unwrap();

    let vocab = teacher.spec().vocab;
    let (argmax, max) = (reference.ints("argmax"), reference.floats("max"));
    let logsumexp = reference.floats("logsumexp");
    assert_eq!(argmax.len(), 2000);
    let mut worst = 0.0f32;
    for (position, row) in logits.chunks_exact(vocab).enumerate() {
        let mut top = 0;
        for (id, logit) in row.iter().enumerate() {
            if *logit > row[top] {
                top = id;
            }
        }
        assert_eq!(
            top, argmax[position] as usize,
            "argmax at position {position}"
        );
        let shifted = row.iter().map(|&x| f64::from(x - row[top]).exp());
        let sum = row[top] + shifted.sum::<f64>().ln() as f32;
        let found = [row[top], sum];
        worst = worst.max(relative_error(
            &found,
            &[max[position], logsumexp[position]],
        ));
    }
    let stride: usize = reference.metadata("column_stride").parse().unwrap();
    let rows = reference.floats("rows");
    let positions = reference.ints("positions");
    let columns = rows.len() / positions.len();
    assert_eq!((positions.len(), columns), (12, vocab / stride));
    for (position, expected) in positions.iter().zip(rows.chunks_exact(columns)) {
        let at = *position as usize * vocab;
        let found: Vec<f32> = logits[at..at + vocab]
            .iter()
            .step_by(stride)
            .copied()
            .collect();
        worst = worst.max(relative_error(&found, expected));
    }
    assert!(worst < 1e-4, "largest relative error {worst}");
}

/// Compares the tokenizer and chat template of `dir` with `references/<name>.json`.
///
/// # Panics
/// If any id, decoded text or prompt differs.
pub fn check_tokenizer(dir: &Path, name: &str) {
    let path = data("references").join(format!("{name}.json"));
    let reference: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    check_inputs(&reference["inputs"], dir);
    let tokenizer = TokenizerFolder::open(dir).unwrap();
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };

    let texts = reference["texts"].as_array().unwrap();
    assert!(texts.len() > 10);
    for case in texts {
        let text = case["text"].as_str().unwrap();
        let found = tokenizer.encode(text, false).unwrap();
        assert_eq!(found, ids(&case["ids"]), "{text:?}");
        assert_eq!(
            tokenizer.encode(text, true).unwrap(),
            ids(&case["ids_special"]),
            "{text:?}"
        );
        let decoded = tokenizer.decode(&found, true).unwrap();
        assert_eq!(decoded, case["decoded"].as_str().unwrap());
        let mut stream = tokenizer.stream();
        let mut streamed = String::new();
        for id in found {
            streamed += &stream.push(id).unwrap();
        }
        assert_eq!(streamed + &stream.finish().unwrap(), decoded);
    }
    let chats = reference["chats"].as_array().unwrap();
    assert!(chats.len() > 10);
    for case in chats {
        let messages: Vec<ChatMessage> = serde_json::from_value(case["messages"].clone()).unwrap();
        let extra: Map<String, Value> = case["extra"].as_object().unwrap().clone();
        let prompt = case["add_generation_prompt"].as_bool().unwrap();
        let text = tokenizer.render_chat(&messages, prompt, &extra).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{messages:?}");
        assert_eq!(
            tokenizer.encode(&text, false).unwrap(),
            ids(&case["ids"]),
            "{messages:?}"
        );
    }
}
