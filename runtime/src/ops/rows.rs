//! Operations along one axis: softmax, reductions, argmax.
//!
//! Each takes the elements of a row into an f32 buffer, whatever their stride,
//! and works on the buffer. So the bits of a row depend on its elements and their
//! number, not on the layout or on the other rows.

use super::{Float, each_float, load_run, math};
use crate::tensor::Data;
use crate::view::{Nest, View, storage_order};

/// Reductions to one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduce {
    Sum,
    Mean,
    Max,
    Min,
    Product,
}

impl Reduce {
    fn row(self, x: &[f32]) -> f32 {
        match self {
            Self::Sum => math::sum(x),
            Self::Mean => math::sum(x) / x.len() as f32,
            Self::Product => math::product(x),
            Self::Max if math::has_nan(x) => f32::NAN,
            // The first of equals, since zeros have signs.
            Self::Max => math::first(x, math::max(x)).map_or(f32::NEG_INFINITY, |i| x[i]),
            Self::Min => x.iter().fold(
                f32::INFINITY,
                |a, &v| if v < a || v.is_nan() { v } else { a },
            ),
        }
    }

    fn ints(self, mut x: impl ExactSizeIterator<Item = i64>) -> i64 {
        let n = x.len() as i64;
        match self {
            Self::Sum => x.fold(0, i64::wrapping_add),
            Self::Mean => x.fold(0, i64::wrapping_add).checked_div(n).unwrap_or(0),
            Self::Product => x.fold(1, i64::wrapping_mul),
            Self::Max => x.by_ref().max().unwrap_or(i64::MIN),
            Self::Min => x.by_ref().min().unwrap_or(i64::MAX),
        }
    }
}

/// Columns gathered at a time when a row is strided: one cache line of f16.
const COLUMNS: usize = 32;

/// The rows of a tensor along its last axis, in storage order of the others.
struct Rows<'a> {
    nest: Nest<1>,
    offset: usize,
    len: usize,
    stride: usize,
    view: &'a View,
}

impl<'a> Rows<'a> {
    /// `view` with the row axis last; `order` is that of the other axes.
    fn new(view: &'a View, order: &[usize]) -> Self {
        let last = view.shape.len() - 1;
        Self {
            nest: Nest::new(&view.shape[..last], order, [&view.strides[..last]]),
            offset: view.offset,
            len: view.shape[last],
            stride: view.strides[last],
            view,
        }
    }

    /// Calls `f` with up to [`COLUMNS`] gathered rows, the index of the first one
    /// and their number.
    fn each<T: Float>(&self, src: &[T], mut f: impl FnMut(&mut [f32], usize, usize)) {
        let step = self.nest.step[0];
        let block = if self.stride == 1 || step != 1 {
            1
        } else {
            COLUMNS
        };
        let mut rows = vec![0.0f32; self.len * block.min(self.nest.run)];
        let mut line = [0.0f32; COLUMNS];
        let mut at = 0;
        self.nest.for_each(|[o]| {
            for i in (0..self.nest.run).step_by(block) {
                let n = block.min(self.nest.run - i);
                let start = self.offset + o + i * step;
                if n == 1 {
                    load_run(src, start, self.stride, &mut rows[..self.len]);
                } else {
                    for j in 0..self.len {
                        T::load(&src[start + j * self.stride..][..n], &mut line[..n]);
                        for (c, &v) in line[..n].iter().enumerate() {
                            rows[c * self.len + j] = v;
                        }
                    }
                }
                f(&mut rows[..n * self.len], at, n);
                at += n;
            }
        });
    }

    /// Calls `f` with the offsets of the elements of each row.
    fn each_offsets(&self, mut f: impl FnMut(usize)) {
        self.nest.for_each(|[o]| {
            for i in 0..self.nest.run {
                f(self.offset + o + i * self.nest.step[0]);
            }
        });
    }
}

/// The view with `axes` merged into one last axis.
fn axes_last(x: View, axes: &[usize]) -> View {
    let kept: Vec<usize> = (0..x.shape.len()).filter(|a| !axes.contains(a)).collect();
    let mut shape: Vec<usize> = kept.iter().map(|&a| x.shape[a]).collect();
    shape.push(axes.iter().map(|&a| x.shape[a]).product());
    let perm: Vec<usize> = kept.iter().chain(axes).copied().collect();
    x.transposed(&perm).reshaped(&shape)
}

fn order_of_others(x: &View) -> Vec<usize> {
    let last = x.shape.len() - 1;
    storage_order(&x.shape[..last], &[&x.strides[..last]])
}

/// Reduction over `axes`, which stay with extent 1.
pub(crate) fn reduce(op: Reduce, x: View, axes: &[usize]) -> View {
    let mut kept = x.shape.clone();
    for &a in axes {
        kept[a] = 1;
    }
    let x = axes_last(x, axes);
    let order = order_of_others(&x);
    let rows = Rows::new(&x, &order);
    let n: usize = kept.iter().product();
    let data = each_float!(&*x.data, v => {
        let mut out = vec![0.0f32; n];
        rows.each(v, |block, at, count| {
            for c in 0..count {
                out[at + c] = op.row(&block[c * rows.len..(c + 1) * rows.len]);
            }
        });
        store_like(v, &out)
    }, else => reduce_ints(op, &rows, n));
    View::ordered(&x.shape[..x.shape.len() - 1], &order, data).reshaped(&kept)
}

fn store_like<T: Float>(_: &[T], values: &[f32]) -> Data
where
    Vec<T>: Into<Data>,
{
    let mut out = vec![T::default(); values.len()];
    T::store(values, &mut out);
    out.into()
}

fn reduce_ints(op: Reduce, rows: &Rows<'_>, n: usize) -> Data {
    macro_rules! ints {
        ($($variant:ident $ty:ty),*) => {
            match &*rows.view.data {
                $(Data::$variant(v) => {
                    let mut out: Vec<$ty> = Vec::with_capacity(n);
                    rows.each_offsets(|o| {
                        let row = (0..rows.len).map(|i| i64::from(v[o + i * rows.stride]));
                        out.push(op.ints(row) as $ty);
                    });
                    out.into()
                })*
                _ => unreachable!("the planner admits numbers"),
            }
        };
    }
    ints!(I32 i32, I16 i16, I8 i8, U32 u32, U16 u16, U8 u8)
}

/// e^(x - max) / sum, over `axis`. A row of -inf gives NaN.
pub(crate) fn softmax(x: View, axis: usize) -> View {
    let x = axes_last(x, &[axis]);
    let order = order_of_others(&x);
    let rows = Rows::new(&x, &order);
    // The rows come out in the order of the others; a strided row keeps its
    // stride, so that the layout of the operand survives.
    let strided = rows.stride != 1 && rows.nest.step[0] == 1;
    let run = rows.nest.run;
    let n = x.len();
    let last = x.shape.len() - 1;
    let fill = Fill { run, strided };
    let data = each_float!(&*x.data, v => softmax_rows(&rows, v, n, fill), else => {
        unreachable!("the planner admits floats")
    });
    let out = if strided {
        // [outer.., len, run]: the innermost group of axes lies inside the row axis.
        let inner = innermost_axes(&x, &order, run);
        let mut full: Vec<usize> = order[..order.len() - inner].to_vec();
        full.push(last);
        full.extend_from_slice(&order[order.len() - inner..]);
        View::ordered(&x.shape, &full, data)
    } else {
        let mut full = order;
        full.push(last);
        View::ordered(&x.shape, &full, data)
    };
    let mut perm: Vec<usize> = (0..last).collect();
    perm.insert(axis, last);
    out.transposed(&perm)
}

/// Where the rows of a softmax go.
#[derive(Clone, Copy)]
struct Fill {
    /// Rows next to each other.
    run: usize,
    /// Each row is a column of `[len][run]`.
    strided: bool,
}

fn softmax_rows<T: Float>(rows: &Rows<'_>, src: &[T], n: usize, fill: Fill) -> Data
where
    Vec<T>: Into<Data>,
{
    let (len, run) = (rows.len, fill.run);
    let mut out = vec![T::default(); n];
    rows.each(src, |block, at, count| {
        for row in block.chunks_exact_mut(len) {
            softmax_row(row);
        }
        if fill.strided {
            let base = at / run * run * len + at % run;
            scatter_columns(block, len, count, run, &mut out[base..]);
        } else {
            T::store(block, &mut out[at * len..(at + count) * len]);
        }
    });
    out.into()
}

/// How many of the last axes in `order` make up an innermost run of `run`.
fn innermost_axes(x: &View, order: &[usize], run: usize) -> usize {
    let mut product = 1;
    let mut count = 0;
    for &axis in order.iter().rev() {
        if product == run {
            break;
        }
        product *= x.shape[axis];
        count += 1;
    }
    count
}

/// Writes `count` rows as neighbouring columns of `[len][run]`.
fn scatter_columns<T: Float>(block: &[f32], len: usize, count: usize, run: usize, out: &mut [T]) {
    let mut line = [0.0f32; COLUMNS];
    for j in 0..len {
        for (c, l) in line[..count].iter_mut().enumerate() {
            *l = block[c * len + j];
        }
        T::store(&line[..count], &mut out[j * run..j * run + count]);
    }
}

/// Below this, relative to the maximum, e^x is zero in f16 and f32 sums alike.
const NEGLIGIBLE: f32 = -104.0;

/// Masked keys lie at the end of a row as a rule; they are zeroed, not computed.
fn softmax_row(x: &mut [f32]) {
    let max = math::max(x);
    let live = x.iter().rposition(|&v| v - max >= NEGLIGIBLE || v.is_nan());
    let (x, masked) = x.split_at_mut(live.map_or(0, |i| i + 1));
    masked.fill(0.0);
    for v in x.iter_mut() {
        *v -= max;
    }
    math::exp(x);
    let sum = math::sum(x);
    for v in x.iter_mut() {
        *v /= sum;
    }
}

/// Index of the largest element along `axis`, the first one on ties; NaN never
/// wins, and a row of only NaN gives 0.
pub(crate) fn argmax(x: View, axis: usize) -> View {
    let mut kept = x.shape.clone();
    kept[axis] = 1;
    let x = axes_last(x, &[axis]);
    let order = order_of_others(&x);
    let rows = Rows::new(&x, &order);
    let n: usize = kept.iter().product();
    let mut out = Vec::with_capacity(n);
    each_float!(&*x.data, v => rows.each(v, |block, _, _| {
        for row in block.chunks_exact(rows.len) {
            out.push(argmax_row(row));
        }
    }), else => argmax_ints(&rows, &mut out));
    View::ordered(&x.shape[..x.shape.len() - 1], &order, Data::U32(out)).reshaped(&kept)
}

fn argmax_ints(rows: &Rows<'_>, out: &mut Vec<u32>) {
    macro_rules! ints {
        ($($variant:ident),*) => {
            match &*rows.view.data {
                $(Data::$variant(v) => rows.each_offsets(|o| {
                    let best = (0..rows.len).fold(0, |best, i| {
                        if v[o + i * rows.stride] > v[o + best * rows.stride] { i } else { best }
                    });
                    out.push(best as u32);
                }),)*
                _ => unreachable!("the planner admits numbers"),
            }
        };
    }
    ints!(I32, I16, I8, U32, U16, U8);
}

/// First index of the largest element that is not NaN; 0 if there is none.
#[allow(clippy::float_cmp, reason = "the maximum is one of the elements")]
pub(crate) fn argmax_row(x: &[f32]) -> u32 {
    math::first(x, math::max(x)).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn pseudo(shape: &[usize]) -> View {
        let n: usize = shape.iter().product();
        let v = (0..n).map(|i| f16::from_f32(((i * 37) % 101) as f32 / 25.0 - 2.0));
        View::dense(shape, Data::F16(v.collect()))
    }

    fn floats(v: View) -> Vec<f32> {
        match v.into_data() {
            Data::F16(v) => v.into_iter().map(f32::from).collect(),
            Data::F32(v) => v,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn softmax_over_any_axis_equals_its_definition() {
        let x = pseudo(&[2, 3, 40, 5]);
        for axis in 0..4 {
            for perm in [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]] {
                let v = x.clone().transposed(&perm);
                let shape = v.shape.clone();
                let got = floats(softmax(v.clone(), axis));
                let src = floats(v);
                let strides = crate::view::row_major(&shape);
                for i in 0..src.len() {
                    let at = i / strides[axis] % shape[axis];
                    let first = i - at * strides[axis];
                    let sum: f64 = (0..shape[axis])
                        .map(|j| f64::from(src[first + j * strides[axis]]).exp())
                        .sum();
                    let want = f64::from(src[i]).exp() / sum;
                    assert!((f64::from(got[i]) - want).abs() <= want * 6e-4 + 1e-7);
                }
            }
        }
    }

    #[test]
    fn softmax_survives_the_extremes_of_f16() {
        let row = |v: [f32; 4]| {
            let data = v.map(f16::from_f32).to_vec();
            floats(softmax(View::dense(&[1, 4], Data::F16(data)), 1))
        };
        assert_eq!(
            row([60_000.0, -60_000.0, 0.0, 60_000.0]),
            [0.5, 0.0, 0.0, 0.5]
        );
        assert_eq!(row([-10_000.0; 4]), [0.25; 4]);
        assert_eq!(
            row([f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0]),
            [0.0, 0.5, 0.0, 0.5]
        );
    }

    #[test]
    fn reductions_keep_their_axes_and_accumulate_wide() {
        let x = View::dense(
            &[2, 4096],
            Data::F16(
                [
                    vec![f16::from_f32(1.0); 4096],
                    vec![f16::from_f32(60_000.0); 4096],
                ]
                .concat(),
            ),
        );
        let sum = reduce(Reduce::Sum, x.clone().sliced(0, 0, 1, 1), &[1]);
        assert_eq!(sum.shape, [1, 1]);
        assert_eq!(floats(sum), [4096.0]);
        assert_eq!(floats(reduce(Reduce::Mean, x, &[1])), [1.0, 60_000.0]);
        let y = View::dense(&[2, 3], Data::I32(vec![3, 1, 2, 9, 7, 8])).transposed(&[1, 0]);
        for (op, want) in [
            (Reduce::Max, [9, 7, 8]),
            (Reduce::Min, [3, 1, 2]),
            (Reduce::Product, [27, 7, 16]),
        ] {
            assert_eq!(
                reduce(op, y.clone(), &[1]).into_data().ints().unwrap(),
                want
            );
        }
        assert_eq!(
            reduce(Reduce::Sum, y, &[0, 1]).into_data().ints().unwrap(),
            [30]
        );
    }

    #[test]
    fn the_largest_of_a_row_is_its_first_and_nan_if_there_is_one() {
        let mut row: Vec<f32> = (0..1000).map(|i| -((i * 37 % 101) as f32)).collect();
        row[700] = -0.0;
        let max = |row: &[f32]| Reduce::Max.row(row).to_bits();
        assert_eq!(max(&row), row[0].to_bits());
        row[0] = -5.0;
        let first = row.iter().position(|&v| v >= 0.0).unwrap();
        assert_eq!(max(&row), row[first].to_bits());
        row[first] = 0.0;
        assert_eq!(max(&row), 0.0f32.to_bits());
        assert_eq!(argmax_row(&row), first as u32);
        row[999] = f32::NAN;
        assert!(Reduce::Max.row(&row).is_nan());
        assert_eq!(argmax_row(&row), first as u32);
        assert_eq!(max(&[]), f32::NEG_INFINITY.to_bits());
        assert_eq!(max(&[f32::NEG_INFINITY; 3]), f32::NEG_INFINITY.to_bits());
    }

    #[test]
    fn argmax_takes_the_first_of_ties_and_never_nan() {
        let v = [1.0, 5.0, f32::NAN, 5.0, 2.0, f32::NAN, f32::NAN, f32::NAN];
        let x = View::dense(&[2, 4], Data::F32(v.to_vec()));
        assert_eq!(argmax(x, 1).into_data().ints().unwrap(), [1, 0]);
        let x = View::dense(&[3, 2], Data::F32(vec![0.0, 9.0, 4.0, 9.0, 4.0, 1.0]));
        let y = argmax(x, 0);
        assert_eq!(y.shape, [1, 2]);
        assert_eq!(y.into_data().ints().unwrap(), [1, 0]);
    }
}
