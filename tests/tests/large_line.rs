//! The line on a model of 54 million parameters in three shards with its own output
//! layer: the simulator is the shipped programs, and long text crosses contexts.

#![allow(clippy::print_stdout, reason = "figures for those who run it by hand")]

use std::path::PathBuf;

use anemone_convert::commands::eval::{self, EvalOptions};
use anemone_convert::commands::text::TextSource;
use anemone_convert::commands::verify;
use anemone_convert::quantize::Method;
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_runtime::engine::Engine;
use anemone_schemas::report::Measured;
use anemone_tests::line::{lowered, quantized, scratch};
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

fn folder() -> (PathBuf, PathBuf, PathBuf) {
    let model = shared("small-qwen3");
    let dir = scratch("small");
    let store = quantized(&model, &dir, Method::Gptq, 8192);
    let folder = lowered(&store, &dir, 2048);
    (model, store, folder)
}

#[test]
fn the_simulator_is_the_shipped_programs_and_contexts_grow_without_a_trace() {
    let (model, store, folder) = folder();
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
