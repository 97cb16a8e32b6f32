//! Where the distance comes from: positions, contexts, layers, matrices.

use anemone_schemas::report::{
    Choice, MatrixQuality, PositionKl, Student, TableSample, WorstContext,
};
use anemone_schemas::store::Store;
use anemone_schemas::tokenizer::TokenizerFolder;

use crate::error::Error;

/// Positions that are reported for each text set.
const WORST: usize = 5;
/// Tokens that are reported for each of them.
const CHOICES: usize = 5;
/// Tokens of a context that are shown.
const CONTEXT: usize = 24;
/// Tables that are shown for a store.
const TABLES: usize = 6;

/// Mean divergence by position in the window: of the first position, and of ranges from each
/// power of two to the next.
pub(super) fn positions(divergences: &[f64], windows: &[usize]) -> Vec<PositionKl> {
    let mut sums: Vec<(u64, f64)> = Vec::new();
    let mut rest = divergences;
    for &length in windows {
        let (own, others) = rest.split_at(length);
        rest = others;
        for (position, kl) in own.iter().enumerate() {
            let range = position.checked_ilog2().map_or(0, |n| n as usize + 1);
            if range >= sums.len() {
                sums.resize(range + 1, (0, 0.0));
            }
            sums[range].0 += 1;
            sums[range].1 += kl;
        }
    }
    let longest = windows.iter().copied().max().unwrap_or(0);
    sums.into_iter()
        .enumerate()
        .map(|(range, (tokens, sum))| PositionKl {
            from: (1 << range) / 2,
            to: longest.min(1 << range),
            tokens,
            kl_mean: sum / tokens as f64,
        })
        .collect()
}

/// The positions of a text set at which two models differ most.
#[derive(Default)]
pub(super) struct Worst(Vec<Found>);

struct Found {
    window: usize,
    position: usize,
    kl: f64,
    teacher: Vec<(u32, f64)>,
    student: Vec<(u32, f64)>,
}

impl Worst {
    /// Looks at a window: divergence by position, and the logits of both models, `vocab` a row
    /// of which the first `valid` count.
    pub(super) fn look(
        &mut self,
        window: usize,
        divergences: &[f64],
        (teacher, student): (&[f32], &[f32]),
        vocab: usize,
        valid: usize,
    ) {
        for (position, &kl) in divergences.iter().enumerate() {
            if self.0.len() == WORST && self.0[WORST - 1].kl >= kl {
                continue;
            }
            let row = position * vocab..position * vocab + valid.min(vocab);
            let found = Found {
                window,
                position,
                kl,
                teacher: likeliest(&teacher[row.clone()]),
                student: likeliest(&student[row]),
            };
            let at = self.0.partition_point(|f| f.kl >= kl);
            self.0.insert(at, found);
            self.0.truncate(WORST);
        }
    }

    /// With text in place of ids.
    pub(super) fn read(
        self,
        windows: &[Vec<u32>],
        tokenizer: &TokenizerFolder,
    ) -> Result<Vec<WorstContext>, Error> {
        let text = |ids: &[u32]| tokenizer.decode(ids, false);
        let choices = |ids: &[(u32, f64)]| -> Result<Vec<Choice>, Error> {
            ids.iter()
                .map(|&(id, probability)| {
                    Ok(Choice {
                        token: text(&[id])?,
                        probability,
                    })
                })
                .collect()
        };
        self.0
            .iter()
            .map(|f| {
                let ids = &windows[f.window];
                let end = f.position + 1;
                Ok(WorstContext {
                    window: f.window,
                    position: f.position,
                    kl: f.kl,
                    context: text(&ids[end.saturating_sub(CONTEXT)..end])?,
                    next: ids.get(end).map(|&id| text(&[id])).transpose()?,
                    teacher: choices(&f.teacher)?,
                    student: choices(&f.student)?,
                })
            })
            .collect()
    }
}

/// The likeliest ids with their probabilities; of equal ones, the smaller id first.
fn likeliest(logits: &[f32]) -> Vec<(u32, f64)> {
    let mut best: Vec<usize> = Vec::with_capacity(CHOICES + 1);
    for (id, logit) in logits.iter().enumerate() {
        let at = best.partition_point(|&other| logits[other] >= *logit);
        if at < CHOICES {
            best.insert(at, id);
            best.truncate(CHOICES);
        }
    }
    let top = best.first().map_or(0.0, |&id| f64::from(logits[id]));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - top).exp()).sum();
    best.into_iter()
        .map(|id| (id as u32, (f64::from(logits[id]) - top).exp() / sum))
        .collect()
}

/// Distance of hidden states from the teacher's, relative to the norm of the teacher's.
pub(super) fn relative(teacher: &[Vec<f32>], student: &[Vec<f32>]) -> f64 {
    let (mut distance, mut norm) = (0.0, 0.0);
    for (t, s) in teacher.iter().flatten().zip(student.iter().flatten()) {
        distance += f64::from(s - t).powi(2);
        norm += f64::from(*t).powi(2);
    }
    (distance / norm).sqrt()
}

/// Adds what the student's store says of its matrices, and the first table of those with the
/// largest relative error.
pub(super) fn add_store(student: &mut Student, store: &Store) -> Result<(), Error> {
    let records = &store.manifest().matrices;
    student.matrices = records
        .iter()
        .map(|r| MatrixQuality {
            name: r.name.clone(),
            bits: r.bits,
            method: r.report.method.clone(),
            plain_error: r.report.plain_error,
            weighted_error: r.report.weighted_error,
            fallback: r.report.fallback.clone(),
        })
        .collect();
    let mut by_error: Vec<_> = records.iter().collect();
    by_error.sort_by(|a, b| b.report.plain_error.total_cmp(&a.report.plain_error));
    for record in by_error.into_iter().take(TABLES) {
        student.tables.push(TableSample {
            matrix: record.name.clone(),
            group: 0,
            values: store.load_lut(&record.name)?.table(0),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_fall_into_ranges_that_double() {
        let found = positions(&[8.0, 1.0, 2.0, 4.0, 16.0, 3.0], &[4, 2]);
        let flat: Vec<_> = found
            .iter()
            .map(|p| (p.from, p.to, p.tokens, p.kl_mean))
            .collect();
        assert_eq!(flat, [(0, 1, 2, 12.0), (1, 2, 2, 2.0), (2, 4, 2, 3.0)]);
    }

    #[test]
    fn the_worst_positions_come_with_the_likeliest_tokens() {
        let mut worst = Worst::default();
        let logits: Vec<f32> = (0..8 * 10).map(|i| (i * 7 % 10) as f32).collect();
        let kl = [0.1, 0.9, 0.3, 0.2, 0.8, 0.7, 0.0, 0.4];
        worst.look(0, &kl, (&logits, &logits), 10, 9);
        worst.look(1, &[0.85, 0.05], (&logits, &logits), 10, 9);
        let places: Vec<_> = worst.0.iter().map(|f| (f.window, f.position)).collect();
        assert_eq!(places, [(0, 1), (1, 0), (0, 4), (0, 5), (0, 7)]);
        // Ids 0 to 8 have logits 0, 7, 4, 1, 8, 5, 2, 9, 6; the ninth is padding.
        let ids: Vec<u32> = worst.0[0].teacher.iter().map(|c| c.0).collect();
        assert_eq!(ids, [7, 4, 1, 8, 5]);
        let total: f64 = (0..9).map(|i| f64::from(i * 7 % 10).exp()).sum();
        assert!((worst.0[0].student[0].1 - 9f64.exp() / total).abs() < 1e-12);
    }

    #[test]
    fn distance_is_relative_to_the_teachers_norm() {
        let error = relative(&[vec![3.0], vec![4.0]], &[vec![3.0], vec![4.5]]);
        assert!((error - 0.1).abs() < 1e-12);
    }
}
