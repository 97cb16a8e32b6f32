//! The forms of the chunk graph compute the same thing: in our runtime, in Apple's,
//! and against plain formulas, at shapes that exercise them.
//!
//! A model of one layer with a vocabulary of three slices is made of random tables and
//! indices, some rows of which are equal, so that their scores tie.

#![allow(clippy::float_cmp, reason = "ties are exact")]

use std::fs;
use std::path::{Path, PathBuf};

use anemone_convert::error::Error;
use anemone_convert::lower::{
    ArgmaxForm, AttentionForm, CacheLayout, Forms, Prescale, Shapes, SiluForm, WeightSource,
    lower_chunk, plan_chunks,
};
use anemone_runtime::{Data, Program, Tensor};
use anemone_schemas::aimodel::asset::{Metadata, write_asset};
use anemone_schemas::aimodel::ir::Elem;
use anemone_schemas::spec::{Architecture, ModelSpec, Rope, RopeKind};
use anemone_schemas::store::StoredLut;
use anemone_tests::line::scratch;
use anemone_tests::oracle;
use half::f16;

const WIDTH: usize = 16;
const VOCAB: usize = 40_000;
const VALID: usize = 39_990;
const HIDDEN: usize = 64;
/// Channels of a cache that lie side by side.
const INTERLEAVED: usize = 8;
/// Rows of the output layer that are made equal: the table groups that hold them.
const TWINS: [(usize, usize); 2] = [(20, 700), (450, 1240)];

fn spec() -> ModelSpec {
    ModelSpec {
        architecture: Architecture::Qwen3,
        hidden: HIDDEN,
        layers: 1,
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        intermediate: 128,
        vocab: VOCAB,
        max_position: 40_960,
        rms_eps: 1e-6,
        rope: Rope {
            theta: 1e6,
            kind: RopeKind::Default,
        },
        tie_word_embeddings: false,
        bos: None,
        eos: vec![],
    }
}

/// Random bits from a counter.
fn random(seed: u64, i: u64) -> u64 {
    let mut z = (seed.wrapping_mul(0xd134_2543_de82_ef95) ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Uniform in (-1, 1).
fn uniform(seed: u64, i: u64) -> f32 {
    (random(seed, i) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Random matrices, a file each.
struct Matrices<'a> {
    shapes: Shapes<'a>,
    dir: PathBuf,
}

impl Matrices<'_> {
    fn bytes(name: &str, lut: &StoredLut) -> Vec<u8> {
        let seed = name
            .bytes()
            .fold(1u64, |h, b| h.wrapping_mul(131).wrapping_add(u64::from(b)));
        let groups = lut.rows / lut.group_rows;
        let mut tables = Vec::new();
        for group in 0..groups as u64 {
            let mut entries: Vec<f32> = (0..16)
                .map(|i| 0.3 * uniform(seed, group * 16 + i))
                .collect();
            entries.sort_by(f32::total_cmp);
            tables.extend(entries.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()));
        }
        let mut indices: Vec<u8> = (0..lut.indices.1)
            .map(|i| random(seed ^ 7, i) as u8)
            .collect();
        if name == "lm_head.weight" {
            let row_bytes = lut.cols / 2;
            let (table, block) = (32, 32 * row_bytes);
            for (from, to) in TWINS {
                tables.copy_within(from * table..(from + 1) * table, to * table);
                indices.copy_within(from * block..(from + 1) * block, to * block);
            }
        }
        [tables, indices].concat()
    }
}

impl WeightSource for Matrices<'_> {
    fn matrix(&self, name: &str) -> Result<StoredLut, Error> {
        let lut = self.shapes.matrix(name)?;
        let path = self.dir.join(name);
        if !path.exists() {
            fs::write(&path, Self::bytes(name, &lut)).unwrap();
        }
        Ok(StoredLut { path, ..lut })
    }

    fn norm(&self, name: &str) -> Result<Vec<f32>, Error> {
        self.shapes.norm(name)
    }
}

/// The model's one chunk as an asset, with `extend` and `logits` functions.
fn asset(dir: &Path, name: &str, context: usize, forms: Forms) -> PathBuf {
    asset_of(dir, name, &[context], forms)
}

/// [`asset`] of several contexts, the longest last.
fn asset_of(dir: &Path, name: &str, contexts: &[usize], forms: Forms) -> PathBuf {
    let spec = spec();
    let source = Matrices {
        shapes: Shapes {
            spec: &spec,
            bits: 4,
            group_rows: 32,
        },
        dir: dir.to_path_buf(),
    };
    let longest = contexts[contexts.len() - 1];
    let mut plan = plan_chunks(&spec, 1, longest, &[], true).unwrap();
    plan.contexts = contexts.to_vec();
    plan.widths = vec![WIDTH];
    plan.forms = Forms {
        valid_vocab: Some(VALID),
        ..forms
    };
    let module = lower_chunk(&source, &plan, &plan.chunks[0]).unwrap();
    let path = dir.join(format!("{name}.aimodel"));
    write_asset(&path, &module, &Metadata::default()).unwrap();
    path
}

/// Inputs of a call that writes slots 4.. over a random cache.
struct Call {
    context: usize,
    hidden: Vec<f32>,
}

const STEP: usize = 4;

impl Call {
    fn new(context: usize, hidden: impl Fn(usize, usize) -> f32) -> Self {
        let hidden = (0..WIDTH * HIDDEN)
            .map(|i| hidden(i / HIDDEN, i % HIDDEN))
            .collect();
        Self { context, hidden }
    }

    /// Name, shape and values of each f16 input.
    fn tensors(&self) -> Vec<(&'static str, Vec<usize>, Vec<f32>)> {
        let (w, c, d) = (WIDTH, self.context, 32);
        let angle = |i: usize| {
            let (row, k) = (i / d, i % (d / 2));
            (STEP + row) as f32 * 1e6f32.powf(-(2.0 * k as f32) / d as f32)
        };
        let mask = (0..c * w).map(|i| if i / w <= STEP + i % w { 0.0 } else { -40000.0 });
        vec![
            (
                "transformer_input",
                vec![1, w, 1, HIDDEN],
                self.hidden.clone(),
            ),
            (
                "rope_cos",
                vec![1, 1, w, d],
                (0..w * d).map(|i| angle(i).cos()).collect(),
            ),
            (
                "rope_sin",
                vec![1, 1, w, d],
                (0..w * d).map(|i| angle(i).sin()).collect(),
            ),
            ("causal_mask", vec![1, c, 1, w], mask.collect()),
        ]
    }

    fn cache(&self, seed: u64) -> Vec<f32> {
        // What lies behind the mask must not matter, so it is not zero.
        (0..64 * self.context as u64)
            .map(|i| uniform(seed, i))
            .collect()
    }

    fn cache_shape(&self) -> [usize; 5] {
        [1, 1, 64, 1, self.context]
    }

    /// Runs a function in our runtime and returns its first output.
    fn ours(&self, asset: &Path, function: &str) -> Tensor {
        let halves = |v: &[f32]| -> Vec<f16> { v.iter().map(|&x| f16::from_f32(x)).collect() };
        let program = Program::open(asset).unwrap();
        let name = format!("{function}_{}_{WIDTH}", self.context);
        let plan = program.plan(&name).unwrap();
        let step = Tensor::new(&[1], vec![STEP as i32]).unwrap();
        let mut inputs: Vec<(&str, Tensor)> = self
            .tensors()
            .into_iter()
            .map(|(name, shape, values)| (name, Tensor::new(&shape, halves(&values)).unwrap()))
            .collect();
        inputs.push(("in_step", step));
        let inputs: Vec<(&str, &Tensor)> = inputs.iter().map(|(n, t)| (*n, t)).collect();
        let cache = |seed| Tensor::new(&self.cache_shape(), halves(&self.cache(seed))).unwrap();
        let (mut keys, mut values) = (cache(1), cache(2));
        let mut states = [("key_cache", &mut keys), ("value_cache", &mut values)];
        plan.run(&inputs, &mut states).unwrap().remove(0).1
    }

    /// Runs a function in Apple's runtime.
    fn apple_outputs(&self, asset: &Path, function: &str) -> oracle::Outputs {
        let name = format!("{function}_{}_{WIDTH}", self.context);
        let mut call = oracle::Call::new(&name);
        for (name, shape, values) in self.tensors() {
            call = call.input(name, oracle::Tensor::f16(&shape, &values));
        }
        call = call.input("in_step", oracle::Tensor::i32(&[1], &[STEP as i32]));
        for (name, seed) in [("key_cache", 1), ("value_cache", 2)] {
            let cache = oracle::Tensor::f16(&self.cache_shape(), &self.cache(seed));
            call = call.state(name, cache);
        }
        oracle::run(asset, &[call]).unwrap().remove(0)
    }

    fn apples(&self, asset: &Path, function: &str, name: &str) -> oracle::Tensor {
        self.apple_outputs(asset, function).get(name).clone()
    }
}

fn ids(t: &Tensor) -> Vec<u32> {
    match t.data() {
        Data::U32(ids) => ids.clone(),
        other => panic!("ids are {:?}", other.elem()),
    }
}

fn floats(t: &Tensor) -> Vec<f32> {
    t.as_f16().unwrap().iter().map(|v| v.to_f32()).collect()
}

/// First row with the largest of the valid logits, for each token.
fn first_best(logits: &[f32]) -> Vec<u32> {
    (0..WIDTH)
        .map(|row| {
            let mut best = 0;
            for v in 1..VALID {
                if logits[v * WIDTH + row] > logits[best * WIDTH + row] {
                    best = v;
                }
            }
            best as u32
        })
        .collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied())
}

fn ordinary(row: usize, column: usize) -> f32 {
    2.0 * uniform(11, (row * HIDDEN + column) as u64)
}

/// Hidden states for which a row of a twin group wins: the row itself.
fn favouring(dir: &Path, rows: &[usize]) -> Vec<Vec<f32>> {
    let bytes = fs::read(dir.join("lm_head.weight")).unwrap();
    let tables = VOCAB / 32 * 32;
    rows.iter()
        .map(|&row| {
            let group = row / 32;
            (0..HIDDEN)
                .map(|c| {
                    let byte = bytes[tables + usize::midpoint(row * HIDDEN, c)];
                    let index = usize::from(if c % 2 == 0 { byte & 15 } else { byte >> 4 });
                    let at = group * 32 + index * 2;
                    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
                })
                .collect()
        })
        .collect()
}

#[test]
fn sliced_choices_are_the_first_best_of_all_valid_logits() {
    let dir = scratch("argmax");
    let f16_form = asset(&dir, "f16", 256, Forms::default());
    let f32_form = asset(
        &dir,
        "f32",
        256,
        Forms {
            argmax: ArgmaxForm::SlicedF32,
            ..Forms::default()
        },
    );
    // Rows that have an equal twin in a later slice, rows near the ends of slices.
    let wanted = [640, 650, 14_400, 14_431, 13_343, 13_344, 26_688, 39_989];
    let favoured = favouring(&dir, &wanted);
    // Large enough that attention and MLP hardly turn them.
    let call = Call::new(256, |row, c| match favoured.get(row) {
        Some(hidden) => 200.0 * hidden[c],
        None => ordinary(row, c),
    });
    let logits = floats(&call.ours(&f16_form, "logits"));
    assert_eq!(logits.len(), VOCAB * WIDTH);
    let expected = first_best(&logits);
    // The ties are real, and some winners lie in each slice.
    for (a, b) in TWINS {
        let tied = (0..32).all(|r| logits[(a * 32 + r) * WIDTH] == logits[(b * 32 + r) * WIDTH]);
        assert!(tied);
    }
    let twins = [640, 650, 14_400, 14_431].map(|v| v as u32);
    assert!(
        expected.iter().filter(|id| twins.contains(id)).count() >= 2,
        "{expected:?}"
    );
    assert!(expected.iter().any(|&id| id > 26_688), "{expected:?}");
    assert_eq!(ids(&call.ours(&f16_form, "extend")), expected);
    assert_eq!(ids(&call.ours(&f32_form, "extend")), expected);

    for form in [&f16_form, &f32_form] {
        let logits = call.apples(form, "logits", "out_logits").to_f32();
        let chosen = call.apples(form, "extend", "out_ids");
        assert_eq!(chosen.dtype, Elem::Ui32);
        let chosen: Vec<u32> = chosen
            .bytes
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        assert_eq!(chosen, first_best(&logits));
    }
}

#[test]
fn attention_by_rows_equals_attention_by_channels() {
    let dir = scratch("attention");
    let form = |name: &str, attention| {
        let forms = Forms {
            attention,
            ..Forms::default()
        };
        asset(&dir, name, 256, forms)
    };
    let channel = form("channel", AttentionForm::Channel);
    let row = form("row", AttentionForm::Row);
    let call = Call::new(256, ordinary);
    let expected = floats(&call.ours(&channel, "logits"));
    // Both round to f16 after the same steps; sums may be taken in another order.
    let ours = floats(&call.ours(&row, "logits"));
    assert!(
        distance(&ours, &expected) < 1e-3,
        "{}",
        distance(&ours, &expected)
    );
    // Apple's CPU products add in f16.
    for form in [&channel, &row] {
        let theirs = call.apples(form, "logits", "out_logits").to_f32();
        assert!(
            distance(&theirs, &expected) < 1e-2,
            "{}",
            distance(&theirs, &expected)
        );
    }
}

#[test]
fn prescaled_norms_bear_hidden_states_up_to_the_end_of_f16() {
    let dir = scratch("prescale");
    let form = |name: &str, prescale| {
        let forms = Forms {
            prescale,
            ..Forms::default()
        };
        asset(&dir, name, 256, forms)
    };
    let plain = form("plain", Prescale::None);
    let scaled = form("scaled", Prescale::Uniform(8));
    // Moderate values: the same result up to rounding.
    let call = Call::new(256, |row, c| 20.0 * ordinary(row, c));
    let expected = floats(&call.ours(&plain, "logits"));
    let got = floats(&call.ours(&scaled, "logits"));
    assert!(
        distance(&got, &expected) < 2e-3,
        "{}",
        distance(&got, &expected)
    );
    // A massive channel: squares overflow, and the plain norm gives nothing but zeros.
    let spiky = Call::new(256, |row, c| {
        if c == 5 {
            60_000.0
        } else {
            20.0 * ordinary(row, c)
        }
    });
    let lost = floats(&spiky.ours(&plain, "logits"));
    assert!(lost.iter().all(|&v| v == 0.0 || !v.is_finite()));
    let got = floats(&spiky.ours(&scaled, "logits"));
    assert!(got.iter().all(|v| v.is_finite()) && got.iter().any(|&v| v != 0.0));
    // In exact arithmetic the norm of such a row is sqrt(D) in that channel.
    let theirs = spiky.apples(&scaled, "logits", "out_logits").to_f32();
    assert!(
        distance(&theirs, &got) < 1e-2,
        "{}",
        distance(&theirs, &got)
    );
    let expected = spiky_logits(&dir);
    for row in 0..WIDTH {
        let column: Vec<f32> = got.iter().skip(row).step_by(WIDTH).copied().collect();
        assert!(
            distance(&column, &expected) < 1e-2,
            "{}",
            distance(&column, &expected)
        );
    }
}

/// Logits of a hidden state whose one channel outweighs all others: a column of the
/// output layer times the norm's weight and `sqrt(D)`.
fn spiky_logits(dir: &Path) -> Vec<f32> {
    let spec = spec();
    let shapes = Shapes {
        spec: &spec,
        bits: 4,
        group_rows: 32,
    };
    let weight = shapes.norm("model.norm.weight").unwrap()[5];
    let factor = f16::from_f32(weight).to_f32() * (HIDDEN as f32).sqrt();
    let rows: Vec<usize> = (0..VOCAB).collect();
    favouring(dir, &rows)
        .iter()
        .map(|row| factor * row[5])
        .collect()
}

/// The tanh form of SiLU gives a layer the same logits, in both runtimes.
#[test]
fn silu_by_tanh_is_silu() {
    let dir = scratch("silu");
    let programs = [SiluForm::Operation, SiluForm::Tanh].map(|silu| {
        let forms = Forms {
            silu,
            ..Forms::default()
        };
        asset(&dir, &format!("{silu:?}"), 256, forms)
    });
    // Tokens of very different sizes; the norm makes gates of them all.
    let call = Call::new(256, |row, c| {
        ordinary(row, c) * 4f32.powi(row as i32 / 2 - 4)
    });
    let ours = programs.each_ref().map(|p| floats(&call.ours(p, "logits")));
    assert!(ours[0] != ours[1], "the form made no difference");
    for (name, found) in [
        ("ours", &ours[1]),
        (
            "Apple's",
            &call.apples(&programs[1], "logits", "out_logits").to_f32(),
        ),
    ] {
        let far = distance(found, &ours[0]);
        assert!(far < 5e-3, "{name}: {far}");
    }
}

/// Where a cache lies must not change what is computed or what it holds.
#[test]
fn the_layout_of_caches_changes_no_bit() {
    let dir = scratch("interleaved");
    let programs = [CacheLayout::Interleaved, CacheLayout::Plain].map(|cache_layout| {
        let forms = Forms {
            cache_layout,
            ..Forms::default()
        };
        asset_of(&dir, &format!("{cache_layout:?}"), &[256, 512], forms)
    });
    for context in [256, 512] {
        let call = Call::new(context, ordinary);
        let [interleaved, plain] = [0, 1].map(|i| call.apple_outputs(&programs[i], "logits"));
        for (state, seed) in [("key_cache", 1), ("value_cache", 2)] {
            let before = call.cache(seed);
            let [found, expected] = [&interleaved, &plain].map(|o| o.state(state).to_f32());
            for (i, before) in before.iter().enumerate() {
                let (channel, slot) = (i / context, i % context);
                // Apple's runtime loses these, see `oracle::report`; no call here sees them.
                if slot == context - 1 && channel > 64 - INTERLEAVED {
                    continue;
                }
                assert!(found[i] == expected[i], "{state} {channel} at {slot}");
                let written = (STEP..STEP + WIDTH).contains(&slot);
                let kept = found[i] == f16::from_f32(*before).to_f32();
                assert!(written || kept, "{state} {channel} at {slot}");
            }
        }
        let logits = |o: &oracle::Outputs| o.get("out_logits").bytes.clone();
        assert!(
            logits(&interleaved) == logits(&plain),
            "logits of {context}"
        );
        let ours = floats(&call.ours(&programs[0], "logits"));
        let theirs = interleaved.get("out_logits").to_f32();
        assert!(distance(&ours, &theirs) < 1e-2, "logits of {context}");
    }
}
