//! CPU time of the quantizer on matrices of an 8B layer.

use std::hint::black_box;
use std::time::Duration;

use anemone_convert::quantize::{Calibration, Matrix, Method, Quantizer, Settings};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;

const SIZE: usize = 4096;

/// Normal weights as a checkpoint holds them.
fn weights() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..SIZE * SIZE)
        .map(|_| {
            let sum: f32 = (0..12).map(|_| uniform()).sum();
            bf16::from_f32(0.02 * (sum - 6.0)).to_f32()
        })
        .collect()
}

/// A Hessian whose columns differ in scale and correlate with their neighbours.
fn hessian() -> Vec<f32> {
    let scale = |i: usize| 1.0 + (i * 37 % 101) as f32 / 25.0;
    (0..SIZE * SIZE)
        .map(|at| {
            let (i, j) = (at / SIZE, at % SIZE);
            scale(i) * scale(j) * 0.9f32.powi(i.abs_diff(j).min(200) as i32)
        })
        .collect()
}

fn quantize(criterion: &mut Criterion) {
    let (weights, hessian) = (weights(), hessian());
    let sumsq: Vec<f64> = (0..SIZE).map(|i| hessian[i * SIZE + i].into()).collect();
    let matrix = Matrix {
        name: "w",
        rows: SIZE,
        cols: SIZE,
        data: &weights,
    };
    let calibration = Calibration {
        name: "x",
        cols: SIZE,
        hessian: &hessian,
        sumsq: &sumsq,
        rows: 65536,
    };
    let quantizer = Quantizer::new(Settings::default(), 1).expect("default settings");
    let mut group = criterion.benchmark_group("4096x4096, one thread");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .throughput(Throughput::Elements((SIZE * SIZE) as u64));
    group.bench_function("factor", |bencher| {
        bencher.iter(|| quantizer.prepare(calibration, Method::Gptq).map(|_| ()));
    });
    let prepared = quantizer
        .prepare(calibration, Method::KMeans)
        .expect("valid input");
    group.bench_function("tables", |bencher| {
        bencher.iter(|| black_box(quantizer.tables(matrix, &prepared)));
    });
    for method in [Method::KMeans, Method::Gptq, Method::TwoSided] {
        let prepared = quantizer.prepare(calibration, method).expect("valid input");
        group.bench_function(method.name(), |bencher| {
            bencher.iter(|| black_box(quantizer.quantize(matrix, &prepared, None)));
        });
    }
    group.finish();
}

criterion_group!(benches, quantize);
criterion_main!(benches);
