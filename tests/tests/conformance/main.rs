//! Our runtime against Apple's: random shapes, axes and values, at least fifty cases
//! of every operation, each within the tolerance of one table.

mod suite;
mod table;

use std::collections::BTreeMap;

use anemone_schemas::aimodel::build::{Conv2d, Padding, Scatter};
use anemone_schemas::aimodel::ir::{Blob, BlobData, Elem, TensorType};
use anemone_tests::oracle::Tensor;

use suite::{CASES, Random, Suite};

/// `shape` with some axes made 1 and some leading ones dropped.
fn narrowed(r: &mut Random, shape: &[usize]) -> Vec<usize> {
    let mut out: Vec<usize> = shape
        .iter()
        .map(|&d| if r.below(3) == 0 { 1 } else { d })
        .collect();
    if r.below(4) == 0 && out.len() > 1 {
        out.remove(0);
    }
    out
}

#[test]
fn functions_of_one_argument() {
    functions_of_one_argument_suite().run();
}

fn functions_of_one_argument_suite() -> Suite {
    let mut r = Random::new(1);
    let mut s = Suite::default();
    for op in [
        "exp", "tanh", "sin", "cos", "abs", "round", "sqrt", "rsqrt", "log", "erf",
    ] {
        for _ in 0..CASES {
            let shape = r.shape();
            // Reduction of large angles is another matter.
            let x = match op {
                "sin" | "cos" => r.plain(&shape, 8.0),
                _ => r.halves(&shape),
            };
            s.add(op, vec![x], 0.0, |g, a| vec![g.unary(op, a[0])]);
        }
    }
    for _ in 0..CASES {
        let shape = r.shape();
        let x = r.halves(&shape);
        s.add("sigmoid", vec![x], 0.0, |g, a| vec![g.sigmoid(a[0])]);
        let x = r.plain(&shape, 12.0);
        s.add("silu", vec![x], 0.0, |g, a| vec![g.silu(a[0])]);
        let x = r.halves(&shape);
        s.add("relu", vec![x], 0.0, |g, a| vec![g.relu(a[0])]);
        let (x, tanh) = (r.plain(&shape, 4.0), r.below(2) == 0);
        s.add("gelu", vec![x], 4e-3, |g, a| vec![g.gelu(a[0], tanh)]);
        let bits: Vec<bool> = (0..shape.iter().product())
            .map(|_| r.below(2) == 0)
            .collect();
        let x = Tensor::bool(&shape, &bits);
        s.add("not", vec![x], 0.0, |g, a| vec![g.unary("not", a[0])]);
        let elem = r.pick(&[Elem::F32, Elem::Si32, Elem::Bool]);
        let x = r.plain(&shape, 100.0);
        s.add("cast", vec![x], 0.0, |g, a| vec![g.cast(a[0], elem)]);
    }
    s
}

#[test]
fn functions_of_two_arguments() {
    functions_of_two_arguments_suite().run();
}

fn functions_of_two_arguments_suite() -> Suite {
    let mut r = Random::new(2);
    let mut s = Suite::default();
    let ops = [
        "add",
        "sub",
        "mul",
        "divide",
        "maximum",
        "minimum",
        "pow",
        "equal",
        "not_equal",
        "greater",
        "modulo",
        "floor_divide",
    ];
    for op in ops {
        for case in 0..CASES {
            let shape = r.shape();
            let other = if case % 2 == 0 {
                shape.clone()
            } else {
                narrowed(&mut r, &shape)
            };
            let (mut x, mut y) = match op {
                "pow" => {
                    let n: usize = shape.iter().product();
                    let base: Vec<f32> = (0..n).map(|_| r.value(3.0).abs() + 0.05).collect();
                    (Tensor::f16(&shape, &base), r.plain(&other, 3.0))
                }
                // What max of a NaN is, the dialect does not say.
                "maximum" | "minimum" | "modulo" | "floor_divide" => {
                    (r.plain(&shape, 9.0), r.plain(&other, 9.0))
                }
                _ => (r.halves(&shape), r.halves(&other)),
            };
            if case % 4 == 3 && op != "pow" {
                std::mem::swap(&mut x, &mut y);
            }
            let bound = if op == "floor_divide" { 1.0 } else { 0.0 };
            s.add(op, vec![x, y], bound, |g, a| {
                vec![if case % 2 == 0 {
                    g.binary(op, a[0], a[1])
                } else {
                    g.broadcasting(op, a[0], a[1])
                }]
            });
        }
    }
    for _ in 0..CASES {
        let shape = r.shape();
        let n: usize = shape.iter().product();
        let left: Vec<i32> = (0..n).map(|_| r.below(2001) as i32 - 1000).collect();
        let mut right: Vec<i32> = (0..n).map(|_| r.below(41) as i32 - 20).collect();
        right.iter_mut().filter(|v| **v == 0).for_each(|v| *v = 7);
        for op in [
            "add",
            "sub",
            "mul",
            "maximum",
            "minimum",
            "modulo",
            "floor_divide",
        ] {
            let inputs = vec![Tensor::i32(&shape, &left), Tensor::i32(&shape, &right)];
            s.add(op, inputs, 0.0, |g, a| vec![g.binary(op, a[0], a[1])]);
        }
    }
    for case in 0..CASES {
        let shape = r.shape();
        let mut bits = |shape: &[usize]| {
            let v: Vec<bool> = (0..shape.iter().product())
                .map(|_| r.below(2) == 0)
                .collect();
            Tensor::bool(shape, &v)
        };
        for op in ["logical_and", "logical_or", "logical_xor"] {
            let (x, y) = (bits(&shape), bits(&shape));
            s.add(op, vec![x, y], 0.0, |g, a| vec![g.binary(op, a[0], a[1])]);
        }
        let c = bits(&shape);
        let (x, y) = (r.halves(&shape), r.halves(&shape));
        s.add("where", vec![c, x, y], 0.0, |g, a| {
            vec![if case % 2 == 0 {
                g.r#where(a[0], a[1], a[2])
            } else {
                g.broadcasting_where(a[0], a[1], a[2])
            }]
        });
    }
    s
}

#[test]
fn moved_elements() {
    moved_elements_suite().run();
}

fn moved_elements_suite() -> Suite {
    let mut r = Random::new(3);
    let mut s = Suite::default();
    for _ in 0..CASES {
        let shape = r.shape();
        let rank = shape.len();
        let x = r.halves(&shape);
        let n: usize = shape.iter().product();
        let to: Vec<usize> = match r.below(3) {
            0 => vec![n],
            1 => shape.iter().rev().copied().collect(),
            _ => [vec![1], shape.clone(), vec![1]].concat(),
        };
        s.add("reshape", vec![x.clone()], 0.0, |g, a| {
            vec![g.reshape(a[0], &to)]
        });
        let mut perm: Vec<usize> = (0..rank).collect();
        for i in (1..rank).rev() {
            perm.swap(i, r.below(i + 1));
        }
        s.add("transpose", vec![x.clone()], 0.0, |g, a| {
            vec![g.transpose(a[0], &perm)]
        });
        let small: Vec<usize> = shape
            .iter()
            .map(|&d| if r.below(2) == 0 { 1 } else { d })
            .collect();
        let y = r.halves(&small);
        s.add("broadcast_to", vec![y], 0.0, |g, a| {
            vec![g.broadcast_to(a[0], &shape)]
        });
        let at = r.below(rank + 1);
        s.add("expand_dims", vec![x.clone()], 0.0, |g, a| {
            vec![g.expand_dims(a[0], &[at])]
        });
        let mut flat = shape.clone();
        flat.insert(at, 1);
        let y = r.halves(&flat);
        s.add("shrink_dims", vec![y.clone()], 0.0, |g, a| {
            vec![g.shrink_dims(a[0], &[at])]
        });
        let size = r.within(1, 5);
        s.add("broadcast_in_dims", vec![y], 0.0, |g, a| {
            vec![g.broadcast_in_dims(a[0], &[size], &[at])]
        });
        let (first, step, len) = (
            r.below(50) as i32 - 25,
            r.within(1, 4) as i32,
            r.within(1, 9),
        );
        let start = Tensor::i32(&[], &[first]);
        s.add("range", vec![start], 0.0, |g, a| {
            let (stop, step) = (g.i32_scalar(first + step * len as i32), g.i32_scalar(step));
            vec![g.range(a[0], stop, step, len)]
        });
        let axis = r.below(rank);
        let mut part = shape.clone();
        part[axis] = r.within(1, 4);
        let y = r.halves(&part);
        s.add("concat", vec![x.clone(), y, x.clone()], 0.0, |g, a| {
            vec![g.concat(axis, a)]
        });
        let at = r.below(shape[axis]);
        let sizes = if at == 0 {
            vec![shape[axis]]
        } else {
            vec![at, shape[axis] - at]
        };
        s.add("split", vec![x.clone()], 0.0, |g, a| {
            g.split(a[0], axis, &sizes)
        });
        let bounds: Vec<[i32; 3]> = shape
            .iter()
            .map(|&d| {
                let start = r.below(d);
                let end = r.within(start + 1, d);
                let negative = r.below(2) == 0;
                let wrap = |v: usize| {
                    if negative && v < d {
                        v as i32 - d as i32
                    } else {
                        v as i32
                    }
                };
                [wrap(start), wrap(end), r.within(1, 2) as i32]
            })
            .collect();
        let column = |i: usize| -> Vec<i32> { bounds.iter().map(|b| b[i]).collect() };
        let (start, end, step) = (column(0), column(1), column(2));
        s.add("slice", vec![x.clone()], 0.0, |g, a| {
            vec![g.slice_strided(a[0], &start, &end, &step)]
        });
        let mut small = shape.clone();
        let mut start = vec![0i32; rank];
        for a in 0..rank {
            small[a] = r.within(1, shape[a]);
            start[a] = r.below(shape[a] - small[a] + 1) as i32;
        }
        let end: Vec<i32> = start
            .iter()
            .zip(&small)
            .map(|(s, n)| s + *n as i32)
            .collect();
        let u = r.halves(&small);
        let inputs = vec![
            x.clone(),
            u,
            Tensor::i32(&[rank], &start),
            Tensor::i32(&[rank], &end),
        ];
        s.add("slice_update", inputs, 0.0, |g, a| {
            vec![g.slice_update(a[0], a[2], a[3], a[1])]
        });
        let mode = r.pick(&[Padding::Constant, Padding::Reflect, Padding::Replicate]);
        let pads: Vec<(usize, usize)> = shape
            .iter()
            .map(|&d| {
                if d == 1 && mode != Padding::Constant {
                    (0, 0)
                } else {
                    (r.below(d.min(3)), r.below(d.min(3)))
                }
            })
            .collect();
        s.add("pad", vec![x.clone()], 0.0, |g, a| {
            vec![g.pad(a[0], &pads, mode, 2.5)]
        });
        let reps: Vec<usize> = shape.iter().map(|_| r.within(1, 3)).collect();
        s.add("tile", vec![x.clone()], 0.0, |g, a| {
            vec![g.tile(a[0], &reps)]
        });
        let (rows, cols) = (r.within(1, 5), r.within(1, 7));
        let count = r.within(1, 6);
        let table = r.halves(&[rows, cols]);
        let ids: Vec<i32> = (0..count).map(|_| r.below(rows) as i32).collect();
        let idx = Tensor::i32(&[count, 1], &ids);
        s.add("gather_nd", vec![table.clone(), idx], 0.0, |g, a| {
            vec![g.gather_nd(a[0], a[1])]
        });
        let ids: Vec<i32> = (0..count * cols).map(|_| r.below(rows) as i32).collect();
        let idx = Tensor::i32(&[count, cols], &ids);
        s.add("gather_along_axis", vec![table, idx], 0.0, |g, a| {
            vec![g.gather_along_axis(a[0], a[1], 0)]
        });
    }
    s
}

#[test]
fn rows() {
    rows_suite().run();
}

fn rows_suite() -> Suite {
    let mut r = Random::new(4);
    let mut s = Suite::default();
    for _ in 0..CASES {
        let mut shape = r.shape();
        let axis = r.below(shape.len());
        shape[axis] = r.pick(&[1, 3, 17, 64, 130]);
        let len = shape[axis] as f32;
        let scale = r.pick(&[1.0, 20.0, 3e4]);
        let x = r.plain(&shape, scale);
        s.add("softmax", vec![x.clone()], 0.0, |g, a| {
            vec![g.softmax(a[0], axis)]
        });
        // Few different values, so that there are ties.
        let n = shape.iter().product();
        let ties: Vec<f32> = (0..n).map(|_| r.below(6) as f32).collect();
        let t = Tensor::f16(&shape, &ties);
        s.add("argmax", vec![t], 0.0, |g, a| vec![g.argmax(a[0], axis)]);
        let x = r.plain(&shape, 2.0);
        // f32 sums differ by a rounding of each of `len` terms at most.
        let bound = len * len * 2.0 * f32::EPSILON;
        s.add("reduce_sum", vec![x.clone()], bound, |g, a| {
            vec![g.reduce_sum(a[0], &[axis])]
        });
        s.add("reduce_mean", vec![x.clone()], bound / len, |g, a| {
            vec![g.reduce_mean(a[0], &[axis])]
        });
        let mut few = shape.clone();
        few[axis] = few[axis].min(17);
        let y = r.plain(&few, 1.5);
        let most = 1.5f32.powi(few[axis] as i32) * few[axis] as f32 * f32::EPSILON;
        s.add("reduce_product", vec![y], most, |g, a| {
            vec![g.reduce_product(a[0], &[axis])]
        });
        s.add("reduce_max", vec![x.clone()], 0.0, |g, a| {
            vec![g.reduce_max(a[0], &[axis])]
        });
        s.add("reduce_min", vec![x], 0.0, |g, a| {
            vec![g.reduce_min(a[0], &[axis])]
        });
    }
    s
}

/// Error of summing `k` products of numbers up to 1 with a rounding to f16 at each
/// step: the partial sum is at most `i`, so step i errs by `i` times 2^-11.
fn f16_steps(k: usize) -> f32 {
    (k * (k + 1)) as f32 / 2.0 * 2f32.powi(-11) + k as f32 * 2f32.powi(-11)
}

#[test]
fn products() {
    products_suite().run();
}

fn products_suite() -> Suite {
    let mut r = Random::new(5);
    let mut s = Suite::default();
    for case in 0..CASES {
        let (m, k, n) = (r.within(1, 9), r.within(1, 24), r.within(1, 40));
        let batch: Vec<usize> = (0..r.below(3)).map(|_| r.within(1, 3)).collect();
        let x = r.plain(&[batch.clone(), vec![m, k]].concat(), 1.0);
        let other: Vec<usize> = if case % 2 == 0 {
            batch
        } else {
            batch.iter().map(|_| 1).collect()
        };
        let y = r.plain(&[other, vec![k, n]].concat(), 1.0);
        s.add("batch_matmul", vec![x, y], f16_steps(k), |g, a| {
            vec![if case % 2 == 0 {
                g.batch_matmul(a[0], a[1])
            } else {
                g.broadcasting_batch_matmul(a[0], a[1])
            }]
        });
        let groups = r.pick(&[1, 1, 2]);
        let (c, o) = (groups * r.within(1, 4), groups * r.within(1, 6));
        let kernel = [r.within(1, 3), r.within(1, 3)];
        let options = Conv2d {
            stride: [r.within(1, 2) as u32, r.within(1, 2) as u32],
            dilation: [1, r.within(1, 2) as u32],
            groups: groups as u32,
        };
        let image = [r.within(1, 2), c, r.within(5, 8), r.within(5, 9)];
        let x = r.plain(&image, 1.0);
        let w = r.plain(&[o, c / groups, kernel[0], kernel[1]], 1.0);
        let terms = (c / groups * kernel[0] * kernel[1]) as f32;
        s.add(
            "conv2d",
            vec![x, w],
            terms * terms * f32::EPSILON,
            |g, a| vec![g.conv2d(a[0], a[1], options)],
        );
        // Tables in the file, read by our fused product and unpacked by Apple's.
        let (rows, cols, width) = (32 * r.within(1, 2), 8 * r.within(1, 20), r.within(1, 20));
        let (elem, bits) = r.pick(&[
            (Elem::Ui1, 1),
            (Elem::Ui2, 2),
            (Elem::Ui3, 3),
            (Elem::Ui4, 4),
            (Elem::Ui6, 6),
            (Elem::Ui8, 8),
        ]);
        let packed: Vec<u8> = (0..rows * cols * bits / 8)
            .map(|_| r.below(256) as u8)
            .collect();
        let tables = r.values((rows / 32) << bits, 1.0);
        let x = r.plain(&[1, cols, 1, width], 1.0);
        let bound = (cols * cols) as f32 * f32::EPSILON;
        for op in ["conv2d", "lut_to_dense"] {
            let (packed, tables, key) = (packed.clone(), tables.clone(), format!("{op}{case}"));
            s.add(op, vec![x.clone()], bound, |g, a| {
                let blob = g.module().add_blob(Blob {
                    key,
                    data: BlobData::Bytes(packed),
                });
                let indices = g.constant_blob(TensorType::new(elem, &[rows, cols, 1, 1]), blob);
                let table = g.f16s(&tables, &[rows / 32, 1, 1, 1, 1 << bits, 1]);
                let dense = g.lut_to_dense(indices, table, 0);
                vec![if op == "conv2d" {
                    g.conv1x1(a[0], dense)
                } else {
                    g.transpose(dense, &[1, 0, 2, 3])
                }]
            });
        }
        let (rows, cols) = (r.within(1, 6), r.within(1, 9));
        let data: Vec<i8> = (0..rows * cols).map(|_| r.below(255) as i8).collect();
        let scale = r.plain(&[rows], 0.1);
        let inputs = vec![Tensor::i8(&[rows, cols], &data), scale];
        s.add(
            "dequantize",
            inputs,
            256.0 * 0.1 * 2f32.powi(-10),
            |g, a| {
                let (zero, shift) = (
                    g.full(Elem::Si8, &[rows], 3.0),
                    g.full(Elem::F16, &[rows], 0.5),
                );
                vec![g.dequantize(a[0], a[1], zero, shift, 0)]
            },
        );
        let (rows, cols) = (r.within(1, 6), 4 * r.within(1, 5));
        let data: Vec<i8> = (0..rows * cols).map(|_| r.below(255) as i8).collect();
        let scale = r.plain(&[rows, cols / 4], 0.1);
        let inputs = vec![Tensor::i8(&[rows, cols], &data), scale];
        s.add(
            "blockwise_shift_scale",
            inputs,
            256.0 * 0.1 * 2f32.powi(-10),
            |g, a| {
                let zero = g.full(Elem::Si8, &[rows, cols / 4], 3.0);
                let shift = g.full(Elem::F16, &[rows, cols / 4], 0.5);
                vec![g.blockwise_shift_scale(a[0], a[1], zero, shift)]
            },
        );
    }
    s
}

#[test]
fn rare_operations() {
    rare_operations_suite().run();
}

/// Indices `0..n` in random order.
fn shuffled(r: &mut Random, n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, r.below(i + 1));
    }
    order
}

fn rare_operations_suite() -> Suite {
    let mut r = Random::new(6);
    let mut s = Suite::default();
    let modes = [
        Scatter::Update,
        Scatter::Add,
        Scatter::Sub,
        Scatter::Mul,
        Scatter::Div,
        Scatter::Max,
        Scatter::Min,
    ];
    for case in 0..CASES {
        // What two writes to one place do is not defined, so no index appears twice.
        let (rows, cols) = (r.within(1, 7), r.within(1, 6));
        let count = r.within(1, rows);
        let x = r.halves(&[rows, cols]);
        let ids: Vec<i32> = shuffled(&mut r, rows)[..count]
            .iter()
            .map(|&i| i as i32 - if r.below(4) == 0 { rows as i32 } else { 0 })
            .collect();
        let idx = Tensor::i32(&[count, 1], &ids);
        let new = r.halves(&[count, cols]);
        s.add("scatter_nd", vec![x.clone(), idx, new], 0.0, |g, a| {
            vec![g.scatter_nd(a[0], a[1], a[2])]
        });
        let places = r.within(1, rows * cols);
        let pairs: Vec<i32> = shuffled(&mut r, rows * cols)[..places]
            .iter()
            .flat_map(|&p| [(p / cols) as i32, (p % cols) as i32])
            .collect();
        let idx = Tensor::i32(&[places, 2], &pairs);
        let new = r.halves(&[places]);
        s.add("scatter_nd", vec![x, idx, new], 0.0, |g, a| {
            vec![g.scatter_nd(a[0], a[1], a[2])]
        });

        let mode = modes[case % modes.len()];
        let axis = r.below(2);
        let (shape, len) = ([rows, cols], [rows, cols][axis]);
        let count = r.within(1, len);
        let mut to = shape;
        to[axis] = count;
        let mut ids = vec![0; to[0] * to[1]];
        for lane in 0..shape[1 - axis] {
            for (k, &i) in shuffled(&mut r, len)[..count].iter().enumerate() {
                let at = if axis == 0 {
                    k * to[1] + lane
                } else {
                    lane * to[1] + k
                };
                ids[at] = i as i32;
            }
        }
        let (x, new) = (r.plain(&shape, 9.0), r.plain(&to, 9.0));
        let inputs = vec![x, Tensor::i32(&to, &ids), new];
        s.add("scatter_along_axis", inputs, 0.0, |g, a| {
            vec![g.scatter_along_axis(a[0], a[1], a[2], axis, mode)]
        });

        let shape = r.shape();
        let x = r.halves(&shape);
        let mut axes = shuffled(&mut r, shape.len());
        axes.truncate(r.within(1, shape.len()));
        s.add("reverse", vec![x], 0.0, |g, a| vec![g.reverse(a[0], &axes)]);
        let mut shape = r.shape();
        let axis = r.below(shape.len());
        shape[axis] = r.pick(&[1, 2, 9, 40]);
        let descending = r.below(2) == 0;
        // Few different values, so that there are ties.
        let n = shape.iter().product();
        let ties: Vec<f32> = (0..n).map(|_| r.below(7) as f32 - 3.0).collect();
        let x = if case % 2 == 0 {
            Tensor::f16(&shape, &ties)
        } else {
            r.plain(&shape, 50.0)
        };
        s.add("sort", vec![x.clone()], 0.0, |g, a| {
            vec![g.sort(a[0], axis, descending)]
        });
        s.add("argsort", vec![x], 0.0, |g, a| {
            vec![g.argsort(a[0], axis, descending, true)]
        });
        let ints = |r: &mut Random| -> Vec<i32> {
            (0..n)
                .map(|_| r.below(1 << 20) as i32 - (1 << 19))
                .collect()
        };
        for op in ["bitwise_and", "bitwise_or", "bitwise_xor"] {
            let (x, y) = (ints(&mut r), ints(&mut r));
            let inputs = vec![Tensor::i32(&shape, &x), Tensor::i32(&shape, &y)];
            s.add(op, inputs, 0.0, |g, a| vec![g.binary(op, a[0], a[1])]);
        }
    }
    s
}

#[test]
fn the_page_of_operations_is_current() {
    let suites = [
        functions_of_one_argument_suite(),
        functions_of_two_arguments_suite(),
        moved_elements_suite(),
        rows_suite(),
        products_suite(),
        rare_operations_suite(),
    ];
    let mut cases = BTreeMap::new();
    for op in suites.iter().flat_map(Suite::operations) {
        *cases.entry(op).or_insert(0) += 1;
    }
    for (op, n) in &cases {
        assert!(*n >= CASES, "{n} cases of `{op}`");
    }
    let page = table::page(&cases);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations.md");
    if std::env::var_os("ANEMONE_BLESS").is_some() {
        std::fs::write(path, &page).expect("docs can be written");
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == page, "run this test with `ANEMONE_BLESS=1`");
}
