//! The quality report: how far a quantized model's next-token distributions lie
//! from the bf16 teacher's, and what that was measured on.

use std::fs;
use std::io;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::atomic;

mod detail;
mod effort;
mod html;
mod plots;

pub use detail::{Choice, MatrixQuality, PositionKl, TableSample, WorstContext};
pub use effort::{MatrixEffort, QuantizeReport};

/// Name of the report in a model folder.
pub const REPORT_FILE: &str = "report.json";
/// Version of the report this code writes.
pub const REPORT_VERSION: u32 = 1;

/// What `report.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QualityReport {
    /// [`REPORT_VERSION`].
    pub format: u32,
    /// Program and version that measured.
    pub producer: String,
    /// Fingerprint of the teacher's checkpoint.
    pub teacher: String,
    /// Text the measures were taken on.
    pub text: Vec<TextSet>,
    /// One entry for each model measured.
    pub students: Vec<Student>,
}

/// A set of evaluation text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TextSet {
    /// Name, such as `docs`.
    pub name: String,
    /// Number of windows.
    pub windows: usize,
    /// Positions at which distributions are compared.
    pub tokens: u64,
    /// SHA-256 over the token ids (little-endian u32) of all windows.
    pub sha256: String,
}

/// How a student's logits were computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Measured {
    /// Dequantized weights in the teacher's own graph, f32 arithmetic.
    Simulator,
    /// The chunk programs of a model folder, run on the CPU.
    ShippedPrograms,
}

/// A quantized model and its distance from the teacher.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Student {
    /// What it is, such as `lut4-g32 gptq`.
    pub name: String,
    /// How it was run.
    pub measured: Measured,
    /// Measures by text set, in the order of [`QualityReport::text`].
    pub sets: Vec<SetQuality>,
    /// How far the hidden states lie from the teacher's after each layer, relative to the
    /// norm of the teacher's, over all tokens. Empty if they cannot be seen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_errors: Vec<f64>,
    /// What the store says about each matrix. Empty without a store.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub matrices: Vec<MatrixQuality>,
    /// Some of the store's tables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<TableSample>,
}

/// Measures over one text set. KL is `KL(teacher || student)` in nats per token
/// over the tokenizer's vocabulary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetQuality {
    /// Name of the text set.
    pub set: String,
    /// Positions compared.
    pub tokens: u64,
    /// Mean KL.
    pub kl_mean: f64,
    /// Half width of the 95% confidence interval of the mean. With [`Self::kl_windows`] of
    /// at least two windows it is taken over windows, since neighbouring tokens are not
    /// independent; else over tokens.
    pub kl_ci95: f64,
    /// Mean KL of each window, in the order of the text: two reports on the same text can be
    /// compared window by window. Reports of before have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kl_windows: Vec<f64>,
    /// Median KL.
    pub kl_median: f64,
    /// 90th percentile.
    pub kl_p90: f64,
    /// 99th percentile.
    pub kl_p99: f64,
    /// 99.9th percentile.
    pub kl_p999: f64,
    /// Largest KL.
    pub kl_max: f64,
    /// Share of positions at which both prefer the same token.
    pub top1: f64,
    /// Perplexity of the text under the teacher.
    pub ppl_teacher: Option<f64>,
    /// Perplexity of the text under the student.
    pub ppl_student: Option<f64>,
    /// KL by position in the window: the first position, then ranges that double.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kl_positions: Vec<PositionKl>,
    /// The positions with the largest KL, largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worst: Vec<WorstContext>,
}

impl Student {
    /// Mean KL over the text sets, each counting the same.
    pub fn mean_kl(&self) -> f64 {
        self.sets.iter().map(|s| s.kl_mean).sum::<f64>() / self.sets.len().max(1) as f64
    }

    /// Mean top-1 agreement over the text sets, each counting the same.
    pub fn mean_top1(&self) -> f64 {
        self.sets.iter().map(|s| s.top1).sum::<f64>() / self.sets.len().max(1) as f64
    }
}

/// Writes a report, atomically.
fn write_json(path: &Path, report: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_string_pretty(report).map_err(io::Error::other)?;
    text.push('\n');
    atomic::write_bytes(path, text.as_bytes())
}

impl QualityReport {
    /// Reads a report.
    ///
    /// # Errors
    /// I/O errors, and `InvalidData` for what is no report of this version.
    pub fn read(path: &Path) -> io::Result<Self> {
        let invalid = |m: String| io::Error::new(io::ErrorKind::InvalidData, m);
        let report: Self = serde_json::from_slice(&fs::read(path)?)
            .map_err(|e| invalid(format!("not a quality report: {e}")))?;
        if report.format != REPORT_VERSION {
            return Err(invalid(format!(
                "report version {}, this program reads {REPORT_VERSION}",
                report.format
            )));
        }
        Ok(report)
    }

    /// Writes the report, atomically.
    ///
    /// # Errors
    /// Any I/O error.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_json(path, self)
    }

    /// The measures as Markdown: a table with a row per student, KL and top-1 agreement
    /// per text set, and one with quantiles and perplexities.
    pub fn markdown(&self) -> String {
        use std::fmt::Write;
        let mut out = String::from("| weights | measured on |");
        for t in &self.text {
            let _ = write!(out, " KL {0} | top-1 {0} |", t.name);
        }
        out.push_str("\n|---|---|");
        for _ in &self.text {
            out.push_str("---:|---:|");
        }
        out.push('\n');
        for s in &self.students {
            let measured = match s.measured {
                Measured::Simulator => "simulator",
                Measured::ShippedPrograms => "shipped programs",
            };
            let _ = write!(out, "| {} | {measured} |", s.name);
            for q in &s.sets {
                let _ = write!(
                    out,
                    " {:.4} ± {:.4} | {:.3} |",
                    q.kl_mean, q.kl_ci95, q.top1
                );
            }
            out.push('\n');
        }
        out.push_str(
            "\n| weights | text | tokens | median | 90% | 99% | 99.9% | max | perplexity | \
             teacher's |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
        );
        let number = |v: Option<f64>| v.map_or_else(|| "-".to_string(), |v| format!("{v:.3}"));
        for s in &self.students {
            for q in &s.sets {
                let _ = writeln!(
                    out,
                    "| {} | {} | {} | {:.4} | {:.4} | {:.3} | {:.3} | {:.3} | {} | {} |",
                    s.name,
                    q.set,
                    q.tokens,
                    q.kl_median,
                    q.kl_p90,
                    q.kl_p99,
                    q.kl_p999,
                    q.kl_max,
                    number(q.ppl_student),
                    number(q.ppl_teacher)
                );
            }
        }
        out
    }
}
