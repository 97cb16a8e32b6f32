//! Operations that move elements without computing: shapes, slices, gathers.

use super::{Ctx, Index, Rule, Stop, demand, extents, plain, wrong};
use crate::aimodel::ir::{DYNAMIC, Elem, TensorType};

impl Ctx<'_> {
    pub(super) fn layout(&self, name: &str) -> Option<Rule<Vec<TensorType>>> {
        let one = match name {
            "primitive.split_v1" => return Some(self.split()),
            "primitive.concat_v1" => self.concat(),
            "primitive.slice_v1" => self.slice(),
            "primitive.slice_update_v1" => self.slice_update(),
            "primitive.reshape_v2" => self.reshape(),
            "primitive.expand_dims_v1" => self.expand_dims(),
            "primitive.shrink_dims_v1" => self.shrink_dims(),
            "primitive.transpose_v1" => self.transpose(),
            "primitive.broadcast_in_dims_v1" => self.broadcast_in_dims(),
            "primitive.broadcast_to_v1" => self.broadcast_to(),
            "primitive.pad_v1" => self.pad(),
            "primitive.gather_nd_v1" => self.gather_nd(),
            "primitive.gather_along_axis_v1" => self.gather_along_axis(),
            "primitive.scatter_nd_v1" => self.scatter_nd(),
            "primitive.scatter_along_axis_v1" => self.scatter_along_axis(),
            "primitive.reverse_v1" => self.reverse(),
            "primitive.argsort_v1" => self.sort(Some(Elem::Si32)),
            "sort_v1" => self.sort(None),
            "tile_v2" => self.tile(),
            _ => return None,
        };
        Some(one.map(|t| vec![t]))
    }

    /// Operand 0 with other extents.
    fn reshaped(&self, dims: &[usize]) -> Rule<TensorType> {
        Ok(plain(self.tensor(0)?.elem, extents(dims)))
    }

    fn concat(&self) -> Rule<TensorType> {
        let parts = self.op.operands.len().saturating_sub(1);
        demand!(parts > 0, "has nothing to concatenate");
        self.index_elem(0, Index::Signed)?;
        let first = self.tensor(1)?;
        for i in 2..=parts {
            self.same_elem(1, i)?;
            let rank = self.tensor(i)?.shape.len();
            demand!(
                rank == first.shape.len(),
                "operand {i} has rank {rank}, operand 1 has rank {}",
                first.shape.len()
            );
        }
        let axis = self.axis(0, first.shape.len())?;
        let mut out = self.dims(1)?;
        for i in 2..=parts {
            let dims = self.dims(i)?;
            for (d, (&a, &b)) in out.iter().zip(&dims).enumerate() {
                demand!(
                    d == axis || a == b,
                    "operand {i} has extent {b} on axis {d}, operand 1 has {a}"
                );
            }
            out[axis] += dims[axis];
        }
        Ok(plain(first.elem, extents(&out)))
    }

    fn split(&self) -> Rule<Vec<TensorType>> {
        self.arity(3)?;
        self.index_elem(1, Index::Unsigned)?;
        self.index_elem(2, Index::Signed)?;
        let dims = self.dims(0)?;
        let axis = self.axis(2, dims.len())?;
        let mut sizes = self.sizes(1)?;
        if self.tensor(1)?.shape.is_empty() {
            let size = sizes[0];
            demand!(
                size > 0 && dims[axis] % size == 0,
                "size {size} does not divide extent {}",
                dims[axis]
            );
            demand!(
                dims[axis] / size <= crate::aimodel::limits::MAX_RESULTS,
                "splits into {} parts",
                dims[axis] / size
            );
            sizes = vec![size; dims[axis] / size];
        }
        let sum: usize = sizes.iter().sum();
        demand!(
            sum == dims[axis],
            "sizes {sizes:?} sum to {sum}, the axis has {}",
            dims[axis]
        );
        sizes
            .into_iter()
            .map(|size| {
                let mut out = dims.clone();
                out[axis] = size;
                self.reshaped(&out)
            })
            .collect()
    }

    /// Checks start, end and strides, and gives the extents they select, or all
    /// dynamic ones if an offset is only known at run time.
    fn selected(&self) -> Rule<Vec<i64>> {
        let rank = self.tensor(0)?.shape.len();
        for i in 1..=3 {
            self.index_operand(i, Index::Signed, 1)?;
            let have = self.tensor(i)?.shape[0];
            demand!(
                super::compatible(have, rank as i64),
                "operand {i} has {have} entries for rank {rank}"
            );
        }
        let known = (|| Ok((self.dims(0)?, self.ints(1)?, self.ints(2)?, self.ints(3)?)))();
        let (dims, start, end, strides) = match known {
            Ok(all) => all,
            Err(Stop::Unknown) => return Ok(vec![DYNAMIC; rank]),
            Err(e) => return Err(e),
        };
        let mut out = Vec::with_capacity(rank);
        for d in 0..rank {
            let extent = dims[d] as i64;
            let clamp = |v: i64| (if v < 0 { v + extent } else { v }).clamp(0, extent);
            demand!(strides[d] > 0, "stride {} on axis {d}", strides[d]);
            let span = (clamp(end[d]) - clamp(start[d])).max(0);
            out.push((span + strides[d] - 1) / strides[d]);
        }
        Ok(out)
    }

    fn slice(&self) -> Rule<TensorType> {
        self.arity(4)?;
        Ok(plain(self.tensor(0)?.elem, self.selected()?))
    }

    fn slice_update(&self) -> Rule<TensorType> {
        self.arity(5)?;
        self.same_elem(0, 4)?;
        super::same_shapes(&self.selected()?, &self.tensor(4)?.shape)?;
        Ok(self.tensor(0)?.clone())
    }

    fn reshape(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Shape, 1)?;
        let (from, to) = (self.dims(0)?, self.sizes(1)?);
        let count = |dims: &[usize]| dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        demand!(
            count(&from).is_some() && count(&from) == count(&to),
            "cannot reshape {from:?} to {to:?}"
        );
        self.reshaped(&to)
    }

    fn expand_dims(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Signed, 1)?;
        let dims = self.dims(0)?;
        let added = self.ints(1)?.len();
        let axes = self.axes(1, dims.len() + added)?;
        let mut rest = dims.iter();
        let out: Vec<usize> = (0..dims.len() + added)
            .map(|d| {
                if axes.contains(&d) {
                    1
                } else {
                    *rest.next().expect("as many as not added")
                }
            })
            .collect();
        self.reshaped(&out)
    }

    fn shrink_dims(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Signed, 1)?;
        let dims = self.dims(0)?;
        let axes = self.axes(1, dims.len())?;
        for &a in &axes {
            demand!(dims[a] == 1, "axis {a} has extent {}, not 1", dims[a]);
        }
        let out: Vec<usize> = (0..dims.len())
            .filter(|d| !axes.contains(d))
            .map(|d| dims[d])
            .collect();
        self.reshaped(&out)
    }

    fn transpose(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Unsigned, 1)?;
        let dims = self.dims(0)?;
        let perm = self.axes(1, dims.len())?;
        demand!(
            perm.len() == dims.len(),
            "permutation of {} axes for rank {}",
            perm.len(),
            dims.len()
        );
        let out: Vec<usize> = perm.iter().map(|&p| dims[p]).collect();
        self.reshaped(&out)
    }

    fn broadcast_in_dims(&self) -> Rule<TensorType> {
        self.arity(3)?;
        self.index_operand(1, Index::Unsigned, 1)?;
        self.index_operand(2, Index::Signed, 1)?;
        let mut dims = self.dims(0)?;
        let (sizes, axes) = (self.sizes(1)?, self.axes(2, dims.len())?);
        demand!(
            sizes.len() == axes.len(),
            "{} sizes for {} axes",
            sizes.len(),
            axes.len()
        );
        for (&size, &axis) in sizes.iter().zip(&axes) {
            demand!(
                dims[axis] == 1,
                "axis {axis} has extent {}, not 1",
                dims[axis]
            );
            dims[axis] = size;
        }
        self.reshaped(&dims)
    }

    fn broadcast_to(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Unsigned, 1)?;
        let (dims, to) = (self.dims(0)?, self.sizes(1)?);
        let out = super::broadcast_shapes(&extents(&dims), &extents(&to))?;
        demand!(out == extents(&to), "cannot broadcast {dims:?} to {to:?}");
        self.reshaped(&to)
    }

    fn pad(&self) -> Rule<TensorType> {
        self.arity(3)?;
        self.index_operand(1, Index::Unsigned, 1)?;
        self.same_elem(0, 2)?;
        demand!(
            self.tensor(2)?.shape.is_empty(),
            "the padding value has rank {}, not 0",
            self.tensor(2)?.shape.len()
        );
        let (mut dims, pads) = (self.dims(0)?, self.sizes(1)?);
        demand!(
            pads.len() == 2 * dims.len(),
            "{} paddings for rank {}",
            pads.len(),
            dims.len()
        );
        for (d, pair) in dims.iter_mut().zip(pads.chunks_exact(2)) {
            *d += pair[0] + pair[1];
        }
        self.reshaped(&dims)
    }

    /// `idx[..-1] ++ x[k..]`, where `k` is the last extent of the indices.
    fn gathered(&self) -> Rule<Vec<usize>> {
        self.index_elem(1, Index::Signed)?;
        let (x, idx) = (self.dims(0)?, self.dims(1)?);
        let Some((&k, lead)) = idx.split_last() else {
            wrong!("the indices have rank 0");
        };
        demand!(
            k <= x.len(),
            "the indices address {k} axes of a tensor of rank {}",
            x.len()
        );
        Ok([lead, &x[k..]].concat())
    }

    fn gather_nd(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.reshaped(&self.gathered()?)
    }

    fn scatter_nd(&self) -> Rule<TensorType> {
        self.arity(3)?;
        self.same_elem(0, 2)?;
        super::same_shapes(&extents(&self.gathered()?), &self.tensor(2)?.shape)?;
        Ok(self.tensor(0)?.clone())
    }

    /// Indices of the tensor's rank that agree with it off the axis, which is
    /// operand `axis`.
    fn along_axis(&self, axis: usize) -> Rule<Vec<usize>> {
        self.index_elem(1, Index::Signed)?;
        self.index_operand(axis, Index::Signed, 0)?;
        let (x, idx) = (self.dims(0)?, self.dims(1)?);
        demand!(
            x.len() == idx.len(),
            "indices of rank {} for a tensor of rank {}",
            idx.len(),
            x.len()
        );
        self.axis(axis, x.len())?;
        Ok(idx)
    }

    fn gather_along_axis(&self) -> Rule<TensorType> {
        self.arity(3)?;
        self.reshaped(&self.along_axis(2)?)
    }

    fn scatter_along_axis(&self) -> Rule<TensorType> {
        self.arity(4)?;
        self.same_elem(0, 2)?;
        super::same_shapes(&extents(&self.along_axis(3)?), &self.tensor(2)?.shape)?;
        Ok(self.tensor(0)?.clone())
    }

    fn reverse(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Signed, 1)?;
        let x = self.tensor(0)?;
        match self.axes(1, x.shape.len()) {
            Ok(_) | Err(Stop::Unknown) => Ok(x.clone()),
            Err(e) => Err(e),
        }
    }

    /// A tensor, the axis, and whether descending and stable: the tensor sorted, or
    /// of `elem` the indices that sort it.
    fn sort(&self, elem: Option<Elem>) -> Rule<TensorType> {
        self.arity(4)?;
        self.index_operand(1, Index::Signed, 0)?;
        for i in [2, 3] {
            let flag = self.tensor(i)?;
            demand!(
                flag.elem == Elem::Bool && flag.shape.is_empty(),
                "operand {i} must be an i1 of rank 0"
            );
        }
        let x = self.tensor(0)?;
        demand!(x.elem != Elem::Bool, "operand 0 is i1, which has no order");
        match self.axis(1, x.shape.len()) {
            Ok(_) | Err(Stop::Unknown) => Ok(plain(elem.unwrap_or(x.elem), x.shape.clone())),
            Err(e) => Err(e),
        }
    }

    fn tile(&self) -> Rule<TensorType> {
        self.arity(2)?;
        self.index_operand(1, Index::Unsigned, 1)?;
        let (mut dims, reps) = (self.dims(0)?, self.sizes(1)?);
        demand!(
            reps.len() == dims.len(),
            "{} repetitions for rank {}",
            reps.len(),
            dims.len()
        );
        for (d, &r) in dims.iter_mut().zip(&reps) {
            match d.checked_mul(r) {
                Some(n) => *d = n,
                None => wrong!("{d} repeated {r} times is too large"),
            }
        }
        self.reshaped(&dims)
    }
}
