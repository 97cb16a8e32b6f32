//! Operations that move elements, by axes or by indices.

use anemone_schemas::aimodel::ir::{Elem, enum_code};

use super::{Resolved, Resolver, Result, broadcast};
use crate::ops::layout::{PadMode, Span};
use crate::plan::kind::Kind;

impl Resolver<'_> {
    pub(super) fn reshape(&self) -> Result<Resolved> {
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

    pub(super) fn transpose(&self) -> Result<Resolved> {
        self.arity(2)?;
        let perm = self.axes(1, self.args[0].rank())?;
        demand!(perm.len() == self.args[0].rank(), "permutation {perm:?}");
        let shape: Vec<usize> = perm.iter().map(|&p| self.args[0].shape[p]).collect();
        self.done(Kind::Transpose(perm), &[0], &shape)
    }

    pub(super) fn broadcast(&self) -> Result<Resolved> {
        let shape = &self.results[0].shape;
        demand!(
            broadcast(&self.args[0].shape, shape).as_ref() == Ok(shape),
            "cannot broadcast {:?} to {shape:?}",
            self.args[0].shape
        );
        self.done(Kind::Broadcast(shape.clone()), &[0], shape)
    }

    pub(super) fn concat(&self) -> Result<Resolved> {
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

    pub(super) fn split(&self) -> Result<Resolved> {
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
    pub(super) fn spans(&self) -> Result<Option<Vec<Span>>> {
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

    pub(super) fn slice(&self) -> Result<Resolved> {
        self.arity(4)?;
        if let Some(spans) = self.spans()? {
            let shape: Vec<usize> = spans.iter().map(|s| s.len).collect();
            return self.done(Kind::Slice(spans), &[0], &shape);
        }
        let shape = &self.results[0].shape;
        self.done(Kind::SliceRuntime, &[0, 1, 2, 3], shape)
    }

    pub(super) fn slice_update(&self) -> Result<Resolved> {
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

    pub(super) fn pad(&self) -> Result<Resolved> {
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

    pub(super) fn tile(&self) -> Result<Resolved> {
        self.arity(2)?;
        let (reps, x) = (self.sizes(1)?, &self.args[0].shape);
        let rank = reps.len().max(x.len());
        let at = |v: &[usize], i: usize| (i + v.len()).checked_sub(rank).map_or(1, |j| v[j]);
        let shape: Vec<usize> = (0..rank)
            .map(|i| at(&reps, i).saturating_mul(at(x, i)))
            .collect();
        self.done(Kind::Tile(reps), &[0], &shape)
    }

    pub(super) fn gather_nd(&self) -> Result<Resolved> {
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

    pub(super) fn gather_along_axis(&self) -> Result<Resolved> {
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

    pub(super) fn range(&self) -> Result<Resolved> {
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
}
