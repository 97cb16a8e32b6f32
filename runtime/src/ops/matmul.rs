//! Matrix products.

use std::sync::Arc;

use half::f16;

use crate::kernels::{
    self, Activations, DenseWeights, Layout, LutWeights, Operand, Pool, Product, Real,
};
use crate::tensor::Data;
use crate::view::View;

/// `x [.., m, k] * y [.., k, n]`, batch axes broadcast to `batch`.
pub(crate) fn batch_matmul(pool: &Pool, x: View, y: View, batch: &[usize]) -> View {
    let (m, k, n) = extents(&x, &y);
    let (x, y) = (with_batch(x, batch), with_batch(y, batch));
    let data = match (&*x.data, &*y.data) {
        (Data::F16(a), Data::F16(b)) => products(pool, &x, a, &y, b, (m, k, n)),
        (Data::F32(a), Data::F32(b)) => products(pool, &x, a, &y, b, (m, k, n)),
        _ => unreachable!("the planner admits f16 or f32"),
    };
    let (data, swapped) = data;
    let rank = batch.len() + 2;
    let mut shape = batch.to_vec();
    shape.extend([m, n]);
    let mut order: Vec<usize> = (0..rank).collect();
    if swapped {
        order.swap(rank - 2, rank - 1);
    }
    View::ordered(&shape, &order, data)
}

fn extents(x: &View, y: &View) -> (usize, usize, usize) {
    let (rx, ry) = (x.shape.len(), y.shape.len());
    (x.shape[rx - 2], x.shape[rx - 1], y.shape[ry - 1])
}

fn with_batch(v: View, batch: &[usize]) -> View {
    let mut shape = batch.to_vec();
    shape.extend_from_slice(&v.shape[v.shape.len() - 2..]);
    // The matrix axes keep their strides even where the extent is 1.
    let tail: Vec<usize> = v.strides[v.strides.len() - 2..].to_vec();
    let mut v = v.broadcast(&shape);
    let rank = shape.len();
    v.strides[rank - 2..].copy_from_slice(&tail);
    v
}

/// The buffer of the result, and whether its matrices are stored transposed.
fn products<T: Real + Default>(
    pool: &Pool,
    x: &View,
    a: &[T],
    y: &View,
    b: &[T],
    (m, k, n): (usize, usize, usize),
) -> (Data, bool)
where
    Vec<T>: Into<Data>,
{
    let rank = x.shape.len();
    let strides = |v: &View| (v.strides[rank - 2], v.strides[rank - 1]);
    let (sx, sy) = (strides(x), strides(y));
    let swapped = kernels::transposes(m, n, sx, sy);
    let count: usize = x.shape[..rank - 2].iter().product();
    let mut out = vec![T::default(); count * m * n];
    let nest_shape = &x.shape[..rank - 2];
    let order: Vec<usize> = (0..nest_shape.len()).collect();
    let mut offsets = Vec::with_capacity(count);
    let nest = crate::view::Nest::new(
        nest_shape,
        &order,
        [&x.strides[..rank - 2], &y.strides[..rank - 2]],
    );
    nest.for_each(|[ox, oy]| {
        for i in 0..nest.run {
            offsets.push((ox + i * nest.step[0], oy + i * nest.step[1]));
        }
    });
    if m * n > 0 {
        let list = offsets
            .into_iter()
            .zip(out.chunks_exact_mut(m * n))
            .map(|((ox, oy), out)| {
                let left = Operand {
                    data: &a[x.offset + ox..],
                    row: sx.0,
                    col: sx.1,
                };
                let right = Operand {
                    data: &b[y.offset + oy..],
                    row: sy.0,
                    col: sy.1,
                };
                let (a, b) = if swapped {
                    (right.flipped(), left.flipped())
                } else {
                    (left, right)
                };
                Product { a, b, out }
            })
            .collect();
        if swapped {
            kernels::batch(pool, n, k, m, list);
        } else {
            kernels::batch(pool, m, k, n, list);
        }
    }
    (out.into(), swapped)
}

/// A weight matrix with its rows along the output channels.
pub(crate) enum Weights<'a> {
    Lut(LutWeights<'a>),
    Dense(DenseWeights<'a>),
}

impl Weights<'_> {
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Lut(w) => w.rows(),
            Self::Dense(w) => w.rows(),
        }
    }
}

/// Packs `x` `[tokens, channels]` for [`weight_matmul`]; the first `live` tokens.
pub(crate) fn pack(x: &View, live: usize, into: &mut Activations) {
    let cols = x.shape[1];
    let n = live.min(x.shape[0]);
    let Data::F16(_) = &*x.data else {
        unreachable!("the planner admits f16")
    };
    let columns_first = x.strides[1] != 1 && x.strides[0] == 1;
    let dense = |v: &View| n == 1 || v.strides[0] == cols;
    let rows_first = (x.strides[1] == 1 || cols == 1) && dense(x);
    if rows_first {
        into.pack_rows(&halves(x)[x.offset..x.offset + n * cols], n, cols);
    } else if columns_first {
        into.pack_cols(&halves(x)[x.offset..], n, cols, x.strides[1]);
    } else {
        let v = x.clone().sliced(0, 0, n, 1).contiguous();
        into.pack_rows(&halves(&v)[v.offset..v.offset + n * cols], n, cols);
    }
}

fn halves(v: &View) -> &[f16] {
    match &*v.data {
        Data::F16(data) => data,
        _ => &[],
    }
}

/// `x w^T` as `[tokens, rows]`, where `x` was packed, in `out`. Tokens that were not
/// packed stay as they are there.
pub(crate) fn weight_matmul(
    pool: &Pool,
    w: &Weights<'_>,
    x: &Activations,
    tokens: usize,
    mut out: Vec<f16>,
) -> View {
    let rows = w.rows();
    let live = x.tokens().min(tokens) * rows;
    let layout = Layout::RowMajor { stride: rows };
    match w {
        Weights::Lut(w) => kernels::lut_matmul(pool, w, x, &mut out[..live], layout),
        Weights::Dense(w) => kernels::dense_matmul(pool, w, x, &mut out[..live], layout),
    }
    View {
        data: Arc::new(Data::F16(out)),
        offset: 0,
        shape: vec![tokens, rows],
        strides: vec![rows, 1],
    }
}
