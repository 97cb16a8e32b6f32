//! Whether two texts share passages, known by hashes of runs of ids.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::Corpus;

/// Ids in a run: longer than idioms and boilerplate phrases, shorter than a paragraph.
const RUN: usize = 32;

/// Every so many ids a run of the first text is kept; of the second, every one is looked up.
const STRIDE: usize = 16;

/// Hashes of runs of a corpus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shingles {
    /// [`Corpus::fingerprint`].
    pub sha256: String,
    /// Tokens of the corpus.
    pub tokens: usize,
    /// The first 16 hexadecimal digits of the SHA-256 of each run.
    pub runs: BTreeSet<String>,
}

impl Corpus {
    /// What is needed to know passages of this corpus again.
    pub fn shingles(&self) -> Shingles {
        let runs = self.windows().iter().flat_map(|window| {
            let last = window.len().saturating_sub(RUN - 1);
            (0..last)
                .step_by(STRIDE)
                .map(|at| hash(&window[at..at + RUN]))
        });
        Shingles {
            sha256: self.fingerprint(),
            tokens: self.tokens(),
            runs: runs.collect(),
        }
    }
}

impl Shingles {
    /// Share of the tokens of `other` that lie in runs of this corpus. Passages shorter than
    /// 47 ids may escape.
    pub fn share_of(&self, other: &Corpus) -> f64 {
        let mut covered = 0;
        for window in other.windows() {
            let mut end = 0;
            for at in 0..window.len().saturating_sub(RUN - 1) {
                if self.runs.contains(&hash(&window[at..at + RUN])) {
                    covered += at + RUN - end.max(at);
                    end = at + RUN;
                }
            }
        }
        covered as f64 / other.tokens().max(1) as f64
    }
}

fn hash(ids: &[u32]) -> String {
    let mut hash = Sha256::new();
    for id in ids {
        hash.update(id.to_le_bytes());
    }
    let digest = hash.finalize();
    digest[..8].iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
