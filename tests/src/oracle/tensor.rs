//! Tensors and the file they travel in.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anemone_schemas::aimodel::ir::Elem;
use half::f16;
use serde_json::{Value, json};

use super::Result;

/// A dense row-major tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Element type.
    pub dtype: Elem,
    /// Extents.
    pub shape: Vec<usize>,
    /// Little-endian elements; a bool is a byte.
    pub bytes: Vec<u8>,
}

/// Element types that can travel, with their names in safetensors.
const DTYPES: [(Elem, &str); 12] = [
    (Elem::Bool, "BOOL"),
    (Elem::F16, "F16"),
    (Elem::F32, "F32"),
    (Elem::F64, "F64"),
    (Elem::Si8, "I8"),
    (Elem::Si16, "I16"),
    (Elem::Si32, "I32"),
    (Elem::Si64, "I64"),
    (Elem::Ui8, "U8"),
    (Elem::Ui16, "U16"),
    (Elem::Ui32, "U32"),
    (Elem::Ui64, "U64"),
];

impl Tensor {
    fn new(dtype: Elem, shape: &[usize], bytes: Vec<u8>) -> Self {
        let count: usize = shape.iter().product();
        assert_eq!(bytes.len(), count * dtype.bits() / 8, "shape {shape:?}");
        Self {
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// Zeros.
    pub fn zeros(dtype: Elem, shape: &[usize]) -> Self {
        let count: usize = shape.iter().product();
        Self::new(dtype, shape, vec![0; count * dtype.bits() / 8])
    }

    /// f16 elements, rounded to nearest even.
    pub fn f16(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values
            .iter()
            .flat_map(|&v| f16::from_f32(v).to_le_bytes())
            .collect();
        Self::new(Elem::F16, shape, bytes)
    }

    /// f32 elements.
    pub fn f32(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(Elem::F32, shape, bytes)
    }

    /// si32 elements.
    pub fn i32(shape: &[usize], values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(Elem::Si32, shape, bytes)
    }

    /// si8 elements.
    pub fn i8(shape: &[usize], values: &[i8]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(Elem::Si8, shape, bytes)
    }

    /// ui8 elements.
    pub fn u8(shape: &[usize], values: &[u8]) -> Self {
        Self::new(Elem::Ui8, shape, values.to_vec())
    }

    /// Bools.
    pub fn bool(shape: &[usize], values: &[bool]) -> Self {
        let bytes = values.iter().map(|&v| u8::from(v)).collect();
        Self::new(Elem::Bool, shape, bytes)
    }

    /// The elements as f32, whatever they are.
    pub fn to_f32(&self) -> Vec<f32> {
        fn each<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            bytes.as_chunks::<N>().0.iter().map(|&b| f(b)).collect()
        }
        match self.dtype {
            Elem::Bool | Elem::Ui8 => each(&self.bytes, |[b]| f32::from(b)),
            Elem::Si8 => each(&self.bytes, |b| f32::from(i8::from_le_bytes(b))),
            Elem::F16 => each(&self.bytes, |b| f16::from_le_bytes(b).to_f32()),
            Elem::F32 => each(&self.bytes, f32::from_le_bytes),
            Elem::F64 => each(&self.bytes, |b| f64::from_le_bytes(b) as f32),
            Elem::Si16 => each(&self.bytes, |b| f32::from(i16::from_le_bytes(b))),
            Elem::Ui16 => each(&self.bytes, |b| f32::from(u16::from_le_bytes(b))),
            Elem::Si32 => each(&self.bytes, |b| i32::from_le_bytes(b) as f32),
            Elem::Ui32 => each(&self.bytes, |b| u32::from_le_bytes(b) as f32),
            Elem::Si64 => each(&self.bytes, |b| i64::from_le_bytes(b) as f32),
            Elem::Ui64 => each(&self.bytes, |b| u64::from_le_bytes(b) as f32),
            other => panic!("no conversion of {}", other.name()),
        }
    }
}

/// Writes a safetensors file with a `job` in its metadata.
pub(super) fn write_file(path: &Path, job: &Value, tensors: &[(String, &Tensor)]) -> Result<()> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({ "job": job.to_string() }));
    let mut data = vec![];
    for (name, t) in tensors {
        let dtype = DTYPES.iter().find(|d| d.0 == t.dtype);
        let dtype = dtype
            .ok_or_else(|| format!("`{name}` is {}", t.dtype.name()))?
            .1;
        let start = data.len();
        data.extend_from_slice(&t.bytes);
        let entry =
            json!({ "dtype": dtype, "shape": t.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string().into_bytes();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(&header);
    file.extend_from_slice(&data);
    fs::write(path, file).map_err(|e| format!("cannot write `{}`: {e}", path.display()))
}

/// Reads such a file.
pub(super) fn read_file(path: &Path) -> Result<(Value, BTreeMap<String, Tensor>)> {
    let file = fs::read(path).map_err(|e| format!("cannot read `{}`: {e}", path.display()))?;
    parse(&file).ok_or_else(|| format!("`{}` is malformed", path.display()))
}

fn parse(file: &[u8]) -> Option<(Value, BTreeMap<String, Tensor>)> {
    let (len, rest) = file.split_first_chunk::<8>()?;
    let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(header).ok()?;
    let mut job = Value::Null;
    let mut tensors = BTreeMap::new();
    for (name, entry) in header {
        if name == "__metadata__" {
            job = serde_json::from_str(entry.get("job")?.as_str()?).ok()?;
            continue;
        }
        let number = |v: &Value| usize::try_from(v.as_u64()?).ok();
        let shape: Option<Vec<usize>> =
            entry.get("shape")?.as_array()?.iter().map(number).collect();
        let dtype = entry.get("dtype")?.as_str()?;
        let offsets = entry.get("data_offsets")?;
        let bytes = data.get(number(offsets.get(0)?)?..number(offsets.get(1)?)?)?;
        let tensor = Tensor {
            dtype: DTYPES.iter().find(|d| d.1 == dtype)?.0,
            shape: shape?,
            bytes: bytes.to_vec(),
        };
        tensors.insert(name, tensor);
    }
    Some((job, tensors))
}
