//! Every operation the builder knows, judged by Apple's runtime: each case is a
//! function of one program, its result compared with a formula.

use anemone_schemas::aimodel::asset::{Metadata, write_asset};
use anemone_schemas::aimodel::build::{Bound, Conv2d, GraphBuilder, Input, Padding, Scatter};
use anemone_schemas::aimodel::ir::{Backing, Elem, Module, TensorType, ValueId};
use anemone_tests::oracle::{self, Call, Tensor};

/// A reference tensor.
#[derive(Clone)]
struct Nd {
    shape: Vec<usize>,
    data: Vec<f32>,
}

impl Nd {
    fn from_fn(shape: &[usize], mut f: impl FnMut(&[usize]) -> f32) -> Self {
        let count: usize = shape.iter().product();
        let mut index = vec![0; shape.len()];
        let mut data = Vec::with_capacity(count);
        for _ in 0..count {
            data.push(f(&index));
            for d in (0..shape.len()).rev() {
                index[d] += 1;
                if index[d] < shape[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Self {
            shape: shape.to_vec(),
            data,
        }
    }

    /// Reproducible numbers between -2 and 2, on a grid that f16 holds exactly.
    fn noise(shape: &[usize], seed: u32) -> Self {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        Self::from_fn(shape, |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 20) as f32 / 1024.0 - 2.0
        })
    }

    fn at(&self, index: &[usize]) -> f32 {
        let flat = index
            .iter()
            .zip(&self.shape)
            .fold(0, |flat, (&i, &d)| flat * d + i);
        self.data[flat]
    }

    fn map(&self, f: impl Fn(f32) -> f32) -> Self {
        Self {
            shape: self.shape.clone(),
            data: self.data.iter().map(|&v| f(v)).collect(),
        }
    }

    fn zip(&self, other: &Self, f: impl Fn(f32, f32) -> f32) -> Self {
        assert_eq!(self.shape, other.shape);
        let pairs = self.data.iter().zip(&other.data);
        Self {
            shape: self.shape.clone(),
            data: pairs.map(|(&a, &b)| f(a, b)).collect(),
        }
    }

    fn f16(&self) -> Tensor {
        Tensor::f16(&self.shape, &self.data)
    }

    fn f32(&self) -> Tensor {
        Tensor::f32(&self.shape, &self.data)
    }
}

/// Functions to build and what they must give.
#[derive(Default)]
struct Suite {
    module: Module,
    calls: Vec<Call>,
    expected: Vec<(Nd, f32)>,
}

impl Suite {
    /// Adds a function of `inputs` (bound by `a0`, `a1`, ..) whose result must be
    /// within `tolerance` of `expected`, absolute or relative.
    fn case(
        &mut self,
        name: &str,
        inputs: &[Tensor],
        build: impl FnOnce(&mut GraphBuilder) -> ValueId,
        expected: Nd,
        tolerance: f32,
    ) {
        let names: Vec<String> = (0..inputs.len()).map(|i| format!("a{i}")).collect();
        let types: Vec<(&str, Input)> = names
            .iter()
            .zip(inputs)
            .map(|(n, t)| {
                let ty = TensorType::new(t.dtype, &t.shape);
                (n.as_str(), Input::Tensor(ty))
            })
            .collect();
        let mut g = GraphBuilder::new(&mut self.module, name, &types);
        let y = build(&mut g);
        assert_eq!(g.shape(y), expected.shape, "{name}");
        g.finish(&[("y", y)], &[]);
        let mut call = Call::new(name);
        for (n, t) in names.iter().zip(inputs) {
            call = call.input(n, t.clone());
        }
        self.calls.push(call);
        self.expected.push((expected, tolerance));
    }

    /// Runs all functions in one process and compares.
    fn run(self) {
        let dir = tempfile::tempdir().unwrap();
        let asset = dir.path().join("ops.aimodel");
        write_asset(&asset, &self.module, &Metadata::default()).unwrap();
        let report = oracle::report(&asset, &self.calls).unwrap();
        assert_eq!(report.compatibility.as_deref(), Some("27.0"));
        let mut wrong = vec![];
        for ((call, outputs), (expected, tolerance)) in
            self.calls.iter().zip(&report.calls).zip(&self.expected)
        {
            let found = outputs.get("y");
            assert_eq!(found.shape, expected.shape, "{}", call.function);
            let values = found.to_f32();
            let off = values
                .iter()
                .zip(&expected.data)
                .position(|(&f, &e)| f != e && !((f - e).abs() <= tolerance * (1.0 + e.abs())));
            if let Some(i) = off {
                wrong.push(format!(
                    "{}: element {i} is {}, expected {}",
                    call.function, values[i], expected.data[i]
                ));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

fn sigmoid(v: f32) -> f32 {
    1.0 / (1.0 + (-v).exp())
}

/// `erf`, by Simpson's rule on its integral.
fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    let n = 2000;
    let h = x / f64::from(n);
    let f = |t: f64| (-t * t).exp();
    let inner: f64 = (1..n)
        .map(|i| f64::from(2 + 2 * (i % 2)) * f(f64::from(i) * h))
        .sum();
    ((f(0.0) + inner + f(x)) * h / 3.0 * 2.0 / std::f64::consts::PI.sqrt()) as f32
}

type Unary = (&'static str, fn(f32) -> f32);
type BinaryOp = (&'static str, fn(f32, f32) -> f32);

const ARITHMETIC: [BinaryOp; 8] = [
    ("add", |a, b| a + b),
    ("sub", |a, b| a - b),
    ("mul", |a, b| a * b),
    ("divide", |a, b| a / b),
    ("maximum", f32::max),
    ("minimum", f32::min),
    ("floor_divide", |a, b| (a / b).floor()),
    // With the sign of the dividend, as in C.
    ("modulo", |a, b| a % b),
];

const COMPARISONS: [BinaryOp; 3] = [
    ("equal", |a, b| f32::from(u8::from(a == b))),
    ("not_equal", |a, b| f32::from(u8::from(a != b))),
    ("greater", |a, b| f32::from(u8::from(a > b))),
];

#[test]
fn elementwise_operations() {
    let mut s = Suite::default();
    let a = Nd::noise(&[2, 4], 1);
    // Apart from zero, so that quotients stay small; some equal to `a`.
    let mut c = Nd::noise(&[2, 4], 2).map(|v| if v < 0.0 { v - 0.5 } else { v + 0.5 });
    c.data[3] = a.data[3];
    let row = Nd::from_fn(&[1, 4], |i| c.at(&[1, i[1]]));
    let positive = a.map(|v| v.abs() + 0.125);

    let any: [Unary; 6] = [
        ("exp", f32::exp),
        ("tanh", f32::tanh),
        ("sin", f32::sin),
        ("cos", f32::cos),
        ("abs", f32::abs),
        ("round", f32::round_ties_even),
    ];
    for (name, f) in any {
        s.case(
            name,
            &[a.f16()],
            |g| g.unary(name, g.arg(0)),
            a.map(f),
            2e-3,
        );
    }
    s.case(
        "erf",
        &[a.f16()],
        |g| g.unary("erf", g.arg(0)),
        a.map(erf),
        2e-3,
    );
    let roots: [Unary; 3] = [
        ("sqrt", f32::sqrt),
        ("rsqrt", |v| 1.0 / v.sqrt()),
        ("log", f32::ln),
    ];
    for (name, f) in roots {
        let x = positive.f16();
        s.case(
            name,
            &[x],
            |g| g.unary(name, g.arg(0)),
            positive.map(f),
            2e-3,
        );
    }
    for (name, f) in ARITHMETIC.into_iter().chain(COMPARISONS) {
        let build = |g: &mut GraphBuilder| g.binary(name, g.arg(0), g.arg(1));
        s.case(name, &[a.f16(), c.f16()], build, a.zip(&c, f), 2e-3);
        let build = |g: &mut GraphBuilder| g.broadcasting(name, g.arg(0), g.arg(1));
        let expected = Nd::from_fn(&[2, 4], |i| f(a.at(i), row.at(&[0, i[1]])));
        let name = format!("broadcasting_{name}");
        s.case(&name, &[a.f16(), row.f16()], build, expected, 2e-3);
    }
    s.case(
        "pow",
        &[positive.f16(), c.f16()],
        |g| g.binary("pow", g.arg(0), g.arg(1)),
        positive.zip(&c, f32::powf),
        4e-3,
    );

    let mask = a.map(|v| f32::from(u8::from(v > 0.0)));
    let bools = |m: &Nd| {
        Tensor::bool(
            &m.shape,
            &m.data.iter().map(|&v| v != 0.0).collect::<Vec<_>>(),
        )
    };
    let other = c.map(|v| f32::from(u8::from(v > 0.5)));
    let logical: [BinaryOp; 2] = [("logical_and", |p, q| p * q), ("logical_or", f32::max)];
    for (name, f) in logical {
        let build = |g: &mut GraphBuilder| g.binary(name, g.arg(0), g.arg(1));
        s.case(
            name,
            &[bools(&mask), bools(&other)],
            build,
            mask.zip(&other, f),
            0.0,
        );
    }
    let not = mask.map(|v| 1.0 - v);
    s.case(
        "not",
        &[bools(&mask)],
        |g| g.unary("not", g.arg(0)),
        not,
        0.0,
    );
    s.case(
        "where",
        &[bools(&mask), a.f16(), c.f16()],
        |g| g.r#where(g.arg(0), g.arg(1), g.arg(2)),
        Nd::from_fn(
            &[2, 4],
            |i| if mask.at(i) != 0.0 { a.at(i) } else { c.at(i) },
        ),
        0.0,
    );
    let one_row = Nd::from_fn(&[1, 4], |i| mask.at(&[0, i[1]]));
    s.case(
        "broadcasting_where",
        &[bools(&one_row), a.f16(), c.f16()],
        |g| g.broadcasting_where(g.arg(0), g.arg(1), g.arg(2)),
        Nd::from_fn(&[2, 4], |i| {
            if one_row.at(&[0, i[1]]) != 0.0 {
                a.at(i)
            } else {
                c.at(i)
            }
        }),
        0.0,
    );

    s.case(
        "sigmoid",
        &[a.f16()],
        |g| g.sigmoid(g.arg(0)),
        a.map(sigmoid),
        2e-3,
    );
    s.case(
        "silu",
        &[a.f16()],
        |g| g.silu(g.arg(0)),
        a.map(|v| v * sigmoid(v)),
        2e-3,
    );
    s.case(
        "relu",
        &[a.f16()],
        |g| g.relu(g.arg(0)),
        a.map(|v| v.max(0.0)),
        0.0,
    );
    let exact = a.map(|v| 0.5 * v * (1.0 + erf(v / 2f32.sqrt())));
    s.case("gelu", &[a.f16()], |g| g.gelu(g.arg(0), false), exact, 2e-3);
    let tanh = a.map(|v| {
        let inner = (2.0 / std::f32::consts::PI).sqrt() * (v + 0.044_715 * v * v * v);
        0.5 * v * (1.0 + inner.tanh())
    });
    s.case(
        "gelu_tanh",
        &[a.f16()],
        |g| g.gelu(g.arg(0), true),
        tanh,
        2e-3,
    );

    for (elem, f) in [
        (Elem::F32, (|v| v) as fn(f32) -> f32),
        (Elem::Si32, f32::trunc),
        (Elem::Bool, |v| f32::from(u8::from(v != 0.0))),
    ] {
        let build = |g: &mut GraphBuilder| g.cast(g.arg(0), elem);
        s.case(
            &format!("cast_{}", elem.name()),
            &[a.f16()],
            build,
            a.map(f),
            0.0,
        );
    }
    s.run();
}

#[test]
fn reductions() {
    let mut s = Suite::default();
    let a = Nd::noise(&[2, 3, 4], 3);
    let over_last = |f: &dyn Fn(f32, f32) -> f32, init: f32| {
        Nd::from_fn(&[2, 3, 1], |i| {
            (0..4).fold(init, |acc, k| f(acc, a.at(&[i[0], i[1], k])))
        })
    };
    let sum = over_last(&|x, y| x + y, 0.0);
    s.case(
        "sum",
        &[a.f16()],
        |g| g.reduce_sum(g.arg(0), &[2]),
        sum.clone(),
        2e-3,
    );
    let mean = sum.map(|v| v / 4.0);
    s.case(
        "mean",
        &[a.f16()],
        |g| g.reduce_mean(g.arg(0), &[2]),
        mean,
        2e-3,
    );
    let max = over_last(&f32::max, f32::NEG_INFINITY);
    s.case(
        "max",
        &[a.f16()],
        |g| g.reduce_max(g.arg(0), &[2]),
        max.clone(),
        0.0,
    );
    let min = over_last(&f32::min, f32::INFINITY);
    s.case(
        "min",
        &[a.f16()],
        |g| g.reduce_min(g.arg(0), &[2]),
        min,
        0.0,
    );
    let product = over_last(&|x, y| x * y, 1.0);
    s.case(
        "product",
        &[a.f16()],
        |g| g.reduce_product(g.arg(0), &[2]),
        product,
        2e-3,
    );
    let all = Nd::from_fn(&[1, 3, 1], |i| {
        (0..8).map(|k| a.at(&[k / 4, i[1], k % 4])).sum()
    });
    s.case(
        "sum_two_axes",
        &[a.f16()],
        |g| g.reduce_sum(g.arg(0), &[0, 2]),
        all,
        2e-3,
    );

    let softmax = Nd::from_fn(&[2, 3, 4], |i| {
        let column: f32 = (0..3).map(|k| a.at(&[i[0], k, i[2]]).exp()).sum();
        a.at(i).exp() / column
    });
    s.case(
        "softmax",
        &[a.f16()],
        |g| g.softmax(g.arg(0), 1),
        softmax,
        2e-3,
    );
    let mut ties = a.clone();
    ties.data[2] = 9.0;
    ties.data[3] = 9.0;
    let best = Nd::from_fn(&[2, 3, 1], |i| {
        let row: Vec<f32> = (0..4).map(|k| ties.at(&[i[0], i[1], k])).collect();
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter().position(|&v| v == top).unwrap() as f32
    });
    s.case(
        "argmax_first_of_ties",
        &[ties.f16()],
        |g| g.argmax(g.arg(0), 2),
        best,
        0.0,
    );
    s.run();
}

#[test]
fn layout_operations() {
    let mut s = Suite::default();
    let a = Nd::noise(&[2, 4], 4);
    let b = Nd::noise(&[1, 4], 5);
    let x = [a.f16()];
    s.case(
        "concat",
        &[a.f16(), b.f16()],
        |g| g.concat(0, &[g.arg(0), g.arg(1)]),
        Nd::from_fn(
            &[3, 4],
            |i| {
                if i[0] < 2 { a.at(i) } else { b.at(&[0, i[1]]) }
            },
        ),
        0.0,
    );
    let right = Nd::from_fn(&[2, 3], |i| a.at(&[i[0], i[1] + 1]));
    s.case(
        "split",
        &x,
        |g| g.split(g.arg(0), 1, &[1, 3])[1],
        right.clone(),
        0.0,
    );
    s.case(
        "slice",
        &x,
        |g| g.slice(g.arg(0), &[0, 1], &[2, i32::MAX]),
        right,
        0.0,
    );
    s.case(
        "slice_strided",
        &x,
        |g| g.slice_strided(g.arg(0), &[0, -3], &[2, 4], &[1, 2]),
        Nd::from_fn(&[2, 2], |i| a.at(&[i[0], 1 + 2 * i[1]])),
        0.0,
    );
    let (from, to) = (Tensor::i32(&[2], &[1, 1]), Tensor::i32(&[2], &[2, 3]));
    s.case(
        "slice_runtime",
        &[a.f16(), from.clone(), to.clone()],
        |g| g.slice_runtime(g.arg(0), g.arg(1), g.arg(2), &[1, 2]),
        Nd::from_fn(&[1, 2], |i| a.at(&[1, i[1] + 1])),
        0.0,
    );
    let nines = Nd::from_fn(&[1, 2], |_| 9.0);
    let updated = Nd::from_fn(&[2, 4], |i| {
        if i[0] == 1 && (1..3).contains(&i[1]) {
            9.0
        } else {
            a.at(i)
        }
    });
    s.case(
        "slice_update",
        &[a.f16(), nines.f16()],
        |g| g.slice_update(g.arg(0), &[1, 1], &[2, 3], g.arg(1)),
        updated.clone(),
        0.0,
    );
    s.case(
        "slice_update_runtime",
        &[a.f16(), nines.f16(), from, to],
        |g| g.slice_update(g.arg(0), g.arg(2), Bound::Runtime(g.arg(3)), g.arg(1)),
        updated,
        0.0,
    );
    let flat = |shape: &[usize]| Nd {
        shape: shape.to_vec(),
        data: a.data.clone(),
    };
    s.case(
        "reshape",
        &x,
        |g| g.reshape(g.arg(0), &[4, 2, 1]),
        flat(&[4, 2, 1]),
        0.0,
    );
    s.case(
        "expand_dims",
        &x,
        |g| g.expand_dims(g.arg(0), &[0, 2]),
        flat(&[1, 2, 1, 4]),
        0.0,
    );
    s.case(
        "shrink_dims",
        &[b.f16()],
        |g| g.shrink_dims(g.arg(0), &[0]),
        Nd::from_fn(&[4], |i| b.at(&[0, i[0]])),
        0.0,
    );
    let t = Nd::from_fn(&[4, 2], |i| a.at(&[i[1], i[0]]));
    s.case("transpose", &x, |g| g.transpose(g.arg(0), &[1, 0]), t, 0.0);
    let c = Nd::noise(&[2, 3, 4], 6);
    let t = Nd::from_fn(&[4, 2, 3], |i| c.at(&[i[1], i[2], i[0]]));
    s.case(
        "transpose_3d",
        &[c.f16()],
        |g| g.transpose(g.arg(0), &[2, 0, 1]),
        t,
        0.0,
    );
    let spread = |shape: &[usize]| Nd::from_fn(shape, |i| b.at(&[0, i[i.len() - 1]]));
    s.case(
        "broadcast_to",
        &[b.f16()],
        |g| g.broadcast_to(g.arg(0), &[3, 2, 4]),
        spread(&[3, 2, 4]),
        0.0,
    );
    s.case(
        "broadcast_in_dims",
        &[b.f16()],
        |g| g.broadcast_in_dims(g.arg(0), &[3], &[0]),
        spread(&[3, 4]),
        0.0,
    );
    s.case(
        "tile",
        &x,
        |g| g.tile(g.arg(0), &[2, 3]),
        Nd::from_fn(&[4, 12], |i| a.at(&[i[0] % 2, i[1] % 4])),
        0.0,
    );
    let padded = Nd::from_fn(&[3, 6], |i| {
        if i[0] == 0 || i[1] > 3 {
            7.0
        } else {
            a.at(&[i[0] - 1, i[1]])
        }
    });
    let by = [(1, 0), (0, 2)];
    s.case(
        "pad",
        &x,
        |g| g.pad(g.arg(0), &by, Padding::Constant, 7.0),
        padded,
        0.0,
    );
    // Columns 1 0 . . . . 2 1 of a row of four.
    let mirrored = Nd::from_fn(&[2, 7], |i| a.at(&[i[0], [1, 0, 1, 2, 3, 2, 1][i[1]]]));
    let by = [(0, 0), (1, 2)];
    s.case(
        "pad_reflect",
        &x,
        |g| g.pad(g.arg(0), &by, Padding::Reflect, 0.0),
        mirrored,
        0.0,
    );
    let edges = Nd::from_fn(&[2, 7], |i| a.at(&[i[0], [0, 0, 1, 2, 3, 3, 3][i[1]]]));
    s.case(
        "pad_replicate",
        &x,
        |g| g.pad(g.arg(0), &by, Padding::Replicate, 0.0),
        edges,
        0.0,
    );

    let table = Nd::noise(&[10, 4], 7);
    let rows = [3, 0, 9];
    let picked = Tensor::i32(&[3, 1], &rows);
    let row = |i: usize| rows[i] as usize;
    s.case(
        "gather_nd",
        &[table.f16(), picked.clone()],
        |g| g.gather_nd(g.arg(0), g.arg(1)),
        Nd::from_fn(&[3, 4], |i| table.at(&[row(i[0]), i[1]])),
        0.0,
    );
    let along: Vec<i32> = (0..12).map(|i| i * 7 % 10).collect();
    s.case(
        "gather_along_axis",
        &[table.f16(), Tensor::i32(&[3, 4], &along)],
        |g| g.gather_along_axis(g.arg(0), g.arg(1), 0),
        Nd::from_fn(&[3, 4], |i| {
            table.at(&[along[4 * i[0] + i[1]] as usize, i[1]])
        }),
        0.0,
    );
    let updates = Nd::noise(&[3, 4], 8);
    s.case(
        "scatter_nd",
        &[table.f16(), picked, updates.f16()],
        |g| g.scatter_nd(g.arg(0), g.arg(1), g.arg(2)),
        Nd::from_fn(&[10, 4], |i| match (0..3).find(|&k| row(k) == i[0]) {
            Some(k) => updates.at(&[k, i[1]]),
            None => table.at(i),
        }),
        0.0,
    );
    let onto = [1, 2, 3, 4, 5, 6, 7, 8];
    let two = Nd::noise(&[2, 4], 9);
    for (name, mode) in [
        ("scatter_update", Scatter::Update),
        ("scatter_add", Scatter::Add),
    ] {
        s.case(
            name,
            &[table.f16(), Tensor::i32(&[2, 4], &onto), two.f16()],
            |g| g.scatter_along_axis(g.arg(0), g.arg(1), g.arg(2), 0, mode),
            Nd::from_fn(&[10, 4], |i| {
                match (0..2).find(|&k| onto[4 * k + i[1]] as usize == i[0]) {
                    Some(k) if mode == Scatter::Update => two.at(&[k, i[1]]),
                    Some(k) => table.at(i) + two.at(&[k, i[1]]),
                    None => table.at(i),
                }
            }),
            2e-3,
        );
    }
    s.case(
        "range",
        &[Tensor::i32(&[], &[2])],
        |g| {
            let (stop, step) = (g.i32_scalar(10), g.i32_scalar(2));
            g.range(g.arg(0), stop, step, 4)
        },
        Nd::from_fn(&[4], |i| (2 + 2 * i[0]) as f32),
        0.0,
    );
    let hw = |g: &mut GraphBuilder| {
        let hw = g.hw_constraints(Backing::MtlBuffer, &[1, 1, 64], &[1, 1]);
        let laid_out = g.copy_with_constraints(g.arg(0), hw);
        g.copy_discarding_constraints(laid_out)
    };
    s.case("constraints", &x, hw, a.clone(), 0.0);
    s.run();
}

#[test]
fn products() {
    let mut s = Suite::default();
    let x = Nd::noise(&[2, 3, 4], 10);
    let y = Nd::noise(&[2, 4, 5], 11);
    let product = |x: &Nd, y: &dyn Fn(usize, usize, usize) -> f32| {
        Nd::from_fn(&[2, 3, 5], |i| {
            (0..4)
                .map(|k| x.at(&[i[0], i[1], k]) * y(i[0], k, i[2]))
                .sum()
        })
    };
    s.case(
        "batch_matmul",
        &[x.f32(), y.f32()],
        |g| g.batch_matmul(g.arg(0), g.arg(1)),
        product(&x, &|b, k, n| y.at(&[b, k, n])),
        1e-5,
    );
    let first = Nd::from_fn(&[4, 5], |i| y.at(&[0, i[0], i[1]]));
    s.case(
        "broadcasting_batch_matmul",
        &[x.f16(), first.f16()],
        |g| g.broadcasting_batch_matmul(g.arg(0), g.arg(1)),
        product(&x, &|_, k, n| first.at(&[k, n])),
        5e-3,
    );

    let image = Nd::noise(&[1, 8, 5, 7], 12);
    let pointwise = Nd::noise(&[6, 8, 1, 1], 13);
    s.case(
        "conv1x1",
        &[image.f16(), pointwise.f16()],
        |g| g.conv1x1(g.arg(0), g.arg(1)),
        Nd::from_fn(&[1, 6, 5, 7], |i| {
            (0..8)
                .map(|c| image.at(&[0, c, i[2], i[3]]) * pointwise.at(&[i[1], c, 0, 0]))
                .sum()
        }),
        5e-3,
    );
    // Two groups, stride 2 and 1, dilation 1 and 2, padded by (1, 0) and (2, 1).
    let w = Nd::noise(&[6, 4, 2, 3], 14);
    let options = Conv2d {
        stride: [2, 1],
        dilation: [1, 2],
        groups: 2,
    };
    let pixel = |c: usize, h: usize, w: usize| match (h.checked_sub(1), w.checked_sub(2)) {
        (Some(h), Some(w)) if h < 5 && w < 7 => image.at(&[0, c, h, w]),
        _ => 0.0,
    };
    s.case(
        "conv2d",
        &[image.f16(), w.f16()],
        |g| {
            let by = [(0, 0), (0, 0), (1, 0), (2, 1)];
            let padded = g.pad(g.arg(0), &by, Padding::Constant, 0.0);
            g.conv2d(padded, g.arg(1), options)
        },
        Nd::from_fn(&[1, 6, 3, 6], |i| {
            let group = i[1] / 3;
            let mut sum = 0.0;
            for c in 0..4 {
                for kh in 0..2 {
                    for kw in 0..3 {
                        sum += w.at(&[i[1], c, kh, kw])
                            * pixel(4 * group + c, 2 * i[2] + kh, i[3] + 2 * kw);
                    }
                }
            }
            sum
        }),
        2e-2,
    );
    s.run();
}

/// Unsigned numbers below 2^bits, packed least significant bit first.
fn pack(values: &[u8], bits: usize) -> Vec<u8> {
    let mut out = vec![0u8; (values.len() * bits).div_ceil(8)];
    for (i, &v) in values.iter().enumerate() {
        for b in 0..bits {
            let at = i * bits + b;
            out[at / 8] |= (v >> b & 1) << (at % 8);
        }
    }
    out
}

#[test]
fn decompression() {
    let mut s = Suite::default();
    // A dummy input, so that every function has one.
    let none = [Tensor::f16(&[1], &[0.0])];
    let widths = [
        (Elem::Ui1, 1),
        (Elem::Ui2, 2),
        (Elem::Ui3, 3),
        (Elem::Ui4, 4),
        (Elem::Ui6, 6),
        (Elem::Ui8, 8),
    ];
    // Conv weights [8, 32, 1, 1] with a table for every four rows.
    for (elem, bits) in widths {
        let entries = 1usize << bits;
        let indices: Vec<u8> = (0..256u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & (entries - 1) as u8)
            .collect();
        let table = Nd::noise(&[2, entries], bits as u32);
        let x = Nd::noise(&[1, 32, 1, 16], 20);
        let weight = |o: usize, c: usize| table.at(&[o / 4, indices[32 * o + c] as usize]);
        s.case(
            &format!("lut{bits}"),
            &[x.f16()],
            |g| {
                let ty = TensorType::new(elem, &[8, 32, 1, 1]);
                let i = g.constant(ty, &pack(&indices, bits));
                let t = g.f16s(&table.data, &[2, 1, 1, 1, entries, 1]);
                let w = g.lut_to_dense(i, t, 0);
                g.conv1x1(g.arg(0), w)
            },
            Nd::from_fn(&[1, 8, 1, 16], |i| {
                (0..32)
                    .map(|c| weight(i[1], c) * x.at(&[0, c, 0, i[3]]))
                    .sum()
            }),
            5e-3,
        );
    }
    // Entries of two elements, laid along axis 0.
    let indices: Vec<u8> = (0..32).map(|i| i * 5 % 16).collect();
    let table = Nd::noise(&[2, 1, 16, 2], 21);
    s.case(
        "lut_of_vectors",
        &none,
        |g| {
            let i = g.constant(TensorType::new(Elem::Ui4, &[4, 8]), &pack(&indices, 4));
            let t = g.f16s(&table.data, &[2, 1, 16, 2]);
            g.lut_to_dense(i, t, 0)
        },
        Nd::from_fn(&[8, 8], |i| {
            let index = indices[8 * (i[0] / 2) + i[1]] as usize;
            table.at(&[i[0] / 4, 0, index, i[0] % 2])
        }),
        0.0,
    );

    let q: Vec<i8> = (0..32).map(|i| (i * 37 % 251 - 125) as i8).collect();
    // The loader refuses scales that are not positive.
    let scale = Nd::noise(&[4, 2], 22).map(|v| (v.abs() + 0.125) / 16.0);
    let zero: Vec<i8> = (0..8).map(|i| i - 4).collect();
    let shift = Nd::noise(&[4, 2], 23);
    s.case(
        "blockwise_shift_scale",
        &[Tensor::i8(&[8, 4], &q)],
        |g| {
            let bytes: Vec<u8> = zero.iter().map(|&z| z as u8).collect();
            let scale = g.f16s(&scale.data, &[4, 2]);
            let zero = g.constant(TensorType::new(Elem::Si8, &[4, 2]), &bytes);
            let shift = g.f16s(&shift.data, &[4, 2]);
            g.blockwise_shift_scale(g.arg(0), scale, zero, shift)
        },
        Nd::from_fn(&[8, 4], |i| {
            let block = [i[0] / 2, i[1] / 2];
            let z = zero[2 * block[0] + block[1]];
            let steps = f32::from(q[4 * i[0] + i[1]]) - f32::from(z);
            scale.at(&block) * steps + shift.at(&block)
        }),
        2e-2,
    );
    let nibbles: Vec<u8> = (0..32).map(|i| i * 3 % 16).collect();
    s.case(
        "blockwise_shift_scale_4_bits",
        &none,
        |g| {
            let data = g.constant(TensorType::new(Elem::Ui4, &[8, 4]), &pack(&nibbles, 4));
            let zero = g.constant(TensorType::new(Elem::Ui4, &[4, 2]), &pack(&[8; 8], 4));
            let (scale, shift) = (g.f16s(&scale.data, &[4, 2]), g.f16s(&shift.data, &[4, 2]));
            g.blockwise_shift_scale(data, scale, zero, shift)
        },
        Nd::from_fn(&[8, 4], |i| {
            let block = [i[0] / 2, i[1] / 2];
            let steps = f32::from(nibbles[4 * i[0] + i[1]]) - 8.0;
            scale.at(&block) * steps + shift.at(&block)
        }),
        1e-2,
    );
    let per_row = Nd::noise(&[8], 24).map(|v| (v.abs() + 0.125) / 16.0);
    s.case(
        "dequantize",
        &[Tensor::i8(&[8, 4], &q)],
        |g| {
            let scale = g.f16s(&per_row.data, &[8]);
            let (zero, shift) = (g.full(Elem::Si8, &[8], 0.0), g.full(Elem::F16, &[8], 0.0));
            g.dequantize(g.arg(0), scale, zero, shift, 0)
        },
        Nd::from_fn(&[8, 4], |i| {
            per_row.at(&[i[0]]) * f32::from(q[4 * i[0] + i[1]])
        }),
        2e-2,
    );
    s.run();
}

#[test]
fn constants_of_every_kind() {
    let mut s = Suite::default();
    let none = [Tensor::f16(&[1], &[0.0])];
    // 100 elements: a blob for all of them; 5: inline for all whole bytes.
    for count in [5usize, 100] {
        let values: Vec<u8> = (0..count).map(|i| (i * 3 % 7) as u8).collect();
        let expected = Nd::from_fn(&[count], |i| f32::from(values[i[0]]));
        let kinds = [
            (Elem::Ui8, 1),
            (Elem::Si8, 1),
            (Elem::Ui16, 2),
            (Elem::Si32, 4),
            (Elem::Ui32, 4),
            (Elem::Si64, 8),
        ];
        for (elem, width) in kinds {
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|&v| u64::from(v).to_le_bytes()[..width].to_vec())
                .collect();
            s.case(
                &format!("{}_{count}", elem.name()),
                &none,
                |g| g.constant(TensorType::new(elem, &[count]), &bytes),
                expected.clone(),
                0.0,
            );
        }
        s.case(
            &format!("f32_{count}"),
            &none,
            |g| g.f32s(&expected.data, &[count]),
            expected.clone(),
            0.0,
        );
        // Packed below a byte, so never inline.
        s.case(
            &format!("ui3_{count}"),
            &none,
            |g| {
                let q = g.constant(TensorType::new(Elem::Ui3, &[count]), &pack(&values, 3));
                let table = g.f16s(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &[1, 8, 1]);
                g.lut_to_dense(q, table, 0)
            },
            expected.clone(),
            0.0,
        );
    }
    let half = Nd::from_fn(&[300], |_| 0.5);
    s.case(
        "splat",
        &none,
        |g| g.full(Elem::F16, &[300], 0.5),
        half,
        0.0,
    );
    s.run();
}
