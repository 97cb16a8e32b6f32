//! The line on a model of 54 million parameters in three shards with its own output
//! layer: the simulator is the shipped programs, and long text crosses contexts.

#![allow(clippy::print_stdout, reason = "figures for those who run it by hand")]
#![allow(clippy::float_cmp, reason = "a maximum is one of the values")]

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::OnceLock;

use anemone_convert::commands::eval::{self, EvalOptions};
use anemone_convert::commands::text::TextSource;
use anemone_convert::commands::verify;
use anemone_convert::quantize::Method;
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_runtime::engine::Engine;
use anemone_schemas::report::Measured;
use anemone_tests::line::{lowered, quantized, scratch, teacher_logits};
use anemone_tests::reference::shared;

fn texts() -> Vec<TextSource> {
    let dir = shared("text");
    [
        ("docs", "eval_docs.txt"),
        ("code", "eval_code.txt"),
        ("chat", "eval_chat.jsonl"),
    ]
    .map(|(name, file)| TextSource {
        name: name.into(),
        path: dir.join(file),
    })
    .to_vec()
}

/// The checkpoint and its store, made once.
fn store() -> &'static (PathBuf, PathBuf) {
    static STORE: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
    STORE.get_or_init(|| {
        let model = shared("small-qwen3");
        let store = quantized(&model, &scratch("small"), Method::Gptq, 8192);
        (model, store)
    })
}

fn folder(max_context: usize) -> PathBuf {
    let dir = scratch(&format!("small-{max_context}"));
    lowered(&store().1, &dir, max_context)
}

#[test]
fn the_simulator_is_the_shipped_programs_and_contexts_grow_without_a_trace() {
    let (model, store) = store().clone();
    let folder = folder(2048);
    verify::run(&folder, Ui::Quiet).expect("a whole folder");
    let options = EvalOptions {
        model,
        store: Some(store),
        folder: Some(folder.clone()),
        text: texts(),
        window: 512,
        tokens: 3072,
        threads: 2,
    };
    let report = eval::run(&options, Ui::Quiet, &Stop::default()).expect("whole inputs");
    let by = |m: Measured| {
        report
            .students
            .iter()
            .find(|s| s.measured == m)
            .expect("measured")
    };
    let (shipped, simulated) = (by(Measured::ShippedPrograms), by(Measured::Simulator));
    for (a, b) in shipped.sets.iter().zip(&simulated.sets) {
        println!(
            "{}: {:.5} shipped, {:.5} simulated",
            a.set, a.kl_mean, b.kl_mean
        );
        assert!((a.kl_mean - b.kl_mean).abs() <= 0.004);
        assert!(a.kl_mean < 0.08 && a.top1 > 0.8, "{a:?}");
    }

    // One long window from an empty cache of 256 slots, growing to 2048, against the
    // same window in a cache that is large from the start: the same choices.
    let engine = Engine::open(&folder, 2).expect("a whole folder");
    let text = std::fs::read_to_string(&texts()[0].path).expect("checked");
    let ids = engine
        .tokenizer()
        .encode(&text[..12_000], true)
        .expect("text");
    let window = &ids[..1200];
    let chosen = |mut cache: anemone_runtime::engine::Cache| {
        let mut all: Vec<u32> = Vec::new();
        let feed = engine.feed(&mut cache, window, 0, |_, step| all.extend(&step.ids));
        feed.expect("the window fits");
        (all, cache.context())
    };
    let (grown, context) = chosen(engine.cache());
    assert_eq!(context, 2048);
    let (at_once, _) = chosen(engine.cache_for(2048).expect("a context of the folder"));
    assert_eq!(grown, at_once);
}

/// A prompt of 3,000 tokens goes through the contexts 256, 512, 1024 and 2048 into 4096,
/// and continues as the f32 teacher does on the same quantized weights.
#[test]
fn a_long_prompt_continues_as_the_teacher_on_dequantized_weights() {
    const PROMPT: usize = 3000;
    const NEW: usize = 32;
    let (model, store) = store();
    let engine = Engine::open(&folder(4096), 2).expect("a whole folder");
    let text = std::fs::read_to_string(&texts()[0].path).expect("checked");
    let prompt = engine.tokenizer().encode(&text, true).expect("text");
    let prompt = &prompt[..PROMPT];
    let made = engine
        .generate(prompt, NEW, |_| ControlFlow::Continue(()))
        .expect("it fits");
    assert!(made.ids.len() >= 8, "{} new ids are few", made.ids.len());

    let all = [prompt, &made.ids].concat();
    let logits = teacher_logits(model, store, &all, PROMPT - 1);
    let rows = logits.iter().take(made.ids.len());
    let chosen: Vec<u32> = rows
        .map(|row| {
            let known = &row[..engine.tokenizer().size()];
            let best = known.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            known.iter().position(|&v| v == best).expect("it is there") as u32
        })
        .collect();
    let decode = |ids: &[u32]| engine.tokenizer().decode(ids, false).expect("known ids");
    println!("{:?}", decode(&made.ids));
    assert_eq!(decode(&made.ids), decode(&chosen));
    assert_eq!(made.ids, chosen);
}
