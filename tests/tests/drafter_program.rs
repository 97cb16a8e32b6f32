//! The drafter's program against its PyTorch reference, guess by guess, on our runtime
//! and on Apple's; and the command that makes it.
//!
//! Products are f16 here and f32 in the reference, so guesses may differ where two
//! logits of the reference lie within [`NEAR_TIE`]; every such place is counted.

#![allow(clippy::print_stdout, reason = "figures for those who run it by hand")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anemone_convert::commands::drafter::{self, DrafterOptions, HeadSource, WeightForm};
use anemone_convert::commands::package::{self, PackageOptions};
use anemone_convert::commands::{inspect, lint, verify};
use anemone_convert::lint::LintOptions;
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_runtime::Tensor;
use anemone_runtime::engine::{Draft, DrafterProgram, Guess, ProgramDrafter};
use anemone_schemas::aimodel::ir::Elem;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::manifest::{DrafterHead, Manifest};
use anemone_tests::drafting::{Agreement, Walk, taps};
use anemone_tests::line::{scratch, tiny_folder};
use anemone_tests::oracle::{self, Call, Tensor as Apple};
use anemone_tests::reference::data;
use half::f16;
use safetensors::SafeTensors;

/// Largest difference of a probability or a confidence from the reference's.
const TOLERANCE: f32 = 0.03;
/// Hidden width of the tiny model.
const HIDDEN: usize = 128;
/// First choices that may differ at near ties, of a hundred.
const TIES_PER_CENT: f64 = 1.0;

fn options(drafter: &Path, output: PathBuf) -> DrafterOptions {
    DrafterOptions {
        drafter: drafter.to_path_buf(),
        target: tiny_folder().to_path_buf(),
        output: Some(output),
        model: None,
        head: HeadSource::Auto,
        weights: WeightForm::F16,
        jobs: 2,
        overwrite: false,
    }
}

fn convert(options: &DrafterOptions) -> Manifest {
    drafter::run(options, Ui::Quiet, &Stop::default()).unwrap()
}

/// The tiny model's folder with its drafter in f16.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let output = scratch("drafter").join("folder");
        convert(&options(&data("tiny-dspark"), output.clone()));
        output
    })
}

/// The tiny drafter's backbone as z-lab would publish it: no tables, no heads, 16 rows.
fn dflash_checkpoint() -> PathBuf {
    let dir = scratch("dflash");
    let from = data("tiny-dspark");
    let text = fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let map = config.as_object_mut().unwrap();
    let ids: BTreeMap<&str, _> = ["mask_token_id", "target_layer_ids"]
        .into_iter()
        .map(|key| (key, map.remove(key).unwrap()))
        .collect();
    map.retain(|key, _| !key.starts_with("markov") && !key.contains("confidence"));
    map.insert(
        "architectures".into(),
        serde_json::json!(["DFlashDraftModel"]),
    );
    map.insert("dflash_config".into(), serde_json::json!(ids));
    map.insert("block_size".into(), 16.into());
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let foreign = ["embed_tokens", "lm_head", "markov_head", "confidence_head"];
    let kept: Vec<_> = file
        .tensors()
        .into_iter()
        .filter(|(name, _)| !foreign.iter().any(|f| name.starts_with(f)))
        .collect();
    assert_eq!(kept.len(), 58);
    let out = safetensors::serialize(kept, None).unwrap();
    fs::write(dir.join("model.safetensors"), out).unwrap();
    dir
}

fn walk(dflash: bool) -> Walk {
    Walk::open(
        "tiny-dspark",
        &data("tiny-qwen3"),
        &data("tiny-dspark"),
        dflash,
    )
}

/// Taps of every text of a walk, by the f32 model.
fn all_taps(walk: &Walk, layers: &[usize]) -> Vec<Vec<Vec<f16>>> {
    let model = Checkpoint::open(&data("tiny-qwen3")).unwrap();
    walk.texts
        .iter()
        .map(|text| taps(&model, text, layers))
        .collect()
}

/// Gives a drafter rows `from..to` of a text's taps, as calls of at most `width` rows
/// whose other rows are garbage.
fn extend(drafter: &mut ProgramDrafter, taps: &[Vec<f16>], from: usize, to: usize, width: usize) {
    let layers = drafter.info().taps.clone();
    let d = HIDDEN;
    for start in (from..to).step_by(width / 2) {
        let end = to.min(start + width / 2);
        // The rows lie in the middle of the call.
        let first = width / 4;
        let tensors: Vec<(usize, Tensor)> = layers
            .iter()
            .zip(taps)
            .map(|(&layer, rows)| {
                let mut values = vec![f16::from_f32(1e4); width * d];
                values[first * d..(first + end - start) * d]
                    .copy_from_slice(&rows[start * d..end * d]);
                (layer, Tensor::new(&[1, width, 1, d], values).unwrap())
            })
            .collect();
        let rows: Vec<_> = (start..end).map(|p| (first + p - start, p)).collect();
        drafter.extend(&tensors, &rows).unwrap();
    }
}

/// Our runtime along a walk.
fn ours(folder: &Path, walk: &Walk) -> Agreement {
    let program = DrafterProgram::open(folder, 1).unwrap().expect("a drafter");
    let taps = all_taps(walk, &[1, 2, 3, 5, 6]);
    let mut found = Agreement::default();
    for (text, ids) in walk.texts.iter().enumerate() {
        let mut drafter = ProgramDrafter::new(&program);
        for cycle in walk.cycles_of(text) {
            let known = drafter.len();
            extend(&mut drafter, &taps[text], known, cycle.anchor, 64);
            let guesses = drafter.propose(&ids[..=cycle.anchor], 64).unwrap();
            found.add(walk, cycle, &guesses);
        }
    }
    found
}

fn check(found: &Agreement, what: &str) {
    println!("{what}: {found:?}, kept in the mean {:.3?}", found.means());
    let ties = 100.0 * found.firsts as f64 / found.guesses as f64;
    assert!(
        ties <= TIES_PER_CENT,
        "{ties:.2}% of the first choices differ"
    );
    assert!(found.probability <= TOLERANCE && found.confidence <= TOLERANCE);
}

/// Guesses kept in the mean are those of the reference but for the near ties.
fn check_kept(walk: &Walk, found: &Agreement) {
    let expected: usize = walk.cycles.iter().map(|c| c.kept).sum();
    let kept: usize = found.kept.iter().map(|k| k[0]).sum();
    assert!(
        expected.abs_diff(kept) <= 7 * found.firsts,
        "{kept}, expected {expected}"
    );
}

#[test]
fn guesses_are_those_of_the_reference() {
    let walk = walk(false);
    assert!(walk.cycles.len() >= 200);
    assert!(
        walk.cycles.iter().any(|c| c.anchor > 300),
        "a text must outgrow 256 slots"
    );
    let found = ours(folder(), &walk);
    check(&found, "ours");
    check_kept(&walk, &found);
}

#[test]
fn masks_of_a_dflash_drafter_guess_as_in_the_reference() {
    let output = scratch("dflash-folder").join("folder");
    let manifest = convert(&options(&dflash_checkpoint(), output.clone()));
    let info = manifest.drafter.unwrap();
    assert_eq!(
        (info.block, info.guesses, info.confidences),
        (16, 15, false)
    );
    assert_eq!(info.embedding, manifest.embedding);
    verify::run(&output, Ui::Quiet).unwrap();
    let walk = walk(true);
    check(&ours(&output, &walk), "DFlash, ours");
}

/// Inputs of a call, made from the manifest alone.
struct Inputs<'a> {
    info: &'a anemone_schemas::manifest::Drafter,
    embedding: Vec<u8>,
    hidden: usize,
}

impl Inputs<'_> {
    fn rope(&self, first: usize, n: usize) -> [Apple; 2] {
        let half = self.info.rope.inv_freq.len();
        let angle = |i: usize| {
            (first + i / (2 * half)) as f32 * self.info.rope.inv_freq[i % (2 * half) % half]
        };
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = (0..n * 2 * half).map(|i| f(angle(i))).collect();
            Apple::f32(&[n, 2 * half], &values)
        };
        [table(f32::cos), table(f32::sin)]
    }

    /// A call with these rows of a text, then nothing or a draft after them.
    fn call(
        &self,
        text: &[u32],
        taps: &[Vec<f16>],
        rows: Range<usize>,
        context: usize,
        drafts: bool,
    ) -> Call {
        let Range {
            start: from,
            end: to,
        } = rows;
        let (d, n) = (
            self.hidden,
            if drafts {
                self.info.rows
            } else {
                self.info.prefill_rows
            },
        );
        let name = if drafts { "draft" } else { "extend" };
        let mut call = Call::new(&format!("{name}_{context}"));
        for (layer, rows) in self.info.taps.iter().zip(taps) {
            let mut values: Vec<f32> = rows[from * d..to * d].iter().map(|v| v.to_f32()).collect();
            values.resize(n * d, 77.0);
            call = call.input(&format!("tap_{layer}"), Apple::f16(&[1, n, 1, d], &values));
        }
        let [cos, sin] = self.rope(from, n);
        call = call
            .input("context_cos", cos)
            .input("context_sin", sin)
            .input("in_step", Apple::i32(&[1], &[from as i32]));
        if !drafts {
            return call;
        }
        let block = self.info.block;
        let mut bytes = Vec::new();
        for row in 0..block {
            let id = if row == 0 {
                text[to]
            } else {
                self.info.mask_id
            } as usize;
            bytes.extend_from_slice(&self.embedding[id * d * 2..(id + 1) * d * 2]);
        }
        let embedded = Apple {
            dtype: Elem::F16,
            shape: vec![1, block, 1, d],
            bytes,
        };
        let slots = context + self.info.spare_slots;
        let mask: Vec<f32> = (0..slots)
            .map(|s| if s < to { 0.0 } else { -40_000.0 })
            .collect();
        let [cos, sin] = self.rope(to, block);
        call.input("block_input", embedded)
            .input("block_cos", cos)
            .input("block_sin", sin)
            .input("context_mask", Apple::f32(&[1, 1, 1, slots], &mask))
            .input("anchor", Apple::i32(&[1], &[text[to] as i32]))
    }
}

fn guesses(outputs: &oracle::Outputs) -> Vec<Guess> {
    let words = outputs.get("out_ids").bytes.as_chunks::<4>().0;
    let ids: Vec<u32> = words.iter().map(|&b| u32::from_le_bytes(b)).collect();
    let p = outputs.get("out_probabilities").to_f32();
    let confidences = outputs.get("out_confidences").to_f32();
    let guess = |(j, ids): (usize, &[u32])| Guess {
        id: ids[0],
        probability: p[3 * j],
        others: [(ids[1], p[3 * j + 1]), (ids[2], p[3 * j + 2])],
        confidence: confidences[j],
    };
    ids.chunks_exact(3).enumerate().map(guess).collect()
}

#[test]
fn apples_runtime_guesses_the_same() {
    let path = folder();
    let manifest = Manifest::read(path).unwrap();
    let info = manifest.drafter.as_ref().unwrap();
    let inputs = Inputs {
        info,
        embedding: fs::read(path.join(&info.embedding.path)).unwrap(),
        hidden: manifest.model.hidden,
    };
    let walk = walk(false);
    let taps = all_taps(&walk, &info.taps);
    let (mut calls, mut drafts) = (Vec::new(), Vec::new());
    for (text, ids) in walk.texts.iter().enumerate() {
        let longest = walk.cycles_of(text).map(|c| c.anchor).max().unwrap();
        let context = if longest <= 256 { 256 } else { 512 };
        let (first, mut known) = (calls.len(), 0);
        for cycle in walk.cycles_of(text) {
            while cycle.anchor - known > info.rows {
                let to = cycle.anchor.min(known + info.prefill_rows);
                calls.push(inputs.call(ids, &taps[text], known..to, context, false));
                known = to;
            }
            drafts.push((calls.len(), cycle));
            calls.push(inputs.call(ids, &taps[text], known..cycle.anchor, context, true));
            known = cycle.anchor;
        }
        let slots = context + info.spare_slots;
        let shape = [info.layers, 1, info.kv_heads, slots, info.head_dim];
        for state in ["key_cache", "value_cache"] {
            let zeros = Apple::zeros(Elem::F16, &shape);
            calls[first].states.push((state.into(), zeros));
        }
    }
    let report = oracle::report(&path.join(&info.path), &calls).unwrap();
    assert_eq!(report.compatibility.as_deref(), Some("27.0"));
    let mut found = Agreement::default();
    for (at, cycle) in drafts {
        found.add(&walk, cycle, &guesses(&report.calls[at]));
    }
    check(&found, "Apple's");
    check_kept(&walk, &found);
}

/// What is drafted does not depend on how the rows came in, on what was drafted in
/// between, or on rows that were taken back.
#[test]
fn drafts_depend_on_the_rows_alone() {
    let walk = walk(false);
    let program = DrafterProgram::open(folder(), 1).unwrap().unwrap();
    let text = (0..walk.texts.len())
        .max_by_key(|&t| walk.texts[t].len())
        .unwrap();
    let ids = &walk.texts[text];
    let model = Checkpoint::open(&data("tiny-qwen3")).unwrap();
    let right = taps(&model, ids, &[1, 2, 3, 5, 6]);
    let mut wrong = right.clone();
    wrong
        .iter_mut()
        .flatten()
        .for_each(|v| *v = f16::from_f32(3.0) - *v);
    let at = ids.len() - 8;
    let mut plain = ProgramDrafter::new(&program);
    extend(&mut plain, &right, 0, at, 64);
    let expected = plain.propose(&ids[..=at], 7).unwrap();
    assert_eq!(expected.len(), 7);
    // Rows one by one, with drafts in between, crossing a context.
    let mut slow = ProgramDrafter::new(&program);
    for p in 0..at {
        extend(&mut slow, &right, p, p + 1, 16);
        if p % 5 == 0 {
            slow.propose(&ids[..=p + 1], 7).unwrap();
        }
    }
    assert_eq!(slow.propose(&ids[..=at], 7).unwrap(), expected);
    // Wrong rows beyond a point, drafted from, then taken back.
    let mut back = ProgramDrafter::new(&program);
    let half = at / 2;
    extend(&mut back, &right, 0, half, 64);
    extend(&mut back, &wrong, half, at, 64);
    assert_ne!(back.propose(&ids[..=at], 7).unwrap(), expected);
    extend(&mut back, &right, half, at, 64);
    assert_eq!(back.propose(&ids[..=at], 7).unwrap(), expected);
    // Fewer guesses are the first of them; nothing is said of a text it does not know.
    assert_eq!(back.propose(&ids[..=at], 3).unwrap(), expected[..3]);
    assert!(back.propose(&ids[..at + 3], 7).unwrap().is_empty());
    assert!(
        ProgramDrafter::new(&program)
            .propose(&ids[..1], 7)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn tables_that_equal_the_models_are_shared() {
    let manifest = Manifest::read(folder()).unwrap();
    let info = manifest.drafter.as_ref().unwrap();
    assert_eq!(
        (&info.embedding, info.head),
        (&manifest.embedding, DrafterHead::Model)
    );
    assert_eq!(info.taps, [1, 2, 3, 5, 6]);
    // Another embedding is kept beside the model's.
    let dir = scratch("other-tables");
    let text = fs::read(data("tiny-dspark").join("config.json")).unwrap();
    fs::write(dir.join("config.json"), text).unwrap();
    let mut bytes = fs::read(data("tiny-dspark").join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    for name in ["embed_tokens.weight", "lm_head.weight"] {
        let at = json[name]["data_offsets"][0].as_u64().unwrap() as usize;
        bytes[8 + header + at + 2] ^= 1;
    }
    fs::write(dir.join("model.safetensors"), bytes).unwrap();
    let output = dir.join("folder");
    let manifest = convert(&options(&dir, output.clone()));
    let info = manifest.drafter.unwrap();
    assert_eq!(info.embedding.path, "drafter_embedding.f16");
    assert_eq!(info.head, DrafterHead::Own);
    verify::run(&output, Ui::Quiet).unwrap();
}

#[test]
fn the_other_commands_know_a_drafter() {
    let path = folder();
    let manifest = verify::run(path, Ui::Quiet).unwrap();
    assert!(manifest.files.contains_key("drafter.aimodel/main.mlirb"));
    assert!(
        inspect::run(path, false)
            .unwrap()
            .contains("DSpark drafter, 7 guesses")
    );
    let report = lint::run(path, &LintOptions::default()).unwrap();
    assert_eq!(report.errors(), 0);
    assert!(
        report
            .programs
            .iter()
            .all(|p| !p.path.ends_with("drafter.aimodel"))
    );
    let options = PackageOptions {
        folder: path.to_path_buf(),
        report: None,
        with_drafter: false,
    };
    let error = package::run(&options, Ui::Quiet).unwrap_err();
    assert!(error.message.contains("licence"), "{error}");
    // The model folder itself is as it was.
    assert!(Manifest::read(tiny_folder()).unwrap().drafter.is_none());
    verify::run(tiny_folder(), Ui::Quiet).unwrap();
}

#[test]
fn a_drafter_comes_and_goes_in_place() {
    let dir = scratch("in-place");
    let copy = dir.join("folder");
    convert(&options(&data("tiny-dspark"), copy.clone()));
    let in_place = DrafterOptions {
        target: copy.clone(),
        output: None,
        weights: WeightForm::Lut4,
        ..options(&data("tiny-dspark"), copy.clone())
    };
    let error = drafter::run(&in_place, Ui::Quiet, &Stop::default()).unwrap_err();
    assert!(error.message.contains("has a drafter already"), "{error}");
    let manifest = convert(&DrafterOptions {
        overwrite: true,
        ..in_place
    });
    assert_eq!(manifest.drafter.unwrap().weights, "lut4-g32");
    verify::run(&copy, Ui::Quiet).unwrap();
    let left: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left, ["folder"], "nothing may be left beside the folder");
}

#[test]
fn drafters_of_other_models_are_refused() {
    for (key, value, expected) in [
        ("num_target_layers", 9, "number of target layers of 9"),
        ("target_layer_ids", 0, "--taps 1,2,4 "),
    ] {
        let dir = scratch(&format!("other-{key}"));
        let text = fs::read_to_string(data("tiny-dspark").join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        let file = data("tiny-dspark").join("model.safetensors");
        let bytes = fs::read(file).unwrap();
        let st = SafeTensors::deserialize(&bytes).unwrap();
        let fuse = vec![0; 128 * 3 * 128 * 2];
        let mut tensors: BTreeMap<String, _> = st.tensors().into_iter().collect();
        if value == 0 {
            config[key] = serde_json::json!([1, 2, 4]);
            let view = safetensors::tensor::TensorView::new(
                safetensors::Dtype::BF16,
                vec![128, 3 * 128],
                &fuse,
            );
            tensors.insert("fc.weight".into(), view.unwrap());
        } else {
            config[key] = value.into();
        }
        fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let bytes = safetensors::serialize(tensors, None).unwrap();
        fs::write(dir.join("model.safetensors"), bytes).unwrap();
        let options = options(&dir, dir.join("folder"));
        let error = drafter::run(&options, Ui::Quiet, &Stop::default()).unwrap_err();
        let said = format!("{} {}", error.message, error.hint.unwrap_or_default());
        assert!(said.contains(expected), "{said}");
        assert!(!dir.join("folder").exists());
    }
}

/// What compression of the weights costs: guesses kept in the mean. Printed; the program
/// must run and keep most of what f16 keeps.
#[test]
fn compressed_weights_guess_nearly_as_well() {
    let walk = walk(false);
    let reference = walk.cycles.iter().map(|c| c.kept).sum::<usize>() as f64;
    let program = |weights, head| {
        let output = scratch(&format!("drafter-{weights:?}-{head:?}")).join("folder");
        convert(&DrafterOptions {
            weights,
            head,
            ..options(&data("tiny-dspark"), output.clone())
        });
        output
    };
    let taps = all_taps(&walk, &[1, 2, 3, 5, 6]);
    for (weights, head, floor) in [
        (WeightForm::F16, HeadSource::Chunk, 0.8),
        (WeightForm::Lut8, HeadSource::Exact, 0.95),
        (WeightForm::Lut4, HeadSource::Exact, 0.7),
    ] {
        let opened = DrafterProgram::open(&program(weights, head), 1)
            .unwrap()
            .unwrap();
        let mut kept = 0;
        for (text, ids) in walk.texts.iter().enumerate() {
            let mut drafter = ProgramDrafter::new(&opened);
            for cycle in walk.cycles_of(text) {
                let known = drafter.len();
                extend(&mut drafter, &taps[text], known, cycle.anchor, 64);
                let guesses = drafter.propose(&ids[..=cycle.anchor], 7).unwrap();
                let agrees =
                    |(j, g): &(usize, &Guess)| ids.get(cycle.anchor + 1 + j) == Some(&g.id);
                kept += guesses.iter().enumerate().take_while(agrees).count();
            }
        }
        let share = kept as f64 / reference;
        println!("{weights:?}, head {head:?}: {share:.3} of the guesses kept");
        assert!(share >= floor, "{weights:?} {head:?} keeps {share}");
    }
}
