//! Operations that no model here spends time in, one element at a time.

use half::{bf16, f16};

use super::gather::{along, rows_at};
use crate::tensor::{Data, each_elem};
use crate::view::View;

/// A rare operation with its attributes.
#[derive(Clone, Debug)]
pub(crate) enum Rare {
    /// Operands: tensor, indices, updates.
    ScatterNd,
    /// Axis. Operands: tensor, indices, updates.
    ScatterAlongAxis(usize, Combine),
    /// Axes.
    Reverse(Vec<usize>),
    /// Axis. Operands: tensor, whether descending.
    Sort(usize),
    /// As [`Self::Sort`]; gives the indices.
    Argsort(usize),
    /// Shape of the result. Operands are integers of one type.
    Bitwise(Bitwise, Vec<usize>),
}

/// What a scatter makes of the old and the new element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    Update,
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

/// Functions of two integers, bit by bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bitwise {
    And,
    Or,
    Xor,
}

/// Runs a rare operation.
pub(crate) fn rare(op: &Rare, args: Vec<View>) -> Result<View, String> {
    let mut args = args.into_iter();
    let mut next = || args.next().ok_or("an operand is missing");
    match op {
        Rare::ScatterNd => scatter_nd(next()?, next()?, next()?),
        Rare::ScatterAlongAxis(axis, how) => {
            scatter_along_axis(next()?, next()?, next()?, *axis, *how)
        }
        Rare::Reverse(axes) => Ok(reverse(next()?, axes)),
        Rare::Sort(axis) => sort(next()?, next()?, *axis, false),
        Rare::Argsort(axis) => sort(next()?, next()?, *axis, true),
        Rare::Bitwise(op, shape) => bitwise(*op, next()?, next()?, shape),
    }
}

/// A number two of which can be combined. Floats are combined in f32 and rounded once.
trait Element: Copy {
    fn combined(self, new: Self, how: Combine) -> Self;
}

macro_rules! floats {
    ($($ty:ty, $from:expr);*) => {$(
        impl Element for $ty {
            fn combined(self, new: Self, how: Combine) -> Self {
                let (a, b) = (f32::from(self), f32::from(new));
                $from(match how {
                    Combine::Update => return new,
                    Combine::Add => a + b,
                    Combine::Sub => a - b,
                    Combine::Mul => a * b,
                    Combine::Div => a / b,
                    Combine::Max => if b > a || b.is_nan() { b } else { a },
                    Combine::Min => if b < a || b.is_nan() { b } else { a },
                })
            }
        }
    )*};
}
floats!(f16, f16::from_f32; bf16, bf16::from_f32; f32, |x| x);

macro_rules! integers {
    ($($ty:ty),*) => {$(
        impl Element for $ty {
            fn combined(self, new: Self, how: Combine) -> Self {
                match how {
                    Combine::Update => new,
                    Combine::Add => self.wrapping_add(new),
                    Combine::Sub => self.wrapping_sub(new),
                    Combine::Mul => self.wrapping_mul(new),
                    Combine::Div if new == 0 => 0,
                    Combine::Div => self.wrapping_div(new),
                    Combine::Max => self.max(new),
                    Combine::Min => self.min(new),
                }
            }
        }
    )*};
}
integers!(i32, i16, i8, u32, u16, u8);

/// The planner admits bools for [`Combine::Update`] alone.
impl Element for bool {
    fn combined(self, new: Self, _: Combine) -> Self {
        new
    }
}

/// Combines `out[at[i]]` with `new[i]`, in order.
fn combine(out: &mut Data, at: &[usize], new: &Data, how: Combine) -> Result<(), String> {
    fn each<T: Element>(out: &mut [T], at: &[usize], new: &[T], how: Combine) {
        for (&i, &n) in at.iter().zip(new) {
            out[i] = out[i].combined(n, how);
        }
    }
    macro_rules! pairs {
        ($($variant:ident),*) => {
            match (out, new) {
                $((Data::$variant(out), Data::$variant(new)) => each(out, at, new, how),)*
                _ => return Err("the updates have another element type".into()),
            }
        };
    }
    pairs!(F16, Bf16, F32, I32, I16, I8, U32, U16, U8, Bool);
    Ok(())
}

fn scatter_nd(x: View, indices: View, updates: View) -> Result<View, String> {
    let shape = x.shape.clone();
    let x = View::dense(&shape, x.into_data());
    let depth = indices.shape.last().copied().unwrap_or(0);
    let inner: usize = shape[depth..].iter().product();
    let rows = updates.len().checked_div(inner).unwrap_or(0);
    let starts = rows_at(&x, &indices.into_data(), depth, rows)?;
    let at: Vec<usize> = starts.iter().flat_map(|&s| s..s + inner).collect();
    let mut out = x.into_data();
    combine(&mut out, &at, &updates.into_data(), Combine::Update)?;
    Ok(View::dense(&shape, out))
}

fn scatter_along_axis(
    x: View,
    indices: View,
    updates: View,
    axis: usize,
    how: Combine,
) -> Result<View, String> {
    let shape = x.shape.clone();
    let x = View::dense(&shape, x.into_data());
    let to = indices.shape.clone();
    let index = indices.into_data().ints().unwrap_or_default();
    let at = along(&x, &index, &to, axis)?;
    let mut out = x.into_data();
    combine(&mut out, &at, &updates.into_data(), how)?;
    Ok(View::dense(&shape, out))
}

fn reverse(x: View, axes: &[usize]) -> View {
    let shape = x.shape.clone();
    let mut data = x.into_data();
    for &axis in axes {
        let inner: usize = shape[axis + 1..].iter().product();
        let block = shape[axis] * inner;
        if block == 0 {
            break;
        }
        data = each_elem!(&data, v => {
            let mut out = Vec::with_capacity(v.len());
            for lane in v.chunks_exact(block) {
                for row in lane.chunks_exact(inner).rev() {
                    out.extend_from_slice(row);
                }
            }
            out.into()
        });
    }
    View::dense(&shape, data)
}

/// Sorts the lanes along an axis, NaN last; equal elements keep their order.
fn sort(x: View, descending: View, axis: usize, indices: bool) -> Result<View, String> {
    let descending = match descending.into_data() {
        Data::Bool(v) => v.first().copied().unwrap_or(false),
        _ => return Err("whether to sort descending is not a bool".into()),
    };
    let shape = x.shape.clone();
    let data = x.into_data();
    let keys = keys(&data);
    let len = shape[axis];
    let inner: usize = shape[axis + 1..].iter().product();
    // Where in the data each element of the result comes from.
    let mut from = vec![0; keys.len()];
    for lane in 0..keys.len().checked_div(len).unwrap_or(0) {
        let first = lane / inner * len * inner + lane % inner;
        let key = |i: usize| keys[first + i * inner];
        let mut order: Vec<usize> = (0..len).collect();
        order.sort_by(|&i, &j| {
            let (a, b) = (key(i), key(j));
            let by_value = if descending {
                b.partial_cmp(&a)
            } else {
                a.partial_cmp(&b)
            };
            by_value.unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
        });
        for (to, i) in order.into_iter().enumerate() {
            from[first + to * inner] = first + i * inner;
        }
    }
    let out = if indices {
        let along = from.iter().map(|&i| (i / inner % len) as i32);
        Data::I32(along.collect())
    } else {
        each_elem!(&data, v => from.iter().map(|&i| v[i]).collect::<Vec<_>>().into())
    };
    Ok(View::dense(&shape, out))
}

/// The elements as numbers that compare as they do; every type fits exactly.
fn keys(data: &Data) -> Vec<f64> {
    match data {
        Data::F16(v) => v.iter().map(|x| x.to_f64()).collect(),
        Data::Bf16(v) => v.iter().map(|x| x.to_f64()).collect(),
        Data::F32(v) => v.iter().map(|&x| f64::from(x)).collect(),
        Data::Bool(v) => v.iter().map(|&x| f64::from(u8::from(x))).collect(),
        ints => (ints.ints().unwrap_or_default().iter())
            .map(|&x| x as f64)
            .collect(),
    }
}

fn bitwise(op: Bitwise, x: View, y: View, shape: &[usize]) -> Result<View, String> {
    macro_rules! zip {
        ($a:expr, $b:expr) => {
            ($a.iter().zip($b))
                .map(|(&a, &b)| match op {
                    Bitwise::And => a & b,
                    Bitwise::Or => a | b,
                    Bitwise::Xor => a ^ b,
                })
                .collect::<Vec<_>>()
                .into()
        };
    }
    let (x, y) = (
        x.broadcast(shape).into_data(),
        y.broadcast(shape).into_data(),
    );
    let data = match (&x, &y) {
        (Data::I32(a), Data::I32(b)) => zip!(a, b),
        (Data::I16(a), Data::I16(b)) => zip!(a, b),
        (Data::I8(a), Data::I8(b)) => zip!(a, b),
        (Data::U32(a), Data::U32(b)) => zip!(a, b),
        (Data::U16(a), Data::U16(b)) => zip!(a, b),
        (Data::U8(a), Data::U8(b)) => zip!(a, b),
        _ => return Err("the operands are not integers of one type".into()),
    };
    Ok(View::dense(shape, data))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ints(shape: &[usize], v: &[i32]) -> View {
        View::dense(shape, Data::I32(v.to_vec()))
    }

    fn run(op: &Rare, args: Vec<View>) -> Vec<i64> {
        rare(op, args).unwrap().into_data().ints().unwrap()
    }

    #[test]
    fn scatters_write_where_gathers_read() {
        let x = || ints(&[3, 2], &[1, 2, 3, 4, 5, 6]);
        let y = run(
            &Rare::ScatterNd,
            vec![x(), ints(&[2, 1], &[2, 0]), ints(&[2, 2], &[7, 8, 9, 10])],
        );
        assert_eq!(y, [9, 10, 3, 4, 7, 8]);
        let add = Rare::ScatterAlongAxis(0, Combine::Add);
        let y = run(
            &add,
            vec![
                x(),
                ints(&[2, 2], &[2, -1, 2, 0]),
                ints(&[2, 2], &[1, 2, 3, 4]),
            ],
        );
        assert_eq!(y, [1, 6, 3, 4, 9, 8]);
        let far = vec![x(), ints(&[1, 1], &[3]), ints(&[1, 2], &[0, 0])];
        let e = rare(&Rare::ScatterNd, far).unwrap_err();
        assert!(e.contains("index 3"), "{e}");
    }

    #[test]
    fn lanes_are_turned_and_sorted_along_any_axis() {
        let x = || ints(&[2, 3], &[5, 1, 3, 2, 2, 9]);
        assert_eq!(
            run(&Rare::Reverse(vec![0, 1]), vec![x()]),
            [9, 2, 2, 3, 1, 5]
        );
        let flag = |on| View::dense(&[], Data::Bool(vec![on]));
        assert_eq!(
            run(&Rare::Sort(1), vec![x(), flag(false)]),
            [1, 3, 5, 2, 2, 9]
        );
        assert_eq!(
            run(&Rare::Sort(0), vec![x(), flag(true)]),
            [5, 2, 9, 2, 1, 3]
        );
        assert_eq!(
            run(&Rare::Argsort(1), vec![x(), flag(true)]),
            [0, 2, 1, 2, 0, 1]
        );
        let nan = View::dense(&[3], Data::F32(vec![f32::NAN, 2.0, f32::INFINITY]));
        for (on, order) in [(false, [1, 2, 0]), (true, [2, 1, 0])] {
            assert_eq!(run(&Rare::Argsort(0), vec![nan.clone(), flag(on)]), order);
        }
    }

    #[test]
    fn bits_are_combined_with_broadcasting() {
        let x = ints(&[2, 2], &[12, 10, -1, 0]);
        let y = ints(&[1, 2], &[10, 6]);
        for (op, want) in [
            (Bitwise::And, [8, 2, 10, 0]),
            (Bitwise::Or, [14, 14, -1, 6]),
            (Bitwise::Xor, [6, 12, -11, 6]),
        ] {
            let op = Rare::Bitwise(op, vec![2, 2]);
            assert_eq!(run(&op, vec![x.clone(), y.clone()]), want);
        }
    }
}
