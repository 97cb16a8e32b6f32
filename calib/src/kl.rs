//! How far a student's next-token distribution is from the teacher's.
//!
//! For one position, `KL = Σ p (ln p - ln q)` over the ids the tokenizer knows, with
//! `p` the teacher's and `q` the student's softmax; unit: nats. Logits are f32,
//! everything from there on is f64, and no logits are stored: both models are run side
//! by side (16-bit files of clipped logits bias the result for large vocabularies).

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::Error;

/// Collects the divergence of positions one by one.
#[derive(Debug, Default)]
pub struct Kl {
    divergences: Vec<f64>,
    same_top: u64,
    targets: u64,
    teacher_nll: f64,
    student_nll: f64,
}

/// What [`Kl`] found. Quantiles interpolate linearly between order statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KlSummary {
    /// Positions compared.
    pub tokens: u64,
    /// Mean divergence.
    pub mean: f64,
    /// Standard error of the mean, as if positions were independent; neighbours are
    /// not quite, so the true one is somewhat larger.
    pub stderr: f64,
    /// Half-width of the 95 % confidence interval of the mean: `1.96 * stderr`.
    pub ci95: f64,
    /// Half of the positions diverge less.
    pub median: f64,
    /// 90 % of the positions diverge less.
    pub p90: f64,
    /// 99 % of the positions diverge less.
    pub p99: f64,
    /// 99.9 % of the positions diverge less.
    pub p999: f64,
    /// The largest divergence.
    pub max: f64,
    /// Share of positions where both models prefer the same id.
    pub top1: f64,
    /// Perplexity of the text under the teacher; absent if no next ids were given.
    pub ppl_teacher: Option<f64>,
    /// Perplexity of the text under the student.
    pub ppl_student: Option<f64>,
}

/// One position's comparison.
struct Position {
    divergence: f64,
    same_top: bool,
    /// Negative log-likelihood of the next id under teacher and student.
    nll: Option<[f64; 2]>,
}

impl Kl {
    /// Nothing compared yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Compares one position. `valid_vocab` is the tokenizer's size: ids above it are
    /// padding rows of the embedding table and take no part. `target` is the id that
    /// follows in the text, if any.
    ///
    /// # Errors
    /// [`Error::BadLogits`] if a logit is not finite, or [`Error::Length`].
    pub fn add(
        &mut self,
        teacher: &[f32],
        student: &[f32],
        valid_vocab: usize,
        target: Option<u32>,
    ) -> Result<(), Error> {
        self.add_rows(teacher, student, teacher.len(), valid_vocab, &[target])
    }

    /// Compares many positions, `[targets.len(), vocab]` logits of each model, on all
    /// threads; the result is that of [`Self::add`] row by row.
    ///
    /// # Errors
    /// As [`Self::add`]; nothing is taken in then.
    pub fn add_rows(
        &mut self,
        teacher: &[f32],
        student: &[f32],
        vocab: usize,
        valid_vocab: usize,
        targets: &[Option<u32>],
    ) -> Result<(), Error> {
        let check = |what, expected: usize, found: usize| {
            if expected == found {
                return Ok(());
            }
            Err(Error::Length {
                what,
                expected,
                found,
            })
        };
        check("the teacher's logits", vocab * targets.len(), teacher.len())?;
        check("the student's logits", vocab * targets.len(), student.len())?;
        let valid = valid_vocab.min(vocab);
        check("the valid vocabulary", valid_vocab.max(1), valid)?;
        let before = self.divergences.len();
        let positions: Vec<Position> = teacher
            .par_chunks_exact(vocab)
            .zip(student.par_chunks_exact(vocab))
            .zip(targets)
            .enumerate()
            .map(|(at, ((teacher, student), target))| {
                compare(&teacher[..valid], &student[..valid], *target).map_err(|model| {
                    Error::BadLogits {
                        model,
                        token: before + at,
                    }
                })
            })
            .collect::<Result<_, _>>()?;
        for position in positions {
            self.divergences.push(position.divergence);
            self.same_top += u64::from(position.same_top);
            if let Some([teacher, student]) = position.nll {
                self.targets += 1;
                self.teacher_nll += teacher;
                self.student_nll += student;
            }
        }
        Ok(())
    }

    /// The divergence of each position, in the order they were compared.
    pub fn divergences(&self) -> &[f64] {
        &self.divergences
    }

    /// The summary, or `None` if nothing was compared.
    pub fn summary(&self) -> Option<KlSummary> {
        let n = self.divergences.len();
        if n == 0 {
            return None;
        }
        let mean = self.divergences.iter().sum::<f64>() / n as f64;
        let square = |x: &f64| (x - mean).powi(2);
        let variance = self.divergences.iter().map(square).sum::<f64>() / (n.max(2) - 1) as f64;
        let stderr = (variance / n as f64).sqrt();
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        let quantile = |q: f64| {
            let at = q * (n - 1) as f64;
            let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
            low + (high - low) * at.fract()
        };
        let perplexity = |nll: f64| (self.targets > 0).then(|| (nll / self.targets as f64).exp());
        Some(KlSummary {
            tokens: n as u64,
            mean,
            stderr,
            ci95: 1.96 * stderr,
            median: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: sorted[n - 1],
            top1: self.same_top as f64 / n as f64,
            ppl_teacher: perplexity(self.teacher_nll),
            ppl_student: perplexity(self.student_nll),
        })
    }
}

/// Compares one position. The error is whose logits are bad.
fn compare(
    teacher: &[f32],
    student: &[f32],
    target: Option<u32>,
) -> Result<Position, &'static str> {
    let (p_top, p_norm) = normalizer(teacher).ok_or("teacher")?;
    let (q_top, q_norm) = normalizer(student).ok_or("student")?;
    let divergence: f64 = teacher
        .iter()
        .zip(student)
        .map(|(&t, &s)| {
            let (ln_p, ln_q) = (f64::from(t) - p_norm, f64::from(s) - q_norm);
            ln_p.exp() * (ln_p - ln_q)
        })
        .sum();
    let nll = target.and_then(|id| {
        let (t, s) = (teacher.get(id as usize)?, student.get(id as usize)?);
        Some([p_norm - f64::from(*t), q_norm - f64::from(*s)])
    });
    Ok(Position {
        // It is never negative but for rounding.
        divergence: divergence.max(0.0),
        same_top: p_top == q_top,
        nll,
    })
}

/// Index of the largest logit (the first if several) and `ln Σ e^logit`.
fn normalizer(logits: &[f32]) -> Option<(usize, f64)> {
    let mut top = 0;
    for (id, logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return None;
        }
        if *logit > logits[top] {
            top = id;
        }
    }
    let max = f64::from(*logits.get(top)?);
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
    Some((top, max + sum.ln()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(seed: usize, n: usize) -> Vec<f32> {
        (0..n)
            .map(|i| ((i * 31 + seed * 17) % 101) as f32 / 9.0)
            .collect()
    }

    #[test]
    fn two_outcomes_have_the_divergence_of_two_coins() {
        // p = 3/4, 1/4; q = 1/2, 1/2: KL = 3/4 ln(3/2) + 1/4 ln(1/2).
        let mut kl = Kl::new();
        let teacher = [3f32.ln(), 0.0, 1e4];
        kl.add(&teacher, &[7.0, 7.0, -5.0], 2, Some(0)).unwrap();
        let found = kl.summary().unwrap();
        let exact = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((found.mean - exact).abs() < 1e-7, "{found:?}");
        assert!((found.ppl_teacher.unwrap() - 4.0 / 3.0).abs() < 1e-6);
        assert!((found.ppl_student.unwrap() - 2.0).abs() < 1e-12);
        assert_eq!(
            (found.tokens, found.max.to_bits()),
            (1, found.mean.to_bits())
        );
    }

    #[test]
    fn equal_models_do_not_diverge_even_if_logits_are_shifted() {
        let mut kl = Kl::new();
        for seed in 0..20 {
            let teacher = logits(seed, 1000);
            let student: Vec<f32> = teacher.iter().map(|x| x + 64.0).collect();
            kl.add(&teacher, &teacher, 990, Some(3)).unwrap();
            kl.add(&teacher, &student, 990, Some(995)).unwrap();
        }
        let found = kl.summary().unwrap();
        assert!(found.max < 1e-9, "{found:?}");
        assert_eq!((found.top1.to_bits(), found.tokens), (1f64.to_bits(), 40));
    }

    #[test]
    fn order_statistics_and_errors_of_known_divergences() {
        let kl = Kl {
            divergences: (0..=1000).rev().map(|i| f64::from(i) / 1000.0).collect(),
            ..Kl::new()
        };
        let found = kl.summary().unwrap();
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        close(found.mean, 0.5);
        close(found.median, 0.5);
        close(found.p90, 0.9);
        close(found.p99, 0.99);
        close(found.p999, 0.999);
        // Variance of 0..=n by steps of 1/n is (n + 1)(n + 2) / 12n², here n = 1000.
        let variance: f64 = 1001.0 * 1002.0 / 12e6;
        close(found.stderr, (variance / 1001.0).sqrt());
        close(found.ci95, 1.96 * found.stderr);
        assert_eq!((found.ppl_teacher, found.top1.to_bits()), (None, 0));
        assert_eq!(Kl::new().summary(), None);
    }

    #[test]
    fn rows_together_are_rows_one_by_one() {
        let (a, b) = (logits(1, 900), logits(2, 900));
        let targets: Vec<Option<u32>> = (0..9).map(|i| (i % 2 == 0).then_some(i)).collect();
        let (mut together, mut single) = (Kl::new(), Kl::new());
        together.add_rows(&a, &b, 100, 97, &targets).unwrap();
        for (row, target) in targets.iter().enumerate() {
            let row = row * 100..(row + 1) * 100;
            single.add(&a[row.clone()], &b[row], 97, *target).unwrap();
        }
        assert_eq!(together.summary(), single.summary());
    }

    #[test]
    fn bad_logits_are_refused_and_padding_is_not_looked_at() {
        let mut kl = Kl::new();
        kl.add(&[1.0, 2.0, f32::NAN], &[1.0, 2.0, f32::INFINITY], 2, None)
            .unwrap();
        let error = kl.add(&[1.0, 2.0], &[1.0, f32::NAN], 2, None).unwrap_err();
        assert!(matches!(
            error,
            Error::BadLogits {
                model: "student",
                token: 1
            }
        ));
        assert!(kl.add(&[1.0, 2.0], &[1.0], 2, None).is_err());
        assert!(kl.add(&[1.0], &[1.0], 2, None).is_err());
        assert!(kl.add(&[1.0], &[1.0], 0, None).is_err());
        assert_eq!(kl.summary().unwrap().tokens, 1);
    }
}
