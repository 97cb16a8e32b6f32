//! What making a store took, matrix by matrix.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::store::MatrixReport;

/// The report of `quantize`: its times, which a store does not hold because two runs
/// of the same command give the same store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QuantizeReport {
    /// [`super::REPORT_VERSION`].
    pub format: u32,
    /// Program and version.
    pub producer: String,
    /// Fingerprint of the checkpoint.
    pub source: String,
    /// Seconds by step: those of the passes (`forward`, `head`, `backward`, statistics
    /// included) as a clock shows them, those of the quantizer (`factorize`, `kmeans`, `gptq`,
    /// `two_sided`) summed over its threads.
    pub seconds: BTreeMap<String, f64>,
    /// One entry for each matrix of the store.
    pub matrices: Vec<MatrixEffort>,
}

/// How a matrix was quantized.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MatrixEffort {
    /// Name of the tensor.
    pub name: String,
    /// Bits per code.
    pub bits: u8,
    /// Method, fallback and errors, as in the store.
    pub report: MatrixReport,
    /// Seconds from its load to its file; absent if an earlier run had made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

impl QuantizeReport {
    /// Reads a report.
    ///
    /// # Errors
    /// As the file system's, or text that is no such report.
    pub fn read(path: &Path) -> io::Result<Self> {
        serde_json::from_slice(&fs::read(path)?).map_err(|e| {
            let message = format!("not a report of `quantize`: {e}");
            io::Error::new(io::ErrorKind::InvalidData, message)
        })
    }

    /// Writes the report, atomically.
    ///
    /// # Errors
    /// As the file system's.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        super::write_json(path, self)
    }
}
