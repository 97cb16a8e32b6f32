//! Operations on one element at a time, with numpy broadcasting.

use std::sync::Arc;

use anemone_schemas::aimodel::ir::Elem;

use super::{Float, each_float, load_run, math};
use crate::tensor::Data;
use crate::view::{Nest, View, dense_strides, storage_order};

/// Functions of one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unary {
    Exp,
    Tanh,
    Sin,
    Cos,
    Abs,
    Round,
    Sqrt,
    Rsqrt,
    Log,
    Erf,
    Sigmoid,
    Silu,
    Relu,
    Gelu,
    GeluTanh,
}

/// Functions of two arguments of one type. `modulo` has the sign of the dividend,
/// while `floor_divide` rounds down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Divide,
    Maximum,
    Minimum,
    Pow,
    Modulo,
    FloorDivide,
}

/// Elements converted to f32 at a time: a block of each operand stays in the
/// first-level cache.
const BLOCK: usize = 1024;

impl Unary {
    fn apply(self, x: &mut [f32]) {
        macro_rules! map {
            ($f:expr) => {
                for v in x.iter_mut() {
                    *v = $f(*v);
                }
            };
        }
        match self {
            Self::Exp => math::exp(x),
            Self::Tanh => map!(f32::tanh),
            Self::Sin => map!(f32::sin),
            Self::Cos => map!(f32::cos),
            Self::Abs => map!(f32::abs),
            Self::Round => map!(f32::round_ties_even),
            Self::Sqrt => map!(f32::sqrt),
            Self::Rsqrt => map!(|v: f32| 1.0 / v.sqrt()),
            Self::Log => map!(f32::ln),
            Self::Erf => map!(math::erf),
            Self::Sigmoid => math::sigmoid(x),
            Self::Silu => {
                let mut gate = [0.0f32; BLOCK];
                for x in x.chunks_mut(BLOCK) {
                    let gate = &mut gate[..x.len()];
                    gate.copy_from_slice(x);
                    math::sigmoid(gate);
                    for (v, g) in x.iter_mut().zip(gate) {
                        *v *= *g;
                    }
                }
            }
            Self::Relu => map!(|v: f32| if v < 0.0 { 0.0 } else { v }),
            Self::Gelu => map!(|v| math::gelu(v, false)),
            Self::GeluTanh => map!(|v| math::gelu(v, true)),
        }
    }
}

/// `f(x)`, in place if this is the last use of `x`.
pub(crate) fn unary(op: Unary, mut x: View) -> View {
    if x.is_unique() {
        let done = Arc::get_mut(&mut x.data).map(|data| {
            each_float!(data, v => { map_in_place(v, |b| op.apply(b)); true }, else => false)
        });
        if done == Some(true) {
            return x;
        }
    }
    let order = storage_order(&x.shape, &[&x.strides]);
    let nest = Nest::new(&x.shape, &order, [&x.strides]);
    let n = x.len();
    let data = each_float!(&*x.data, v => map_new(&nest, v, x.offset, n, |b| op.apply(b)), else => {
        int_unary(op, &x, &order)
    });
    View::ordered(&x.shape, &order, data)
}

/// `abs` and `relu` of integers; every other function is the identity on them
/// (the planner admits only `round`).
fn int_unary(op: Unary, x: &View, order: &[usize]) -> Data {
    let view = x.copied(order);
    let mut data = Arc::unwrap_or_clone(view.data);
    macro_rules! signed {
        ($v:expr) => {
            for v in $v.iter_mut() {
                match op {
                    Unary::Abs => *v = v.wrapping_abs(),
                    Unary::Relu => *v = (*v).max(0),
                    _ => {}
                }
            }
        };
    }
    match &mut data {
        Data::I32(v) => signed!(v),
        Data::I16(v) => signed!(v),
        Data::I8(v) => signed!(v),
        _ => {}
    }
    data
}

fn map_in_place<T: Float>(v: &mut [T], f: impl Fn(&mut [f32])) {
    let mut buf = [0.0f32; BLOCK];
    for chunk in v.chunks_mut(BLOCK) {
        let b = &mut buf[..chunk.len()];
        T::load(chunk, b);
        f(b);
        T::store(b, chunk);
    }
}

fn map_new<T: Float>(
    nest: &Nest<1>,
    src: &[T],
    offset: usize,
    n: usize,
    f: impl Fn(&mut [f32]),
) -> Data
where
    Vec<T>: Into<Data>,
{
    let mut out = vec![T::default(); n];
    let mut buf = [0.0f32; BLOCK];
    let mut at = 0;
    nest.for_each(|[s]| {
        for i in (0..nest.run).step_by(BLOCK) {
            let b = &mut buf[..BLOCK.min(nest.run - i)];
            load_run(src, offset + s + i * nest.step[0], nest.step[0], b);
            f(b);
            T::store(b, &mut out[at..at + b.len()]);
            at += b.len();
        }
    });
    out.into()
}

impl Binary {
    fn apply(self, x: &mut [f32], y: &[f32]) {
        macro_rules! zip {
            ($f:expr) => {
                for (a, &b) in x.iter_mut().zip(y) {
                    *a = $f(*a, b);
                }
            };
        }
        match self {
            Self::Add => zip!(|a, b| a + b),
            Self::Sub => zip!(|a, b| a - b),
            Self::Mul => zip!(|a, b| a * b),
            Self::Divide => zip!(|a, b| a / b),
            Self::Maximum => zip!(|a: f32, b: f32| if b > a || b.is_nan() { b } else { a }),
            Self::Minimum => zip!(|a: f32, b: f32| if b < a || b.is_nan() { b } else { a }),
            Self::Pow => zip!(f32::powf),
            Self::Modulo => zip!(|a: f32, b: f32| a % b),
            Self::FloorDivide => zip!(|a: f32, b: f32| (a / b).floor()),
        }
    }

    fn int(self, a: i64, b: i64) -> i64 {
        match self {
            Self::Add => a.wrapping_add(b),
            Self::Sub => a.wrapping_sub(b),
            Self::Mul => a.wrapping_mul(b),
            Self::Divide => a.checked_div(b).unwrap_or(0),
            Self::Maximum => a.max(b),
            Self::Minimum => a.min(b),
            Self::Pow => u32::try_from(b).map_or(0, |b| a.wrapping_pow(b)),
            Self::Modulo | Self::FloorDivide if b == 0 => 0,
            Self::Modulo => a.wrapping_rem(b),
            Self::FloorDivide => floor_div(a, b),
        }
    }
}

fn floor_div(a: i64, b: i64) -> i64 {
    let q = a.wrapping_div(b);
    if a % b != 0 && (a < 0) != (b < 0) {
        q - 1
    } else {
        q
    }
}

/// `v` laid out as `lead` is, if it is broadcast against it and would otherwise be
/// gathered again for every repetition: the causal mask against all heads.
fn aligned(v: View, lead: &View) -> View {
    let rank = v.shape.len();
    if rank != lead.shape.len() || v.len() * 2 > lead.len() || v.len() < BLOCK {
        return v;
    }
    let innermost = storage_order(&lead.shape, &[&lead.strides]).pop();
    match innermost {
        Some(axis) if v.shape[axis] > 1 && v.strides[axis] > 1 => {
            let strides: Vec<usize> = (0..rank)
                .map(|a| if v.shape[a] == 1 { 1 } else { lead.strides[a] })
                .collect();
            v.copied(&storage_order(&v.shape, &[&strides]))
        }
        _ => v,
    }
}

/// `f(x, y)` of `shape`, in the buffer of an operand that is used here last.
pub(crate) fn binary(op: Binary, x: View, y: View, shape: &[usize]) -> View {
    let (x, y) = if x.len() >= y.len() {
        let y = aligned(y, &x);
        (x, y)
    } else {
        (aligned(x, &y), y)
    };
    let (mut x, mut y) = (x.broadcast(shape), y.broadcast(shape));
    let order = storage_order(shape, &[&x.strides, &y.strides]);
    let strides = dense_strides(shape, &order);
    let nest = Nest::new(shape, &order, [&x.strides, &y.strides]);
    let n: usize = shape.iter().product();
    let fits = |v: &View| (0..shape.len()).all(|i| shape[i] == 1 || v.strides[i] == strides[i]);
    let reuse_x =
        fits(&x) && x.offset == 0 && x.data.len() == n && Arc::get_mut(&mut x.data).is_some();
    let reuse_y = !reuse_x
        && fits(&y)
        && y.offset == 0
        && y.data.len() == n
        && Arc::get_mut(&mut y.data).is_some();
    macro_rules! floats {
        ($variant:ident, $a:ident, $b:ident) => {{
            if reuse_x {
                let Data::$variant(b) = &*$b else {
                    unreachable!("one type")
                };
                let mut data = Arc::try_unwrap($a).unwrap_or_else(|a| (*a).clone());
                if let Data::$variant(out) = &mut data {
                    zip_into(&nest, out, None, Some((b, y.offset)), |x, y| op.apply(x, y));
                }
                data
            } else if reuse_y {
                let Data::$variant(a) = &*$a else {
                    unreachable!("one type")
                };
                let mut data = Arc::try_unwrap($b).unwrap_or_else(|b| (*b).clone());
                if let Data::$variant(out) = &mut data {
                    zip_into(&nest, out, Some((a, x.offset)), None, |x, y| op.apply(x, y));
                }
                data
            } else {
                let (Data::$variant(a), Data::$variant(b)) = (&*$a, &*$b) else {
                    unreachable!("one type")
                };
                let mut out = vec![Default::default(); n];
                zip_into(
                    &nest,
                    &mut out,
                    Some((a, x.offset)),
                    Some((b, y.offset)),
                    |x, y| op.apply(x, y),
                );
                Data::$variant(out)
            }
        }};
    }
    let (a, b) = (x.data, y.data);
    let kind = a.elem();
    let data = match kind {
        Elem::F16 => floats!(F16, a, b),
        Elem::Bf16 => floats!(Bf16, a, b),
        Elem::F32 => floats!(F32, a, b),
        _ => int_binary(op, &nest, (&a, x.offset), (&b, y.offset), n),
    };
    View {
        data: Arc::new(data),
        offset: 0,
        shape: shape.to_vec(),
        strides,
    }
}

/// `out = f(x, y)`, where an operand that is `None` is `out` itself.
fn zip_into<T: Float>(
    nest: &Nest<2>,
    out: &mut [T],
    x: Option<(&[T], usize)>,
    y: Option<(&[T], usize)>,
    f: impl Fn(&mut [f32], &[f32]),
) {
    let (mut bx, mut by) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    let mut at = 0;
    nest.for_each(|[ox, oy]| {
        for i in (0..nest.run).step_by(BLOCK) {
            let n = BLOCK.min(nest.run - i);
            let (bx, by) = (&mut bx[..n], &mut by[..n]);
            let dst = &mut out[at..at + n];
            let [sx, sy] = nest.step;
            match x {
                Some((v, o)) => load_run(v, o + ox + i * sx, sx, bx),
                None => T::load(dst, bx),
            }
            match y {
                Some((v, o)) => load_run(v, o + oy + i * sy, sy, by),
                None => T::load(dst, by),
            }
            f(bx, by);
            T::store(bx, dst);
            at += n;
        }
    });
}

/// Calls `f` with the element offsets of both operands, in order.
fn each_pair(nest: &Nest<2>, x: usize, y: usize, mut f: impl FnMut(usize, usize)) {
    nest.for_each(|[ox, oy]| {
        for i in 0..nest.run {
            f(x + ox + i * nest.step[0], y + oy + i * nest.step[1]);
        }
    });
}

fn int_binary(op: Binary, nest: &Nest<2>, x: (&Data, usize), y: (&Data, usize), n: usize) -> Data {
    macro_rules! ints {
        ($($variant:ident $ty:ty),*) => {
            match (x.0, y.0) {
                $((Data::$variant(a), Data::$variant(b)) => {
                    let mut out: Vec<$ty> = Vec::with_capacity(n);
                    each_pair(nest, x.1, y.1, |i, j| {
                        out.push(op.int(i64::from(a[i]), i64::from(b[j])) as $ty);
                    });
                    out.into()
                })*
                _ => unreachable!("the planner admits integers of one type"),
            }
        };
    }
    ints!(I32 i32, I16 i16, I8 i8, U32 u32, U16 u16, U8 u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn ints(v: View) -> Vec<i64> {
        v.into_data().ints().unwrap()
    }

    #[test]
    fn integer_division_rounds_down_and_the_remainder_follows_the_dividend() {
        let v = |x: [i32; 4]| View::dense(&[4], Data::I32(x.to_vec()));
        let (x, y) = (v([7, -7, 7, -7]), v([3, 3, -3, 0]));
        let f = |op| ints(binary(op, x.clone(), y.clone(), &[4]));
        assert_eq!(f(Binary::FloorDivide), [2, -3, -3, 0]);
        assert_eq!(f(Binary::Modulo), [1, -1, 1, 0]);
        assert_eq!(f(Binary::Divide), [2, -2, -2, 0]);
    }

    #[test]
    fn broadcasting_in_any_layout_equals_the_definition() {
        let x = View::dense(&[2, 3, 4], Data::I32((0..24).collect()));
        let y = View::dense(&[4, 3], Data::I32((0..12).map(|i| i * 100).collect()));
        let got = ints(binary(
            Binary::Add,
            x.clone(),
            y.clone().transposed(&[1, 0]),
            &[2, 3, 4],
        ));
        for i in 0..24 {
            let (b, c) = (i / 4 % 3, i % 4);
            assert_eq!(got[i], (i + (c * 3 + b) * 100) as i64);
        }
    }

    #[test]
    fn an_operand_still_in_use_is_not_written_to() {
        let h = |v: &[f32]| {
            let v: Vec<f16> = v.iter().map(|&x| f16::from_f32(x)).collect();
            View::dense(&[2, 2], Data::F16(v))
        };
        let (x, y) = (h(&[1., 2., 3., 4.]), h(&[10., 20., 30., 40.]));
        let keep = x.clone();
        let sum = binary(Binary::Add, x, y, &[2, 2]);
        assert_eq!(*sum.data, *h(&[11., 22., 33., 44.]).data);
        assert_eq!(*keep.data, *h(&[1., 2., 3., 4.]).data);
        // A transposed operand of the same buffer size is not mistaken for its own.
        let t = binary(Binary::Sub, keep.clone(), keep.transposed(&[1, 0]), &[2, 2]);
        assert_eq!(*t.contiguous().data, *h(&[0., -1., 1., 0.]).data);
    }
}
