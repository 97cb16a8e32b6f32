//! What determines the bytes of a store.

use std::path::PathBuf;

use anemone_calib::Corpus;
use anemone_schemas::spec::{LM_HEAD, Linear, ModelSpec};
use serde_json::{Map, Value};

use super::rules::{self, Bits, MatrixOptions, Rule};
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
            bits: Bits::Table(self.settings.bits),
            vector: self.settings.vector,
            damping: self.settings.damping,
        };
        let mut found = rules::resolve(&self.rules, default, name);
        if found.vector > 1 && found.method == Method::TwoSided {
            found.method = Method::Gptq;
        }
        found
    }

    /// Refuses what one of the matrices cannot have.
    ///
    /// # Errors
    /// As [`Recipe::bytes`].
    pub(crate) fn check(&self, spec: &ModelSpec) -> Result<(), Error> {
        for layer in 0..spec.layers {
            for linear in Linear::ALL {
                self.bytes(&linear.tensor(layer), linear.shape(spec))?;
            }
        }
        self.bytes(LM_HEAD, [spec.vocab, spec.hidden]).map(drop)
    }

    /// How many bytes a matrix of this shape takes.
    ///
    /// # Errors
    /// A number of bits that its indices cannot have, or vectors that its rows are not made of.
    pub(crate) fn bytes(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<u64, Error> {
        let MatrixOptions { bits, vector, .. } = self.matrix(name);
        bits.bytes([rows, cols], |bits| {
            let settings = Settings {
                bits,
                vector,
                ..self.settings
            };
            let shape = settings.shape(rows, cols);
            shape.map(|shape| shape.file_len()).map_err(|e| {
                Error::usage(format!("`{name}`: {e}")).hint(format!(
                    "it would have {bits} bits per weight in vectors of {vector}"
                ))
            })
        })
    }

    /// Whether the store has the matrix, and in tables.
    pub(crate) fn has_table(&self, name: &str) -> bool {
        let bits = self.matrix(name).bits;
        (self.head || name != LM_HEAD) && matches!(bits, Bits::Table(_))
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
