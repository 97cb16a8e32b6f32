//! Matrix kernels at the shapes of an 8B Qwen3, against the roofline.
//!
//! `cargo bench --bench kernels` runs criterion on every shape and width;
//! `cargo bench --bench kernels -- shares` prints the table of shares instead:
//! the fastest of many interleaved calls, next to limits measured in the same
//! process, on one thread in processor time. Weights rotate through half a gigabyte of copies, so that width 1
//! reads memory and not a cache.
#![expect(clippy::print_stdout, reason = "the table goes to the terminal")]

use anemone_runtime::kernels::clock::seconds;
use anemone_runtime::kernels::roofline::Roofline;
use anemone_runtime::kernels::{Activations, Layout, LutWeights, Pool, isa_name, lut_matmul};
use criterion::{Criterion, Throughput, criterion_group};
use half::f16;
use std::time::Duration;

const SHAPES: [(usize, usize); 4] = [(4096, 4096), (12288, 4096), (4096, 12288), (2048, 512)];
const WIDTHS: [usize; 9] = [1, 2, 4, 5, 8, 16, 24, 32, 64];
const GROUP: usize = 32;
const ROTATION: usize = 512 << 20;

/// One buffer of random bytes, cut into as many matrices as fit.
struct Weights {
    rows: usize,
    cols: usize,
    tables: Vec<u8>,
    bytes: Vec<u8>,
}

impl Weights {
    fn new(rows: usize, cols: usize, bytes: &mut Vec<u8>) -> Self {
        let tables = (0..rows / GROUP)
            .flat_map(|_| (0..16).map(|i| f16::from_f32((i as f32 - 7.5) / 256.0)))
            .flat_map(f16::to_le_bytes)
            .collect();
        Self {
            rows,
            cols,
            tables,
            bytes: std::mem::take(bytes),
        }
    }

    fn copies(&self) -> usize {
        self.bytes.len() / (self.rows * self.cols / 2)
    }

    fn get(&self, i: usize) -> LutWeights<'_> {
        let size = self.rows * self.cols / 2;
        let indices = &self.bytes[i % self.copies() * size..][..size];
        LutWeights::new(self.rows, self.cols, 4, GROUP, &self.tables, indices).expect("valid")
    }
}

fn random_bytes() -> Vec<u8> {
    let mut state = 1_u64;
    (0..ROTATION / 8)
        .flat_map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state ^ state >> 29).to_le_bytes()
        })
        .collect()
}

fn tokens(n: usize, cols: usize) -> Activations {
    let x: Vec<f16> = (0..n * cols)
        .map(|i| f16::from_f32((i % 97) as f32 / 97.0 - 0.5))
        .collect();
    let mut packed = Activations::new();
    packed.pack_rows(&x, n, cols);
    packed
}

fn kernels(c: &mut Criterion) {
    let mut bytes = random_bytes();
    for threads in [1, 2] {
        let pool = Pool::new(threads);
        for (rows, cols) in SHAPES {
            let weights = Weights::new(rows, cols, &mut bytes);
            let mut group = c.benchmark_group(format!("lut4/{rows}x{cols}/{threads}t"));
            group
                .measurement_time(Duration::from_secs(2))
                .sample_size(20);
            for n in WIDTHS {
                let x = tokens(n, cols);
                let mut out = vec![f16::ZERO; rows * n];
                let mut call = 0;
                group.throughput(Throughput::Elements((2 * rows * cols * n) as u64));
                group.bench_function(n.to_string(), |b| {
                    b.iter(|| {
                        call += 1;
                        let layout = Layout::ChannelMajor { stride: n };
                        lut_matmul(&pool, &weights.get(call), &x, &mut out, layout);
                    });
                });
            }
            group.finish();
            bytes = weights.bytes;
        }
    }
}

/// Prints, per shape and width, the time of the fastest call and its shares of
/// memory bandwidth and of the multiply-add peak.
fn shares() {
    let mut bytes = random_bytes();
    println!("instruction set: {}", isa_name());
    for threads in [1, 2] {
        let pool = Pool::new(threads);
        let limits = Roofline::measure(&pool, ROTATION);
        println!(
            "\n{threads} threads: {:.1} GB/s, {:.0} GFLOP/s",
            limits.bytes_per_second / 1e9,
            limits.flops_per_second / 1e9
        );
        println!("shape         width      ms   GB/s     %  GFLOP/s     %  x width 1");
        for (rows, cols) in SHAPES {
            let weights = Weights::new(rows, cols, &mut bytes);
            let mut first = 0.0;
            for n in WIDTHS {
                let x = tokens(n, cols);
                let mut out = vec![f16::ZERO; rows * n];
                let mut best = f64::INFINITY;
                let started = seconds(threads);
                let mut call = 0;
                while call < weights.copies().max(20) && seconds(threads) - started < 2.0 {
                    let w = weights.get(call);
                    call += 1;
                    let start = seconds(threads);
                    lut_matmul(&pool, &w, &x, &mut out, Layout::ChannelMajor { stride: n });
                    best = best.min(seconds(threads) - start);
                }
                if n == 1 {
                    first = best;
                }
                let bandwidth = weights.get(0).bytes() as f64 / best;
                let flops = (2 * rows * cols * n) as f64 / best;
                println!(
                    "{rows:>5}x{cols:<6} {n:>6} {:>7.3} {:>6.1} {:>4.0}% {:>8.0} {:>4.0}% {:>9.2}",
                    best * 1e3,
                    bandwidth / 1e9,
                    100.0 * bandwidth / limits.bytes_per_second,
                    flops / 1e9,
                    100.0 * flops / limits.flops_per_second,
                    best / first,
                );
            }
            bytes = weights.bytes;
        }
    }
}

criterion_group!(benches, kernels);

fn main() {
    if std::env::args().any(|a| a == "shares") {
        shares();
    } else {
        benches();
        Criterion::default().configure_from_args().final_summary();
    }
}
