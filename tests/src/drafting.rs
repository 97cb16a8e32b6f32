//! What the PyTorch reference of a drafter says, as `reference/make_drafter_references.py`
//! wrote it to `data/references`, and how a runtime's guesses are held against it.

use std::path::Path;

use anemone_calib::{Teacher, Weights};
use anemone_runtime::engine::Guess;
use half::f16;

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
        let agrees = |(j, g): &(usize, &Guess)| text.get(cycle.anchor + 1 + j) == Some(&g.id);
        let kept = guesses.iter().enumerate().take_while(agrees).count();
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
