//! Whether drafting pays, and how many rows of it.
//!
//! A cycle costs the time of the drafter, of the target's programs and of the host, and
//! gives one token or more. Both ways of decoding are watched: the mean tokens and time
//! of cycles with drafts, and the mean time of cycles without, tried now and then.
//! Drafting is switched off when it is slower by more than a little, and at once when it
//! would be with every guess right. While off it is probed, and switched on again when it has
//! become faster: what is being written may have changed. Between two probes as much time
//! passes as makes what they lose a twentieth of it.
//!
//! Where rows are free, as on hardware with fixed shapes, all rows of a call are used.
//! Where they cost time, a row is worth that time only if the tokens it promises are
//! more than the same time gives otherwise:
//!
//! ```text
//! gain >= slope * tokens / time
//! ```
//!
//! with the slope of the programs' time over the number of rows, fitted to all cycles.

use std::collections::VecDeque;

/// Weight of the newest observation in a mean.
const NEWEST: f64 = 1.0 / 12.0;
/// Share of its weight that an observation of the fit keeps after another one.
const KEPT: f64 = 0.97;
/// Cycles with drafts before a judgement.
const LEAST: usize = 10;
/// Cycles whose median time counts.
const TIMES: usize = 9;
/// Cycles without drafts are tried at these cycles, and once in every so many: there
/// must be something to compare with.
const FIRST_PLAIN: [usize; 2] = [2, 8];
const PLAIN_EVERY: usize = 64;
/// Cycles with drafts in a probe, and cycles without between two, at least.
const PROBE: usize = 3;
const PAUSE: usize = 12;
/// Share of the time that probes may lose.
const LOST: f64 = 0.05;
/// Ratio of speeds that switches, so that noise does not.
const MARGIN: f64 = 1.04;
/// No observation of more than this many times the usual time counts.
const OUTLIER: f64 = 4.0;

/// One cycle as it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cycle {
    /// Whether the drafter was asked.
    pub(crate) drafted: bool,
    /// Rows of the call.
    pub(crate) rows: usize,
    /// Tokens it gave, and the one that a side told for the next.
    pub(crate) tokens: usize,
    /// Tokens it would have given with every guess right.
    pub(crate) most: usize,
    /// Milliseconds in the target's programs.
    pub(crate) verify: f64,
    /// Milliseconds of the whole cycle.
    pub(crate) whole: f64,
}

/// Mean tokens and median time of the last cycles of one kind: a machine that does
/// something else in between makes single cycles long, and says nothing about drafts.
#[derive(Clone, Debug, Default)]
struct Recent {
    cycles: usize,
    tokens: f64,
    times: VecDeque<f64>,
}

impl Recent {
    fn add(&mut self, tokens: usize, time: f64) {
        self.cycles += 1;
        // A plain mean until there are enough for a moving one.
        let weight = NEWEST.max(1.0 / self.cycles as f64);
        self.tokens += weight * (tokens as f64 - self.tokens);
        self.times.push_back(time);
        if self.times.len() > TIMES {
            self.times.pop_front();
        }
    }

    fn time(&self) -> f64 {
        let mut sorted: Vec<f64> = self.times.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len().saturating_sub(1) / 2;
        sorted.get(middle).copied().unwrap_or(0.0)
    }

    /// Tokens per millisecond.
    fn speed(&self) -> f64 {
        self.tokens / self.time().max(1e-9)
    }
}

/// Weighted sums of a straight line through (rows, milliseconds).
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    fn add(&mut self, x: f64, y: f64) {
        for sum in [
            &mut self.weight,
            &mut self.x,
            &mut self.y,
            &mut self.xx,
            &mut self.xy,
        ] {
            *sum *= KEPT;
        }
        self.weight += 1.0;
        self.x += x;
        self.y += y;
        self.xx += x * x;
        self.xy += x * y;
    }

    /// Milliseconds per row; 0 if rows seem free or nothing is known.
    fn slope(&self) -> f64 {
        let spread = self.weight * self.xx - self.x * self.x;
        // Rows that hardly differ tell nothing.
        if spread < 0.5 * self.weight * self.weight {
            return 0.0;
        }
        ((self.weight * self.xy - self.x * self.y) / spread).max(0.0)
    }
}

/// The controller of one session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pace {
    cycles: usize,
    off: bool,
    /// Milliseconds without drafts that the next probe waits for.
    rest: f64,
    drafting: Recent,
    plain: Recent,
    line: Line,
}

impl Pace {
    /// Whether the next cycle asks for drafts.
    pub(crate) fn drafts(&self) -> bool {
        if self.off {
            self.rest <= 0.0
        } else {
            !FIRST_PLAIN.contains(&self.cycles) && self.cycles % PLAIN_EVERY != PLAIN_EVERY - 1
        }
    }

    /// Tokens that a row must promise to be worth its time.
    pub(crate) fn least(&self) -> f32 {
        if self.drafting.cycles == 0 {
            return 0.0;
        }
        (self.line.slope() * self.drafting.speed().max(self.plain.speed())) as f32
    }

    /// Takes in a cycle; says why if drafting is switched off or on by it.
    pub(crate) fn record(&mut self, cycle: &Cycle) -> Option<(bool, String)> {
        self.cycles += 1;
        let alike = if cycle.drafted {
            &self.drafting
        } else {
            &self.plain
        };
        if alike.cycles < 3 || cycle.whole <= OUTLIER * alike.time() {
            self.line.add(cycle.rows as f64, cycle.verify);
        }
        if !cycle.drafted {
            self.plain.add(cycle.tokens, cycle.whole);
            self.rest -= cycle.whole;
            return None;
        }
        self.drafting.add(cycle.tokens, cycle.whole);
        if self.off {
            return self.judge_probe();
        }
        let plain = self.plain.speed();
        let at_best = cycle.most as f64 / self.drafting.time().max(1e-9);
        let hopeless = self.plain.cycles > 0 && at_best * MARGIN < plain;
        let known = self.plain.cycles >= FIRST_PLAIN.len() && self.drafting.cycles >= LEAST;
        if !(hopeless || known && self.drafting.speed() * MARGIN < plain) {
            return None;
        }
        let reason = self.reason();
        self.off = true;
        self.pause();
        Some((false, reason))
    }

    /// Forgets the drafts so far and waits.
    fn pause(&mut self) {
        let plain = self.plain.speed();
        let lost = self.drafting.time() - self.drafting.tokens / plain.max(1e-9);
        let least = PAUSE as f64 * self.plain.time();
        self.rest = (PROBE as f64 * lost / LOST).max(least);
        self.drafting = Recent::default();
    }

    fn judge_probe(&mut self) -> Option<(bool, String)> {
        if self.drafting.cycles < PROBE {
            return None;
        }
        let fast = self.drafting.speed() > self.plain.speed() * MARGIN;
        if fast {
            self.off = false;
            return Some((true, self.reason()));
        }
        self.pause();
        None
    }

    fn reason(&self) -> String {
        format!(
            "{:.2} tokens in {:.2} ms with drafts, {:.2} in {:.2} ms without",
            self.drafting.tokens,
            self.drafting.time(),
            self.plain.tokens,
            self.plain.time()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a call of `n` rows takes `base + slope n` and a draft
    /// `draft`; `tokens` come with drafts.
    struct Machine {
        base: f64,
        slope: f64,
        draft: f64,
        tokens: usize,
    }

    impl Machine {
        fn run(&self, pace: &mut Pace, cycles: usize) -> Vec<(bool, String)> {
            let mut switches = Vec::new();
            for _ in 0..cycles {
                let drafted = pace.drafts();
                let rows = if drafted { 16 } else { 2 };
                let verify = self.base + self.slope * rows as f64;
                switches.extend(pace.record(&Cycle {
                    drafted,
                    rows,
                    tokens: if drafted { self.tokens } else { 1 },
                    most: if drafted { 8 } else { 1 },
                    verify,
                    whole: verify + if drafted { self.draft } else { 0.0 },
                }));
            }
            switches
        }
    }

    #[test]
    fn drafts_that_pay_stay_on() {
        let fixed = Machine {
            base: 80.0,
            slope: 0.0,
            draft: 10.0,
            tokens: 3,
        };
        let mut pace = Pace::default();
        assert_eq!(fixed.run(&mut pace, 500), []);
        assert!(pace.least().abs() < 1e-6, "rows are free");
    }

    #[test]
    fn drafts_that_do_not_pay_go_off_and_come_back_when_they_do() {
        let mut machine = Machine {
            base: 2.0,
            slope: 1.0,
            draft: 6.0,
            tokens: 2,
        };
        let mut pace = Pace::default();
        let switches = machine.run(&mut pace, 100);
        assert_eq!(switches.len(), 1);
        assert!(!switches[0].0);
        assert_eq!(
            switches[0].1,
            "2.00 tokens in 24.00 ms with drafts, 1.00 in 4.00 ms without"
        );
        machine.tokens = 8;
        let switches = machine.run(&mut pace, 170);
        assert_eq!(switches.iter().map(|s| s.0).collect::<Vec<_>>(), [true]);
        // A row takes 1 ms, in which 8/24 tokens come otherwise.
        assert!((pace.least() - 1.0 / 3.0).abs() < 0.01, "{}", pace.least());
    }

    #[test]
    fn while_off_a_twentieth_is_lost_to_probes() {
        let machine = Machine {
            base: 2.0,
            slope: 1.0,
            draft: 6.0,
            tokens: 1,
        };
        let mut pace = Pace::default();
        machine.run(&mut pace, 50);
        let drafted = (0..2000).filter(|_| {
            let drafted = pace.drafts();
            machine.run(&mut pace, 1);
            drafted
        });
        let drafted = drafted.count() as f64;
        // 24 ms and 4 ms, a token each.
        let lost = drafted * 20.0 / (2000.0 * 4.0);
        assert!(drafted >= PROBE as f64 && lost <= LOST, "{drafted} cycles");
    }

    #[test]
    fn drafts_that_could_not_pay_with_every_guess_right_go_off_at_once() {
        let machine = Machine {
            base: 2.0,
            slope: 1.0,
            draft: 18.0,
            tokens: 8,
        };
        let mut pace = Pace::default();
        // Eight tokens in 36 ms, one in 4.
        let switches = machine.run(&mut pace, FIRST_PLAIN[0] + 2);
        assert_eq!(switches.iter().map(|s| s.0).collect::<Vec<_>>(), [false]);
    }
}
