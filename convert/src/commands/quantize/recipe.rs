//! What determines the bytes of a store.

use std::path::PathBuf;
use std::str::FromStr;

use anemone_calib::Corpus;
use serde_json::{Map, Value};

use super::statistics::LABEL_SEED;
use super::text;
use crate::error::Error;
use crate::quantize::{CODE_VERSION, Method, Settings};

/// Other bits for the matrices whose name holds a text, written `TEXT=BITS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitsRule {
    /// Part of a tensor's name, such as `lm_head` or `layers.0.`.
    pub part: String,
    /// Bits per weight.
    pub bits: u8,
}

impl FromStr for BitsRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (part, bits) = text.rsplit_once('=').ok_or("expected TEXT=BITS")?;
        let bits = bits.parse().map_err(|e| format!("`{bits}`: {e}"))?;
        let part = part.to_string();
        Ok(Self { part, bits })
    }
}

/// The bits of a matrix: those of the last rule that fits, else `default`.
pub(super) fn bits_of(rules: &[BitsRule], default: u8, name: &str) -> u8 {
    let fitting = rules.iter().rev().find(|r| name.contains(&r.part));
    fitting.map_or(default, |rule| rule.bits)
}

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
    /// Exceptions to the bits; the last that fits counts.
    pub rules: Vec<BitsRule>,
    /// Whether the output layer is quantized too. Without it a store cannot be lowered, only
    /// compared with others.
    pub head: bool,
}

impl Recipe {
    /// Whether the teacher must run backward for it.
    pub(super) fn needs_gradients(&self) -> bool {
        self.guided || self.method == Method::TwoSided
    }

    pub(super) fn bits(&self, name: &str) -> u8 {
        bits_of(&self.rules, self.settings.bits, name)
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
        let rules = self.rules.iter().map(|r| (r.part.clone(), r.bits.into()));
        let rules: Map<String, Value> = rules.collect();
        if !rules.is_empty() {
            map.insert("bits_for".into(), rules.into());
        }
        map.insert("calibration_tokens".into(), corpus.tokens().into());
        map.insert("calibration_window".into(), window.into());
        map.insert("calibration_seed".into(), text::SEED.into());
        map.insert("code_version".into(), CODE_VERSION.into());
        Ok(map)
    }
}
