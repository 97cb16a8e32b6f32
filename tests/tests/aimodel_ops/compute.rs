//! Reductions and products.

use anemone_schemas::aimodel::build::{Conv2d, Padding};

use crate::suite::{Nd, Suite};

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
        row.iter().position(|&v| v >= top).unwrap() as f32
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
