//! Seconds by step and by matrix.

use std::collections::BTreeMap;
use std::time::Instant;

use anemone_schemas::report::{MatrixEffort, QuantizeReport, REPORT_VERSION};
use anemone_schemas::store::Store;

/// What a run took.
#[derive(Clone, Debug, Default)]
pub struct Effort {
    steps: BTreeMap<String, f64>,
    /// By matrix; of several stores made at once, the last.
    matrices: BTreeMap<String, f64>,
}

impl Effort {
    /// Adds the seconds since `start` to a step.
    pub(super) fn step(&mut self, name: &str, start: Instant) {
        self.add(name, start.elapsed().as_secs_f64());
    }

    pub(super) fn add(&mut self, name: &str, seconds: f64) {
        *self.steps.entry(name.to_string()).or_default() += seconds;
    }

    pub(super) fn matrix(&mut self, name: &str, start: Instant) {
        let seconds = start.elapsed().as_secs_f64();
        self.matrices.insert(name.to_string(), seconds);
    }

    /// The report of the store that was made.
    pub fn report(&self, store: &Store) -> QuantizeReport {
        let manifest = store.manifest();
        let matrices = manifest.matrices.iter().map(|m| MatrixEffort {
            name: m.name.clone(),
            bits: m.bits,
            report: m.report.clone(),
            seconds: self.matrices.get(&m.name).copied(),
        });
        QuantizeReport {
            format: REPORT_VERSION,
            producer: crate::PRODUCER.to_string(),
            source: manifest.provenance.source_fingerprint.clone(),
            seconds: self.steps.clone(),
            matrices: matrices.collect(),
        }
    }
}
