//! The promise of decoding with drafts: the same text for any drafts whatsoever, bit
//! for bit, and what it rests on.

#![allow(clippy::print_stdout, reason = "figures for those who run it by hand")]

use std::fs;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, OnceLock};

use anemone_convert::commands::drafter::{self, DrafterOptions, HeadSource, WeightForm};
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_runtime::Tensor;
use anemone_runtime::engine::{
    Answer, Draft, DrafterProgram, Engine, EngineError, Finish, Guess, Lookup, Options,
    ProgramDrafter, Row, Session, Step, check_drafts,
};
use anemone_tests::drafts::{
    Random, guess, mixed_drafts, oracle_drafts, prompts, random_drafts, scripted,
};
use anemone_tests::line::{scratch, teacher_logits, tiny_folder};
use anemone_tests::reference::data;
use half::f16;

const NEW_TOKENS: usize = 256;
const PROMPTS_PER_DOMAIN: usize = 20;

fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::open(tiny_folder(), 2).expect("a whole folder"))
}

/// No adaptation, so that counts do not depend on the machine; the text runs past stop
/// ids.
fn options(max_tokens: usize) -> Options {
    Options {
        max_tokens,
        adapt: false,
        stop: false,
        ..Options::default()
    }
}

fn generate(draft: Option<Box<dyn Draft + Send>>, prompt: &[u32], options: &Options) -> Answer {
    Session::new(engine(), draft)
        .answer(engine(), prompt, options, |_| ControlFlow::Continue(()))
        .expect("the prompt fits")
}

/// Every prompt with its plain continuation.
fn plain() -> &'static [(Vec<u32>, Vec<u32>)] {
    static PLAIN: OnceLock<Vec<(Vec<u32>, Vec<u32>)>> = OnceLock::new();
    PLAIN.get_or_init(|| {
        let continued = |prompt: Vec<u32>| {
            let answer = generate(None, &prompt, &options(NEW_TOKENS));
            assert_eq!(answer.ids.len(), NEW_TOKENS);
            (prompt, answer.ids)
        };
        let prompts = prompts(engine(), PROMPTS_PER_DOMAIN);
        prompts.into_iter().map(continued).collect()
    })
}

/// T1 of the specification.
#[test]
fn any_drafts_give_the_text_that_none_give() {
    let mut table = [(0, 0, 0, 0); 4];
    for (n, (prompt, ids)) in plain().iter().enumerate() {
        let truth: Vec<u32> = [&prompt[..], ids].concat();
        let sources = [
            ("random", random_drafts(n as u64)),
            ("oracle", oracle_drafts(&truth)),
            ("mixed", mixed_drafts(&truth, n as u64)),
            ("lookup", Some(Box::new(Lookup::new()) as _)),
        ];
        for (row, (name, draft)) in table.iter_mut().zip(sources) {
            let answer = generate(draft, prompt, &options(NEW_TOKENS));
            let same = answer.ids.iter().zip(ids).take_while(|(a, b)| a == b);
            assert_eq!(same.count(), NEW_TOKENS, "prompt {n}, {name} drafts");
            let s = &answer.statistics;
            assert_eq!(
                s.tokens,
                NEW_TOKENS - 1,
                "all but the first come from cycles"
            );
            assert_eq!(s.accepted + s.cycles, s.tokens);
            row.0 += s.cycles;
            row.1 += s.accepted;
            row.2 += s.side_hits;
            row.3 += s.replays;
        }
    }
    for (name, row) in ["random", "oracle", "mixed", "lookup"].iter().zip(table) {
        println!(
            "{name}: {} cycles, {} accepted, {} side hits, {} replays",
            row.0, row.1, row.2, row.3
        );
    }
    let [_, oracle, mixed, lookup] = table;
    assert!(oracle.1 > 8 * oracle.0, "full walks: {oracle:?}");
    assert!(mixed.2 > 500, "side hits: {mixed:?}");
    assert!(lookup.1 > 1000, "repetitions: {lookup:?}");
}

/// The same with the drafter that was trained for the model, and what it is worth: with
/// sides more than without, at the same number of rows.
#[test]
fn the_trained_drafter_gives_the_text_that_none_gives() {
    let program = trained_drafter();
    let mut counts = [[[0usize; 3]; 3]; 2];
    for (n, (prompt, ids)) in plain().iter().enumerate() {
        for (counts, sides) in counts.iter_mut().zip([false, true]) {
            let draft = Box::new(ProgramDrafter::new(program));
            let options = Options {
                sides,
                ..options(NEW_TOKENS)
            };
            let answer = generate(Some(draft), prompt, &options);
            assert_eq!(&answer.ids, ids, "prompt {n}, sides {sides}");
            let s = &answer.statistics;
            let sums = &mut counts[n / PROMPTS_PER_DOMAIN];
            let new = [s.accepted, s.cycles, s.side_hits];
            for (sum, new) in sums.iter_mut().zip(new) {
                *sum += new;
            }
        }
    }
    let mean = |c: [usize; 3]| c[0] as f64 / c[1] as f64;
    for (kind, domains) in ["chain", "tree"].iter().zip(counts) {
        for (domain, c) in ["code", "docs", "chat"].iter().zip(domains) {
            println!("{kind} {domain}: {:.3} accepted, {c:?}", mean(c));
        }
    }
    let all = counts.map(|domains| {
        let sum = |i: usize| domains.iter().map(|d| d[i]).sum();
        mean([sum(0), sum(1), sum(2)])
    });
    println!("chain {:.3}, tree {:.3}", all[0], all[1]);
    assert!(all[1] >= 1.05 * all[0], "sides must pay: {all:?}");
}

/// The tiny model's drafter, in a folder of its own.
fn trained_drafter() -> &'static Arc<DrafterProgram> {
    static PROGRAM: OnceLock<Arc<DrafterProgram>> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let folder = scratch("speculate-drafter").join("folder");
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
        drafter::run(&options, Ui::Quiet, &Stop::default()).expect("a drafter of this model");
        let program = DrafterProgram::open(&folder, 2).expect("a whole folder");
        program.expect("a drafter")
    })
}

/// Reads the drafter one row off: guess `k` is given out as guess `k + 1`.
struct OneOff(ProgramDrafter);

impl Draft for OneOff {
    fn extend(
        &mut self,
        taps: &[(usize, Tensor)],
        rows: &[(usize, usize)],
    ) -> Result<(), EngineError> {
        self.0.extend(taps, rows)
    }

    fn propose(&mut self, text: &[u32], most: usize) -> Result<Vec<Guess>, EngineError> {
        let mut guesses = self.0.propose(text, most + 1)?;
        guesses.drain(..1.min(guesses.len()));
        Ok(guesses)
    }
}

/// Gives the drafter the hidden states of other layers than it was trained on.
struct OtherLayers(ProgramDrafter);

impl Draft for OtherLayers {
    fn extend(
        &mut self,
        taps: &[(usize, Tensor)],
        rows: &[(usize, usize)],
    ) -> Result<(), EngineError> {
        let mut turned: Vec<_> = taps.iter().map(|t| t.1.clone()).collect();
        turned.rotate_left(2);
        let layers = taps.iter().map(|t| t.0);
        self.0.extend(&layers.zip(turned).collect::<Vec<_>>(), rows)
    }

    fn propose(&mut self, text: &[u32], most: usize) -> Result<Vec<Guess>, EngineError> {
        self.0.propose(text, most)
    }
}

/// The check at load: the right drafter passes, a wrong one is refused by name.
#[test]
fn a_drafter_of_another_model_is_found_out() {
    let new = || ProgramDrafter::new(trained_drafter());
    let right = check_drafts(engine(), Box::new(new())).expect("the right drafter");
    println!("accepted per cycle on the fixed prompt: {right:.2}");
    let wrong: [(&str, Box<dyn Draft + Send>); 3] = [
        ("one row off", Box::new(OneOff(new()))),
        ("other layers", Box::new(OtherLayers(new()))),
        ("random", random_drafts(1).expect("a draft")),
    ];
    for (what, draft) in wrong {
        match check_drafts(engine(), draft) {
            Err(e @ EngineError::Mismatch { .. }) => {
                println!("{what}: {e}");
                assert!(e.to_string().contains("does not match this target"));
            }
            other => panic!("{what}: {other:?}"),
        }
    }
}

/// Rows and drafts chosen by what is measured, so that they differ from run to run.
#[test]
fn adapting_to_the_machine_does_not_show_in_the_text() {
    for (n, (prompt, ids)) in plain().iter().enumerate().step_by(7) {
        let truth: Vec<u32> = [&prompt[..], ids].concat();
        let options = Options {
            adapt: true,
            ..options(NEW_TOKENS)
        };
        for draft in [
            random_drafts(n as u64),
            mixed_drafts(&truth, 5),
            Some(Box::new(Lookup::new()) as _),
        ] {
            let answer = generate(draft, prompt, &options);
            assert_eq!(&answer.ids, ids);
        }
    }
}

/// Plain decoding against the definition of greedy: all of the text in wide calls,
/// again for every token.
#[test]
fn plain_text_is_what_whole_prefills_choose() {
    for (prompt, ids) in plain().iter().step_by(20) {
        let mut text = prompt.clone();
        for &id in ids.iter().take(24) {
            let mut chosen = None;
            engine()
                .feed(&mut engine().cache(), &text, 0, |_, step| {
                    chosen = step.ids.last().copied();
                })
                .unwrap();
            assert_eq!(chosen, Some(id));
            text.push(id);
        }
    }
}

/// And against the f32 teacher on the same weights, dequantized, whose logits are those
/// of `transformers` (`teacher.rs`): f16 sums may turn near ties and nothing else.
#[test]
fn plain_text_is_the_teachers_on_dequantized_weights() {
    const NEAR_TIE: f32 = 0.06;
    let store = tiny_folder().with_file_name("store");
    let known = engine().tokenizer().size();
    let (mut rows, mut ties) = (0, 0);
    for (n, (prompt, ids)) in plain().iter().enumerate().step_by(5) {
        let text = [&prompt[..], ids].concat();
        let logits = teacher_logits(&data("tiny-qwen3"), &store, &text, prompt.len() - 1);
        for (i, (&id, row)) in ids.iter().zip(&logits).enumerate() {
            let best = row[..known].iter().copied().fold(f32::MIN, f32::max);
            let short = best - row[id as usize];
            assert!(short < NEAR_TIE, "prompt {n}, token {i}: {short} too low");
            rows += 1;
            ties += usize::from(short > 0.0);
        }
    }
    println!("{ties} of {rows} tokens differ, all at near ties");
    assert!(
        rows == 12 * NEW_TOKENS && ties * 100 <= rows,
        "{ties} of {rows}"
    );
}

/// Ids of a text of `n` tokens.
fn text(n: usize) -> Vec<u32> {
    let text = fs::read_to_string(data("text/eval_code.txt")).expect("checked in");
    let ids = engine().tokenizer().encode(&text, false).expect("text");
    ids[..n].to_vec()
}

fn step(rows: &[Row], text: &[u32], offset: usize) -> Step {
    let mut cache = engine().cache();
    engine()
        .feed(&mut cache, &text[..offset], 0, |_, _| ())
        .unwrap();
    engine().step(&mut cache, offset, rows).unwrap()
}

/// Logits and taps of a row, as bits.
fn bits(step: &Step, row: usize) -> Vec<u32> {
    let mut bits: Vec<u32> = step.logits(row).iter().map(|x| x.to_bits()).collect();
    for (_, tap) in &step.taps {
        let d = tap.shape()[3];
        let values = &tap.as_f16().unwrap()[row * d..][..d];
        bits.extend(values.iter().map(|v| u32::from(v.to_bits())));
    }
    bits
}

/// T2: a row does not depend on rows it does not see.
#[test]
fn rows_do_not_depend_on_other_rows() {
    let text = text(120);
    let (offset, root) = (100, 102);
    let chain = Row::chain(&text[offset..root + 8], offset);
    let alone = step(&chain, &text, offset);
    let mut random = Random(3);
    for sides in 0..=6 {
        let mut rows = chain.clone();
        for _ in 0..sides {
            let depth = 1 + random.below(7);
            rows.push(Row {
                id: random.below(4090) as u32,
                position: (root + depth) as u32,
                sees: ((1 << (root - offset + depth)) - 1) | (1 << rows.len()),
            });
        }
        let together = step(&rows, &text, offset);
        for row in 0..chain.len() {
            assert_eq!(
                bits(&together, row),
                bits(&alone, row),
                "{sides} sides, row {row}"
            );
        }
        // And a shorter chain is the start of a longer one.
        let shorter = step(&chain[..3 + sides], &text, offset);
        for row in 0..3 + sides {
            assert_eq!(bits(&shorter, row), bits(&alone, row), "row {row}");
        }
    }
}

/// T3: nor on the row's place in the call, which replays decide, nor on the width. Calls off
/// the grid are among them.
#[test]
fn rows_do_not_depend_on_their_place() {
    let text = text(256);
    let mut wide = Vec::new();
    let mut cache = engine().cache();
    engine()
        .feed(&mut cache, &text, 0, |_, step| {
            wide.extend((0..step.ids.len()).map(|row| bits(step, row)));
        })
        .unwrap();
    for root in [16usize, 61, 118, 203] {
        for replays in 0..16 {
            let offset = root - replays;
            let rows = Row::chain(&text[offset..=root], offset);
            let step = step(&rows, &text, offset);
            assert_eq!(
                bits(&step, replays),
                wide[root],
                "root {root}, {replays} replays"
            );
        }
    }
}

/// Nor on the size of the context.
#[test]
fn rows_do_not_depend_on_the_context() {
    let text = text(240);
    let calls = |mut cache: anemone_runtime::engine::Cache| {
        let mut all = Vec::new();
        engine()
            .feed(&mut cache, &text, 0, |_, step| {
                all.extend((0..step.ids.len()).map(|row| bits(step, row)));
            })
            .unwrap();
        (all, cache.context())
    };
    let (small, size) = calls(engine().cache());
    let (large, larger) = calls(engine().cache_for(400).unwrap());
    assert_eq!((size, larger), (256, 512));
    assert_eq!(small, large);
}

/// T4: replayed keys and values are what they were.
#[test]
fn replays_write_what_is_there() {
    let text = text(80);
    let mut cache = engine().cache();
    engine().feed(&mut cache, &text, 0, |_, _| ()).unwrap();
    let before = cache.clone();
    for offset in [0usize, 4, 7, 33, 36, 64] {
        let rows = Row::chain(&text[offset..offset + 16], offset);
        engine().step(&mut cache, offset, &rows).unwrap();
        for (old, new) in before.states().iter().zip(cache.states()) {
            for (old, new) in old.iter().zip(new) {
                let slots = |t: &Tensor| -> Vec<f16> {
                    let lines = t.as_f16().unwrap().chunks(256);
                    lines.flat_map(|l| l[..80].to_vec()).collect()
                };
                assert!(slots(old) == slots(new), "offset {offset}");
            }
        }
    }
}

/// T5: a token gives nearly the same as a side and in the chain: it sees the same, but
/// sums over slots are taken in another order. So nothing that a side's row says may be
/// text before a row of the chain has said it.
#[test]
fn a_side_gives_nearly_what_the_chain_gives() {
    let text = text(140);
    for root in [100usize, 103, 130] {
        let offset = root / 4 * 4;
        let first = root - offset;
        let chain = Row::chain(&text[offset..root + 8], offset);
        let straight = step(&chain, &text, offset);
        for depth in 1..=4 {
            // The true token stands aside, a wrong one in its place in the chain.
            let mut rows = chain.clone();
            rows[first + depth].id = 7;
            rows.push(Row {
                sees: ((1 << (first + depth)) - 1) | (1 << rows.len()),
                ..chain[first + depth]
            });
            let aside = step(&rows, &text, offset);
            let aside = aside.logits(rows.len() - 1);
            let straight = straight.logits(first + depth);
            let gaps = aside.iter().zip(&straight).map(|(a, b)| (a - b).abs());
            let worst = gaps.fold(0.0, f32::max);
            let size = straight.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            println!("root {root}, depth {depth}: logits differ by {worst} of {size}");
            // A wrong position or mask changes logits by about their size.
            assert!(
                worst < size / 200.0,
                "root {root}, depth {depth}: {worst} of {size}"
            );
        }
    }
}

/// T7: a miss at every depth, with a side that is right and without one.
#[test]
fn a_scripted_miss_gives_what_it_is_worth() {
    let (prompt, ids) = &plain()[1];
    let truth: Vec<u32> = [&prompt[..], ids].concat();
    for miss in 1..=8 {
        for hit in [None, Some(0), Some(1)] {
            let script = {
                let truth = truth.clone();
                move |text: &[u32], most: usize| {
                    let rest = &truth[text.len()..];
                    let one = |(depth, &id): (usize, &u32)| {
                        let mut g = guess(id);
                        if depth == miss {
                            g.id = (id + 1) % 4090;
                            g.confidence = 0.3;
                            g.others = [((id + 2) % 4090, 0.2), ((id + 3) % 4090, 0.2)];
                            if let Some(rank) = hit {
                                g.others[rank].0 = id;
                            }
                        }
                        g
                    };
                    (1..).zip(rest).map(one).take(most.min(7)).collect()
                }
            };
            let answer = generate(scripted(script), prompt, &options(200));
            assert_eq!(answer.ids, ids[..200], "miss {miss}, hit {hit:?}");
            let s = &answer.statistics;
            let sided = hit.is_some() && miss <= 7;
            assert_eq!(s.tokens, 199);
            // Right guesses and the target's own token; after a side hit, that row's.
            let each = (miss - 1).min(7) + 1 + usize::from(sided);
            let cycles = if sided {
                1 + (199 - miss).div_ceil(each)
            } else {
                199usize.div_ceil(each)
            };
            assert_eq!(s.cycles, cycles, "miss {miss}, hit {hit:?}");
            assert_eq!(s.accepted, 199 - cycles);
            if sided {
                // But the last cycle, which is cut.
                assert!(s.side_hits + 1 >= cycles, "{s:?}");
            } else {
                assert_eq!(s.side_hits, 0);
            }
            for depth in 1..miss.min(8) {
                assert_eq!(s.depths[depth - 1].right, s.depths[depth - 1].reached);
            }
            if miss <= 7 {
                assert_eq!(s.depths[miss - 1].right, 0);
            }
        }
    }
}

/// The end of the text where drafts go on: a stop id, a count, the context.
#[test]
fn the_text_ends_where_it_would_without_drafts() {
    let mut stopped = 0;
    for (n, (prompt, ids)) in plain().iter().enumerate() {
        let truth: Vec<u32> = [&prompt[..], ids].concat();
        let stop = &engine().manifest().stop;
        let Some(end) = ids.iter().position(|id| stop.contains(id)) else {
            continue;
        };
        stopped += 1;
        for draft in [oracle_drafts(&truth), mixed_drafts(&truth, n as u64), None] {
            let with_stop = Options {
                stop: true,
                ..options(NEW_TOKENS)
            };
            let answer = generate(draft, prompt, &with_stop);
            assert_eq!(answer.finish, Finish::Stop);
            assert_eq!(answer.ids, ids[..end]);
            // The stop id is a token of the cycles, unless it is the very first.
            assert_eq!(answer.statistics.tokens, end);
        }
    }
    assert!(stopped > 10, "{stopped} answers end");

    let (prompt, ids) = &plain()[2];
    let truth: Vec<u32> = [&prompt[..], ids].concat();
    for most in 0..40 {
        for draft in [
            oracle_drafts(&truth),
            mixed_drafts(&truth, 1),
            random_drafts(2),
        ] {
            let answer = generate(draft, prompt, &options(most));
            assert_eq!(
                (answer.finish, &answer.ids[..]),
                (Finish::Length, &ids[..most])
            );
        }
    }
}

#[test]
fn the_context_ends_where_it_would_without_drafts() {
    for length in [470, 485, 495, 496, 497, 509, 511, 512] {
        let prompt = text(length);
        let plain = generate(None, &prompt, &options(1000));
        assert_eq!(plain.finish, Finish::Context);
        assert_eq!(prompt.len() + plain.ids.len(), 513, "every slot is used");
        let truth: Vec<u32> = [&prompt[..], &plain.ids].concat();
        let sources = [
            oracle_drafts(&[&truth[..], &[1; 20]].concat()),
            mixed_drafts(&truth, 4),
            random_drafts(5),
            Some(Box::new(Lookup::new()) as _),
        ];
        for draft in sources {
            let answer = generate(draft, &prompt, &options(1000));
            assert_eq!(answer.finish, Finish::Context);
            assert_eq!(answer.ids, plain.ids, "prompt of {length}");
        }
    }
}

/// T8: what lies beyond the text does not matter.
#[test]
fn garbage_beyond_the_text_does_not_show() {
    let mut random = Random(9);
    for (n, (prompt, ids)) in plain().iter().enumerate().step_by(6) {
        let truth: Vec<u32> = [&prompt[..], ids].concat();
        let mut session = Session::new(engine(), mixed_drafts(&truth, n as u64));
        let mut text = prompt.clone();
        while text.len() < truth.len() {
            // The last token is processed again in any case.
            let valid = if text.len() == prompt.len() {
                0
            } else {
                text.len() - 1
            };
            let cache = session.cache_mut();
            let context = cache.context();
            for [keys, values] in cache.states_mut() {
                // Keys beyond what the norm lets through could outweigh the mask.
                for (state, size) in [(keys, 100.0), (values, 60000.0)] {
                    let anemone_runtime::Data::F16(values) = state.data_mut() else {
                        panic!("fp16 states");
                    };
                    for line in values.chunks_mut(context) {
                        for value in &mut line[valid.min(context)..] {
                            *value = f16::from_f32((random.unit() * 2.0 - 1.0) * size);
                        }
                    }
                }
            }
            let most = (1 + random.below(20)).min(truth.len() - text.len());
            let answer = session
                .answer(engine(), &text, &options(most), |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            text.extend(answer.ids);
            assert_eq!(text, truth[..text.len()]);
        }
    }
}

type Taken = Arc<Mutex<Vec<Option<Vec<u32>>>>>;

/// Passes drafts on and keeps the taps that come back, by position.
struct Recorder {
    inner: Box<dyn Draft + Send>,
    taken: Taken,
}

impl Draft for Recorder {
    fn extend(
        &mut self,
        taps: &[(usize, Tensor)],
        rows: &[(usize, usize)],
    ) -> Result<(), EngineError> {
        let mut taken = self.taken.lock().unwrap();
        assert!(taps.windows(2).all(|w| w[0].0 < w[1].0), "by layer");
        for &(row, position) in rows {
            assert!(
                position <= taken.len(),
                "position {position} of {}",
                taken.len()
            );
            taken.truncate(position);
            let mut bits = Vec::new();
            for (_, tap) in taps {
                let d = tap.shape()[3];
                let values = &tap.as_f16().unwrap()[row * d..][..d];
                bits.extend(values.iter().map(|v| u32::from(v.to_bits())));
            }
            taken.push(Some(bits));
        }
        Ok(())
    }

    fn propose(&mut self, text: &[u32], most: usize) -> Result<Vec<Guess>, EngineError> {
        assert_eq!(
            self.taken.lock().unwrap().len(),
            text.len() - 1,
            "all but the last"
        );
        self.inner.propose(text, most)
    }
}

/// The drafter gets the hidden states of every token of the text once, in order, over
/// several turns of a conversation, side hits included.
#[test]
fn the_taps_of_the_text_go_to_the_drafter() {
    let (prompt, ids) = &plain()[4];
    let truth: Vec<u32> = [&prompt[..], ids].concat();
    let taken = Taken::default();
    let recorder = Recorder {
        inner: mixed_drafts(&truth, 8).unwrap(),
        taken: Arc::clone(&taken),
    };
    let mut session = Session::new(engine(), Some(Box::new(recorder)));
    let mut turn = |text: &[u32], most| {
        session
            .answer(
                engine(),
                text,
                &options(most),
                |_| ControlFlow::Continue(()),
            )
            .unwrap()
    };
    let answer = turn(prompt, 120);
    assert!(answer.statistics.side_hits > 3);
    let whole = |text: &[u32], taken: &Taken| {
        let mut all = Vec::new();
        engine()
            .feed(&mut engine().cache(), text, 0, |_, step| {
                let logits = step.logits(0).len();
                all.extend((0..step.ids.len()).map(|row| Some(bits(step, row).split_off(logits))));
            })
            .unwrap();
        let taken = taken.lock().unwrap();
        assert!(
            taken.len() + 1 >= text.len(),
            "{} of {}",
            taken.len(),
            text.len()
        );
        for position in 0..text.len() - 1 {
            assert!(
                taken[position] == all[position],
                "taps of position {position}"
            );
        }
    };
    let mut text = [&prompt[..], &answer.ids].concat();
    whole(&text, &taken);
    // The next turn goes on from the middle of the answer, then with other words.
    text.truncate(prompt.len() + 90);
    text.extend([11, 12, 13]);
    let answer = turn(&text, 30);
    assert!(answer.statistics.cached_tokens >= prompt.len() + 90);
    text.extend(answer.ids);
    whole(&text, &taken);
}

/// A cancelled request leaves a session that goes on as if it had ended there.
#[test]
fn a_cancelled_answer_can_be_continued() {
    let (prompt, ids) = &plain()[5];
    let truth: Vec<u32> = [&prompt[..], ids].concat();
    let mut session = Session::new(engine(), oracle_drafts(&truth));
    let mut seen = 0;
    let answer = session
        .answer(engine(), prompt, &options(100), |_| {
            seen += 1;
            if seen == 13 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .unwrap();
    assert_eq!(answer.finish, Finish::Cancelled);
    assert_eq!(answer.ids, ids[..13]);
    let text = [&prompt[..], &answer.ids].concat();
    let answer = session
        .answer(engine(), &text, &options(50), |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(answer.ids, ids[13..63]);
}
