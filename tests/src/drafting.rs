//! What the PyTorch reference of a drafter says, as `reference/make_drafter_references.py`
//! wrote it to `data/references`, and how a runtime's guesses are held against it.

use std::fs;
use std::ops::Range;
use std::path::Path;

use anemone_calib::{Teacher, Weights};
use anemone_runtime::Tensor;
use anemone_runtime::engine::{Draft, DrafterProgram, Guess, ProgramDrafter};
use anemone_schemas::aimodel::ir::Elem;
use anemone_schemas::manifest::{Drafter, Manifest};
use half::f16;

use crate::oracle::{self, Call, Outputs, Tensor as Apple};
use crate::reference::{Reference, check_inputs};

/// A walk through the model's own texts.
pub struct Walk {
    /// Prompts with the answers that plain greedy decoding gives.
    pub texts: Vec<Vec<u32>>,
    /// Of each text: 0 for docs, 1 for code, 2 for chat.
    pub domains: Vec<usize>,
    /// Drafts in order.
    pub cycles: Vec<Cycle>,
}

/// One draft of the reference.
pub struct Cycle {
    /// Which text.
    pub text: usize,
    /// Position of its newest token.
    pub anchor: usize,
    /// Guesses the text agrees with.
    pub kept: usize,
    /// First, second and third choice of each guess.
    pub ids: Vec<[u32; 3]>,
    /// Their probabilities.
    pub probabilities: Vec<[f32; 3]>,
    /// By how much the first logit exceeds the second, and the second the third.
    pub gaps: Vec<[f32; 2]>,
    /// Chance that each guess holds; none for a drafter that does not say.
    pub confidences: Vec<f32>,
}

impl Walk {
    /// The part of the walk through the first `texts` texts.
    #[must_use]
    pub fn first(mut self, texts: usize) -> Self {
        self.texts.truncate(texts);
        self.domains.truncate(texts);
        self.cycles.retain(|cycle| cycle.text < texts);
        self
    }

    /// Reads the reference `name`, made from the model in `model` and the drafter in
    /// `drafter`; `dflash` reads what the same weights guess as a DFlash drafter.
    ///
    /// # Panics
    /// If the files are not those the reference was made from.
    pub fn open(name: &str, model: &Path, drafter: &Path, dflash: bool) -> Self {
        let reference = Reference::open(name);
        check_inputs(&reference.metadata("inputs").parse().unwrap(), model);
        check_inputs(&reference.metadata("drafter").parse().unwrap(), drafter);
        let mut rest = reference.ints("tokens");
        let mut texts = Vec::new();
        for length in reference.ints("lengths") {
            let others = rest.split_off(length as usize);
            texts.push(rest);
            rest = others;
        }
        let prefix = if dflash { "dflash_" } else { "" };
        let column = |key: &str| reference.floats(&format!("{prefix}{key}"));
        let ids = reference.ints(&format!("{prefix}ids"));
        let anchors = reference.ints("anchors");
        let per = ids.len() / anchors.len();
        let (probabilities, gaps) = (column("probabilities"), column("gaps"));
        let confidences = if dflash {
            Vec::new()
        } else {
            column("confidences")
        };
        let (kept, of) = (reference.ints("kept"), reference.ints("texts"));
        let cycles = (0..anchors.len()).map(|i| Cycle {
            text: of[i] as usize,
            anchor: anchors[i] as usize,
            kept: kept[i] as usize,
            ids: ids[i * per..(i + 1) * per].as_chunks().0.to_vec(),
            probabilities: probabilities[i * per..(i + 1) * per].as_chunks().0.to_vec(),
            gaps: gaps[i * per / 3 * 2..(i + 1) * per / 3 * 2]
                .as_chunks()
                .0
                .to_vec(),
            confidences: confidences
                .chunks(per / 3)
                .nth(i)
                .unwrap_or_default()
                .to_vec(),
        });
        Self {
            cycles: cycles.collect(),
            domains: reference
                .ints("domains")
                .iter()
                .map(|&d| d as usize)
                .collect(),
            texts,
        }
    }

    /// The walk with `guesses` in the place of what the reference says, one draft for each
    /// cycle.
    #[must_use]
    pub fn told_by(mut self, guesses: &[Vec<Guess>]) -> Self {
        for (cycle, guesses) in self.cycles.iter_mut().zip(guesses) {
            let text = &self.texts[cycle.text];
            let all = guesses.iter().map(|g| {
                let [(two, p2), (three, p3)] = g.others;
                ([g.id, two, three], [g.probability, p2, p3])
            });
            (cycle.ids, cycle.probabilities) = all.unzip();
            let gaps = cycle.probabilities.iter();
            cycle.gaps = gaps.map(|[a, b, c]| [(a / b).ln(), (b / c).ln()]).collect();
            cycle.confidences = guesses.iter().map(|g| g.confidence).collect();
            cycle.kept = kept(text, cycle.anchor, guesses);
        }
        self
    }

    /// The cycles of a text.
    pub fn cycles_of(&self, text: usize) -> impl Iterator<Item = &Cycle> {
        self.cycles.iter().filter(move |c| c.text == text)
    }
}

/// The hidden states after the tapped layers as the chunk programs would give them out:
/// the f32 model's, rounded to f16. By tap, all rows one after the other.
///
/// # Panics
/// If the model cannot be run.
pub fn taps(weights: &dyn Weights, text: &[u32], layers: &[usize]) -> Vec<Vec<f16>> {
    let teacher = Teacher::new(weights);
    let mut hidden = teacher.embed(&[text.to_vec()]).unwrap();
    let mut taps = Vec::new();
    for layer in 0..=layers.iter().copied().max().unwrap_or(0) {
        teacher.block(layer, &mut hidden, None).unwrap();
        if layers.contains(&layer) {
            taps.push(hidden.0[0].iter().map(|&v| f16::from_f32(v)).collect());
        }
    }
    taps
}

/// Guesses that a text agrees with, up to the first that it does not.
pub fn kept(text: &[u32], anchor: usize, guesses: &[Guess]) -> usize {
    let agrees = |(j, g): &(usize, &Guess)| text.get(anchor + 1 + j) == Some(&g.id);
    guesses.iter().enumerate().take_while(agrees).count()
}

/// How guesses compare with the reference's.
#[derive(Debug, Default)]
pub struct Agreement {
    /// Guesses compared, up to the first of each draft that differs.
    pub guesses: usize,
    /// First choices that differ, all at near ties.
    pub firsts: usize,
    /// Second and third choices that differ, all at near ties.
    pub others: usize,
    /// Largest difference of probabilities.
    pub probability: f32,
    /// Largest difference of confidences.
    pub confidence: f32,
    /// Guesses kept by domain, and cycles by domain.
    pub kept: [[usize; 2]; 3],
}

/// Gap of two logits below which f16 products may order them otherwise. A product's
/// result is rounded to 11 bits, 0.008 for a logit around 16, after five layers of such.
pub const NEAR_TIE: f32 = 0.15;

impl Agreement {
    /// Takes in one draft.
    ///
    /// # Panics
    /// If it differs from the reference by more than f16 explains.
    pub fn add(&mut self, walk: &Walk, cycle: &Cycle, guesses: &[Guess]) {
        assert_eq!(guesses.len(), cycle.ids.len());
        let text = &walk.texts[cycle.text];
        let place = format!("text {} position {}", cycle.text, cycle.anchor);
        let kept = kept(text, cycle.anchor, guesses);
        let [sum, cycles] = &mut self.kept[walk.domains[cycle.text]];
        (*sum, *cycles) = (*sum + kept, *cycles + 1);
        for (j, guess) in guesses.iter().enumerate() {
            let ([first, second, third], [near, far]) = (cycle.ids[j], cycle.gaps[j]);
            self.guesses += 1;
            if let Some(&expected) = cycle.confidences.get(j) {
                self.confidence = self.confidence.max((guess.confidence - expected).abs());
            }
            if guess.id != first {
                assert!(near < NEAR_TIE, "{place} depth {j}: {guess:?}, gap {near}");
                self.firsts += 1;
                // What follows was guessed after another token.
                break;
            }
            let [(two, p2), (three, p3)] = guess.others;
            let found = [guess.probability, p2, p3];
            for (found, expected) in found.iter().zip(cycle.probabilities[j]) {
                self.probability = self.probability.max((found - expected).abs());
            }
            if two != second {
                let tie = near.min(far) < NEAR_TIE;
                assert!(tie, "{place} depth {j}: {guess:?}, gaps {near} {far}");
            }
            self.others += usize::from(two != second) + usize::from(three != third);
        }
    }

    /// Guesses kept in the mean, by domain.
    pub fn means(&self) -> [f64; 3] {
        self.kept
            .map(|[sum, cycles]| sum as f64 / cycles.max(1) as f64)
    }
}

/// Gives a drafter rows `from..to` of a text's taps, as calls of at most `width` rows
/// whose other rows are garbage.
///
/// # Panics
/// If the drafter refuses them.
pub fn extend(
    drafter: &mut ProgramDrafter,
    taps: &[Vec<f16>],
    from: usize,
    to: usize,
    width: usize,
) {
    let layers = drafter.info().taps.clone();
    let d = drafter.info().embedding.shape[1];
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

/// What our runtime guesses along a walk, with the taps of each text: a draft for each
/// cycle.
///
/// # Panics
/// If a draft fails.
pub fn our_guesses(folder: &Path, walk: &Walk, taps: &[Vec<Vec<f16>>]) -> Vec<Vec<Guess>> {
    let program = DrafterProgram::open(folder, 2).unwrap().expect("a drafter");
    let mut drafts = Vec::new();
    for (text, ids) in walk.texts.iter().enumerate() {
        let mut drafter = ProgramDrafter::new(&program);
        for cycle in walk.cycles_of(text) {
            let known = drafter.len();
            extend(&mut drafter, &taps[text], known, cycle.anchor, 64);
            drafts.push(drafter.propose(&ids[..=cycle.anchor], 64).unwrap());
        }
    }
    drafts
}

/// Our runtime along a walk, with the taps of each text.
///
/// # Panics
/// If a draft fails, or differs by more than f16 explains.
pub fn ours(folder: &Path, walk: &Walk, taps: &[Vec<Vec<f16>>]) -> Agreement {
    let drafts = our_guesses(folder, walk, taps);
    let mut found = Agreement::default();
    for (cycle, guesses) in walk.cycles.iter().zip(&drafts) {
        found.add(walk, cycle, guesses);
    }
    found
}

/// Inputs of a call, made from the manifest alone.
struct Inputs<'a> {
    info: &'a Drafter,
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

fn guesses(outputs: &Outputs) -> Vec<Guess> {
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

/// Apple's runtime along a walk: all texts in one run of the loader, each from states of
/// zeros and at the context its end needs.
///
/// # Panics
/// If the loader refuses the program, or a draft differs by more than f16 explains.
pub fn apples(folder: &Path, walk: &Walk, taps: &[Vec<Vec<f16>>]) -> Agreement {
    let manifest = Manifest::read(folder).unwrap();
    let info = manifest.drafter.as_ref().expect("a drafter");
    let inputs = Inputs {
        info,
        embedding: fs::read(folder.join(&info.embedding.path)).unwrap(),
        hidden: manifest.model.hidden,
    };
    let (mut calls, mut drafts) = (Vec::new(), Vec::new());
    for (text, ids) in walk.texts.iter().enumerate() {
        let longest = walk.cycles_of(text).map(|c| c.anchor).max().unwrap_or(0);
        let context = info
            .contexts
            .iter()
            .copied()
            .find(|&c| c >= longest)
            .unwrap();
        if walk.cycles_of(text).next().is_none() {
            continue;
        }
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
    let report = oracle::report(&folder.join(&info.path), &calls).unwrap();
    assert_eq!(report.compatibility.as_deref(), Some("27.0"));
    let mut found = Agreement::default();
    for (at, cycle) in drafts {
        found.add(walk, cycle, &guesses(&report.calls[at]));
    }
    found
}
