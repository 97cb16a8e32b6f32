//! Scales of quantized data.
//!
//! Apple's loader takes any scale. One that is zero, negative or not finite is never
//! what a quantizer meant, and the engine stores scales in formats without a sign.

use half::{bf16, f16};

use super::{Checked, Checker};
use crate::aimodel::ir::{Attr, AttrId, Elem, Op, Type};

impl Checker<'_> {
    /// If `op` scales quantized data by a constant, is the scale positive? Each
    /// constant is read once, however many operations use it.
    pub(super) fn scale(&mut self, op: &Op) -> Checked {
        if !matches!(
            op.name.as_str(),
            "primitive.blockwise_shift_scale_v2" | "dequantize_v2"
        ) {
            return Ok(());
        }
        let Some(scale) = op.operands.get(1) else {
            return Ok(());
        };
        let Type::Tensor(ty) = self.type_of(*scale) else {
            return Ok(());
        };
        let Some(&value) = self.constants.get(scale) else {
            return Ok(());
        };
        if !self.scales.insert(value) {
            return Ok(());
        }
        match self.first_unfit(ty.elem, value) {
            Some((i, found)) => self.fail(
                &op.name,
                format!("entry {i} of its scale is {found}, expected a positive number"),
            ),
            None => Ok(()),
        }
    }

    /// The first entry that is not positive and finite. Bytes that are not at hand are
    /// not looked at.
    fn first_unfit(&self, elem: Elem, value: AttrId) -> Option<(usize, f64)> {
        let bytes = match self.m.attr(value) {
            Attr::Dense { bytes, .. } => bytes.as_slice(),
            Attr::Resource(blob) => self.m.blob(*blob).bytes()?,
            _ => return None,
        };
        match elem {
            Elem::F16 => unfit(bytes, |b| f16::from_le_bytes(b).into()),
            Elem::Bf16 => unfit(bytes, |b| bf16::from_le_bytes(b).into()),
            Elem::F32 => unfit(bytes, |b| f32::from_le_bytes(b).into()),
            Elem::F64 => unfit(bytes, f64::from_le_bytes),
            _ => None,
        }
    }
}

fn unfit<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Option<(usize, f64)> {
    let values = bytes.as_chunks::<N>().0.iter().map(|&b| value(b));
    (values.enumerate()).find(|&(_, v)| !(v.is_finite() && v > 0.0))
}
