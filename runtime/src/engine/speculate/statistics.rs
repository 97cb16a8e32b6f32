//! What a request cost and what drafts gave it.

use std::time::Duration;

use serde::Serialize;

use super::plan::Plan;
use super::walk::Walk;

/// Counts and times of one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Prompt tokens that were processed.
    pub prompt_tokens: usize,
    /// Prompt tokens that the cache held already.
    pub cached_tokens: usize,
    /// Verify calls: cycles with guesses or without.
    pub cycles: usize,
    /// Cycles that asked for no drafts: switched off, a probe of the plain speed, or no
    /// room.
    pub plain_cycles: usize,
    /// Tokens of the cycles, the target's own choices included.
    pub tokens: usize,
    /// Drafted tokens that became text, and tokens known from side hits. The token that
    /// every cycle gives anyway, the target's own choice, is not counted.
    pub accepted: usize,
    /// Cycles that ended at a side, whose row told the next token.
    pub side_hits: usize,
    /// Rows spent on guesses of the chain.
    pub chain_rows: usize,
    /// Rows spent on sides.
    pub side_rows: usize,
    /// Rows of tokens that were in the cache already.
    pub replays: usize,
    /// From the prompt to the first token.
    #[serde(rename = "prompt_ms", serialize_with = "milliseconds")]
    pub prompt_time: Duration,
    /// Time of all cycles, without what the receiver of the tokens took.
    #[serde(rename = "decode_ms", serialize_with = "milliseconds")]
    pub decode_time: Duration,
    /// The part of it that the drafter took.
    #[serde(rename = "draft_ms", serialize_with = "milliseconds")]
    pub draft_time: Duration,
    /// The part of it in the target's programs.
    #[serde(rename = "verify_ms", serialize_with = "milliseconds")]
    pub verify_time: Duration,
    /// By depth of the chain, from 1.
    pub depths: Vec<Depth>,
    /// When drafting was switched off and on again, at most the first 16 times.
    pub switches: Vec<Switch>,
}

/// What became of the guesses at one depth of the chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Depth {
    /// Walks that came to a guess here.
    pub reached: usize,
    /// Guesses that were right.
    pub right: usize,
    /// Sides that were right where the guess was wrong.
    pub side_hits: usize,
}

/// Drafting switched off or on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Switch {
    /// Cycles before it.
    pub cycle: usize,
    /// Whether it was switched on.
    pub on: bool,
    /// What was measured.
    pub reason: String,
}

fn milliseconds<S: serde::Serializer>(d: &Duration, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_f64(d.as_secs_f64() * 1e3)
}

impl Statistics {
    /// Time of all cycles outside the drafter and the target's programs.
    pub fn host_time(&self) -> Duration {
        self.decode_time
            .saturating_sub(self.draft_time + self.verify_time)
    }

    /// Mean of accepted tokens over all cycles, the target's own choice not counted.
    pub fn accepted_per_cycle(&self) -> f64 {
        if self.cycles == 0 {
            return 0.0;
        }
        self.accepted as f64 / self.cycles as f64
    }

    /// Tokens per second of the cycles.
    pub fn tokens_per_second(&self) -> f64 {
        let seconds = self.decode_time.as_secs_f64();
        if seconds > 0.0 {
            self.tokens as f64 / seconds
        } else {
            0.0
        }
    }

    /// Takes in a cycle; the first `presumed` tokens of its chain came from a side.
    pub(crate) fn count(&mut self, plan: &Plan, walk: &Walk, presumed: usize) {
        self.cycles += 1;
        self.tokens += walk.new.len();
        self.accepted += walk.new.len() - 1;
        self.chain_rows += plan.chain.len();
        self.side_rows += plan.sides.len();
        self.replays += plan.root;
        for depth in presumed + 1..=plan.chain.len().min(walk.right + 1) {
            let counts = self.depth(depth - presumed);
            counts.reached += 1;
            counts.right += usize::from(depth <= walk.right);
        }
        if walk.side.is_some() {
            self.side_hits += 1;
            self.depth(walk.right + 1 - presumed).side_hits += 1;
        }
    }

    /// The text ended after `used` of the `all` tokens of the last cycle.
    pub(crate) fn cut(&mut self, all: usize, used: usize) {
        self.tokens = self.tokens.saturating_sub(all - used);
        self.accepted = self.accepted.saturating_sub((all - 1).saturating_sub(used));
    }

    /// The entry of a depth, from 1.
    fn depth(&mut self, depth: usize) -> &mut Depth {
        if self.depths.len() < depth {
            self.depths.resize(depth, Depth::default());
        }
        &mut self.depths[depth - 1]
    }

    pub(crate) fn switched(&mut self, on: bool, reason: String) {
        if self.switches.len() < 16 {
            self.switches.push(Switch {
                cycle: self.cycles,
                on,
                reason,
            });
        }
    }
}
