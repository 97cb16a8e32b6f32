//! Where in the text and in the model the distance comes from.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Positions of all windows that have about the same number of tokens before them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PositionKl {
    /// First position in the window.
    pub from: usize,
    /// One past the last.
    pub to: usize,
    /// Positions compared.
    pub tokens: u64,
    /// Mean KL over them, nats per token.
    pub kl_mean: f64,
}

/// A position at which the two models differ most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorstContext {
    /// Window of the text set, from 0.
    pub window: usize,
    /// Position in the window, from 0: the last token that both models had read.
    pub position: usize,
    /// KL there.
    pub kl: f64,
    /// The text that ends there, its last tokens only.
    pub context: String,
    /// The token that follows in the text, if any.
    pub next: Option<String>,
    /// The teacher's likeliest tokens.
    pub teacher: Vec<Choice>,
    /// The student's.
    pub student: Vec<Choice>,
}

/// A token and how likely a model takes it to be next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Choice {
    /// Its text.
    pub token: String,
    /// Between 0 and 1.
    pub probability: f64,
}

/// What the quantizer wrote down about a matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MatrixQuality {
    /// Name of the tensor in the checkpoint.
    pub name: String,
    /// Bits per index.
    pub bits: u8,
    /// The method that produced the codes.
    pub method: String,
    /// ‖Ŵ − W‖ / ‖W‖ in the Frobenius norm.
    pub plain_error: f64,
    /// Mean squared error of the output on the calibration rows, summed over the output
    /// features.
    pub weighted_error: f64,
    /// Why the method is not the one asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

/// The values of one lookup table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TableSample {
    /// Name of the tensor in the checkpoint.
    pub matrix: String,
    /// Which group of rows, from 0.
    pub group: usize,
    /// The values, ascending.
    pub values: Vec<f32>,
}
