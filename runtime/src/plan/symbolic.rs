//! Constants that stay where they are until an operation reads them, and the products
//! that read them in place.

use anemone_schemas::aimodel::ir::{Attr, AttrId, Elem, Op, TensorType};
use half::f16;

use super::kind::{Bytes, Kind, Place, WeightsRef};
use crate::program::Shared;

/// What a value of the program stands for.
#[derive(Clone, Debug)]
pub(super) enum Ref {
    Slot(u32),
    State(usize),
    Token,
    Constant(AttrId, TensorType),
    /// A table look-up of constants: indices, table, axis, dense shape.
    Lut(Box<Lut>),
    /// Integers of constants that are shifted and scaled.
    Scaled(Box<Scaled>),
    /// A matrix of the three kinds above, transposed.
    Transposed(Box<Self>),
}

#[derive(Clone, Debug)]
pub(super) struct Lut {
    pub(super) indices: (AttrId, TensorType),
    pub(super) table: (AttrId, TensorType),
    pub(super) axis: usize,
    pub(super) shape: Vec<usize>,
    pub(super) place: Place,
}

#[derive(Clone, Debug)]
pub(super) struct Scaled {
    /// Integers, scales, and what is subtracted before and added after scaling.
    pub(super) operands: [(AttrId, TensorType); 4],
    pub(super) shape: Vec<usize>,
    pub(super) place: Place,
}

impl Shared {
    /// A product with constant weights: its kind and the operand that is not the
    /// weights.
    pub(super) fn weight_matmul(
        &self,
        kind: &Kind,
        args: &[Ref],
        op: &Op,
    ) -> Option<(Kind, usize)> {
        let module = &self.module;
        let x = module.tensor_type(op.operands[0])?;
        if x.elem != Elem::F16 {
            return None;
        }
        let (weights, channels_first, shape) = match kind {
            Kind::Conv2d(conv, shape) => {
                let w = module.tensor_type(op.operands[1])?.dims()?;
                if !conv.is_pointwise(&w) {
                    return None;
                }
                (
                    self.weights_in_place(&args[1], w[0], w[1])?,
                    true,
                    shape.clone(),
                )
            }
            Kind::BatchMatmul(_) => {
                let Ref::Transposed(inner) = &args[1] else {
                    return None;
                };
                let w = module.tensor_type(op.operands[1])?.dims()?;
                let shape = module.tensor_type(op.results[0])?.dims()?;
                (self.weights_in_place(inner, w[1], w[0])?, false, shape)
            }
            _ => return None,
        };
        self.check_weights(&weights).ok()?;
        let kind = Kind::WeightMatmul {
            weights,
            channels_first,
            shape,
        };
        Some((kind, 0))
    }

    /// The weights `[rows, cols]` as they lie in the program: f16, f16 tables with one
    /// block of indices per group of rows, or bytes with an f16 scale per row.
    fn weights_in_place(&self, r: &Ref, rows: usize, cols: usize) -> Option<WeightsRef> {
        match r {
            Ref::Constant(value, ty)
                if ty.elem == Elem::F16 && ty.count() == rows.checked_mul(cols) =>
            {
                Some(WeightsRef::Dense {
                    rows,
                    cols,
                    values: self.source(*value),
                })
            }
            Ref::Lut(lut) => {
                let (table, indices) = (&lut.table.1, &lut.indices.1);
                let blocks = table.dims()?;
                let rank = lut.shape.len();
                let by_rows = blocks.get(1..rank)?.iter().all(|&b| b == 1);
                let scalar = blocks.get(rank + 1) == Some(&1);
                // Inline indices below a byte lie one to a byte, not packed.
                let packed = indices.elem.bits() >= 8
                    || matches!(self.source(lut.indices.0), Bytes::Blob(_));
                if table.elem != Elem::F16 || !by_rows || !scalar || !packed {
                    return None;
                }
                Some(WeightsRef::Lut {
                    rows,
                    cols,
                    bits: u8::try_from(indices.elem.bits()).ok()?,
                    group_rows: rows.checked_div(blocks[0])?,
                    tables: self.source(lut.table.0),
                    indices: self.source(lut.indices.0),
                })
            }
            Ref::Scaled(scaled) => {
                let [values, scales, before, after] = &scaled.operands;
                let (by_row, elems) = (scales.1.dims()?, (values.1.elem, scales.1.elem));
                let one_per_row = by_row.first() == Some(&rows) && scales.1.count() == Some(rows);
                let unshifted = self.is_zero(before.0) && self.is_zero(after.0);
                let halves = after.1.elem == Elem::F16;
                if elems != (Elem::Si8, Elem::F16) || !one_per_row || !unshifted || !halves {
                    return None;
                }
                let scales = self.bytes(self.source(scales.0))?.as_chunks().0;
                Some(WeightsRef::Int8 {
                    rows,
                    cols,
                    values: self.source(values.0),
                    scales: scales
                        .iter()
                        .map(|&s| f16::from_le_bytes(s).to_f32())
                        .collect(),
                })
            }
            _ => None,
        }
    }

    /// Whether a constant is one zero, repeated.
    fn is_zero(&self, value: AttrId) -> bool {
        matches!(self.module.attr(value), Attr::Dense { splat: true, bytes }
            if bytes.iter().all(|&b| b == 0))
    }

    fn source(&self, value: AttrId) -> Bytes {
        match self.module.attr(value) {
            Attr::Resource(blob) => Bytes::Blob(*blob),
            _ => Bytes::Inline(value),
        }
    }
}

/// The value as a symbol, if it is one: a table look-up of constants, integers of
/// constants scaled, or a matrix of constants transposed.
pub(super) fn symbolic(kind: &Kind, args: &[Ref], place: &Place) -> Option<Ref> {
    match (kind, args) {
        (Kind::LutToDense(axis, shape), [Ref::Constant(i, it), Ref::Constant(t, tt), ..]) => {
            Some(Ref::Lut(Box::new(Lut {
                indices: (*i, it.clone()),
                table: (*t, tt.clone()),
                axis: *axis,
                shape: shape.clone(),
                place: place.clone(),
            })))
        }
        (
            Kind::ShiftScale,
            [
                Ref::Constant(x, xt),
                Ref::Constant(s, st),
                Ref::Constant(b, bt),
                Ref::Constant(a, at),
            ],
        ) => Some(Ref::Scaled(Box::new(Scaled {
            operands: [(x, xt), (s, st), (b, bt), (a, at)].map(|(v, t)| (*v, t.clone())),
            shape: xt.dims()?,
            place: place.clone(),
        }))),
        (
            Kind::Transpose(perm),
            [
                inner @ (Ref::Constant(..) | Ref::Lut(_) | Ref::Scaled(_)),
                ..,
            ],
        ) if perm[..] == [1, 0] => Some(Ref::Transposed(Box::new(inner.clone()))),
        _ => None,
    }
}
