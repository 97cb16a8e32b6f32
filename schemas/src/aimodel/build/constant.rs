//! Constants.

use half::f16;

use super::GraphBuilder;
use crate::aimodel::ir::{Attr, AttrId, BlobId, Elem, Module, TensorType, Type, ValueId};

/// Longest constant kept inside its attribute; longer ones become blobs.
const INLINE_BYTES: usize = 64;

/// The `value` attribute of a constant of these elements.
pub(in crate::aimodel) fn constant_value(m: &mut Module, elem: Elem, bytes: &[u8]) -> AttrId {
    let bits = elem.bits();
    // An inline attribute spends a byte on an element of fewer bits, a blob packs
    // them; so only whole-byte elements go inline.
    let attr = if bits < 8 {
        Attr::Resource(m.intern_blob(bytes))
    } else if let Some(element) = repeated(bytes, bits / 8) {
        Attr::Dense {
            splat: true,
            bytes: element.to_vec(),
        }
    } else if bytes.len() <= INLINE_BYTES {
        Attr::Dense {
            splat: false,
            bytes: bytes.to_vec(),
        }
    } else {
        Attr::Resource(m.intern_blob(bytes))
    };
    m.add_attr(attr)
}

impl GraphBuilder<'_> {
    /// A constant of the given row-major little-endian elements (packed least
    /// significant bit first below a byte). Equal constants are one value, equal
    /// blobs are stored once in the module.
    pub fn constant(&mut self, ty: TensorType, bytes: &[u8]) -> ValueId {
        let count = ty.count().expect("a constant has a static shape");
        let expected = ty.elem.packed_len(count).expect("a constant fits memory");
        assert!(
            bytes.len() == expected,
            "a constant {}{:?} takes {expected} bytes, not {}",
            ty.elem.name(),
            ty.shape,
            bytes.len()
        );
        let attr = constant_value(self.module, ty.elem, bytes);
        self.constant_attr(ty, attr)
    }

    /// A constant whose elements are a blob of the module.
    pub fn constant_blob(&mut self, ty: TensorType, blob: BlobId) -> ValueId {
        let count = ty.count().expect("a constant has a static shape");
        let expected = ty.elem.packed_len(count).expect("a constant fits memory") as u64;
        let have = self.module.blob(blob).len();
        assert!(
            have == expected,
            "a constant {}{:?} takes {expected} bytes, blob `{}` has {have}",
            ty.elem.name(),
            ty.shape,
            self.module.blob(blob).key
        );
        let attr = self.module.add_attr(Attr::Resource(blob));
        self.constant_attr(ty, attr)
    }

    fn constant_attr(&mut self, ty: TensorType, value: AttrId) -> ValueId {
        let ty = self.module.add_type(Type::Tensor(ty));
        if let Some(&known) = self.body().constants.get(&(value, ty)) {
            return known;
        }
        let props = vec![("value", value)];
        let result = self.push("primitive.constant_v1", &[], &[ty], props, vec![])[0];
        self.body().constants.insert((value, ty), result);
        self.constants.insert(result, value);
        result
    }

    /// A tensor of `shape` filled with one value, converted to `elem`.
    ///
    /// # Panics
    /// For elements other than f16, f32, and integers of whole bytes.
    pub fn full(&mut self, elem: Elem, shape: &[usize], value: f64) -> ValueId {
        let element = element_bytes(elem, value);
        let ty = TensorType::new(elem, shape);
        let count = ty.count().expect("a constant fits memory");
        if count == 0 {
            return self.constant(ty, &[]);
        }
        let attr = self.module.add_attr(Attr::Dense {
            splat: true,
            bytes: element,
        });
        self.constant_attr(ty, attr)
    }

    /// `tensor<n x si32>`.
    pub fn i32s(&mut self, values: &[i32]) -> ValueId {
        self.constant(
            TensorType::new(Elem::Si32, &[values.len()]),
            &little_endian(values, i32::to_le_bytes),
        )
    }

    /// `tensor<si32>`.
    pub fn i32_scalar(&mut self, value: i32) -> ValueId {
        self.constant(TensorType::new(Elem::Si32, &[]), &value.to_le_bytes())
    }

    /// `tensor<n x ui32>`.
    pub fn u32s(&mut self, values: &[u32]) -> ValueId {
        self.constant(
            TensorType::new(Elem::Ui32, &[values.len()]),
            &little_endian(values, u32::to_le_bytes),
        )
    }

    /// `tensor<ui32>`.
    pub fn u32_scalar(&mut self, value: u32) -> ValueId {
        self.constant(TensorType::new(Elem::Ui32, &[]), &value.to_le_bytes())
    }

    /// `tensor<si16>`.
    pub fn si16_scalar(&mut self, value: i16) -> ValueId {
        self.constant(TensorType::new(Elem::Si16, &[]), &value.to_le_bytes())
    }

    /// `tensor<f16>`, rounded to nearest even.
    pub fn f16_scalar(&mut self, value: f32) -> ValueId {
        self.f16s(&[value], &[])
    }

    /// `tensor<shape x f16>`, rounded to nearest even.
    pub fn f16s(&mut self, values: &[f32], shape: &[usize]) -> ValueId {
        self.constant(
            TensorType::new(Elem::F16, shape),
            &little_endian(values, |v| f16::from_f32(v).to_le_bytes()),
        )
    }

    /// `tensor<shape x f32>`.
    pub fn f32s(&mut self, values: &[f32], shape: &[usize]) -> ValueId {
        self.constant(
            TensorType::new(Elem::F32, shape),
            &little_endian(values, f32::to_le_bytes),
        )
    }

    pub(super) fn sizes(&mut self, values: &[usize]) -> ValueId {
        let values: Vec<u32> = values
            .iter()
            .map(|&v| u32::try_from(v).expect("a size fits 32 bits"))
            .collect();
        self.u32s(&values)
    }

    /// Axes as the signed operand most operations take.
    pub(super) fn axes(&mut self, values: &[usize]) -> ValueId {
        let values: Vec<i32> = values.iter().map(|&v| v as i32).collect();
        self.i32s(&values)
    }
}

/// The element all of `bytes` repeat, if they repeat one.
fn repeated(bytes: &[u8], width: usize) -> Option<&[u8]> {
    let element = bytes.get(..width)?;
    bytes
        .chunks_exact(width)
        .all(|c| c == element)
        .then_some(element)
}

fn little_endian<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| bytes(v)).collect()
}

fn element_bytes(elem: Elem, value: f64) -> Vec<u8> {
    match elem {
        Elem::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        Elem::Bf16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
        Elem::F32 => (value as f32).to_le_bytes().to_vec(),
        Elem::Si32 => (value as i32).to_le_bytes().to_vec(),
        Elem::Ui32 => (value as u32).to_le_bytes().to_vec(),
        Elem::Si16 => (value as i16).to_le_bytes().to_vec(),
        Elem::Ui16 => (value as u16).to_le_bytes().to_vec(),
        Elem::Si8 => (value as i8).to_le_bytes().to_vec(),
        Elem::Ui8 | Elem::Bool => (value as u8).to_le_bytes().to_vec(),
        other => panic!("no constant of {} by value", other.name()),
    }
}
