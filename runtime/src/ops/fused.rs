//! Fused operations on views: rows along one axis, of which only the live ones are
//! computed. The others are zero.

use half::f16;

use super::elementwise::{Binary, Unary, binary, unary};
use crate::kernels::{self, Mask, Norm, Pool, Queries, Shape, Slots};
use crate::plan::{AttentionShape, Workspace};
use crate::tensor::Data;
use crate::view::{Nest, View, dense_strides, storage_order};

/// The rows of a call along an axis of a value, and how many of them are live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) axis: usize,
    pub(crate) count: usize,
}

/// Rows of work per task of a pool, in elements.
const TASK: usize = 1 << 14;

/// A view as rows along `axis`, in storage order of the other axes.
struct Lines {
    /// Axes, outermost first; the rows' own is last.
    order: Vec<usize>,
    /// Rows that are computed: the first ones.
    live: usize,
    /// Where each of them starts.
    starts: Vec<[usize; 3]>,
}

impl Lines {
    fn new(x: &View, axis: usize, live: Option<Live>, others: [&View; 2]) -> Self {
        let mut order = storage_order(&x.shape, &[&x.strides]);
        order.retain(|&a| a != axis);
        let lead = order.iter().copied().find(|&a| x.shape[a] != 1);
        let total: usize = order.iter().map(|&a| x.shape[a]).product();
        let count = match live {
            Some(live) if lead == Some(live.axis) => total / x.shape[live.axis] * live.count,
            _ => total,
        };
        let nest = Nest::new(
            &x.shape,
            &order,
            [&x.strides, &others[0].strides, &others[1].strides],
        );
        let mut starts = Vec::with_capacity(total);
        nest.for_each(|at| {
            for i in 0..nest.run {
                starts.push([0, 1, 2].map(|k| at[k] + i * nest.step[k]));
            }
        });
        starts.truncate(count);
        order.push(axis);
        Self {
            order,
            live: count,
            starts,
        }
    }

    /// Whether the rows that are computed follow each other without gaps.
    fn adjacent(&self, cols: usize) -> bool {
        let first = self.starts.first().map_or(0, |s| s[0]);
        self.starts
            .iter()
            .enumerate()
            .all(|(i, s)| s[0] == first + i * cols)
    }
}

/// `x` with the elements along `axis` next to each other.
fn along(x: View, axis: usize) -> View {
    if x.shape[axis] == 1 || x.strides[axis] == 1 {
        return x;
    }
    let mut order = storage_order(&x.shape, &[&x.strides]);
    order.retain(|&a| a != axis);
    order.push(axis);
    x.copied(&order)
}

fn halves(x: &View) -> &[f16] {
    match &*x.data {
        Data::F16(v) => v,
        _ => unreachable!("fused operations are of f16"),
    }
}

fn ordered(shape: &[usize], order: &[usize], out: Vec<f16>) -> View {
    View::ordered(shape, order, Data::F16(out))
}

/// RMSNorm over `axis`.
pub(crate) fn rms_norm(
    pool: &Pool,
    work: &mut Workspace,
    x: View,
    axis: usize,
    norm: &Norm,
    live: Option<Live>,
) -> View {
    let x = along(x, axis);
    let cols = x.shape[axis];
    let lines = Lines::new(&x, axis, live, [&x, &x]);
    let computed = lines.live * cols;
    let mut out = work.take(x.len(), computed);
    let src = &halves(&x)[x.offset..];
    if lines.adjacent(cols) && computed > 0 {
        let src = &src[lines.starts[0][0]..][..computed];
        let size = (TASK / cols).max(1) * cols;
        pool.run_chunks(&mut out[..computed], size, |i, out| {
            kernels::rms_norm(&src[i * size..][..out.len()], norm, out);
        });
    } else {
        let rows = out[..computed].chunks_exact_mut(cols.max(1));
        for (at, out) in lines.starts.iter().zip(rows) {
            kernels::rms_norm(&src[at[0]..][..cols], norm, out);
        }
    }
    let shape = x.shape.clone();
    work.give(x);
    ordered(&shape, &lines.order, out)
}

/// Rotation along `axis`.
pub(crate) fn rope(
    work: &mut Workspace,
    x: View,
    tables: [View; 2],
    axis: usize,
    scale: Option<f32>,
    live: Option<Live>,
) -> View {
    let x = along(x, axis);
    let [cos, sin] = tables.map(|t| along(t, axis).broadcast(&x.shape));
    let d = x.shape[axis];
    let lines = Lines::new(&x, axis, live, [&cos, &sin]);
    let computed = lines.live * d;
    let mut out = work.take(x.len(), computed);
    let (src, c, s) = (halves(&x), halves(&cos), halves(&sin));
    for (at, out) in lines.starts.iter().zip(out[..computed].chunks_exact_mut(d)) {
        kernels::rope(
            &src[x.offset + at[0]..][..d],
            &c[cos.offset + at[1]..][..d],
            &s[sin.offset + at[2]..][..d],
            scale,
            out,
        );
    }
    let shape = x.shape.clone();
    work.give(x);
    ordered(&shape, &lines.order, out)
}

/// The elements of a value that lie before those of dead rows, if it is dense and its
/// rows are outermost; all of a dense one without rows.
fn prefix(x: &View, live: Option<Live>) -> Option<usize> {
    let order = storage_order(&x.shape, &[&x.strides]);
    let dense = dense_strides(&x.shape, &order);
    let is_dense = (0..x.shape.len()).all(|i| x.shape[i] == 1 || dense[i] == x.strides[i]);
    let lead = order.iter().copied().find(|&a| x.shape[a] != 1);
    is_dense.then(|| match live {
        Some(live) if lead == Some(live.axis) => x.len() / x.shape[live.axis] * live.count,
        _ => x.len(),
    })
}

/// `op` of two dense values of one layout, or `None`.
fn flat(
    pool: &Pool,
    work: &mut Workspace,
    [x, y]: [&View; 2],
    live: Option<Live>,
    op: fn(&[f16], &[f16], &mut [f16]),
) -> Option<View> {
    let same = x.shape == y.shape
        && (0..x.shape.len()).all(|i| x.shape[i] == 1 || x.strides[i] == y.strides[i]);
    let (Data::F16(a), Data::F16(b)) = (&*x.data, &*y.data) else {
        return None;
    };
    if !same {
        return None;
    }
    let computed = prefix(x, live)?;
    let mut out = work.take(x.len(), computed);
    let (a, b) = (&a[x.offset..][..computed], &b[y.offset..][..computed]);
    pool.run_chunks(&mut out[..computed], TASK, |i, out| {
        let at = i * TASK..i * TASK + out.len();
        op(&a[at.clone()], &b[at], out);
    });
    let order = storage_order(&x.shape, &[&x.strides]);
    Some(ordered(&x.shape, &order, out))
}

/// `silu(gate) * up`.
pub(crate) fn silu_mul(
    pool: &Pool,
    work: &mut Workspace,
    gate: View,
    up: View,
    live: Option<Live>,
) -> View {
    if let Some(out) = flat(pool, work, [&gate, &up], live, kernels::silu_mul) {
        work.give(gate);
        work.give(up);
        return out;
    }
    let shape = gate.shape.clone();
    binary(Binary::Mul, unary(Unary::Silu, gate), up, &shape)
}

/// `x + y`.
pub(crate) fn add(
    pool: &Pool,
    work: &mut Workspace,
    x: View,
    y: View,
    shape: &[usize],
    live: Option<Live>,
) -> View {
    if let Some(out) = flat(pool, work, [&x, &y], live, kernels::add) {
        work.give(x);
        work.give(y);
        return out;
    }
    binary(Binary::Add, x, y, shape)
}

/// The mask of an attention as the kernel reads it, for the first `rows` rows.
pub(crate) fn fill_mask(to: &mut Mask, mask: &View, heads: &AttentionShape, rows: usize) {
    let (by_row, by_slot) = if heads.by_rows {
        (mask.strides[2], mask.strides[3])
    } else {
        (mask.strides[3], mask.strides[1])
    };
    to.fill(
        &halves(mask)[mask.offset..],
        rows,
        heads.slots,
        by_row,
        by_slot,
    );
}

/// Attention of the first `rows` rows, whose mask is `mask`.
pub(crate) fn attention(
    pool: &Pool,
    mask: &Mask,
    heads: &AttentionShape,
    [queries, keys, values]: [View; 3],
    rows: usize,
    mut out: Vec<f16>,
) -> View {
    let (keys, values) = (along(keys, 3), along(values, 3));
    let shape = Shape {
        heads: heads.heads,
        groups: heads.groups,
        depth: heads.depth,
        slots: heads.slots,
        rows,
    };
    let slots = |v: &View| [v.strides[1], v.strides[2]];
    let cache = [&keys, &values].map(|v| Slots {
        data: &halves(v)[v.offset..],
        strides: slots(v),
    });
    let q = Queries {
        data: &halves(&queries)[queries.offset..],
        strides: [queries.strides[1], queries.strides[2], queries.strides[3]],
    };
    let len = rows * heads.heads * heads.depth;
    kernels::attend(pool, shape, q, cache, mask, &mut out[..len]);
    let by_head = [1, heads.heads, heads.depth, heads.width];
    let view = ordered(&by_head, &[0, 3, 1, 2], out);
    if heads.by_rows {
        view.transposed(&[0, 1, 3, 2])
    } else {
        view
    }
}

/// What [`largest`] takes of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Largest {
    Index,
    Value,
}

/// Index or value of the largest element along `axis` of an f16 value whose rows have
/// their elements next to each other; `None` of any other. Dead rows give 0.
pub(crate) fn largest(
    pool: &Pool,
    x: &View,
    axis: usize,
    what: Largest,
    live: Option<Live>,
) -> Option<View> {
    let Data::F16(src) = &*x.data else {
        return None;
    };
    if x.strides[axis] != 1 && x.shape[axis] != 1 || x.shape[axis] < LONG_ROW {
        return None;
    }
    let lines = Lines::new(x, axis, live, [x, x]);
    let total = x.len() / x.shape[axis];
    let mut best = vec![(0, 0.0); total];
    pool.run_chunks(&mut best[..lines.live], 1, |i, best| {
        best[0] = kernels::largest(&src[x.offset + lines.starts[i][0]..][..x.shape[axis]]);
    });
    let mut shape = x.shape.clone();
    shape[axis] = 1;
    let data = match what {
        Largest::Index => Data::U32(best.iter().map(|b| b.0 as u32).collect()),
        Largest::Value => {
            let value = |(i, best): (usize, &(usize, f32))| match lines.starts.get(i) {
                Some(at) if has_nan(&src[x.offset + at[0]..][..x.shape[axis]]) => f16::NAN,
                _ => f16::from_f32(best.1),
            };
            Data::F16(best.iter().enumerate().map(value).collect())
        }
    };
    Some(View::ordered(&shape, &lines.order, data))
}

fn has_nan(x: &[f16]) -> bool {
    let most = x
        .iter()
        .fold(0, |most: i16, v| most.max((v.to_bits() & 0x7FFF) as i16));
    most > 0x7C00
}

/// Rows shorter than this are left to the general reduction.
const LONG_ROW: usize = 256;
