//! The real drafter in the decode loop: the text of plain decoding, in fewer calls.

#![allow(clippy::print_stdout, reason = "figures for those who run it by hand")]

use std::ops::ControlFlow;

use anemone_convert::commands::drafter::{self, DrafterOptions, HeadSource, WeightForm};
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_runtime::engine::{
    Answer, Draft, DrafterProgram, Engine, Options, ProgramDrafter, Session,
};
use anemone_tests::drafting::Walk;
use anemone_tests::line::{scratch, tiny_folder};
use anemone_tests::reference::data;

const NEW_TOKENS: usize = 96;
/// How far the mean of accepted tokens may lie below the reference's, whose model is not
/// quantized: two standard errors of a hundred cycles between 0 and 7.
const NOISE: f64 = 0.55;

#[test]
fn real_drafts_give_the_text_of_plain_decoding_and_are_accepted_as_in_the_reference() {
    let folder = scratch("drafter-line").join("folder");
    let options = DrafterOptions {
        drafter: data("tiny-dspark"),
        target: tiny_folder().to_path_buf(),
        output: Some(folder.clone()),
        model: None,
        head: HeadSource::Auto,
        weights: WeightForm::F16,
        jobs: 2,
        overwrite: false,
    };
    drafter::run(&options, Ui::Quiet, &Stop::default()).unwrap();
    let engine = Engine::open(&folder, 2).unwrap();
    let program = DrafterProgram::open(&folder, 2)
        .unwrap()
        .expect("a drafter");
    let walk = Walk::open(
        "tiny-dspark",
        &data("tiny-qwen3"),
        &data("tiny-dspark"),
        false,
    );
    let answer = |drafts: bool, sides: bool, prompt: &[u32]| -> Answer {
        let draft =
            drafts.then(|| Box::new(ProgramDrafter::new(&program)) as Box<dyn Draft + Send>);
        let options = Options {
            max_tokens: NEW_TOKENS,
            sides,
            adapt: false,
            stop: false,
            ..Options::default()
        };
        let mut session = Session::new(&engine, draft);
        session
            .answer(&engine, prompt, &options, |_| ControlFlow::Continue(()))
            .unwrap()
    };
    // Accepted tokens and cycles by domain: of the reference, of chains, of trees.
    let mut accepted = [[[0usize; 2]; 3]; 3];
    for (text, ids) in walk.texts.iter().enumerate() {
        let domain = walk.domains[text];
        for cycle in walk.cycles_of(text) {
            accepted[0][domain][0] += cycle.kept;
            accepted[0][domain][1] += 1;
        }
        let prompt = &ids[..walk.cycles_of(text).next().expect("a cycle").anchor];
        let plain = answer(false, false, prompt);
        assert_eq!(plain.statistics.accepted, 0);
        for (i, sides) in [(1, false), (2, true)] {
            let drafted = answer(true, sides, prompt);
            assert_eq!(drafted.ids, plain.ids, "text {text}, sides {sides}");
            accepted[i][domain][0] += drafted.statistics.accepted;
            accepted[i][domain][1] += drafted.statistics.cycles;
        }
    }
    let means = accepted.map(|by| by.map(|[sum, cycles]| sum as f64 / cycles as f64));
    println!("accepted per cycle in docs, code, chat: reference, chain, tree {means:.3?}");
    for domain in 0..3 {
        let [reference, chain, tree] = means.map(|m| m[domain]);
        assert!(
            chain >= reference - NOISE,
            "domain {domain}: {chain}, expected {reference}"
        );
        assert!(
            tree >= chain - 0.05,
            "domain {domain}: {tree}, without sides {chain}"
        );
    }
    let total = |i: usize| {
        let sums = accepted[i]
            .iter()
            .fold([0, 0], |a, b| [a[0] + b[0], a[1] + b[1]]);
        sums[0] as f64 / sums[1] as f64
    };
    println!(
        "all: reference {:.3}, chain {:.3}, tree {:.3}",
        total(0),
        total(1),
        total(2)
    );
    assert!(total(2) >= 1.05 * total(1), "sides must pay");
}
