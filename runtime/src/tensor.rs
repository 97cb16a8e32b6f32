//! Tensors a caller feeds and receives: a shape and a typed, row-major buffer.

use std::sync::Arc;

use anemone_schemas::aimodel::ir::Elem;
use half::{bf16, f16};

use crate::error::TensorError;
use crate::view::{View, row_major};

/// The elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are the element types")]
#[non_exhaustive]
pub enum Data {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    I32(Vec<i32>),
    I16(Vec<i16>),
    I8(Vec<i8>),
    U32(Vec<u32>),
    U16(Vec<u16>),
    U8(Vec<u8>),
    Bool(Vec<bool>),
}

/// Runs `$body` with `$v` bound to the vector inside any variant of [`Data`].
macro_rules! each_elem {
    ($data:expr, $v:ident => $body:expr) => {
        match $data {
            $crate::tensor::Data::F16($v) => $body,
            $crate::tensor::Data::Bf16($v) => $body,
            $crate::tensor::Data::F32($v) => $body,
            $crate::tensor::Data::I32($v) => $body,
            $crate::tensor::Data::I16($v) => $body,
            $crate::tensor::Data::I8($v) => $body,
            $crate::tensor::Data::U32($v) => $body,
            $crate::tensor::Data::U16($v) => $body,
            $crate::tensor::Data::U8($v) => $body,
            $crate::tensor::Data::Bool($v) => $body,
        }
    };
}
pub(crate) use each_elem;

impl Data {
    /// Number of elements.
    pub fn len(&self) -> usize {
        each_elem!(self, v => v.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `n` zeros of the storage type of `elem`. Integers below a byte are stored
    /// one to a byte. `None` if the runtime does not compute with `elem`.
    pub fn zeros(elem: Elem, n: usize) -> Option<Self> {
        Some(match elem {
            Elem::F16 => Self::F16(vec![f16::ZERO; n]),
            Elem::Bf16 => Self::Bf16(vec![bf16::ZERO; n]),
            Elem::F32 => Self::F32(vec![0.0; n]),
            Elem::Si32 => Self::I32(vec![0; n]),
            Elem::Si16 => Self::I16(vec![0; n]),
            Elem::Si8 | Elem::Si4 | Elem::Si2 => Self::I8(vec![0; n]),
            Elem::Ui32 => Self::U32(vec![0; n]),
            Elem::Ui16 => Self::U16(vec![0; n]),
            Elem::Ui8 | Elem::Ui6 | Elem::Ui4 | Elem::Ui3 | Elem::Ui2 | Elem::Ui1 => {
                Self::U8(vec![0; n])
            }
            Elem::Bool => Self::Bool(vec![false; n]),
            _ => return None,
        })
    }

    /// The element type, where every storage type stands for its full-width one.
    pub fn elem(&self) -> Elem {
        match self {
            Self::F16(_) => Elem::F16,
            Self::Bf16(_) => Elem::Bf16,
            Self::F32(_) => Elem::F32,
            Self::I32(_) => Elem::Si32,
            Self::I16(_) => Elem::Si16,
            Self::I8(_) => Elem::Si8,
            Self::U32(_) => Elem::Ui32,
            Self::U16(_) => Elem::Ui16,
            Self::U8(_) => Elem::Ui8,
            Self::Bool(_) => Elem::Bool,
        }
    }

    /// Elements from the little-endian, bit-packed bytes of a resource blob.
    /// `None` if the length is wrong or the element type is not supported.
    pub(crate) fn from_packed(elem: Elem, n: usize, bytes: &[u8]) -> Option<Self> {
        if bytes.len() != elem.packed_len(n)? {
            return None;
        }
        if elem.bits() < 8 {
            let unpacked = unpack(bytes, elem.bits(), n);
            return Some(match elem {
                Elem::Si4 | Elem::Si2 => {
                    let shift = 8 - elem.bits();
                    Self::I8(
                        unpacked
                            .iter()
                            .map(|&b| ((b << shift) as i8) >> shift)
                            .collect(),
                    )
                }
                Elem::F4E2M1 => return None,
                _ => Self::U8(unpacked),
            });
        }
        Self::from_bytes(elem, bytes)
    }

    /// Elements from one little-endian value per element (a byte for those below
    /// a byte), as an inline attribute holds them.
    pub(crate) fn from_bytes(elem: Elem, bytes: &[u8]) -> Option<Self> {
        macro_rules! read {
            ($variant:ident, $ty:ty) => {{
                let chunks = bytes.chunks_exact(size_of::<$ty>());
                if !chunks.remainder().is_empty() {
                    return None;
                }
                Self::$variant(
                    chunks
                        .map(|c| <$ty>::from_le_bytes(c.try_into().expect("exact chunk")))
                        .collect(),
                )
            }};
        }
        Some(match elem {
            Elem::F16 => read!(F16, f16),
            Elem::Bf16 => read!(Bf16, bf16),
            Elem::F32 => read!(F32, f32),
            Elem::Si32 => read!(I32, i32),
            Elem::Si16 => read!(I16, i16),
            Elem::Si8 | Elem::Si4 | Elem::Si2 => read!(I8, i8),
            Elem::Ui32 => read!(U32, u32),
            Elem::Ui16 => read!(U16, u16),
            Elem::Ui8 | Elem::Ui6 | Elem::Ui4 | Elem::Ui3 | Elem::Ui2 | Elem::Ui1 => {
                read!(U8, u8)
            }
            Elem::Bool => Self::Bool(bytes.iter().map(|&b| b != 0).collect()),
            _ => return None,
        })
    }

    /// The elements as integers, if they are integers.
    pub(crate) fn ints(&self) -> Option<Vec<i64>> {
        Some(match self {
            Self::I32(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::I16(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::I8(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::U32(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::U16(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::U8(v) => v.iter().map(|&x| i64::from(x)).collect(),
            _ => return None,
        })
    }
}

/// Expands a bit stream (least significant bit first) to a byte per element.
fn unpack(bytes: &[u8], bits: usize, n: usize) -> Vec<u8> {
    let mask = (1u16 << bits) - 1;
    (0..n)
        .map(|i| {
            let (at, shift) = (i * bits / 8, i * bits % 8);
            let next = bytes.get(at + 1).copied().unwrap_or(0);
            let pair = u16::from(bytes[at]) | u16::from(next) << 8;
            (pair >> shift & mask) as u8
        })
        .collect()
}

/// A dense row-major tensor. Clones share the elements until one is changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Arc<Data>,
}

impl Tensor {
    /// A tensor of `shape` over `data`.
    ///
    /// # Errors
    /// If the number of elements is not the product of `shape`.
    pub fn new(shape: &[usize], data: impl Into<Data>) -> Result<Self, TensorError> {
        let data = data.into();
        let expected = shape.iter().try_fold(1usize, |a, &d| a.checked_mul(d));
        if expected != Some(data.len()) {
            return Err(TensorError::Count {
                shape: shape.to_vec(),
                found: data.len(),
            });
        }
        Ok(Self {
            shape: shape.to_vec(),
            data: Arc::new(data),
        })
    }

    /// A tensor of zeros.
    ///
    /// # Errors
    /// If the runtime does not compute with `elem`, or the size overflows.
    pub fn zeros(elem: Elem, shape: &[usize]) -> Result<Self, TensorError> {
        let n = shape
            .iter()
            .try_fold(1usize, |a, &d| a.checked_mul(d))
            .ok_or_else(|| TensorError::Count {
                shape: shape.to_vec(),
                found: 0,
            })?;
        let data = Data::zeros(elem, n).ok_or(TensorError::Elem { elem })?;
        Self::new(shape, data)
    }

    /// Element type (full width: a 4-bit integer is a [`Elem::Ui8`] here).
    pub fn elem(&self) -> Elem {
        self.data.elem()
    }

    /// Extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The elements, to change in place.
    pub fn data_mut(&mut self) -> &mut Data {
        Arc::make_mut(&mut self.data)
    }

    /// The elements if they are f16.
    pub fn as_f16(&self) -> Option<&[f16]> {
        match &*self.data {
            Data::F16(v) => Some(v),
            _ => None,
        }
    }

    /// The elements if they are ui32.
    pub fn as_u32(&self) -> Option<&[u32]> {
        match &*self.data {
            Data::U32(v) => Some(v),
            _ => None,
        }
    }

    pub(crate) fn to_view(&self) -> View {
        View {
            data: Arc::clone(&self.data),
            offset: 0,
            shape: self.shape.clone(),
            strides: row_major(&self.shape),
        }
    }

    pub(crate) fn from_view(view: View) -> Self {
        let view = view.contiguous();
        if view.offset == 0 && view.data.len() == view.len() {
            return Self {
                shape: view.shape,
                data: view.data,
            };
        }
        Self {
            shape: view.shape.clone(),
            data: Arc::new(view.into_data()),
        }
    }

    /// Moves the elements out as a view and leaves an empty tensor.
    pub(crate) fn take_view(&mut self) -> View {
        let view = self.to_view();
        *self = Self {
            shape: vec![0],
            data: Arc::new(Data::U8(Vec::new())),
        };
        view
    }
}

macro_rules! from_vec {
    ($($variant:ident $ty:ty),*) => {
        $(impl From<Vec<$ty>> for Data {
            fn from(v: Vec<$ty>) -> Self {
                Self::$variant(v)
            }
        })*
    };
}
from_vec!(F16 f16, Bf16 bf16, F32 f32, I32 i32, I16 i16, I8 i8, U32 u32, U16 u16, U8 u8, Bool bool);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_elements_straddle_bytes_least_significant_bit_first() {
        // 3-bit: 1, 2, 3, 4, 5 = 0b101_100_011_010_001 over two bytes.
        let bytes = [0b1101_0001, 0b0101_1000];
        let data = Data::from_packed(Elem::Ui3, 5, &bytes).unwrap();
        assert_eq!(data, Data::U8(vec![1, 2, 3, 4, 5]));
        let signed = Data::from_packed(Elem::Si4, 2, &[0x8f]).unwrap();
        assert_eq!(signed, Data::I8(vec![-1, -8]));
        assert!(Data::from_packed(Elem::Ui4, 3, &[0]).is_none());
    }

    #[test]
    fn a_wrong_count_is_refused() {
        assert!(Tensor::new(&[2, 2], Data::U8(vec![0; 3])).is_err());
        assert!(Tensor::new(&[usize::MAX, 2], Data::U8(vec![])).is_err());
    }
}
