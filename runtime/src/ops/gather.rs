//! Operations addressed by run-time indices.

use crate::tensor::{Data, each_elem};
use crate::view::{View, row_major};

fn wrap(i: i64, dim: usize, axis: usize) -> Result<usize, String> {
    let n = dim as i64;
    let j = if i < 0 { i + n } else { i };
    usize::try_from(j)
        .ok()
        .filter(|&j| j < dim)
        .ok_or_else(|| format!("index {i} is out of range for axis {axis} of extent {dim}"))
}

/// `out[i.., j..] = x[indices[i..].., j..]`.
pub(crate) fn gather_nd(x: View, indices: View, shape: &[usize]) -> Result<View, String> {
    let x = x.contiguous();
    let depth = indices.shape.last().copied().unwrap_or(0);
    let inner: usize = x.shape[depth..].iter().product();
    let rows: usize = shape
        .iter()
        .product::<usize>()
        .checked_div(inner)
        .unwrap_or(0);
    let starts = rows_at(&x, &indices.into_data(), depth, rows)?;
    let data = each_elem!(&*x.data, v => {
        let mut out = Vec::with_capacity(rows * inner);
        for &s in &starts {
            out.extend_from_slice(&v[s..s + inner]);
        }
        out.into()
    });
    Ok(View::dense(shape, data))
}

/// The offset into `x` (contiguous) of each of `rows` runs addressed by `depth`
/// leading axes.
pub(super) fn rows_at(
    x: &View,
    indices: &Data,
    depth: usize,
    rows: usize,
) -> Result<Vec<usize>, String> {
    let index = indices.ints().unwrap_or_default();
    let strides = row_major(&x.shape);
    let mut starts = Vec::with_capacity(rows);
    for r in 0..rows {
        let mut at = x.offset;
        for axis in 0..depth {
            at += wrap(index[r * depth + axis], x.shape[axis], axis)? * strides[axis];
        }
        starts.push(at);
    }
    Ok(starts)
}

/// The offset into `x` (contiguous) each element of `indices` addresses along
/// `axis`.
pub(super) fn along(
    x: &View,
    index: &[i64],
    shape: &[usize],
    axis: usize,
) -> Result<Vec<usize>, String> {
    let (from, to) = (row_major(&x.shape), row_major(shape));
    let mut out = Vec::with_capacity(index.len());
    for (i, &v) in index.iter().enumerate() {
        let mut at = x.offset;
        for a in 0..shape.len() {
            at += from[a]
                * if a == axis {
                    wrap(v, x.shape[a], a)?
                } else {
                    i / to[a] % shape[a]
                };
        }
        out.push(at);
    }
    Ok(out)
}

/// `out[i][j][k] = x[i][indices[i][j][k]][k]` for `axis` 1.
pub(crate) fn gather_along_axis(x: View, indices: View, axis: usize) -> Result<View, String> {
    let x = x.contiguous();
    let shape = indices.shape.clone();
    let index = indices.into_data().ints().unwrap_or_default();
    let at = along(&x, &index, &shape, axis)?;
    let data = each_elem!(&*x.data, v => at.iter().map(|&i| v[i]).collect::<Vec<_>>().into());
    Ok(View::dense(&shape, data))
}

/// `start, start + step, ..`: `len` elements of the type of `start`.
pub(crate) fn range(start: &View, step: &View, len: usize) -> View {
    let data = match (&*start.data, &*step.data) {
        (Data::F16(a), Data::F16(b)) => {
            let (a, b) = (a[start.offset].to_f32(), b[step.offset].to_f32());
            let v: Vec<half::f16> = (0..len)
                .map(|i| half::f16::from_f32(a + i as f32 * b))
                .collect();
            v.into()
        }
        (Data::F32(a), Data::F32(b)) => {
            let (a, b) = (a[start.offset], b[step.offset]);
            (0..len)
                .map(|i| a + i as f32 * b)
                .collect::<Vec<_>>()
                .into()
        }
        (a, b) => {
            let first =
                |d: &Data, at: usize| d.ints().and_then(|v| v.get(at).copied()).unwrap_or(0);
            let (a0, b0) = (first(a, start.offset), first(b, step.offset));
            let v: Vec<i32> = (0..len).map(|i| (a0 + i as i64 * b0) as i32).collect();
            let view = View::dense(&[len], Data::I32(v));
            return super::cast::cast(view, a.elem());
        }
    };
    View::dense(&[len], data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathers_follow_numpy_and_refuse_what_is_out_of_range() {
        let x = View::dense(&[2, 3, 2], Data::I32((0..12).collect()));
        let i = View::dense(&[2, 2], Data::I32(vec![1, 0, 0, -1]));
        let y = gather_nd(x.clone(), i, &[2, 2]).unwrap();
        assert_eq!(y.into_data().ints().unwrap(), [6, 7, 4, 5]);
        let bad = View::dense(&[1, 1], Data::I32(vec![2]));
        assert!(
            gather_nd(x.clone(), bad, &[1, 3, 2])
                .unwrap_err()
                .contains("index 2")
        );
        let j = View::dense(&[2, 1, 2], Data::I32(vec![2, 0, 1, 1]));
        let y = gather_along_axis(x, j, 1).unwrap();
        assert_eq!(y.into_data().ints().unwrap(), [4, 1, 8, 9]);
    }

    #[test]
    fn a_range_has_the_type_of_its_start() {
        let v = |x| View::dense(&[], Data::I16(vec![x]));
        let y = range(&v(2), &v(-3), 3);
        assert_eq!(*y.data, Data::I16(vec![2, -1, -4]));
    }
}
