//! One element at a time.

#![allow(clippy::float_cmp, reason = "the operations compare exactly")]

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::Elem;
use anemone_tests::oracle::Tensor;

use crate::suite::{Nd, Suite};

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
    let logical: [BinaryOp; 3] = [
        ("logical_and", |p, q| p * q),
        ("logical_or", f32::max),
        ("logical_xor", |p, q| (p - q).abs()),
    ];
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
            |i| if mask.at(i) > 0.0 { a.at(i) } else { c.at(i) },
        ),
        0.0,
    );
    let one_row = Nd::from_fn(&[1, 4], |i| mask.at(&[0, i[1]]));
    s.case(
        "broadcasting_where",
        &[bools(&one_row), a.f16(), c.f16()],
        |g| g.broadcasting_where(g.arg(0), g.arg(1), g.arg(2)),
        Nd::from_fn(&[2, 4], |i| {
            if one_row.at(&[0, i[1]]) > 0.0 {
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
    // From other elements, and through narrower ones.
    let whole = Nd::from_fn(&[2, 3], |i| (i[0] * 100 + i[1] * 7) as f32 - 60.0);
    let ints: Vec<i32> = whole.data.iter().map(|&v| v as i32).collect();
    let ints = [Tensor::i32(&[2, 3], &ints)];
    for (elem, f) in [
        (Elem::F16, (|v| v) as fn(f32) -> f32),
        (Elem::F32, |v| v),
        (Elem::Si8, |v| v),
        (Elem::Si16, |v| v),
        (Elem::Bool, |v| f32::from(u8::from(v != 0.0))),
    ] {
        let name = format!("cast_si32_{}", elem.name());
        let build = |g: &mut GraphBuilder| g.cast(g.arg(0), elem);
        s.case(&name, &ints, build, whole.map(f), 0.0);
    }
    let bytes: Vec<u8> = (0..6).map(|i| i * 51).collect();
    let wide = Nd::from_fn(&[6], |i| (i[0] * 51) as f32);
    for elem in [Elem::F16, Elem::F32, Elem::Si32, Elem::Ui32] {
        let name = format!("cast_ui8_{}", elem.name());
        let build = |g: &mut GraphBuilder| g.cast(g.arg(0), elem);
        s.case(&name, &[Tensor::u8(&[6], &bytes)], build, wide.clone(), 0.0);
    }
    s.case(
        "cast_f32_f16",
        &[Nd::noise(&[8], 12).map(|v| v + 1e-4).f32()],
        |g| g.cast(g.arg(0), Elem::F16),
        Nd::noise(&[8], 12).map(|v| half::f16::from_f32(v + 1e-4).to_f32()),
        0.0,
    );
    s.case(
        "cast_f32_bf16",
        &[Nd::noise(&[8], 13).f32()],
        |g| {
            let narrow = g.cast(g.arg(0), Elem::Bf16);
            g.cast(narrow, Elem::F32)
        },
        Nd::noise(&[8], 13).map(|v| half::bf16::from_f32(v).to_f32()),
        0.0,
    );
    s.run();
}
