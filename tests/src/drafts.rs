//! Sources of drafts that are not drafters, and the prompts they are tried on.

use std::fs;

use anemone_runtime::Tensor;
use anemone_runtime::engine::{Draft, Engine, EngineError, Guess};
use anemone_schemas::tokenizer::ChatMessage;

use crate::line::questions;
use crate::reference::data;

/// Prompts of 1 to 250 tokens, so that 256 more cross from context 256 into 512: first
/// code, then docs, then chat.
///
/// # Panics
/// If the texts give fewer.
pub fn prompts(engine: &Engine, per_domain: usize) -> Vec<Vec<u32>> {
    /// Starts of prompts in a text.
    const STARTS: usize = 20;
    let mut prompts = Vec::new();
    for (domain, file) in ["text/eval_code.txt", "text/eval_docs.txt"]
        .iter()
        .enumerate()
    {
        let text = fs::read_to_string(data(file)).expect("checked in");
        let ids = engine.tokenizer().encode(&text, false).expect("text");
        for i in 0..per_domain.min(STARTS) {
            let length = 1 + (i * 131 + domain * 7) % 250;
            let start = i * (ids.len() - 300) / STARTS;
            prompts.push(ids[start..start + length].to_vec());
        }
    }
    let chats = questions().into_iter().filter_map(|q| {
        let message = ChatMessage {
            role: "user".into(),
            content: q,
        };
        let ids = engine.chat_prompt(&[message]).expect("a template");
        (ids.len() <= 250).then_some(ids)
    });
    prompts.extend(chats.take(per_domain));
    assert_eq!(prompts.len(), 3 * per_domain);
    prompts
}

/// Pseudo-random numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f32 {
        self.below(1 << 20) as f32 / (1 << 20) as f32
    }
}

/// A guess that is thought to be right.
pub fn guess(id: u32) -> Guess {
    Guess {
        id,
        probability: 0.6,
        others: [(0, 0.0); 2],
        confidence: 0.9,
    }
}

struct Scripted<F>(F);

impl<F: FnMut(&[u32], usize) -> Vec<Guess>> Draft for Scripted<F> {
    fn extend(&mut self, _: &[(usize, Tensor)], _: &[(usize, usize)]) -> Result<(), EngineError> {
        Ok(())
    }

    fn propose(&mut self, text: &[u32], most: usize) -> Result<Vec<Guess>, EngineError> {
        Ok(self.0(text, most))
    }
}

/// Guesses made by a function of the text and the number asked for.
pub fn scripted(
    script: impl FnMut(&[u32], usize) -> Vec<Guess> + Send + 'static,
) -> Option<Box<dyn Draft + Send>> {
    Some(Box::new(Scripted(script)))
}

/// Any ids with any numbers, now and then ids and numbers that cannot be.
pub fn random_drafts(seed: u64) -> Option<Box<dyn Draft + Send>> {
    let mut random = Random(seed);
    scripted(move |_, most| {
        let number = |r: &mut Random| match r.below(40) {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => -3.0,
            _ => r.unit(),
        };
        let id = |r: &mut Random| match r.below(200) {
            0 => u32::MAX,
            1 => 4095,
            _ => r.below(4090) as u32,
        };
        let longest = if random.below(8) == 0 { most + 4 } else { 5 };
        let n = random.below(longest);
        let r = &mut random;
        (0..n)
            .map(|_| Guess {
                id: id(r),
                probability: number(r),
                others: [(id(r), number(r)), (id(r), number(r))],
                confidence: number(r),
            })
            .collect()
    })
}

/// The true continuation.
pub fn oracle_drafts(truth: &[u32]) -> Option<Box<dyn Draft + Send>> {
    let truth = truth.to_vec();
    scripted(move |text, most| {
        let rest = &truth[text.len().min(truth.len())..];
        rest.iter().take(most).map(|&id| guess(id)).collect()
    })
}

/// Seven guesses of which each is right with a chance of 0.7; where one is wrong, the
/// second or third choice is right as often as not.
pub fn mixed_drafts(truth: &[u32], seed: u64) -> Option<Box<dyn Draft + Send>> {
    let truth = truth.to_vec();
    let mut random = Random(seed);
    scripted(move |text, most| {
        let rest = &truth[text.len().min(truth.len())..];
        let mut one = |&id: &u32| {
            let wrong = |r: &mut Random| (id + 1 + r.below(4000) as u32) % 4090;
            let r = &mut random;
            let right = r.unit() < 0.7;
            let mut g = Guess {
                id: if right { id } else { wrong(r) },
                probability: 0.2 + 0.6 * r.unit(),
                others: [(wrong(r), 0.1 * r.unit()), (wrong(r), 0.05 * r.unit())],
                confidence: if right {
                    0.6 + 0.4 * r.unit()
                } else {
                    0.6 * r.unit()
                },
            };
            if !right && r.below(2) == 0 {
                let which = r.below(2);
                g.others[which].0 = id;
            }
            g
        };
        rest.iter().take(most.min(7)).map(&mut one).collect()
    })
}
