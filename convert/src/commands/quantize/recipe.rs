//! What determines the bytes of a store.

use std::path::PathBuf;

use anemone_calib::Corpus;
use anemone_schemas::spec::LM_HEAD;
use serde_json::{Map, Value};

use super::rules::{self, FP16, MatrixOptions, Rule};
use super::statistics::LABEL_SEED;
use super::text;
use crate::error::Error;
use crate::quantize::{CODE_VERSION, Method, Settings};

/// Setting of a store that lists its rules in their order.
pub(crate) const RULES: &str = "set";

/// What determines a store, apart from model and text.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Store to make.
    pub output: PathBuf,
    /// How codes and tables are chosen.
    pub method: Method,
    /// Whether inputs count by the gradient of the loss, mixed half and half with all
    /// counting the same.
    pub guided: bool,
    /// Damping, rounds and bits.
    pub settings: Settings,
    /// Other options for some matrices; the last rule that gives one counts.
    pub rules: Vec<Rule>,
    /// Whether the output layer is quantized too. Without it a store cannot be lowered, only
    /// compared with others.
    pub head: bool,
}

impl Recipe {
    /// Whether the teacher must run backward for it.
    pub(crate) fn needs_gradients(&self) -> bool {
        let mut methods = self.rules.iter().filter_map(Rule::method);
        self.guided || self.method == Method::TwoSided || methods.any(|m| m == Method::TwoSided)
    }

    /// How a matrix is quantized.
    pub(crate) fn matrix(&self, name: &str) -> MatrixOptions {
        let default = MatrixOptions {
            method: self.method,
            bits: self.settings.bits,
            damping: self.settings.damping,
        };
        rules::resolve(&self.rules, default, name)
    }

    /// Whether the store has the matrix, and in tables.
    pub(crate) fn has_table(&self, name: &str) -> bool {
        (self.head || name != LM_HEAD) && self.matrix(name).bits != FP16
    }

    /// All that changes the result, for the store's provenance.
    pub(super) fn recorded(
        &self,
        corpus: &Corpus,
        window: usize,
    ) -> Result<Map<String, Value>, Error> {
        let mut map = match serde_json::to_value(self.settings) {
            Ok(Value::Object(map)) => map,
            Ok(_) => Map::new(),
            Err(e) => return Err(Error::unexpected(&e)),
        };
        map.insert("guided".into(), self.guided.into());
        if self.needs_gradients() {
            map.insert("label_seed".into(), LABEL_SEED.into());
        }
        if !self.rules.is_empty() {
            let rules: Vec<String> = self.rules.iter().map(ToString::to_string).collect();
            map.insert(RULES.into(), rules.into());
        }
        map.insert("calibration_tokens".into(), corpus.tokens().into());
        map.insert("calibration_window".into(), window.into());
        map.insert("calibration_seed".into(), text::SEED.into());
        map.insert("code_version".into(), CODE_VERSION.into());
        Ok(map)
    }
}
