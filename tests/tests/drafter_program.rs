//! The drafter's program against its PyTorch reference, guess by guess, on our runtime
//! and on Apple's; and the command that makes it.
//!
//! Products are f16 here and f32 in the reference, so guesses may differ where two
//! logits of the reference lie within [`NEAR_TIE`]; every such place is counted.

#![allow(clippy::print_stdout, reason = "figures for those who run it by hand")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anemone_convert::commands::drafter::{self, DrafterOptions, HeadSource, WeightForm};
use anemone_convert::commands::package::{self, PackageOptions};
use anemone_convert::commands::{inspect, lint, verify};
use anemone_convert::lint::LintOptions;
use anemone_convert::plan;
use anemone_convert::publish::{self, PublishOptions};
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_runtime::engine::{Draft, DrafterProgram, ProgramDrafter};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::manifest::{DrafterHead, Manifest};
use anemone_tests::drafting::{Agreement, Walk, apples, extend, kept, our_guesses, ours, taps};
use anemone_tests::line::{TAPS, scratch, tiny_folder};
use anemone_tests::reference::data;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// Largest difference of a probability or a confidence from the reference's.
const TOLERANCE: f32 = 0.03;
/// Texts that Apple's runtime walks with integers.
const APPLES_TEXTS: usize = 2;
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
fn all_taps(walk: &Walk) -> Vec<Vec<Vec<f16>>> {
    let model = Checkpoint::open(&data("tiny-qwen3")).unwrap();
    let texts = walk.texts.iter();
    texts.map(|text| taps(&model, text, &TAPS)).collect()
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
    let found = ours(folder(), &walk, &all_taps(&walk));
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
    check(&ours(&output, &walk, &all_taps(&walk)), "DFlash, ours");
}

#[test]
fn apples_runtime_guesses_the_same() {
    let walk = walk(false);
    let found = apples(folder(), &walk, &all_taps(&walk));
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
    let right = taps(&model, ids, &TAPS);
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
    let planned = plan::drafter(&options(&dir, output.clone())).unwrap();
    let manifest = convert(&options(&dir, output.clone()));
    let info = manifest.drafter.unwrap();
    assert_eq!(info.embedding.path, "drafter_embedding.f16");
    let table = fs::metadata(output.join(&info.embedding.path)).unwrap();
    assert_eq!(planned.steps[1].bytes, table.len());
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
    // Packaged with the rest, but published only when told to.
    let copy = scratch("package").join("folder");
    convert(&options(&data("tiny-dspark"), copy.clone()));
    let packaged = PackageOptions {
        folder: copy.clone(),
        ..PackageOptions::default()
    };
    let package = package::run(&packaged, Ui::Quiet).unwrap();
    let publish = |with_drafter| PublishOptions {
        folder: copy.clone(),
        repo: "owner/name".into(),
        direct: false,
        private: false,
        with_drafter,
    };
    let error = publish::check(&publish(false), &package).unwrap_err();
    assert!(error.message.contains("licence"), "{error}");
    publish::check(&publish(true), &package).unwrap();
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
            let view = TensorView::new(Dtype::BF16, vec![128, 3 * 128], &fuse);
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

/// The tiny drafter with its matrices as integers would give them back.
fn rounded_checkpoint() -> PathBuf {
    let dir = scratch("rounded");
    let from = data("tiny-dspark");
    fs::copy(from.join("config.json"), dir.join("config.json")).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, view) in file.tensors() {
        let stays = ["embed_tokens", "norm", "markov_w1", "confidence"];
        assert_eq!(view.dtype(), Dtype::BF16);
        let shape = view.shape().to_vec();
        let (dtype, bytes) = if stays.iter().any(|s| name.contains(s)) {
            (Dtype::BF16, view.data().to_vec())
        } else {
            let values = view.data().as_chunks::<2>().0.iter();
            let values: Vec<f32> = values.map(|&b| bf16::from_le_bytes(b).to_f32()).collect();
            let rounded = values.chunks(shape[1]).flat_map(rounded);
            (Dtype::F32, rounded.flat_map(f32::to_le_bytes).collect())
        };
        tensors.insert(name, (dtype, shape, bytes));
    }
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    let out = safetensors::serialize(views, None).unwrap();
    fs::write(dir.join("model.safetensors"), out).unwrap();
    dir
}

/// A row at the nearest of 255 multiples of an f16 that reach its largest magnitude.
fn rounded(row: &[f32]) -> Vec<f32> {
    let largest = row.iter().copied().map(f32::abs).fold(0.0, f32::max);
    let scale = f16::from_f32(largest / 127.0).to_f32();
    let near = |v: &f32| (v / scale).round_ties_even().clamp(-127.0, 127.0) * scale;
    row.iter().map(near).collect()
}

/// Our runtime multiplies integers in place; by the operation they are made f16 first.
#[test]
fn integers_guess_as_their_values_in_f16_do_in_both_runtimes() {
    let output = scratch("int8").join("folder");
    let manifest = convert(&DrafterOptions {
        weights: WeightForm::Int8,
        ..options(&data("tiny-dspark"), output.clone())
    });
    assert_eq!(manifest.drafter.unwrap().weights, "int8-row");
    verify::run(&output, Ui::Quiet).unwrap();
    let values = scratch("int8-values").join("folder");
    convert(&options(&rounded_checkpoint(), values.clone()));
    let walk = walk(false);
    let taps = all_taps(&walk);
    let expected = our_guesses(&values, &walk, &taps);
    let walk = walk.told_by(&expected);
    let found = ours(&output, &walk, &taps);
    check(&found, "integers, ours");
    check_kept(&walk, &found);
    // Apple's sums are f16, and ours, which they are held against, are no f32 reference:
    // more near ties turn. A part of the walk is enough, its runtime takes its time.
    let part = walk.first(APPLES_TEXTS);
    let found = apples(&output, &part, &taps[..APPLES_TEXTS]);
    println!("integers, Apple's: {found:?}");
    assert!(found.firsts * 50 <= found.guesses);
    assert!(found.probability <= TOLERANCE && found.confidence <= TOLERANCE);
    check_kept(&part, &found);
}

/// `--dry-run` says what the program will have to the byte, whatever its form.
#[test]
fn plans_are_exact() {
    for (weights, head) in [
        (WeightForm::F16, HeadSource::Auto),
        (WeightForm::F16, HeadSource::Chunk),
        (WeightForm::Lut4, HeadSource::Exact),
        (WeightForm::Lut8, HeadSource::Exact),
        (WeightForm::Int8, HeadSource::Exact),
    ] {
        let output = scratch(&format!("plan-{weights:?}-{head:?}")).join("folder");
        let options = DrafterOptions {
            weights,
            head,
            ..options(&data("tiny-dspark"), output.clone())
        };
        let planned = plan::drafter(&options).unwrap();
        assert!(!output.exists());
        convert(&options);
        let written = fs::metadata(output.join("drafter.aimodel/main.mlirb")).unwrap();
        assert_eq!(
            planned.steps[0].bytes,
            written.len(),
            "{weights:?} {head:?}"
        );
    }
}

/// What compression of the weights costs: guesses kept in the mean. Printed; the program
/// must run and keep most of what f16 keeps.
#[test]
fn compressed_weights_guess_nearly_as_well() {
    let walk = walk(false);
    let reference = walk.cycles.iter().map(|c| c.kept).sum::<usize>() as f64;
    let taps = all_taps(&walk);
    for (weights, head, floor) in [
        (WeightForm::F16, HeadSource::Exact, 0.98),
        (WeightForm::F16, HeadSource::Chunk, 0.8),
        (WeightForm::Int8, HeadSource::Exact, 0.95),
        (WeightForm::Lut8, HeadSource::Exact, 0.95),
        (WeightForm::Lut4, HeadSource::Exact, 0.7),
    ] {
        let output = scratch(&format!("drafter-{weights:?}-{head:?}")).join("folder");
        convert(&DrafterOptions {
            weights,
            head,
            ..options(&data("tiny-dspark"), output.clone())
        });
        let drafts = our_guesses(&output, &walk, &taps);
        let cycles = walk.cycles.iter().zip(&drafts);
        let kept: usize = cycles
            .map(|(c, guesses)| kept(&walk.texts[c.text], c.anchor, guesses))
            .sum();
        let share = kept as f64 / reference;
        println!("{weights:?}, head {head:?}: {share:.3} of the guesses kept");
        assert!(share >= floor, "{weights:?} {head:?} keeps {share}");
    }
}
