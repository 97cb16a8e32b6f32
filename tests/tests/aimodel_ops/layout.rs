//! Moving elements.

use anemone_schemas::aimodel::build::{Bound, GraphBuilder, Padding, Scatter};
use anemone_schemas::aimodel::ir::Backing;
use anemone_tests::oracle::Tensor;

use crate::suite::{Nd, Suite};

/// What a scatter mode does with the old and the new value.
type Combine = fn(f32, f32) -> f32;

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
    // The row repeated, and mirrored with its ends.
    for (name, mode, columns) in [
        ("pad_circular", Padding::Circular, [3, 0, 1, 2, 3, 0, 1]),
        ("pad_symmetric", Padding::Symmetric, [0, 0, 1, 2, 3, 3, 2]),
    ] {
        s.case(
            name,
            &x,
            |g| g.pad(g.arg(0), &by, mode, 0.0),
            Nd::from_fn(&[2, 7], |i| a.at(&[i[0], columns[i[1]]])),
            0.0,
        );
    }

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
    // Apart from zero, since one mode divides by it.
    let two = Nd::noise(&[2, 4], 9).map(|v| if v < 0.0 { v - 0.5 } else { v + 0.5 });
    let modes: [(&str, Scatter, Combine); 7] = [
        ("scatter_update", Scatter::Update, |_, new| new),
        ("scatter_add", Scatter::Add, |old, new| old + new),
        ("scatter_sub", Scatter::Sub, |old, new| old - new),
        ("scatter_mul", Scatter::Mul, |old, new| old * new),
        ("scatter_div", Scatter::Div, |old, new| old / new),
        ("scatter_max", Scatter::Max, f32::max),
        ("scatter_min", Scatter::Min, f32::min),
    ];
    for (name, mode, combine) in modes {
        s.case(
            name,
            &[table.f16(), Tensor::i32(&[2, 4], &onto), two.f16()],
            |g| g.scatter_along_axis(g.arg(0), g.arg(1), g.arg(2), 0, mode),
            Nd::from_fn(&[10, 4], |i| {
                match (0..2).find(|&k| onto[4 * k + i[1]] as usize == i[0]) {
                    Some(k) => combine(table.at(i), two.at(&[k, i[1]])),
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
