//! From an operation and its constant operands to a [`Kind`].
//!
//! What the kernels of an operation take for granted (element types, ranks,
//! extents that agree) is established here, so that a program from a file can
//! only fail at plan time, with the operation named.

mod rare;

use anemone_schemas::aimodel::ir::{Attr, Elem, Module, Op, enum_code};

use super::kind::Kind;
use crate::ops::convolution::Conv;
use crate::ops::elementwise::{Binary, Compare, Unary};
use crate::ops::layout::{PadMode, Span};
use crate::ops::rows::Reduce;
use crate::program::tensor_shape;
use crate::tensor::Data;

type Result<T> = std::result::Result<T, String>;

macro_rules! demand {
    ($cond:expr, $($arg:tt)*) => { if !$cond { return Err(format!($($arg)*)); } };
}
use demand;

/// Element type and extents of a value.
#[derive(Clone, Debug)]
pub(super) struct Typed {
    pub(super) elem: Elem,
    pub(super) shape: Vec<usize>,
}

impl Typed {
    fn is_float(&self) -> bool {
        matches!(self.elem, Elem::F16 | Elem::Bf16 | Elem::F32)
    }

    fn is_integer(&self) -> bool {
        !self.is_float() && self.elem != Elem::Bool
    }

    fn storage(&self) -> Elem {
        Data::zeros(self.elem, 0).map_or(self.elem, |d| d.elem())
    }

    fn rank(&self) -> usize {
        self.shape.len()
    }
}

/// An operation with what is known about it.
pub(super) struct Resolver<'a> {
    pub(super) module: &'a Module,
    pub(super) op: &'a Op,
    pub(super) args: Vec<Typed>,
    /// Integers of the operands that are constants of integers.
    pub(super) ints: &'a dyn Fn(usize) -> Option<Vec<i64>>,
    pub(super) results: Vec<Typed>,
}

/// A kind, and which operands are its values.
pub(super) struct Resolved {
    pub(super) kind: Kind,
    pub(super) data: Vec<usize>,
}

impl<'a> Resolver<'a> {
    pub(super) fn new(
        module: &'a Module,
        op: &'a Op,
        ints: &'a dyn Fn(usize) -> Option<Vec<i64>>,
    ) -> Result<Self> {
        let typed = |values: &[_]| -> Result<Vec<Typed>> {
            values
                .iter()
                .map(|&v| {
                    let (elem, shape) = tensor_shape(module, v)?;
                    demand!(
                        Data::zeros(elem, 0).is_some(),
                        "the runtime does not compute with element type `{}`",
                        elem.name()
                    );
                    Ok(Typed { elem, shape })
                })
                .collect()
        };
        Ok(Self {
            module,
            op,
            args: typed(&op.operands)?,
            ints,
            results: typed(&op.results)?,
        })
    }

    pub(super) fn resolve(&self) -> Result<Resolved> {
        let name = self.op.name.as_str();
        let expected = if name == "primitive.split_v1" {
            self.results.len().max(1)
        } else {
            1
        };
        demand!(
            self.results.len() == expected,
            "has {} results, expected {expected}",
            self.results.len()
        );
        let base = name.strip_suffix("_v1").unwrap_or("");
        let pairwise = base
            .strip_prefix("broadcasting_")
            .or_else(|| base.strip_prefix("primitive."))
            .unwrap_or("");
        if let Some(op) = unary(base) {
            return self.unary(op);
        }
        if let Some(op) = binary(pairwise) {
            return self.binary(op);
        }
        if let Some(op) = compare(pairwise) {
            return self.compare(op);
        }
        if let Some(op) = reduction(base) {
            return self.reduce(op);
        }
        match name {
            "primitive.gelu_v1" => {
                let tanh = self.enumeration("approximate", enum_code::APPROXIMATE)? == 1;
                self.unary(if tanh { Unary::GeluTanh } else { Unary::Gelu })
            }
            "primitive.not_v1" => {
                self.arity(1)?;
                self.elem(0, &[Elem::Bool])?;
                self.done(Kind::Not, &[0], &self.args[0].shape)
            }
            "primitive.where_v1" | "broadcasting_where_v1" => self.select(),
            "primitive.cast_v1" => {
                self.arity(1)?;
                let elem = self.results[0].elem;
                demand!(elem.bits() >= 8, "cannot cast to `{}`", elem.name());
                self.done(Kind::Cast(elem), &[0], &self.args[0].shape)
            }
            "primitive.reshape_v2" | "primitive.expand_dims_v1" | "primitive.shrink_dims_v1" => {
                self.reshape()
            }
            "primitive.transpose_v1" => self.transpose(),
            "primitive.broadcast_to_v1" | "primitive.broadcast_in_dims_v1" => self.broadcast(),
            "primitive.concat_v1" => self.concat(),
            "primitive.split_v1" => self.split(),
            "primitive.slice_v1" => self.slice(),
            "primitive.slice_update_v1" => self.slice_update(),
            "primitive.pad_v1" => self.pad(),
            "tile_v2" => self.tile(),
            "primitive.gather_nd_v1" => self.gather_nd(),
            "primitive.gather_along_axis_v1" => self.gather_along_axis(),
            "primitive.range_v1" => self.range(),
            "softmax_v1" => {
                self.arity(2)?;
                self.floats(0)?;
                let axis = self.axis(1, self.args[0].rank())?;
                demand!(self.args[0].shape[axis] > 0, "axis {axis} is empty");
                self.done(Kind::Softmax(axis), &[0], &self.args[0].shape)
            }
            "argmax_v1" => self.argmax(),
            "primitive.batch_matmul_v1" | "broadcasting_batch_matmul_v1" => self.batch_matmul(),
            "primitive.conv2d_v1" => self.conv2d(),
            "primitive.lut_to_dense_v1" => self.lut_to_dense(),
            "primitive.blockwise_shift_scale_v2" => self.shift_scale(),
            "dequantize_v2" => self.dequantize(),
            _ => self.rare(name),
        }
    }

    fn done(&self, kind: Kind, data: &[usize], shape: &[usize]) -> Result<Resolved> {
        let declared = &self.results[0].shape;
        demand!(
            declared == shape,
            "result is declared {declared:?}, but has shape {shape:?}"
        );
        Ok(Resolved {
            kind,
            data: data.to_vec(),
        })
    }

    // ---- operands

    fn arity(&self, n: usize) -> Result<()> {
        let have = self.args.len();
        demand!(have == n, "takes {n} operands, has {have}");
        Ok(())
    }

    fn elem(&self, i: usize, accepted: &[Elem]) -> Result<()> {
        let have = self.args[i].elem;
        demand!(
            accepted.contains(&have),
            "operand {i} of element type `{}` is not supported",
            have.name()
        );
        Ok(())
    }

    fn floats(&self, i: usize) -> Result<()> {
        self.elem(i, &[Elem::F16, Elem::Bf16, Elem::F32])
    }

    fn numbers(&self, i: usize) -> Result<()> {
        demand!(self.args[i].elem != Elem::Bool, "operand {i} is `i1`");
        Ok(())
    }

    fn integers(&self, i: usize) -> Result<()> {
        demand!(
            self.args[i].is_integer(),
            "operand {i} is `{}`, not integers",
            self.args[i].elem.name()
        );
        Ok(())
    }

    fn same_elem(&self, i: usize, j: usize) -> Result<()> {
        let (a, b) = (&self.args[i], &self.args[j]);
        demand!(
            a.storage() == b.storage(),
            "operand {i} is `{}`, operand {j} `{}`",
            a.elem.name(),
            b.elem.name()
        );
        Ok(())
    }

    fn result_elem(&self, elem: Elem) -> Result<()> {
        let declared = self.results[0].elem;
        demand!(
            declared == elem,
            "result is declared `{}`, but is `{}`",
            declared.name(),
            elem.name()
        );
        Ok(())
    }

    fn constant(&self, i: usize) -> Result<Vec<i64>> {
        (self.ints)(i).ok_or_else(|| format!("operand {i} must be a constant of integers"))
    }

    fn sizes(&self, i: usize) -> Result<Vec<usize>> {
        self.constant(i)?
            .into_iter()
            .map(|v| usize::try_from(v).map_err(|_| format!("operand {i} holds the size {v}")))
            .collect()
    }

    fn axes(&self, i: usize, rank: usize) -> Result<Vec<usize>> {
        let mut axes = Vec::new();
        for v in self.constant(i)? {
            let from_start = if v < 0 { v + rank as i64 } else { v };
            let axis = usize::try_from(from_start).ok().filter(|&a| a < rank);
            let axis = axis.ok_or_else(|| format!("axis {v} is outside rank {rank}"))?;
            demand!(!axes.contains(&axis), "axis {v} appears twice");
            axes.push(axis);
        }
        Ok(axes)
    }

    fn axis(&self, i: usize, rank: usize) -> Result<usize> {
        match self.axes(i, rank)?[..] {
            [axis] => Ok(axis),
            _ => Err(format!("operand {i} must hold one axis")),
        }
    }

    fn enumeration(&self, name: &str, code: u32) -> Result<u64> {
        match self.op.prop(name).map(|a| self.module.attr(a)) {
            Some(&Attr::Enum { code: c, value }) if c == code => Ok(value),
            None => Ok(u64::from(code == enum_code::PADDING_MODE)),
            Some(_) => Err(format!("attribute `{name}` is not of its kind")),
        }
    }

    // ---- elementwise

    fn unary(&self, op: Unary) -> Result<Resolved> {
        self.arity(1)?;
        if !matches!(op, Unary::Abs | Unary::Round | Unary::Relu) {
            self.floats(0)?;
        }
        self.numbers(0)?;
        self.result_elem(self.args[0].elem)?;
        self.done(Kind::Unary(op), &[0], &self.args[0].shape)
    }

    fn binary(&self, op: Binary) -> Result<Resolved> {
        self.arity(2)?;
        self.same_elem(0, 1)?;
        self.numbers(0)?;
        self.result_elem(self.args[0].elem)?;
        let shape = broadcast(&self.args[0].shape, &self.args[1].shape)?;
        self.done(Kind::Binary(op, shape.clone()), &[0, 1], &shape)
    }

    fn compare(&self, op: Compare) -> Result<Resolved> {
        self.arity(2)?;
        self.same_elem(0, 1)?;
        if matches!(op, Compare::And | Compare::Or | Compare::Xor) {
            self.elem(0, &[Elem::Bool])?;
        }
        self.result_elem(Elem::Bool)?;
        let shape = broadcast(&self.args[0].shape, &self.args[1].shape)?;
        self.done(Kind::Compare(op, shape.clone()), &[0, 1], &shape)
    }

    fn select(&self) -> Result<Resolved> {
        self.arity(3)?;
        self.elem(0, &[Elem::Bool])?;
        self.same_elem(1, 2)?;
        self.result_elem(self.args[1].elem)?;
        let shape = broadcast(&self.args[0].shape, &self.args[1].shape)?;
        let shape = broadcast(&shape, &self.args[2].shape)?;
        self.done(Kind::Select(shape.clone()), &[0, 1, 2], &shape)
    }

    // ---- layout

    fn reshape(&self) -> Result<Resolved> {
        self.arity(2)?;
        let shape = self.results[0].shape.clone();
        let count = |s: &[usize]| s.iter().try_fold(1usize, |a, &d| a.checked_mul(d));
        demand!(
            count(&shape).is_some() && count(&shape) == count(&self.args[0].shape),
            "cannot reshape {:?} to {shape:?}",
            self.args[0].shape
        );
        self.done(Kind::Reshape(shape.clone()), &[0], &shape)
    }

    fn transpose(&self) -> Result<Resolved> {
        self.arity(2)?;
        let perm = self.axes(1, self.args[0].rank())?;
        demand!(perm.len() == self.args[0].rank(), "permutation {perm:?}");
        let shape: Vec<usize> = perm.iter().map(|&p| self.args[0].shape[p]).collect();
        self.done(Kind::Transpose(perm), &[0], &shape)
    }

    fn broadcast(&self) -> Result<Resolved> {
        let shape = &self.results[0].shape;
        demand!(
            broadcast(&self.args[0].shape, shape).as_ref() == Ok(shape),
            "cannot broadcast {:?} to {shape:?}",
            self.args[0].shape
        );
        self.done(Kind::Broadcast(shape.clone()), &[0], shape)
    }

    fn concat(&self) -> Result<Resolved> {
        demand!(self.args.len() >= 2, "takes an axis and tensors");
        let first = &self.args[1];
        let axis = self.axis(0, first.rank())?;
        let mut shape = first.shape.clone();
        for i in 2..self.args.len() {
            self.same_elem(1, i)?;
            let part = &self.args[i].shape;
            let fits = part.len() == shape.len()
                && (0..part.len()).all(|a| a == axis || part[a] == shape[a]);
            demand!(
                fits,
                "operand {i} of shape {part:?} does not fit {:?}",
                first.shape
            );
            shape[axis] += part[axis];
        }
        let data: Vec<usize> = (1..self.args.len()).collect();
        self.done(Kind::Concat(axis), &data, &shape)
    }

    fn split(&self) -> Result<Resolved> {
        self.arity(3)?;
        let x = &self.args[0];
        let axis = self.axis(2, x.rank())?;
        let mut sizes = self.sizes(1)?;
        if self.args[1].rank() == 0 && sizes.len() == 1 && sizes[0] > 0 {
            sizes = vec![sizes[0]; x.shape[axis] / sizes[0]];
        }
        demand!(
            sizes.iter().sum::<usize>() == x.shape[axis] && sizes.len() == self.results.len(),
            "sizes {sizes:?} do not split an extent of {} into {} results",
            x.shape[axis],
            self.results.len()
        );
        for (result, &size) in self.results.iter().zip(&sizes) {
            let mut shape = x.shape.clone();
            shape[axis] = size;
            demand!(
                result.shape == shape,
                "result is declared {:?}, but has shape {shape:?}",
                result.shape
            );
        }
        Ok(Resolved {
            kind: Kind::Split(axis, sizes),
            data: vec![0],
        })
    }

    /// Spans if all of start, end and strides are constants.
    fn spans(&self) -> Result<Option<Vec<Span>>> {
        for i in 1..4 {
            self.integers(i)?;
        }
        let bounds = [1, 2, 3].map(|i| (self.ints)(i));
        let [Some(start), Some(end), Some(step)] = &bounds else {
            return Ok(None);
        };
        let dims = &self.args[0].shape;
        demand!(
            [start, end, step].iter().all(|v| v.len() == dims.len()),
            "slice bounds do not have the rank {}",
            dims.len()
        );
        (0..dims.len())
            .map(|a| {
                Span::new(dims[a], start[a], end[a], step[a])
                    .ok_or_else(|| format!("axis {a} has a stride of 0"))
            })
            .collect::<Result<_>>()
            .map(Some)
    }

    fn slice(&self) -> Result<Resolved> {
        self.arity(4)?;
        if let Some(spans) = self.spans()? {
            let shape: Vec<usize> = spans.iter().map(|s| s.len).collect();
            return self.done(Kind::Slice(spans), &[0], &shape);
        }
        let shape = &self.results[0].shape;
        self.done(Kind::SliceRuntime, &[0, 1, 2, 3], shape)
    }

    fn slice_update(&self) -> Result<Resolved> {
        self.arity(5)?;
        self.same_elem(0, 4)?;
        let shape = self.args[0].shape.clone();
        demand!(
            self.args[4].rank() == shape.len(),
            "the update has another rank"
        );
        match self.spans()? {
            Some(spans) => {
                let want: Vec<usize> = spans.iter().map(|s| s.len).collect();
                demand!(
                    want == self.args[4].shape,
                    "the slice has shape {want:?}, the update {:?}",
                    self.args[4].shape
                );
                self.done(Kind::SliceUpdate(spans), &[0, 4], &shape)
            }
            None => self.done(Kind::SliceUpdateRuntime, &[0, 1, 2, 3, 4], &shape),
        }
    }

    fn pad(&self) -> Result<Resolved> {
        self.arity(3)?;
        self.same_elem(0, 2)?;
        let flat = self.sizes(1)?;
        let x = &self.args[0].shape;
        demand!(
            flat.len() == 2 * x.len(),
            "{} pads for rank {}",
            flat.len(),
            x.len()
        );
        let pads: Vec<(usize, usize)> = flat.chunks_exact(2).map(|p| (p[0], p[1])).collect();
        let shape = x
            .iter()
            .zip(&pads)
            .map(|(d, p)| d.checked_add(p.0)?.checked_add(p.1))
            .collect::<Option<Vec<_>>>()
            .ok_or("the padded extent overflows")?;
        let mode = match self.enumeration("padding_mode", enum_code::PADDING_MODE)? {
            0 => PadMode::Circular,
            1 => PadMode::Constant,
            2 => PadMode::Reflect,
            3 => PadMode::Replicate,
            4 => PadMode::Symmetric,
            other => return Err(format!("padding mode {other} is not known")),
        };
        demand!(
            mode == PadMode::Constant || !x.contains(&0),
            "cannot pad an empty tensor"
        );
        self.done(Kind::Pad(pads, mode), &[0, 2], &shape)
    }

    fn tile(&self) -> Result<Resolved> {
        self.arity(2)?;
        let (reps, x) = (self.sizes(1)?, &self.args[0].shape);
        let rank = reps.len().max(x.len());
        let at = |v: &[usize], i: usize| (i + v.len()).checked_sub(rank).map_or(1, |j| v[j]);
        let shape: Vec<usize> = (0..rank)
            .map(|i| at(&reps, i).saturating_mul(at(x, i)))
            .collect();
        self.done(Kind::Tile(reps), &[0], &shape)
    }

    // ---- indices

    fn gather_nd(&self) -> Result<Resolved> {
        self.arity(2)?;
        self.integers(1)?;
        let (x, idx) = (&self.args[0].shape, &self.args[1].shape);
        let depth = idx.last().copied().ok_or("indices have rank 0")?;
        demand!(
            depth <= x.len(),
            "indices of depth {depth} into rank {}",
            x.len()
        );
        let mut shape = idx[..idx.len() - 1].to_vec();
        shape.extend_from_slice(&x[depth..]);
        self.done(Kind::GatherNd(shape.clone()), &[0, 1], &shape)
    }

    fn gather_along_axis(&self) -> Result<Resolved> {
        self.arity(3)?;
        self.integers(1)?;
        let (x, idx) = (&self.args[0].shape, &self.args[1].shape);
        let axis = self.axis(2, x.len())?;
        let fits = x.len() == idx.len() && (0..x.len()).all(|a| a == axis || idx[a] <= x[a]);
        demand!(
            fits,
            "indices of shape {idx:?} into {x:?} along axis {axis}"
        );
        self.done(Kind::GatherAlongAxis(axis), &[0, 1], idx)
    }

    fn range(&self) -> Result<Resolved> {
        self.arity(3)?;
        self.same_elem(0, 2)?;
        self.numbers(0)?;
        demand!(
            self.args
                .iter()
                .all(|a| a.shape.iter().product::<usize>() == 1),
            "start, stop and step must be scalars"
        );
        demand!(self.args[0].elem != Elem::Bf16, "bf16 is not supported");
        let shape = self.results[0].shape.clone();
        demand!(shape.len() == 1, "result is not of rank 1");
        self.done(Kind::Range(shape[0]), &[0, 2], &shape)
    }

    // ---- along axes

    fn reduce(&self, op: Reduce) -> Result<Resolved> {
        self.arity(2)?;
        self.numbers(0)?;
        let mut shape = self.args[0].shape.clone();
        let mut axes = self.axes(1, shape.len())?;
        axes.sort_unstable();
        for &a in &axes {
            demand!(
                shape[a] > 0 || matches!(op, Reduce::Sum | Reduce::Product),
                "axis {a} is empty"
            );
            shape[a] = 1;
        }
        self.done(Kind::Reduce(op, axes), &[0], &shape)
    }

    fn argmax(&self) -> Result<Resolved> {
        self.arity(2)?;
        self.numbers(0)?;
        self.result_elem(Elem::Ui32)?;
        let mut shape = self.args[0].shape.clone();
        let axis = self.axis(1, shape.len())?;
        demand!(shape[axis] > 0, "axis {axis} is empty");
        shape[axis] = 1;
        self.done(Kind::Argmax(axis), &[0], &shape)
    }

    // ---- products

    fn batch_matmul(&self) -> Result<Resolved> {
        self.arity(2)?;
        self.elem(0, &[Elem::F16, Elem::F32])?;
        self.same_elem(0, 1)?;
        let (x, y) = (&self.args[0].shape, &self.args[1].shape);
        demand!(
            x.len() >= 2 && y.len() >= 2,
            "operands of ranks {} and {}",
            x.len(),
            y.len()
        );
        let (xb, xm) = x.split_at(x.len() - 2);
        let (yb, ym) = y.split_at(y.len() - 2);
        demand!(xm[1] == ym[0], "{x:?} and {y:?} do not multiply");
        let batch = broadcast(xb, yb)?;
        let mut shape = batch.clone();
        shape.extend([xm[0], ym[1]]);
        self.done(Kind::BatchMatmul(batch), &[0, 1], &shape)
    }

    fn conv2d(&self) -> Result<Resolved> {
        self.arity(5)?;
        self.floats(0)?;
        self.same_elem(0, 1)?;
        let (x, w) = (&self.args[0].shape, &self.args[1].shape);
        demand!(
            x.len() == 4 && w.len() == 4,
            "operands of ranks {} and {}",
            x.len(),
            w.len()
        );
        let pair = |i| match self.sizes(i)?[..] {
            [a, b] if a > 0 && b > 0 => Ok((a, b)),
            _ => Err(format!("operand {i} must hold two positive numbers")),
        };
        let groups = match self.sizes(4)?[..] {
            [g] if g > 0 => g,
            _ => return Err("operand 4 must hold one positive number".into()),
        };
        let conv = Conv {
            stride: pair(2)?,
            dilation: pair(3)?,
            groups,
        };
        demand!(
            w[1].checked_mul(groups) == Some(x[1]) && w[0] % groups == 0,
            "weights {w:?} in {groups} groups do not fit {x:?}"
        );
        let extent = |n: usize, k: usize, stride: usize, dilation: usize| {
            let reach = k.checked_sub(1)?.checked_mul(dilation)?.checked_add(1)?;
            Some(n.checked_sub(reach)? / stride + 1)
        };
        let oh = extent(x[2], w[2], conv.stride.0, conv.dilation.0);
        let ow = extent(x[3], w[3], conv.stride.1, conv.dilation.1);
        let (Some(oh), Some(ow)) = (oh, ow) else {
            return Err(format!("the kernel of {w:?} is larger than {x:?}"));
        };
        let shape = vec![x[0], w[0], oh, ow];
        self.done(Kind::Conv2d(conv, shape.clone()), &[0, 1], &shape)
    }

    // ---- compressed constants

    fn lut_to_dense(&self) -> Result<Resolved> {
        self.arity(3)?;
        let (idx, table) = (&self.args[0], &self.args[1]);
        demand!(
            matches!(idx.storage(), Elem::Ui8),
            "indices of element type `{}`",
            idx.elem.name()
        );
        let rank = idx.rank();
        let axis = self.axis(2, rank)?;
        demand!(
            table.rank() == rank + 2,
            "a table of rank {} for rank {rank}",
            table.rank()
        );
        let blocks = (0..rank).all(|a| table.shape[a] > 0 && idx.shape[a] % table.shape[a] == 0);
        demand!(
            blocks,
            "table blocks {:?} do not divide {:?}",
            table.shape,
            idx.shape
        );
        demand!(
            table.shape[rank] == 1 << idx.elem.bits(),
            "a table of {} entries for `{}`",
            table.shape[rank],
            idx.elem.name()
        );
        let mut shape = idx.shape.clone();
        shape[axis] = shape[axis].saturating_mul(table.shape[rank + 1]);
        self.done(Kind::LutToDense(axis, shape.clone()), &[0, 1], &shape)
    }

    fn scale_operands(&self) -> Result<()> {
        for i in [1, 3] {
            self.floats(i)?;
        }
        for i in [0, 2] {
            self.numbers(i)?;
        }
        self.result_elem(self.args[3].elem)
    }

    fn shift_scale(&self) -> Result<Resolved> {
        self.arity(4)?;
        self.scale_operands()?;
        let shape = self.args[0].shape.clone();
        for i in 1..4 {
            let p = &self.args[i].shape;
            let fits = p.is_empty()
                || p.len() == shape.len()
                    && p.iter().zip(&shape).all(|(&b, &d)| b > 0 && d % b == 0);
            demand!(fits, "operand {i} of shape {p:?} does not divide {shape:?}");
        }
        self.done(Kind::ShiftScale, &[0, 1, 2, 3], &shape)
    }

    fn dequantize(&self) -> Result<Resolved> {
        self.arity(5)?;
        self.scale_operands()?;
        let shape = self.args[0].shape.clone();
        let axis = self.axis(4, shape.len())?;
        for i in 1..4 {
            let n = self.args[i].shape.iter().product::<usize>();
            demand!(
                n == 1 || n == shape[axis],
                "operand {i} has {n} elements for an extent of {}",
                shape[axis]
            );
        }
        self.done(Kind::Dequantize(axis), &[0, 1, 2, 3], &shape)
    }
}

/// numpy broadcasting.
fn broadcast(x: &[usize], y: &[usize]) -> Result<Vec<usize>> {
    let rank = x.len().max(y.len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |j| s[j]);
    (0..rank)
        .map(|i| match (at(x, i), at(y, i)) {
            (a, b) if a == b => Ok(a),
            (1, b) => Ok(b),
            (a, 1) => Ok(a),
            _ => Err(format!("shapes {x:?} and {y:?} do not broadcast")),
        })
        .collect()
}

fn unary(base: &str) -> Option<Unary> {
    Some(match base {
        "primitive.exp" => Unary::Exp,
        "primitive.tanh" => Unary::Tanh,
        "primitive.sin" => Unary::Sin,
        "primitive.cos" => Unary::Cos,
        "primitive.abs" => Unary::Abs,
        "primitive.round" => Unary::Round,
        "primitive.sqrt" => Unary::Sqrt,
        "primitive.rsqrt" => Unary::Rsqrt,
        "primitive.log" => Unary::Log,
        "primitive.erf" => Unary::Erf,
        "sigmoid" => Unary::Sigmoid,
        "silu" => Unary::Silu,
        "relu" => Unary::Relu,
        _ => return None,
    })
}

fn binary(base: &str) -> Option<Binary> {
    Some(match base {
        "add" => Binary::Add,
        "sub" => Binary::Sub,
        "mul" => Binary::Mul,
        "divide" => Binary::Divide,
        "maximum" => Binary::Maximum,
        "minimum" => Binary::Minimum,
        "pow" => Binary::Pow,
        "modulo" => Binary::Modulo,
        "floor_divide" => Binary::FloorDivide,
        _ => return None,
    })
}

fn compare(base: &str) -> Option<Compare> {
    Some(match base {
        "equal" => Compare::Equal,
        "not_equal" => Compare::NotEqual,
        "greater" => Compare::Greater,
        "logical_and" => Compare::And,
        "logical_or" => Compare::Or,
        "logical_xor" => Compare::Xor,
        _ => return None,
    })
}

fn reduction(base: &str) -> Option<Reduce> {
    Some(match base {
        "reduce_sum" => Reduce::Sum,
        "reduce_mean" => Reduce::Mean,
        "reduce_max" => Reduce::Max,
        "reduce_min" => Reduce::Min,
        "reduce_product" => Reduce::Product,
        _ => return None,
    })
}
