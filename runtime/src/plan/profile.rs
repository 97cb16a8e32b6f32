//! Where the time of a call goes.
//!
//! Each step keeps the shortest time it took in any run: other work on the machine
//! makes a step slower and never faster, so the shortest of some runs is what the step
//! costs. On one thread it is processor time.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use super::Plan;
use super::kind::{Kind, Step, WeightsRef};

/// Steps of one kind in a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileEntry {
    /// What they do; for products with weights with their shape.
    pub name: String,
    /// How many there are.
    pub steps: usize,
    /// Shortest time of each, added up.
    pub seconds: f64,
    /// Bytes of weights that they read.
    pub bytes: usize,
    /// Weights they multiply with every row.
    pub weights: usize,
    /// Multiply-adds with weights.
    pub products: usize,
}

impl Plan {
    /// Time by kind of step, longest first, of the runs since this was asked last;
    /// empty if none was profiled. `live` is that of the runs
    /// ([`RunOptions`](super::RunOptions)), for the count of multiply-adds.
    pub fn profile(&self, live: Option<(usize, usize)>) -> Vec<ProfileEntry> {
        let times = std::mem::take(&mut *self.times.lock().unwrap_or_else(PoisonError::into_inner));
        let mut entries: BTreeMap<String, ProfileEntry> = BTreeMap::new();
        for (step, seconds) in self.steps.iter().zip(times.iter()) {
            let (name, [weights, products, bytes]) = describe(step, live);
            let entry = entries.entry(name.clone()).or_insert(ProfileEntry {
                name,
                steps: 0,
                seconds: 0.0,
                bytes: 0,
                weights: 0,
                products: 0,
            });
            entry.steps += 1;
            entry.seconds += seconds;
            entry.bytes += bytes;
            entry.weights += weights;
            entry.products += products;
        }
        let mut entries: Vec<ProfileEntry> = entries.into_values().collect();
        entries.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        entries
    }

    /// Takes in the seconds of every step of one run.
    pub(super) fn record(&self, seconds: &[f64]) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if times.is_empty() {
            times.extend(seconds);
        }
        for (best, &now) in times.iter_mut().zip(seconds) {
            *best = best.min(now);
        }
    }
}

/// Name of a step, and its weights, multiply-adds with them and their bytes.
fn describe(step: &Step, live: Option<(usize, usize)>) -> (String, [usize; 3]) {
    let name = step.kind.name();
    let Kind::WeightMatmul { weights, .. } = &step.kind else {
        return (name.to_owned(), [0; 3]);
    };
    let (rows, cols, bits, what) = match *weights {
        WeightsRef::Lut {
            rows, cols, bits, ..
        } => (rows, cols, usize::from(bits), format!("lut{bits}")),
        WeightsRef::Dense { rows, cols, .. } => (rows, cols, 16, "f16".to_owned()),
        WeightsRef::Int8 { rows, cols, .. } => (rows, cols, 8, "int8".to_owned()),
    };
    let count = rows * cols;
    let results: usize = step.shapes.iter().flatten().product();
    let tokens = match (results.checked_div(rows), live) {
        (Some(width), Some((of, live))) if width == of => live,
        (tokens, _) => tokens.unwrap_or(0),
    };
    (
        format!("{name} {rows}x{cols} {what}"),
        [count, count * tokens, count * bits / 8],
    )
}
