//! Strided views of shared buffers, and the loop nests that walk them.
//!
//! A [`View`] is a buffer, an offset and a stride per axis, as in NumPy. Strides
//! are never negative; a broadcast axis has stride 0. An operation that makes a
//! new buffer lays it out densely in the axis order of its main operand
//! ([`storage_order`]), so a chain of operations on a transposed tensor never
//! moves an element.

use std::sync::Arc;

use crate::tensor::{Data, each_elem};

/// A strided view of a shared buffer.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) data: Arc<Data>,
    pub(crate) offset: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
}

impl View {
    /// A row-major view of a whole buffer.
    pub(crate) fn dense(shape: &[usize], data: Data) -> Self {
        Self {
            data: Arc::new(data),
            offset: 0,
            shape: shape.to_vec(),
            strides: row_major(shape),
        }
    }

    /// A whole buffer laid out densely with the axes in `order`, outermost first.
    pub(crate) fn ordered(shape: &[usize], order: &[usize], data: Data) -> Self {
        Self {
            data: Arc::new(data),
            offset: 0,
            shape: shape.to_vec(),
            strides: dense_strides(shape, order),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the elements lie in row-major order without gaps.
    pub(crate) fn is_contiguous(&self) -> bool {
        contiguous(&self.shape, &self.strides)
    }

    /// Whether the view covers its buffer exactly, in any axis order.
    pub(crate) fn fills_buffer(&self) -> bool {
        self.offset == 0 && self.data.len() == self.len() && {
            let order = storage_order(&self.shape, &[&self.strides]);
            let dense = dense_strides(&self.shape, &order);
            (0..self.shape.len()).all(|i| self.shape[i] == 1 || dense[i] == self.strides[i])
        }
    }

    /// The same elements in row-major order without gaps.
    pub(crate) fn contiguous(self) -> Self {
        if self.is_contiguous() {
            return self;
        }
        let order: Vec<usize> = (0..self.shape.len()).collect();
        self.copied(&order)
    }

    /// A copy laid out densely with the axes in `order`.
    pub(crate) fn copied(&self, order: &[usize]) -> Self {
        let strides = dense_strides(&self.shape, order);
        let data = each_elem!(&*self.data, src => {
            let mut dst = zeros_like(src, self.len());
            copy_strided(&self.shape, src, self.offset, &self.strides, &mut dst, 0, &strides);
            dst.into()
        });
        Self {
            data: Arc::new(data),
            offset: 0,
            shape: self.shape.clone(),
            strides,
        }
    }

    /// The buffer itself if this is its only row-major view, else a copy.
    pub(crate) fn into_data(self) -> Data {
        let view = self.contiguous();
        let (offset, n) = (view.offset, view.len());
        if offset == 0 && view.data.len() == n {
            return Arc::unwrap_or_clone(view.data);
        }
        each_elem!(&*view.data, v => v[offset..offset + n].to_vec().into())
    }

    pub(crate) fn transposed(mut self, perm: &[usize]) -> Self {
        self.shape = perm.iter().map(|&p| self.shape[p]).collect();
        self.strides = perm.iter().map(|&p| self.strides[p]).collect();
        self
    }

    /// Another shape with the same elements; copies only where no strides exist
    /// for it.
    pub(crate) fn reshaped(self, shape: &[usize]) -> Self {
        if let Some(strides) = reshape_strides(&self.shape, &self.strides, shape) {
            return Self {
                shape: shape.to_vec(),
                strides,
                ..self
            };
        }
        let view = self.contiguous();
        Self {
            shape: shape.to_vec(),
            strides: row_major(shape),
            ..view
        }
    }

    /// NumPy broadcasting to `shape`, by strides of 0.
    pub(crate) fn broadcast(mut self, shape: &[usize]) -> Self {
        self.strides = broadcast_strides(&self.shape, &self.strides, shape);
        self.shape = shape.to_vec();
        self
    }

    /// `len` entries of `axis` from `start`, every `step`-th.
    pub(crate) fn sliced(mut self, axis: usize, start: usize, len: usize, step: usize) -> Self {
        if len > 0 {
            self.offset += start * self.strides[axis];
        }
        self.shape[axis] = len;
        self.strides[axis] *= step;
        self
    }

    /// Whether a new value of the same shape may be computed in this buffer.
    pub(crate) fn is_unique(&mut self) -> bool {
        self.fills_buffer() && Arc::get_mut(&mut self.data).is_some()
    }
}

/// `n` zeros of the type of `like`.
pub(crate) fn zeros_like<T: Copy + Default>(_: &[T], n: usize) -> Vec<T> {
    vec![T::default(); n]
}

/// Row-major strides.
pub(crate) fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// Strides of a dense buffer with the axes in `order`, outermost first.
pub(crate) fn dense_strides(shape: &[usize], order: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    let mut step = 1;
    for &axis in order.iter().rev() {
        strides[axis] = step;
        step *= shape[axis];
    }
    strides
}

fn contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut step = 1;
    for i in (0..shape.len()).rev() {
        if shape[i] != 1 {
            if strides[i] != step {
                return false;
            }
            step *= shape[i];
        }
    }
    true
}

/// The axes from outermost to innermost in memory, as the operand that
/// broadcasts least has them; row-major if every operand broadcasts. Axes of
/// extent 1 come first.
pub(crate) fn storage_order(shape: &[usize], strides: &[&[usize]]) -> Vec<usize> {
    let (mut order, mut axes): (Vec<usize>, Vec<usize>) =
        (0..shape.len()).partition(|&i| shape[i] == 1);
    if let Some(lead) = strides
        .iter()
        .find(|s| axes.iter().all(|&axis| s[axis] != 0))
    {
        axes.sort_by_key(|&axis| std::cmp::Reverse(lead[axis]));
    }
    order.extend(axes);
    order
}

pub(crate) fn broadcast_strides(from: &[usize], strides: &[usize], to: &[usize]) -> Vec<usize> {
    let lead = to.len() - from.len();
    (0..to.len())
        .map(|i| match i.checked_sub(lead) {
            Some(j) if from[j] == to[i] && to[i] != 1 => strides[j],
            _ => 0,
        })
        .collect()
}

/// Strides that read `to` out of a view of `from`, if there are any: every group
/// of axes that is split or merged must be evenly spaced.
fn reshape_strides(from: &[usize], strides: &[usize], to: &[usize]) -> Option<Vec<usize>> {
    if to.contains(&0) {
        return Some(row_major(to));
    }
    let old: Vec<(usize, usize)> = from
        .iter()
        .zip(strides)
        .filter(|(d, _)| **d != 1)
        .map(|(&d, &s)| (d, s))
        .collect();
    let mut out = vec![0; to.len()];
    let (mut i, mut j) = (0, 0);
    while i < old.len() {
        // Grow both sides until they cover the same number of elements.
        let (i0, j0) = (i, j);
        let (mut a, mut b) = (old[i].0, 1);
        i += 1;
        while a != b {
            if a < b {
                a *= old.get(i)?.0;
                i += 1;
            } else {
                b *= *to.get(j)?;
                j += 1;
            }
        }
        for k in i0 + 1..i {
            if old[k - 1].1 != old[k].1 * old[k].0 {
                return None;
            }
        }
        let mut step = old[i - 1].1;
        for k in (j0..j).rev() {
            out[k] = step;
            step *= to[k];
        }
    }
    Some(out)
}

/// A loop nest over a shape: outer axes by odometer, the innermost as a run.
pub(crate) struct Nest<const N: usize> {
    /// Extent and strides of the outer axes, outermost first.
    outer: Vec<(usize, [usize; N])>,
    /// Extent of the innermost loop.
    pub(crate) run: usize,
    /// Strides of the innermost loop.
    pub(crate) step: [usize; N],
}

impl<const N: usize> Nest<N> {
    /// Walks the axes of `shape` in `order`, merging those that are evenly spaced
    /// in every operand.
    pub(crate) fn new(shape: &[usize], order: &[usize], strides: [&[usize]; N]) -> Self {
        let mut axes: Vec<(usize, [usize; N])> = Vec::with_capacity(order.len());
        for &axis in order {
            if shape[axis] == 1 {
                continue;
            }
            let s = strides.map(|s| s[axis]);
            match axes.last_mut() {
                Some((n, last)) if (0..N).all(|k| last[k] == s[k] * shape[axis]) => {
                    *n *= shape[axis];
                    *last = s;
                }
                _ => axes.push((shape[axis], s)),
            }
        }
        let (run, step) = axes.pop().unwrap_or((1, [1; N]));
        Self {
            outer: axes,
            run,
            step,
        }
    }

    /// Calls `f` with the offsets at which each innermost run starts.
    pub(crate) fn for_each(&self, mut f: impl FnMut([usize; N])) {
        if self.run == 0 || self.outer.iter().any(|a| a.0 == 0) {
            return;
        }
        let mut index = vec![0usize; self.outer.len()];
        let mut at = [0usize; N];
        loop {
            f(at);
            let mut axis = self.outer.len();
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                let (extent, step) = &self.outer[axis];
                index[axis] += 1;
                if index[axis] < *extent {
                    for k in 0..N {
                        at[k] += step[k];
                    }
                    break;
                }
                for k in 0..N {
                    at[k] -= step[k] * (extent - 1);
                }
                index[axis] = 0;
            }
        }
    }
}

/// Edge of the square tiles of a transposing copy: a tile of f16 is 2 KiB.
const TILE: usize = 32;

/// Copies a strided box. Where the two sides are contiguous along different axes
/// the copy goes by square tiles, so both sides use whole cache lines.
pub(crate) fn copy_strided<T: Copy>(
    shape: &[usize],
    src: &[T],
    src_offset: usize,
    src_strides: &[usize],
    dst: &mut [T],
    dst_offset: usize,
    dst_strides: &[usize],
) {
    if shape.contains(&0) {
        return;
    }
    let order = storage_order(shape, &[dst_strides]);
    let mut nest = Nest::new(shape, &order, [dst_strides, src_strides]);
    let (n, [ds, ss]) = (nest.run, nest.step);
    if ds == 1 && ss == 1 {
        nest.for_each(|[d, s]| {
            let (d, s) = (dst_offset + d, src_offset + s);
            dst[d..d + n].copy_from_slice(&src[s..s + n]);
        });
        return;
    }
    let across = nest.outer.iter().rposition(|a| a.1[1] == 1 && a.0 >= 8);
    let Some(across) = across.filter(|_| n >= 8 && ss != 0) else {
        nest.for_each(|[d, s]| {
            let (mut d, mut s) = (dst_offset + d, src_offset + s);
            for _ in 0..n {
                dst[d] = src[s];
                d += ds;
                s += ss;
            }
        });
        return;
    };
    let (m, [dm, _]) = nest.outer.remove(across);
    nest.for_each(|[d, s]| {
        let (d, s) = (dst_offset + d, src_offset + s);
        for i0 in (0..m).step_by(TILE) {
            for j0 in (0..n).step_by(TILE) {
                for i in i0..m.min(i0 + TILE) {
                    for j in j0..n.min(j0 + TILE) {
                        dst[d + i * dm + j * ds] = src[s + i + j * ss];
                    }
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iota(shape: &[usize]) -> View {
        let n: usize = shape.iter().product();
        View::dense(shape, Data::I32((0..n as i32).collect()))
    }

    fn ints(v: View) -> Vec<i64> {
        v.into_data().ints().unwrap()
    }

    #[test]
    fn a_transposed_view_reads_as_its_definition() {
        for (a, b) in [(3, 5), (33, 70), (8, 8), (1, 9)] {
            let v = ints(iota(&[a, b]).transposed(&[1, 0]));
            for j in 0..b {
                for i in 0..a {
                    assert_eq!(v[j * a + i], (i * b + j) as i64);
                }
            }
        }
    }

    #[test]
    fn a_reshape_moves_nothing_when_strides_exist() {
        let v = iota(&[1, 6, 1, 8]).transposed(&[0, 3, 2, 1]);
        let split = v.clone().reshaped(&[2, 4, 6]);
        assert!(Arc::ptr_eq(&split.data, &v.data));
        assert_eq!(ints(split), ints(v.clone()));
        let merged = v.clone().reshaped(&[48]);
        assert!(!Arc::ptr_eq(&merged.data, &v.data));
        assert_eq!(ints(merged), ints(v));
        assert_eq!(ints(iota(&[4]).reshaped(&[1, 2, 1, 2, 1])), [0, 1, 2, 3]);
        assert_eq!(iota(&[1, 1]).reshaped(&[]).shape, Vec::<usize>::new());
    }

    #[test]
    fn slices_and_broadcasts_compose() {
        let v = iota(&[4, 6]).sliced(1, 1, 2, 3).transposed(&[1, 0]);
        assert_eq!(ints(v.clone()), [1, 7, 13, 19, 4, 10, 16, 22]);
        let b = iota(&[2, 1]).broadcast(&[3, 2, 2]);
        assert_eq!(ints(b), [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]);
        assert!(v.reshaped(&[8]).is_contiguous());
    }

    #[test]
    fn a_copy_in_any_order_keeps_the_elements() {
        let v = iota(&[2, 3, 4]);
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let c = v.copied(&order);
            assert!(c.fills_buffer());
            assert_eq!(ints(c), ints(v.clone()));
        }
    }
}
