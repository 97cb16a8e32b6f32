//! Operations that compute: on elements, along axes, products, compressed constants.

use anemone_schemas::aimodel::ir::Elem;

use super::{Resolved, Resolver, Result, broadcast};
use crate::ops::convolution::Conv;
use crate::ops::elementwise::{Binary, Unary};
use crate::ops::logic::Compare;
use crate::ops::rows::Reduce;
use crate::plan::kind::Kind;

impl Resolver<'_> {
    pub(super) fn unary(&self, op: Unary) -> Result<Resolved> {
        self.arity(1)?;
        if !matches!(op, Unary::Abs | Unary::Round | Unary::Relu) {
            self.floats(0)?;
        }
        self.numbers(0)?;
        self.result_elem(self.args[0].elem)?;
        self.done(Kind::Unary(op), &[0], &self.args[0].shape)
    }

    pub(super) fn binary(&self, op: Binary) -> Result<Resolved> {
        self.arity(2)?;
        self.same_elem(0, 1)?;
        self.numbers(0)?;
        self.result_elem(self.args[0].elem)?;
        let shape = broadcast(&self.args[0].shape, &self.args[1].shape)?;
        self.done(Kind::Binary(op, shape.clone()), &[0, 1], &shape)
    }

    pub(super) fn compare(&self, op: Compare) -> Result<Resolved> {
        self.arity(2)?;
        self.same_elem(0, 1)?;
        if matches!(op, Compare::And | Compare::Or | Compare::Xor) {
            self.elem(0, &[Elem::Bool])?;
        }
        self.result_elem(Elem::Bool)?;
        let shape = broadcast(&self.args[0].shape, &self.args[1].shape)?;
        self.done(Kind::Compare(op, shape.clone()), &[0, 1], &shape)
    }

    pub(super) fn select(&self) -> Result<Resolved> {
        self.arity(3)?;
        self.elem(0, &[Elem::Bool])?;
        self.same_elem(1, 2)?;
        self.result_elem(self.args[1].elem)?;
        let shape = broadcast(&self.args[0].shape, &self.args[1].shape)?;
        let shape = broadcast(&shape, &self.args[2].shape)?;
        self.done(Kind::Select(shape.clone()), &[0, 1, 2], &shape)
    }

    pub(super) fn reduce(&self, op: Reduce) -> Result<Resolved> {
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

    pub(super) fn argmax(&self) -> Result<Resolved> {
        self.arity(2)?;
        self.numbers(0)?;
        self.result_elem(Elem::Ui32)?;
        let mut shape = self.args[0].shape.clone();
        let axis = self.axis(1, shape.len())?;
        demand!(shape[axis] > 0, "axis {axis} is empty");
        shape[axis] = 1;
        self.done(Kind::Argmax(axis), &[0], &shape)
    }

    pub(super) fn batch_matmul(&self) -> Result<Resolved> {
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

    pub(super) fn conv2d(&self) -> Result<Resolved> {
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

    pub(super) fn lut_to_dense(&self) -> Result<Resolved> {
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

    pub(super) fn scale_operands(&self) -> Result<()> {
        for i in [1, 3] {
            self.floats(i)?;
        }
        for i in [0, 2] {
            self.numbers(i)?;
        }
        self.result_elem(self.args[3].elem)
    }

    pub(super) fn shift_scale(&self) -> Result<Resolved> {
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

    pub(super) fn dequantize(&self) -> Result<Resolved> {
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
