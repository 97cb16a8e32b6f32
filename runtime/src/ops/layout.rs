//! Operations that move elements or only rename their axes.

use std::sync::Arc;

use crate::tensor::{Data, each_elem};
use crate::view::{View, copy_strided, dense_strides, row_major, storage_order};

/// Joins `parts` along `axis`, in the layout of the first part.
pub(crate) fn concat(parts: &[View], axis: usize) -> View {
    let mut shape = parts[0].shape.clone();
    shape[axis] = parts.iter().map(|p| p.shape[axis]).sum();
    let order = concat_order(parts, axis, &shape);
    let strides = dense_strides(&shape, &order);
    macro_rules! with {
        ($($variant:ident),*) => {
            match &*parts[0].data {
                $(Data::$variant(_) => {
                    let mut out = vec![Default::default(); shape.iter().product()];
                    let mut at = 0;
                    for p in parts {
                        let Data::$variant(src) = &*p.data else {
                            unreachable!("the planner admits parts of one type")
                        };
                        copy_strided(&p.shape, src, p.offset, &p.strides, &mut out, at * strides[axis], &strides);
                        at += p.shape[axis];
                    }
                    Data::$variant(out)
                })*
            }
        };
    }
    let data = with!(F16, Bf16, F32, I32, I16, I8, U32, U16, U8, Bool);
    View::ordered(&shape, &order, data)
}

/// The layout of the largest part. Parts of extent 1 say nothing about the place
/// of `axis`: it goes outermost, where each part is one piece.
fn concat_order(parts: &[View], axis: usize, shape: &[usize]) -> Vec<usize> {
    let lead = parts.iter().max_by_key(|p| p.len()).unwrap_or(&parts[0]);
    if lead.shape[axis] != 1 {
        return storage_order(shape, &[&lead.strides]);
    }
    let order = storage_order(&lead.shape, &[&lead.strides]);
    let mut out = vec![axis];
    out.extend(order.into_iter().filter(|&a| a != axis));
    out
}

/// A numpy slice of one axis: first element, count and step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) step: i64,
}

impl Span {
    /// `start:end:step` of an axis of extent `dim`, clamped as numpy does.
    /// `None` for a step of 0.
    pub(crate) fn new(dim: usize, start: i64, end: i64, step: i64) -> Option<Self> {
        let n = i64::try_from(dim).ok()?;
        let wrap = |v: i64| if v < 0 { v.saturating_add(n) } else { v };
        if step == 0 {
            return None;
        }
        let (first, count) = if step > 0 {
            let (s, e) = (wrap(start).clamp(0, n), wrap(end).clamp(0, n));
            (s, (e - s).max(0) as u64)
        } else {
            let (s, e) = (wrap(start).clamp(-1, n - 1), wrap(end).clamp(-1, n - 1));
            (s, (s - e).max(0) as u64)
        };
        Some(Self {
            start: usize::try_from(first).unwrap_or(0),
            len: usize::try_from(count.div_ceil(step.unsigned_abs())).ok()?,
            step,
        })
    }
}

/// The elements of `spans`, one span per axis.
pub(crate) fn slice(mut x: View, spans: &[Span]) -> View {
    if spans.iter().any(|s| s.step < 0 && s.len > 1) {
        return slice_backwards(&x, spans);
    }
    for (axis, s) in spans.iter().enumerate() {
        x = x.sliced(axis, s.start, s.len, usize::try_from(s.step).unwrap_or(1));
    }
    x
}

/// Views have no negative strides, so a backward slice is a gather.
fn slice_backwards(x: &View, spans: &[Span]) -> View {
    let shape: Vec<usize> = spans.iter().map(|s| s.len).collect();
    let n: usize = shape.iter().product();
    let strides = row_major(&shape);
    let at = |i: usize| {
        let offset: i64 = spans
            .iter()
            .enumerate()
            .map(|(a, s)| {
                let j = i / strides[a] % s.len;
                (s.start as i64 + j as i64 * s.step) * x.strides[a] as i64
            })
            .sum();
        x.offset + offset as usize
    };
    let data = each_elem!(&*x.data, v => (0..n).map(|i| v[at(i)]).collect::<Vec<_>>().into());
    View::dense(&shape, data)
}

/// `x` with the elements of `spans` replaced by `update`: in place if this is the
/// last use of `x`.
pub(crate) fn slice_update(x: View, spans: &[Span], update: View) -> View {
    let mut x = x;
    if !x.is_unique() {
        let order = storage_order(&x.shape, &[&x.strides]);
        x = x.copied(&order);
    }
    let backwards = spans.iter().any(|s| s.step < 0 && s.len > 1);
    let update = if backwards {
        flip(update, spans)
    } else {
        update
    };
    let mut offset = 0;
    let mut strides = Vec::with_capacity(spans.len());
    for (a, s) in spans.iter().enumerate() {
        let step = s.step.unsigned_abs() as usize;
        let first = if s.step < 0 {
            s.start - (s.len.max(1) - 1) * step
        } else {
            s.start
        };
        if s.len > 0 {
            offset += first * x.strides[a];
        }
        strides.push(x.strides[a] * step);
    }
    let shape = update.shape.clone();
    let mut data = Arc::unwrap_or_clone(x.data);
    macro_rules! with {
        ($($variant:ident),*) => {
            match (&mut data, &*update.data) {
                $((Data::$variant(dst), Data::$variant(src)) => {
                    copy_strided(&shape, src, update.offset, &update.strides, dst, offset, &strides);
                })*
                _ => unreachable!("the planner admits operands of one type"),
            }
        };
    }
    with!(F16, Bf16, F32, I32, I16, I8, U32, U16, U8, Bool);
    View {
        data: Arc::new(data),
        ..x
    }
}

/// Reverses the axes whose span runs backwards.
fn flip(x: View, spans: &[Span]) -> View {
    let reversed: Vec<Span> = spans
        .iter()
        .map(|s| Span {
            start: if s.step < 0 {
                s.len.saturating_sub(1)
            } else {
                0
            },
            len: s.len,
            step: s.step.signum(),
        })
        .collect();
    slice(x, &reversed)
}

/// What lies beyond the edge of a padded tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PadMode {
    Circular,
    Constant,
    Reflect,
    Replicate,
    Symmetric,
}

impl PadMode {
    /// The element at `i` of an axis of extent `n`, `None` for the pad value.
    fn source(self, i: i64, n: i64) -> Option<i64> {
        if (0..n).contains(&i) {
            return Some(i);
        }
        match self {
            Self::Constant => None,
            Self::Replicate => Some(i.clamp(0, n - 1)),
            Self::Circular => Some(i.rem_euclid(n)),
            Self::Reflect if n == 1 => Some(0),
            Self::Reflect => {
                let j = i.rem_euclid(2 * n - 2);
                Some(if j < n { j } else { 2 * n - 2 - j })
            }
            Self::Symmetric => {
                let j = i.rem_euclid(2 * n);
                Some(if j < n { j } else { 2 * n - 1 - j })
            }
        }
    }
}

/// `x` with `pads` (before, after) elements added per axis.
pub(crate) fn pad(x: &View, pads: &[(usize, usize)], mode: PadMode, value: &View) -> View {
    let shape: Vec<usize> = x
        .shape
        .iter()
        .zip(pads)
        .map(|(d, p)| d + p.0 + p.1)
        .collect();
    let strides = row_major(&shape);
    let n: usize = shape.iter().product();
    macro_rules! with {
        ($($variant:ident),*) => {
            match (&*x.data, &*value.data) {
                $((Data::$variant(src), Data::$variant(value_data)) => {
                    let mut out = vec![value_data[value.offset]; n];
                    if mode == PadMode::Constant {
                        let offset = (0..shape.len()).map(|a| pads[a].0 * strides[a]).sum();
                        copy_strided(&x.shape, src, x.offset, &x.strides, &mut out, offset, &strides);
                    } else {
                        for (i, o) in out.iter_mut().enumerate() {
                            let at: Option<usize> = (0..shape.len())
                                .map(|a| {
                                    let p = (i / strides[a] % shape[a]) as i64 - pads[a].0 as i64;
                                    let j = mode.source(p, x.shape[a] as i64)?;
                                    Some(j as usize * x.strides[a])
                                })
                                .sum();
                            if let Some(at) = at {
                                *o = src[x.offset + at];
                            }
                        }
                    }
                    Data::$variant(out)
                })*
                _ => unreachable!("the planner admits operands of one type"),
            }
        };
    }
    let data = with!(F16, Bf16, F32, I32, I16, I8, U32, U16, U8, Bool);
    View::dense(&shape, data)
}

/// `x` repeated `reps` times along each axis.
pub(crate) fn tile(x: View, reps: &[usize]) -> View {
    let x = x.contiguous();
    let rank = reps.len().max(x.shape.len());
    let mut dims = vec![1; rank - x.shape.len()];
    dims.extend_from_slice(&x.shape);
    let mut times = vec![1; rank - reps.len()];
    times.extend_from_slice(reps);
    // [r0, d0, r1, d1, ..] by broadcasting, then merged.
    let spread: Vec<usize> = dims.iter().flat_map(|&d| [1, d]).collect();
    let full: Vec<usize> = times
        .iter()
        .zip(&dims)
        .flat_map(|(&r, &d)| [r, d])
        .collect();
    let shape: Vec<usize> = times.iter().zip(&dims).map(|(r, d)| r * d).collect();
    x.reshaped(&spread).broadcast(&full).reshaped(&shape)
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

    fn spans(dims: &[usize], s: &[(i64, i64, i64)]) -> Vec<Span> {
        dims.iter()
            .zip(s)
            .map(|(&d, &(a, b, c))| Span::new(d, a, b, c).unwrap())
            .collect()
    }

    #[test]
    fn spans_follow_numpy() {
        let s = |start, end, step| {
            let s = Span::new(5, start, end, step).unwrap();
            (s.start, s.len)
        };
        assert_eq!(s(0, i64::from(i32::MAX), 1), (0, 5));
        assert_eq!(s(-3, -1, 1), (2, 2));
        assert_eq!(s(1, 5, 2), (1, 2));
        assert_eq!(s(4, 2, 1).1, 0);
        assert_eq!(s(-1, -6, -1), (4, 5));
        assert_eq!(s(9, 0, -2), (4, 2));
        assert!(Span::new(5, 0, 5, 0).is_none());
    }

    #[test]
    fn slices_run_forwards_and_backwards() {
        let x = iota(&[3, 5]);
        let s = spans(&[3, 5], &[(1, 3, 1), (4, 0, -2)]);
        assert_eq!(ints(slice(x.clone(), &s)), [9, 7, 14, 12]);
        let u = View::dense(&[2, 2], Data::I32(vec![-1, -2, -3, -4]));
        let y = ints(slice_update(x, &s, u));
        assert_eq!(y, [0, 1, 2, 3, 4, 5, 6, -2, 8, -1, 10, 11, -4, 13, -3]);
    }

    #[test]
    fn an_update_happens_in_place_only_on_the_last_use() {
        let x = iota(&[2, 3]);
        let before = Arc::as_ptr(&x.data);
        let keep = x.clone();
        let s = spans(&[2, 3], &[(0, 1, 1), (1, 2, 1)]);
        let u = View::dense(&[1, 1], Data::I32(vec![7]));
        let y = slice_update(x, &s, u.clone());
        assert_eq!(ints(keep.clone()), [0, 1, 2, 3, 4, 5]);
        assert_ne!(Arc::as_ptr(&y.data), before);
        drop(y);
        let z = slice_update(keep, &s, u);
        assert_eq!(ints(z), [0, 7, 2, 3, 4, 5]);
    }

    #[test]
    fn concat_of_mixed_layouts_keeps_the_elements() {
        let (a, b) = (iota(&[2, 3]), iota(&[2, 2]).transposed(&[1, 0]));
        assert_eq!(ints(concat(&[a, b], 1)), [0, 1, 2, 0, 2, 3, 4, 5, 1, 3]);
        let (a, b) = (iota(&[3, 2]).transposed(&[1, 0]), iota(&[1, 3]));
        assert_eq!(ints(concat(&[a, b], 0)), [0, 2, 4, 1, 3, 5, 0, 1, 2]);
    }

    #[test]
    fn pads_follow_numpy_modes() {
        let x = View::dense(&[3], Data::I32(vec![1, 2, 3]));
        let v = View::dense(&[], Data::I32(vec![9]));
        let p = |m| ints(pad(&x, &[(2, 2)], m, &v));
        assert_eq!(p(PadMode::Constant), [9, 9, 1, 2, 3, 9, 9]);
        assert_eq!(p(PadMode::Reflect), [3, 2, 1, 2, 3, 2, 1]);
        assert_eq!(p(PadMode::Symmetric), [2, 1, 1, 2, 3, 3, 2]);
        assert_eq!(p(PadMode::Replicate), [1, 1, 1, 2, 3, 3, 3]);
        assert_eq!(p(PadMode::Circular), [2, 3, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn tiles_follow_numpy() {
        let x = iota(&[2, 2]);
        assert_eq!(ints(tile(x.clone(), &[1, 2])), [0, 1, 0, 1, 2, 3, 2, 3]);
        assert_eq!(ints(tile(x, &[2, 1, 1])), [0, 1, 2, 3, 0, 1, 2, 3]);
    }
}
