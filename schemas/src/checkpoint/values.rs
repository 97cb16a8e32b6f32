//! Element types and widening to f32.

use std::fmt;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Error, TensorView};

/// The element types of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        })
    }
}

/// Widens `bytes` into `out` and refuses NaN and infinity. `first` is the index
/// within the tensor of the first element, for the message.
pub(crate) fn widen(
    tensor: &str,
    dtype: Dtype,
    bytes: &[u8],
    first: usize,
    out: &mut [f32],
) -> Result<(), Error> {
    // Blocks are checked while they are in cache.
    const BLOCK: usize = 4096;
    let mut halves = [f16::ZERO; BLOCK];
    let blocks = bytes.chunks(BLOCK * dtype.size());
    for (block, (bytes, out)) in blocks.zip(out.chunks_mut(BLOCK)).enumerate() {
        match dtype {
            Dtype::Bf16 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = bf16::from_le_bytes(*b).to_f32();
                }
            }
            Dtype::F16 => {
                let halves = &mut halves[..out.len()];
                for (x, b) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *x = f16::from_le_bytes(*b);
                }
                halves.convert_to_f32_slice(out);
            }
            Dtype::F32 => {
                for (x, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*b);
                }
            }
        }
        if !out.iter().fold(true, |finite, x| finite & x.is_finite()) {
            let at = out.iter().position(|x| !x.is_finite()).unwrap_or(0);
            return Err(Error::NonFinite {
                tensor: tensor.to_owned(),
                dtype,
                index: first + block * BLOCK + at,
                value: out[at],
            });
        }
    }
    Ok(())
}

/// Calls `each` with the elements of a tensor in order, at most `block` at a time.
pub(crate) fn for_each_block(
    tensor: &str,
    view: &TensorView<'_>,
    block: usize,
    each: &mut dyn FnMut(&[f32]),
) -> Result<(), Error> {
    let size = view.dtype.size();
    let total = view.bytes.len() / size;
    let mut buffer = vec![0.0; total.min(block.max(1))];
    let mut first = 0;
    for bytes in view.bytes.chunks(buffer.len().max(1) * size) {
        let values = &mut buffer[..bytes.len() / size];
        widen(tensor, view.dtype, bytes, first, values)?;
        each(values);
        first += values.len();
    }
    Ok(())
}
