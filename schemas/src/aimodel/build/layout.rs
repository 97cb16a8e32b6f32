//! Shapes, slices, gathers and scatters.

use super::GraphBuilder;
use crate::aimodel::ir::{Attr, DYNAMIC, Elem, TensorType, ValueId, enum_code};

/// What [`GraphBuilder::pad`] puts around the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// The tensor, repeated periodically.
    Circular,
    /// One value.
    Constant,
    /// The tensor mirrored at its first and last element.
    Reflect,
    /// The nearest element.
    Replicate,
    /// The tensor mirrored at its borders.
    Symmetric,
}

/// How [`GraphBuilder::scatter_along_axis`] combines old and new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Scatter {
    Update,
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

/// A slice bound: known now, or a `tensor<rank x si32>` of the graph.
#[derive(Clone, Copy, Debug)]
pub enum Bound<'a> {
    /// One offset per axis; negative ones count from the end.
    Static(&'a [i32]),
    /// Offsets computed by the graph.
    Runtime(ValueId),
}

impl<'a, const N: usize> From<&'a [i32; N]> for Bound<'a> {
    fn from(offsets: &'a [i32; N]) -> Self {
        Self::Static(offsets)
    }
}

impl<'a> From<&'a [i32]> for Bound<'a> {
    fn from(offsets: &'a [i32]) -> Self {
        Self::Static(offsets)
    }
}

impl<'a> From<&'a Vec<i32>> for Bound<'a> {
    fn from(offsets: &'a Vec<i32>) -> Self {
        Self::Static(offsets)
    }
}

impl From<ValueId> for Bound<'_> {
    fn from(offsets: ValueId) -> Self {
        Self::Runtime(offsets)
    }
}

impl GraphBuilder<'_> {
    /// Reorders axes: result axis `i` is axis `perm[i]` of `x`.
    pub fn transpose(&mut self, x: ValueId, perm: &[usize]) -> ValueId {
        let perm = self.sizes(perm);
        self.infer("primitive.transpose_v1", &[x, perm])
    }

    /// The same elements in another shape.
    pub fn reshape(&mut self, x: ValueId, shape: &[usize]) -> ValueId {
        let shape = self.sizes(shape);
        self.infer("primitive.reshape_v2", &[x, shape])
    }

    /// Inserts axes of extent 1 at these positions of the result.
    pub fn expand_dims(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        let axes = self.axes(axes);
        self.infer("primitive.expand_dims_v1", &[x, axes])
    }

    /// Removes axes of extent 1.
    pub fn shrink_dims(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        let axes = self.axes(axes);
        self.infer("primitive.shrink_dims_v1", &[x, axes])
    }

    /// numpy's `broadcast_to`.
    pub fn broadcast_to(&mut self, x: ValueId, shape: &[usize]) -> ValueId {
        let shape = self.sizes(shape);
        self.infer("primitive.broadcast_to_v1", &[x, shape])
    }

    /// Repeats axes of extent 1 to the given sizes; the rank stays.
    pub fn broadcast_in_dims(&mut self, x: ValueId, sizes: &[usize], axes: &[usize]) -> ValueId {
        let (sizes, axes) = (self.sizes(sizes), self.axes(axes));
        self.infer("primitive.broadcast_in_dims_v1", &[x, sizes, axes])
    }

    /// Joins tensors along an axis.
    pub fn concat(&mut self, axis: usize, parts: &[ValueId]) -> ValueId {
        let mut operands = vec![self.i32_scalar(axis as i32)];
        operands.extend_from_slice(parts);
        self.infer("primitive.concat_v1", &operands)
    }

    /// Cuts `x` along an axis into parts of the given sizes, which sum to its extent.
    pub fn split(&mut self, x: ValueId, axis: usize, sizes: &[usize]) -> Vec<ValueId> {
        let (sizes, axis) = (self.sizes(sizes), self.i32_scalar(axis as i32));
        self.infer_with("primitive.split_v1", &[x, sizes, axis], vec![], vec![])
    }

    /// `x[start:end]` with step 1 on every axis, offsets known now.
    pub fn slice(&mut self, x: ValueId, start: &[i32], end: &[i32]) -> ValueId {
        let strides = vec![1; start.len()];
        self.slice_strided(x, start, end, &strides)
    }

    /// `x[start:end:stride]`.
    pub fn slice_strided(
        &mut self,
        x: ValueId,
        start: &[i32],
        end: &[i32],
        strides: &[i32],
    ) -> ValueId {
        let operands = [x, self.i32s(start), self.i32s(end), self.i32s(strides)];
        self.infer("primitive.slice_v1", &operands)
    }

    /// `x[start:end]` where an offset is computed at run time, so the caller says
    /// which extents come out.
    pub fn slice_runtime<'a>(
        &mut self,
        x: ValueId,
        start: impl Into<Bound<'a>>,
        end: impl Into<Bound<'a>>,
        shape: &[usize],
    ) -> ValueId {
        let (start, end, strides) = self.bounds(x, start.into(), end.into());
        let result = TensorType::new(self.elem(x), shape);
        self.typed("primitive.slice_v1", &[x, start, end, strides], result)
    }

    /// `x` with `x[start:end]` replaced by `update`.
    pub fn slice_update<'a>(
        &mut self,
        x: ValueId,
        start: impl Into<Bound<'a>>,
        end: impl Into<Bound<'a>>,
        update: ValueId,
    ) -> ValueId {
        let (start, end, strides) = self.bounds(x, start.into(), end.into());
        self.infer(
            "primitive.slice_update_v1",
            &[x, start, end, strides, update],
        )
    }

    fn bounds(&mut self, x: ValueId, start: Bound, end: Bound) -> (ValueId, ValueId, ValueId) {
        let strides = vec![1; self.tensor_type(x).shape.len()];
        let mut value = |bound| match bound {
            Bound::Static(offsets) => self.i32s(offsets),
            Bound::Runtime(v) => v,
        };
        (value(start), value(end), value(Bound::Static(&strides)))
    }

    /// Pads with `(before, after)` per axis; `value` is used by
    /// [`Padding::Constant`] only.
    pub fn pad(
        &mut self,
        x: ValueId,
        pads: &[(usize, usize)],
        mode: Padding,
        value: f64,
    ) -> ValueId {
        let pads: Vec<usize> = pads.iter().flat_map(|&(a, b)| [a, b]).collect();
        let elem = self.elem(x);
        let operands = [x, self.sizes(&pads), self.full(elem, &[], value)];
        let mode = self.module.add_attr(Attr::Enum {
            code: enum_code::PADDING_MODE,
            value: mode as u64,
        });
        let props = vec![("padding_mode", mode)];
        self.infer_with("primitive.pad_v1", &operands, props, vec![])[0]
    }

    /// `x[idx[.., 0], idx[.., 1], ..]`: the last axis of the indices addresses the
    /// first axes of `x`. A table look-up takes indices `[n, 1]`.
    pub fn gather_nd(&mut self, x: ValueId, indices: ValueId) -> ValueId {
        self.infer("primitive.gather_nd_v1", &[x, indices])
    }

    /// numpy's `take_along_axis`.
    pub fn gather_along_axis(&mut self, x: ValueId, indices: ValueId, axis: usize) -> ValueId {
        let axis = self.i32_scalar(axis as i32);
        self.infer("primitive.gather_along_axis_v1", &[x, indices, axis])
    }

    /// `x` with the places [`Self::gather_nd`] would read replaced by `updates`.
    pub fn scatter_nd(&mut self, x: ValueId, indices: ValueId, updates: ValueId) -> ValueId {
        let scalar = self.scalar_type(self.elem(x));
        let combine = self.region(&[scalar, scalar], |_, args| vec![args[1]]);
        self.infer_with(
            "primitive.scatter_nd_v1",
            &[x, indices, updates],
            vec![],
            vec![combine],
        )[0]
    }

    /// `x` with the places [`Self::gather_along_axis`] would read combined with
    /// `updates`.
    pub fn scatter_along_axis(
        &mut self,
        x: ValueId,
        indices: ValueId,
        updates: ValueId,
        axis: usize,
        mode: Scatter,
    ) -> ValueId {
        let axis = self.i32_scalar(axis as i32);
        let mode = self.module.add_attr(Attr::Enum {
            code: enum_code::SCATTER_MODE,
            value: mode as u64,
        });
        self.infer_with(
            "primitive.scatter_along_axis_v1",
            &[x, indices, updates, axis],
            vec![("scatter_mode", mode)],
            vec![],
        )[0]
    }

    /// `x` with its elements in the opposite order along each of `axes`.
    pub fn reverse(&mut self, x: ValueId, axes: &[usize]) -> ValueId {
        let axes = self.axes(axes);
        self.infer("primitive.reverse_v1", &[x, axes])
    }

    /// Indices (`si32`) of the elements along an axis in ascending or descending order.
    /// NaN is last either way. Equal elements keep their order if `stable`.
    pub fn argsort(&mut self, x: ValueId, axis: usize, descending: bool, stable: bool) -> ValueId {
        let operands = self.sort_operands(x, axis, [descending, stable]);
        self.infer("primitive.argsort_v1", &operands)
    }

    pub(super) fn sort_operands(
        &mut self,
        x: ValueId,
        axis: usize,
        flags: [bool; 2],
    ) -> [ValueId; 4] {
        let axis = self.i32_scalar(axis as i32);
        let [descending, stable] =
            flags.map(|on| self.full(Elem::Bool, &[], f64::from(u8::from(on))));
        [x, axis, descending, stable]
    }

    /// `[start, start + step, ..)` of `len` elements; the three are scalars of one type.
    pub fn range(&mut self, start: ValueId, stop: ValueId, step: ValueId, len: usize) -> ValueId {
        let result = TensorType::new(self.elem(start), &[len]);
        self.typed("primitive.range_v1", &[start, stop, step], result)
    }

    /// Whether any extent of a value is only known at run time.
    pub(super) fn is_dynamic(&self, x: ValueId) -> bool {
        self.tensor_type(x).shape.contains(&DYNAMIC)
    }
}
