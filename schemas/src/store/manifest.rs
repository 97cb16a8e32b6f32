//! The JSON side of the store.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};

use super::StoreError;
use crate::hex;
use crate::lut::{LutError, LutShape, is_single, single};

/// `format` of the manifests this version writes.
pub(super) const FORMAT: &str = "anemone-store/1";

/// Name of a stored tensor's file: the SHA-256 of all that determines its bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct Key(#[schemars(regex(pattern = r"^[0-9a-f]{64}$"))] String);

impl Key {
    /// The key of a list of parts. Lengths are hashed too, so no two lists collide
    /// by being cut differently.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hex(&hash.finalize()))
    }

    /// A key from its hexadecimal digits.
    ///
    /// # Errors
    /// [`StoreError::Key`] for anything but 64 lower-case hexadecimal digits.
    pub fn parse(digits: &str) -> Result<Self, StoreError> {
        let valid = digits.len() == 64
            && digits
                .bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if valid {
            Ok(Self(digits.to_string()))
        } else {
            Err(StoreError::Key {
                found: digits.to_string(),
            })
        }
    }

    /// The 64 digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        Self::parse(&digits).map_err(serde::de::Error::custom)
    }
}

/// Where the weights came from and how they were made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Provenance {
    /// Fingerprint of the checkpoint.
    pub source_fingerprint: String,
    /// Name of the quantization method.
    pub method: String,
    /// All settings that change the result.
    pub settings: serde_json::Map<String, serde_json::Value>,
    /// Fingerprint of the calibration statistics, if the method uses any.
    pub calibration: Option<String>,
    /// Program and version that wrote the store.
    pub tool: String,
}

/// How well a matrix was approximated, and how that came about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MatrixReport {
    /// The method that produced the codes.
    pub method: String,
    /// Why that is not the method asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// Damping of the Hessian as a fraction of its mean diagonal; absent if the
    /// method needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damping: Option<f64>,
    /// ‖Ŵ − W‖ / ‖W‖ in the Frobenius norm.
    pub plain_error: f64,
    /// Mean squared error of the layer's output on the calibration rows, summed over
    /// the output features: tr(E H Eᵀ) / rows with E = Ŵ − W and H = Σ x xᵀ.
    pub weighted_error: f64,
    /// Input columns that were zero on every calibration row.
    pub dead_columns: u64,
}

/// One lookup-table matrix of the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LutRecord {
    /// Name of the tensor in the checkpoint.
    pub name: String,
    /// Key of the matrix.
    pub key: Key,
    /// Length of the file.
    pub bytes: u64,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Bits per index.
    pub bits: u8,
    /// Rows per table.
    pub group_rows: usize,
    /// Rows that an index stands for.
    #[serde(default = "single", skip_serializing_if = "is_single")]
    pub vector: usize,
    /// How well it approximates the original.
    pub report: MatrixReport,
}

impl LutRecord {
    /// Bits per index and, if it stands for several rows, how many: `4`, or `4v2`.
    pub fn form(&self) -> String {
        match self.vector {
            1 => self.bits.to_string(),
            n => format!("{}v{n}", self.bits),
        }
    }

    pub(super) fn shape(&self) -> Result<LutShape, LutError> {
        LutShape::new(self.rows, self.cols, self.bits, self.group_rows)?.with_vector(self.vector)
    }
}

/// Element type of a dense tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DenseElem {
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// Integers from -127 to 127, with an f16 factor for each row in a tensor of its own.
    I8,
}

impl DenseElem {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
            Self::I8 => 1,
        }
    }
}

/// One dense tensor of the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DenseRecord {
    /// Name of the tensor in the checkpoint.
    pub name: String,
    /// Key of the tensor.
    pub key: Key,
    /// Length of the file.
    pub bytes: u64,
    /// SHA-256 of the file.
    pub sha256: String,
    /// Element type.
    pub elem: DenseElem,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl DenseRecord {
    /// Name of the tensor with the factors of a tensor of [`DenseElem::I8`], one for each row.
    pub fn scales(name: &str) -> String {
        format!("{name}.scales")
    }

    /// Bytes that element type and shape ask for, if memory can address them.
    pub(super) fn expected_len(elem: DenseElem, shape: &[usize]) -> Option<u64> {
        let bytes = shape
            .iter()
            .try_fold(elem.size(), |n, &dim| n.checked_mul(dim))?;
        isize::try_from(bytes).ok().map(|n| n as u64)
    }
}

/// One copied file of the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Name in the folder.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// SHA-256 of the file.
    pub sha256: String,
}

/// `store.json`. All lists are sorted by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// `anemone-store/1`.
    pub format: String,
    /// Where the weights came from.
    pub provenance: Provenance,
    /// The quantized matrices.
    pub matrices: Vec<LutRecord>,
    /// The tensors kept dense.
    pub dense: Vec<DenseRecord>,
    /// The copied files.
    pub files: Vec<FileRecord>,
}

/// What matrices and dense tensors have in common on disk.
pub(super) trait Record: Serialize + for<'de> Deserialize<'de> {
    const FOLDER: &'static str;
    const EXTENSION: &'static str;

    fn name(&self) -> &str;
    fn key(&self) -> &Key;
    fn bytes(&self) -> u64;
    fn sha256(&self) -> &str;

    /// What is wrong with the record by itself.
    fn contradiction(&self) -> Option<String>;
}

impl Record for LutRecord {
    const FOLDER: &'static str = "matrices";
    const EXTENSION: &'static str = "lut";

    fn name(&self) -> &str {
        &self.name
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn sha256(&self) -> &str {
        &self.sha256
    }

    fn contradiction(&self) -> Option<String> {
        match self.shape() {
            Ok(shape) if shape.file_len() == self.bytes => None,
            Ok(shape) => Some(format!(
                "a {} x {} matrix takes {} bytes, recorded are {}",
                self.rows,
                self.cols,
                shape.file_len(),
                self.bytes
            )),
            Err(e) => Some(e.to_string()),
        }
    }
}

impl Record for DenseRecord {
    const FOLDER: &'static str = "dense";
    const EXTENSION: &'static str = "bin";

    fn name(&self) -> &str {
        &self.name
    }

    fn key(&self) -> &Key {
        &self.key
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn sha256(&self) -> &str {
        &self.sha256
    }

    fn contradiction(&self) -> Option<String> {
        let expected = Self::expected_len(self.elem, &self.shape);
        (expected != Some(self.bytes)).then(|| {
            format!(
                "shape {:?} does not take the recorded {} bytes",
                self.shape, self.bytes
            )
        })
    }
}
