//! Decoding with drafts where attention changes its form: by channels up to 4096 slots,
//! by rows above.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::OnceLock;

use anemone_convert::quantize::Method;
use anemone_runtime::engine::{Answer, Draft, Engine, Lookup, Options, Row, Session};
use anemone_tests::drafts::{mixed_drafts, oracle_drafts, random_drafts};
use anemone_tests::line::{lowered, quantized, scratch};
use anemone_tests::reference::data;

/// Slots up to which attention goes by channels.
const SWITCH: usize = 4096;
/// Tokens before and after it.
const BEFORE: usize = 70;
const NEW: usize = 160;

/// The tiny model as if it had been trained on longer texts: what it says there is not
/// sensible, but must be the same for any drafts.
fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let dir = scratch("long-context");
        let model: PathBuf = dir.join("model");
        fs::create_dir(&model).expect("a scratch folder");
        for entry in fs::read_dir(data("tiny-qwen3")).expect("checked in") {
            let entry = entry.expect("checked in");
            fs::copy(entry.path(), model.join(entry.file_name())).expect("room for a copy");
        }
        let config = fs::read_to_string(model.join("config.json")).expect("checked in");
        let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
        config["max_position_embeddings"] = (2 * SWITCH).into();
        fs::remove_file(model.join("config.json")).expect("the copy is ours");
        fs::write(model.join("config.json"), config.to_string()).expect("the copy is ours");
        let store = quantized(&model, &dir, Method::KMeansUnweighted, 256);
        Engine::open(&lowered(&store, &dir, 2 * SWITCH), 2).expect("a whole folder")
    })
}

fn prompt() -> Vec<u32> {
    let text = fs::read_to_string(data("text/eval_docs.txt")).expect("checked in");
    let ids = engine().tokenizer().encode(&text, false).expect("text");
    ids.into_iter().cycle().take(SWITCH - BEFORE).collect()
}

fn generate(draft: Option<Box<dyn Draft + Send>>, prompt: &[u32]) -> Answer {
    let options = Options {
        max_tokens: NEW,
        adapt: false,
        stop: false,
        ..Options::default()
    };
    let mut session = Session::new(engine(), draft);
    let answer = session.answer(engine(), prompt, &options, |_| ControlFlow::Continue(()));
    let answer = answer.expect("the prompt fits");
    assert_eq!(session.cache_mut().context(), 2 * SWITCH);
    answer
}

#[test]
fn any_drafts_give_the_text_that_none_give_across_the_change_of_form() {
    let prompt = prompt();
    let plain = generate(None, &prompt);
    assert_eq!(plain.ids.len(), NEW);
    let truth: Vec<u32> = [&prompt[..], &plain.ids].concat();
    let sources: [(&str, Option<Box<dyn Draft + Send>>); 4] = [
        ("random", random_drafts(1)),
        ("oracle", oracle_drafts(&truth)),
        ("mixed", mixed_drafts(&truth, 2)),
        ("lookup", Some(Box::new(Lookup::new()))),
    ];
    for (name, draft) in sources {
        let answer = generate(draft, &prompt);
        assert_eq!(answer.ids, plain.ids, "{name} drafts");
        let s = &answer.statistics;
        assert!(name == "random" || s.accepted > NEW / 4, "{name}: {s:?}");
    }
}

/// A row has the same logits in both forms, bit for bit: the text may cross at any token.
#[test]
fn rows_do_not_depend_on_the_form() {
    let text = prompt();
    let offset = 1024;
    let call = |slots: usize| {
        let mut cache = engine().cache_for(slots).expect("a context");
        let feed = engine().feed(&mut cache, &text[..offset], 0, |_, _| ());
        feed.expect("the text fits");
        let rows = Row::chain(&text[offset..offset + 16], offset);
        let step = engine().step(&mut cache, offset, &rows).expect("a call");
        assert_eq!(cache.context(), slots);
        let bits = |row| -> Vec<u32> { step.logits(row).iter().map(|v| v.to_bits()).collect() };
        (0..16).map(bits).collect::<Vec<_>>()
    };
    assert!(call(SWITCH) == call(2 * SWITCH), "a row differs");
}
