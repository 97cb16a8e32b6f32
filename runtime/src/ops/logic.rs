//! Predicates and choices between elements, with numpy broadcasting.

use crate::tensor::Data;
use crate::view::{Nest, View, storage_order};

/// Predicates of two arguments of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    Equal,
    NotEqual,
    Greater,
    And,
    Or,
    Xor,
}

/// A predicate of `x` and `y`, broadcast to `shape`.
#[allow(clippy::float_cmp, reason = "the operation is exact equality")]
pub(crate) fn compare(op: Compare, x: View, y: View, shape: &[usize]) -> View {
    let (x, y) = (x.broadcast(shape), y.broadcast(shape));
    let order = storage_order(shape, &[&x.strides, &y.strides]);
    let nest = Nest::new(shape, &order, [&x.strides, &y.strides]);
    let mut out: Vec<bool> = Vec::with_capacity(shape.iter().product());
    let at = [x.offset, y.offset];
    macro_rules! with {
        ($($variant:ident),*) => {
            match (&*x.data, &*y.data) {
                $((Data::$variant(a), Data::$variant(b)) => {
                    let sides = [&a[..], &b[..]];
                    match op {
                        Compare::Equal => pairs(&nest, sides, at, &mut out, |a, b| a == b),
                        Compare::NotEqual => pairs(&nest, sides, at, &mut out, |a, b| a != b),
                        _ => pairs(&nest, sides, at, &mut out, |a, b| a > b),
                    }
                })*
                (Data::Bool(a), Data::Bool(b)) => {
                    let f = match op {
                        Compare::Equal => |a, b| a == b,
                        Compare::NotEqual | Compare::Xor => |a, b| a != b,
                        Compare::Greater => |a: bool, b: bool| a & !b,
                        Compare::And => |a, b| a & b,
                        Compare::Or => |a, b| a | b,
                    };
                    pairs(&nest, [a, b], at, &mut out, f);
                }
                _ => unreachable!("the planner admits operands of one type"),
            }
        };
    }
    with!(F16, Bf16, F32, I32, I16, I8, U32, U16, U8);
    View::ordered(shape, &order, Data::Bool(out))
}

/// Appends `f` of every pair of elements, in order.
fn pairs<T: Copy>(
    nest: &Nest<2>,
    [a, b]: [&[T]; 2],
    at: [usize; 2],
    out: &mut Vec<bool>,
    f: impl Fn(T, T) -> bool,
) {
    let n = nest.run;
    nest.for_each(|[oa, ob]| {
        let (a, b) = (&a[at[0] + oa..], &b[at[1] + ob..]);
        match nest.step {
            // Unit strides and constants are what vector units are good at.
            [1, 1] => out.extend(a[..n].iter().zip(&b[..n]).map(|(&a, &b)| f(a, b))),
            [1, 0] => {
                let b = b[0];
                out.extend(a[..n].iter().map(|&a| f(a, b)));
            }
            [0, 1] => {
                let a = a[0];
                out.extend(b[..n].iter().map(|&b| f(a, b)));
            }
            [sa, sb] => out.extend((0..n).map(|i| f(a[i * sa], b[i * sb]))),
        }
    });
}

/// Logical negation.
pub(crate) fn not(x: View) -> View {
    let x = x.contiguous();
    let shape = x.shape.clone();
    let data = match x.into_data() {
        Data::Bool(v) => Data::Bool(v.into_iter().map(|b| !b).collect()),
        other => other,
    };
    View::dense(&shape, data)
}

/// `cond ? x : y`, broadcast to `shape`.
pub(crate) fn select(cond: View, x: View, y: View, shape: &[usize]) -> View {
    let (cond, x, y) = (
        cond.broadcast(shape),
        x.broadcast(shape),
        y.broadcast(shape),
    );
    let order = storage_order(shape, &[&x.strides, &y.strides, &cond.strides]);
    let nest = Nest::new(shape, &order, [&cond.strides, &x.strides, &y.strides]);
    let Data::Bool(c) = &*cond.data else {
        unreachable!("the planner admits a condition of i1");
    };
    macro_rules! with {
        ($($variant:ident),*) => {
            match (&*x.data, &*y.data) {
                $((Data::$variant(a), Data::$variant(b)) => {
                    let mut out = Vec::with_capacity(shape.iter().product());
                    let n = nest.run;
                    nest.for_each(|[oc, ox, oy]| {
                        let c = &c[cond.offset + oc..];
                        let (a, b) = (&a[x.offset + ox..], &b[y.offset + oy..]);
                        match nest.step {
                            [1, 0, 1] => {
                                let a = a[0];
                                let rows = c[..n].iter().zip(&b[..n]);
                                out.extend(rows.map(|(&c, &b)| if c { a } else { b }));
                            }
                            [sc, sx, sy] => out.extend((0..n).map(|i| {
                                if c[i * sc] { a[i * sx] } else { b[i * sy] }
                            })),
                        }
                    });
                    Data::$variant(out)
                })*
                _ => unreachable!("the planner admits operands of one type"),
            }
        };
    }
    let data = with!(F16, Bf16, F32, I32, I16, I8, U32, U16, U8, Bool);
    View::ordered(shape, &order, data)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All strides that the loops tell apart, against the definition.
    #[test]
    fn every_layout_gives_what_its_elements_give() {
        let dense = |k: usize| {
            let values = (0..12).map(|i| ((i * k) % 5) as f32);
            View::dense(&[3, 4], Data::F32(values.collect()))
        };
        let turned = |k| {
            let values = (0..12).map(|i| ((i * k) % 7) as f32);
            View::dense(&[4, 3], Data::F32(values.collect())).transposed(&[1, 0])
        };
        let views = [
            dense(3),
            turned(2),
            dense(2).sliced(0, 1, 1, 1),
            dense(4).sliced(1, 2, 1, 1),
            View::dense(&[1, 1], Data::F32(vec![2.0])),
        ];
        let at = |v: &View, r: usize, c: usize| {
            let v = v.clone().broadcast(&[3, 4]);
            let Data::F32(data) = &*v.data else {
                unreachable!()
            };
            data[v.offset + r * v.strides[0] + c * v.strides[1]]
        };
        let places = (0..12).map(|i| (i / 4, i % 4));
        for x in &views {
            for y in &views {
                let greater = compare(Compare::Greater, x.clone(), y.clone(), &[3, 4]);
                let equal = compare(Compare::Equal, x.clone(), y.clone(), &[3, 4]);
                let chosen = select(greater.clone(), x.clone(), y.clone(), &[3, 4]);
                let [greater, equal] = [greater, equal].map(|v| v.contiguous().into_data());
                let chosen = chosen.contiguous().into_data();
                for (i, (r, c)) in places.clone().enumerate() {
                    let (a, b) = (at(x, r, c), at(y, r, c));
                    let [Data::Bool(g), Data::Bool(e)] = [&greater, &equal] else {
                        unreachable!()
                    };
                    assert_eq!((g[i], e[i]), (a > b, a >= b && b >= a));
                    let Data::F32(chosen) = &chosen else {
                        unreachable!()
                    };
                    assert_eq!(chosen[i].to_bits(), a.max(b).to_bits());
                }
            }
        }
    }
}
