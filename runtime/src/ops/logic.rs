//! Predicates and choices between elements, with numpy broadcasting.

use super::elementwise::each_pair;
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
    macro_rules! with {
        ($($variant:ident),*) => {
            match (&*x.data, &*y.data) {
                $((Data::$variant(a), Data::$variant(b)) => each_pair(&nest, x.offset, y.offset, |i, j| {
                    let (a, b) = (a[i], b[j]);
                    out.push(match op {
                        Compare::Equal => a == b,
                        Compare::NotEqual => a != b,
                        _ => a > b,
                    });
                }),)*
                (Data::Bool(a), Data::Bool(b)) => each_pair(&nest, x.offset, y.offset, |i, j| {
                    let (a, b) = (a[i], b[j]);
                    out.push(match op {
                        Compare::Equal => a == b,
                        Compare::NotEqual | Compare::Xor => a != b,
                        Compare::Greater => a & !b,
                        Compare::And => a & b,
                        Compare::Or => a | b,
                    });
                }),
                _ => unreachable!("the planner admits operands of one type"),
            }
        };
    }
    with!(F16, Bf16, F32, I32, I16, I8, U32, U16, U8);
    View::ordered(shape, &order, Data::Bool(out))
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
                    nest.for_each(|[oc, ox, oy]| {
                        for i in 0..nest.run {
                            let [sc, sx, sy] = nest.step;
                            out.push(if c[cond.offset + oc + i * sc] {
                                a[x.offset + ox + i * sx]
                            } else {
                                b[y.offset + oy + i * sy]
                            });
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
