//! Operations that turn compressed constants into dense tensors.

use half::f16;

use super::{Float, each_float};
use crate::tensor::{Data, each_elem};
use crate::view::{View, row_major, zeros_like};

/// A table look-up: `indices` `[a0 ..]`, `table` `[b0 .., entries, vector]`, where
/// each `b_i` divides `a_i`. Element j of the vector goes to position
/// `index * vector + j` of `axis`.
pub(crate) fn lut_to_dense(indices: View, table: View, axis: usize, shape: &[usize]) -> View {
    let (indices, table) = (indices.contiguous(), table.contiguous());
    let rank = indices.shape.len();
    let (entries, vector) = (table.shape[rank], table.shape[rank + 1]);
    let index = match &*indices.data {
        Data::U8(v) => &v[indices.offset..indices.offset + indices.len()],
        _ => &[],
    };
    let (from, to, blocks) = (
        row_major(&indices.shape),
        row_major(shape),
        row_major(&table.shape[..rank]),
    );
    let data = each_elem!(&*table.data, t => {
        let mut out = zeros_like(t, shape.iter().product());
        for (i, &entry) in index.iter().enumerate() {
            let (mut block, mut at) = (0, 0);
            for a in 0..rank {
                let p = i / from[a] % indices.shape[a];
                block += p / (indices.shape[a] / table.shape[a]) * blocks[a];
                at += p * to[a] * if a == axis { vector } else { 1 };
            }
            let first = table.offset + (block * entries + usize::from(entry).min(entries - 1)) * vector;
            for j in 0..vector {
                out[at + j * to[axis]] = t[first + j];
            }
        }
        out.into()
    });
    View::dense(shape, data)
}

/// `scale * (data - offset1) + offset2`, where each element of the parameters
/// covers a block of the data.
pub(crate) fn shift_scale(data: View, scale: View, offset1: View, offset2: View) -> View {
    let shape = data.shape.clone();
    let spread = |v: View| blocks(v.contiguous(), &shape);
    let (scale, offset1, offset2) = (spread(scale), spread(offset1), spread(offset2));
    combine(&shape, data, scale, offset1, offset2)
}

/// As [`shift_scale`] with parameters that are scalars or vectors along `axis`.
pub(crate) fn dequantize(
    data: View,
    scale: View,
    offset1: View,
    offset2: View,
    axis: usize,
) -> View {
    let shape = data.shape.clone();
    let spread = |v: View| {
        if v.len() == 1 {
            v.reshaped(&vec![1; shape.len()]).broadcast(&shape)
        } else {
            let mut along = vec![1; shape.len()];
            along[axis] = v.len();
            v.reshaped(&along).broadcast(&shape)
        }
    };
    let (scale, offset1, offset2) = (spread(scale), spread(offset1), spread(offset2));
    combine(&shape, data, scale, offset1, offset2)
}

/// Repeats each element of `v` over its block of `shape`.
fn blocks(v: View, shape: &[usize]) -> View {
    let mut split = Vec::new();
    let mut full = Vec::new();
    for (&have, &want) in v.shape.iter().zip(shape) {
        split.extend([have, 1]);
        full.extend([have, want.checked_div(have).unwrap_or(0)]);
    }
    v.reshaped(&split).broadcast(&full).reshaped(shape)
}

fn combine(shape: &[usize], data: View, scale: View, offset1: View, offset2: View) -> View {
    let wide = |v: View| -> Vec<f32> {
        let v = v.contiguous();
        let (o, n) = (v.offset, v.len());
        each_float!(&*v.data, s => {
            let mut out = vec![0.0; n];
            Float::load(&s[o..o + n], &mut out);
            out
        }, else => v.data.ints().unwrap_or_default()[o..o + n].iter().map(|&x| x as f32).collect())
    };
    let result = offset2.data.clone();
    let (d, s, a, b) = (wide(data), wide(scale), wide(offset1), wide(offset2));
    let values: Vec<f32> = (0..d.len()).map(|i| s[i] * (d[i] - a[i]) + b[i]).collect();
    let data = match &*result {
        Data::F16(_) => {
            let mut out = vec![f16::ZERO; values.len()];
            f16::store(&values, &mut out);
            out.into()
        }
        Data::Bf16(_) => {
            let out: Vec<half::bf16> = values.iter().map(|&x| half::bf16::from_f32(x)).collect();
            out.into()
        }
        _ => values.into(),
    };
    View::dense(shape, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_chosen_by_block_and_vectors_run_along_the_axis() {
        // Two blocks of rows, two entries, vectors of two along axis 1.
        let indices = View::dense(&[2, 2], Data::U8(vec![0, 1, 1, 0]));
        let table = View::dense(&[2, 1, 2, 2], Data::F32((1..9).map(|i| i as f32).collect()));
        let y = lut_to_dense(indices.clone(), table.clone(), 1, &[2, 4]);
        assert_eq!(*y.data, Data::F32(vec![1., 2., 3., 4., 7., 8., 5., 6.]));
        let y = lut_to_dense(indices, table, 0, &[4, 2]);
        assert_eq!(*y.data, Data::F32(vec![1., 3., 2., 4., 7., 5., 8., 6.]));
    }

    #[test]
    fn parameters_cover_blocks_of_the_data() {
        let f = |shape: &[usize], v: &[f32]| View::dense(shape, Data::F32(v.to_vec()));
        let data = View::dense(&[2, 4], Data::I8(vec![1, 2, 3, 4, 5, 6, 7, 8]));
        let zero = View::dense(&[1, 1], Data::I8(vec![1]));
        let y = shift_scale(
            data.clone(),
            f(&[2, 2], &[1., 10., 100., 1000.]),
            zero.clone(),
            f(&[1, 1], &[0.5]),
        );
        assert_eq!(
            *y.data,
            Data::F32(vec![0.5, 1.5, 20.5, 30.5, 400.5, 500.5, 6000.5, 7000.5])
        );
        let y = dequantize(data, f(&[2], &[1., 2.]), zero, f(&[], &[0.]), 0);
        assert_eq!(*y.data, Data::F32(vec![0., 1., 2., 3., 8., 10., 12., 14.]));
    }
}
