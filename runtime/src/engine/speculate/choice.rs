//! What the rows of a call are spent on.
//!
//! With `c_k` the chance that guess `k` is right if those before it are, the walk
//! reaches depth `k` with chance `reach_k = c_1 ... c_{k-1}`. Expected tokens of a row:
//!
//! ```text
//! guess k                    reach_k c_k
//! other choice x at depth k  reach_k (1 - c_k) p_x / (1 - p_k)
//! ```
//!
//! where `p` are the drafter's probabilities: `p_x / (1 - p_k)` is the chance of `x`
//! once guess `k` is known to be wrong. The rows with the largest gains are taken. A
//! guess gains no less than anything deeper, so what is taken is always a tree.
//!
//! Drafters are too sure of themselves, and what they are sure of is agreement under
//! sampling, not under greedy choice. So both chances are corrected by what has been
//! seen: the range of a stated chance is cut into bins, and the bin's true share takes
//! over from the stated value as observations come in.

use super::plan::Side;
use crate::engine::Guess;

/// Depths that are told apart; deeper ones count as the last.
const DEPTHS: usize = 8;
const BINS: usize = 10;
/// Observations that weigh as much as what the drafter states.
const PRIOR: f32 = 8.0;

/// The chain and the sides of a call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Choice {
    pub(crate) chain: Vec<u32>,
    pub(crate) sides: Vec<Side>,
}

/// Picks the rows that are worth most, at most `free` and each worth at least `least`
/// tokens.
pub(crate) fn choose(
    guesses: &[Guess],
    calibration: &Calibration,
    sides: bool,
    free: usize,
    least: f32,
) -> Choice {
    let mut rows: Vec<(f32, usize, Option<Side>)> = Vec::new();
    let mut reach = 1.0;
    for (depth, guess) in (1..).zip(guesses) {
        let right = calibration.confidence(depth, guess);
        rows.push((reach * right, depth, None));
        for (rank, &(id, _)) in guess.others.iter().enumerate() {
            let same = id == guess.id || rank > 0 && id == guess.others[0].0;
            let hit = calibration.hit(rank, guess);
            if sides && !same && hit > 0.0 {
                let side = Side { depth, id, rank };
                rows.push((reach * (1.0 - right) * hit, depth, Some(side)));
            }
        }
        reach *= right;
    }
    // Stable, so that at the same gain and depth the guess comes before its sides.
    rows.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut choice = Choice::default();
    for (gain, depth, side) in rows.into_iter().take(free) {
        if gain < least {
            break;
        }
        match side {
            Some(side) => choice.sides.push(side),
            None => choice.chain.push(guesses[depth - 1].id),
        }
    }
    choice
}

/// A chance as stated by a drafter: within 0 and 1, whatever it was.
fn chance(stated: f32) -> f32 {
    if stated.is_nan() {
        0.0
    } else {
        stated.clamp(0.0, 1.0)
    }
}

/// What became of stated chances.
#[derive(Clone, Debug, Default)]
pub(crate) struct Calibration {
    /// By depth and stated chance.
    chain: [[Seen; BINS]; DEPTHS],
    /// By rank and stated chance.
    sides: [[Seen; BINS]; 2],
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    times: f32,
    hits: f32,
}

impl Seen {
    fn record(&mut self, hit: bool) {
        self.times += 1.0;
        self.hits += f32::from(u8::from(hit));
    }

    fn corrected(self, stated: f32) -> f32 {
        (PRIOR * stated + self.hits) / (PRIOR + self.times)
    }
}

fn bin(chance: f32) -> usize {
    ((chance * BINS as f32) as usize).min(BINS - 1)
}

impl Calibration {
    fn confidence(&self, depth: usize, guess: &Guess) -> f32 {
        let stated = chance(guess.confidence);
        self.chain[depth.min(DEPTHS) - 1][bin(stated)].corrected(stated)
    }

    /// Chance that the other choice of a rank is right if the guess is wrong; 0 if
    /// there is no such choice.
    fn hit(&self, rank: usize, guess: &Guess) -> f32 {
        let stated = stated_hit(rank, guess);
        if stated > 0.0 {
            self.sides[rank][bin(stated)].corrected(stated)
        } else {
            0.0
        }
    }

    /// Records the guesses that a walk came to: the first `right` were right, and after
    /// them the target chose `wanted`.
    pub(crate) fn record(&mut self, guesses: &[Guess], right: usize, wanted: u32) {
        for (depth, guess) in (1..=right + 1).zip(guesses) {
            let agreed = depth <= right || guess.id == wanted;
            let stated = chance(guess.confidence);
            self.chain[depth.min(DEPTHS) - 1][bin(stated)].record(agreed);
            for (rank, &(id, _)) in guess.others.iter().enumerate() {
                let stated = stated_hit(rank, guess);
                if !agreed && stated > 0.0 {
                    self.sides[rank][bin(stated)].record(id == wanted);
                }
            }
        }
    }
}

fn stated_hit(rank: usize, guess: &Guess) -> f32 {
    let rest = (1.0 - chance(guess.probability)).max(1e-6);
    chance(chance(guess.others[rank].1) / rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(id: u32, confidence: f32, second: f32, third: f32) -> Guess {
        Guess {
            id,
            probability: 0.5,
            others: [(id + 100, second), (id + 200, third)],
            confidence,
        }
    }

    fn ids(choice: &Choice) -> (Vec<u32>, Vec<u32>) {
        let sides = choice.sides.iter().map(|s| s.id);
        (choice.chain.clone(), sides.collect())
    }

    #[test]
    fn rows_go_where_they_gain_most() {
        let guesses = [
            guess(1, 0.9, 0.25, 0.1),
            guess(2, 0.2, 0.4, 0.0),
            guess(3, 0.9, 0.3, 0.1),
        ];
        let none = Calibration::default();
        let chosen = |free| ids(&choose(&guesses, &none, true, free, 0.0));
        // Gains: 0.9, 0.18, 0.162 for the chain; 0.05, 0.02 at depth 1, 0.576 at depth
        // 2, 0.0108, 0.0036 at depth 3.
        assert_eq!(chosen(1), (vec![1], vec![]));
        assert_eq!(chosen(2), (vec![1], vec![102]));
        assert_eq!(chosen(5), (vec![1, 2, 3], vec![102, 101]));
        assert_eq!(chosen(15), (vec![1, 2, 3], vec![102, 101, 201, 103, 203]));
        let worth = choose(&guesses, &none, true, 15, 0.1);
        assert_eq!(ids(&worth), (vec![1, 2, 3], vec![102]));
        let chain = choose(&guesses, &none, false, 15, 0.0);
        assert_eq!(ids(&chain), (vec![1, 2, 3], vec![]));
    }

    #[test]
    fn whatever_a_drafter_states_what_is_taken_is_a_tree() {
        let odd = [f32::NAN, -1.0, 0.0, 0.5, 1.0, 7.0, f32::INFINITY];
        for a in odd {
            for b in odd {
                for c in odd {
                    let mut guesses = vec![guess(1, a, b, c), guess(2, b, c, a), guess(3, c, a, b)];
                    guesses[1].probability = a;
                    for free in 0..10 {
                        let choice = choose(&guesses, &Calibration::default(), true, free, 0.0);
                        assert!(choice.chain.len() + choice.sides.len() <= free);
                        assert!([1, 2, 3].starts_with(&choice.chain));
                        let deepest = choice.sides.iter().map(|s| s.depth).max();
                        assert!(deepest.unwrap_or(1) <= choice.chain.len() + 1);
                    }
                }
            }
        }
    }

    #[test]
    fn stated_chances_give_way_to_what_is_seen() {
        let mut seen = Calibration::default();
        let guesses = [guess(1, 0.95, 0.4, 0.05)];
        for i in 0..400 {
            // Right three times in four; if not, the second choice is right once in two.
            let (right, wanted) = match i % 8 {
                0 => (0, 101),
                1 => (0, 9),
                _ => (1, 9),
            };
            seen.record(&guesses, right, wanted);
        }
        assert!((seen.confidence(1, &guesses[0]) - 0.75).abs() < 0.01);
        assert!((seen.hit(0, &guesses[0]) - 0.5).abs() < 0.05);
        assert!(seen.hit(1, &guesses[0]) < 0.02);
        // Another depth and another bin are as stated.
        assert!((seen.confidence(2, &guesses[0]) - 0.95).abs() < 1e-6);
    }
}
