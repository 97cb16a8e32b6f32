//! Every instruction set of this processor against the scalar twin, bit by
//! bit: widths, shapes, index widths, group sizes, alignments, values.

use super::activations::Activations;
use super::matmul::{Layout, matmul};
use super::pool::Pool;
use super::rows::Rows;
use super::scalar;
use super::simd::Isa;
use super::weights::{DenseValues, DenseWeights, LutWeights};
use half::f16;

/// A small generator (SplitMix64), so that cases are the same everywhere.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in [-1, 1).
    pub(super) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(super) fn halves(&mut self, n: usize) -> Vec<f16> {
        (0..n).map(|_| f16::from_f32(self.unit())).collect()
    }

    pub(super) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }

    /// Any bit pattern: subnormals, infinities and NaN among them.
    pub(super) fn wild_halves(&mut self, n: usize) -> Vec<f16> {
        (0..n).map(|_| f16::from_bits(self.next() as u16)).collect()
    }
}

fn twin(rows: &Rows, x: &Activations, row: usize, token: usize) -> f16 {
    let get = |k| match rows {
        _ if k >= rows.cols() => 0.0,
        Rows::Lut(w) => w.get(row, k),
        Rows::Dense(w) => w.get(row, k),
    };
    let sum = scalar::dot(get, x, token);
    scalar::narrow(rows.scale(row).map_or(sum, |scale| sum * scale))
}

/// Compares all results of one product, on every instruction set, with the
/// twin, in both layouts and with guards around each row of the output.
fn check(pool: &Pool, rows: Rows, tokens: &[f16], n: usize, what: &str) {
    let (height, cols) = (rows.rows(), rows.cols());
    let mut x = Activations::new();
    x.pack_rows(tokens, n, cols);
    let expected: Vec<u16> = (0..height)
        .flat_map(|r| (0..n).map(move |t| (r, t)))
        .map(|(r, t)| twin(&rows, &x, r, t).to_bits())
        .collect();
    let guard = f16::from_bits(0x5A5A);
    for isa in Isa::all() {
        for channel_major in [false, true] {
            let (outer, inner) = if channel_major {
                (height, n)
            } else {
                (n, height)
            };
            let stride = inner + 3;
            let layout = if channel_major {
                Layout::ChannelMajor { stride }
            } else {
                Layout::RowMajor { stride }
            };
            let mut out = vec![guard; outer * stride];
            matmul(isa, pool, rows, &x, &mut out, layout);
            for (i, line) in out.chunks(stride).enumerate() {
                for (j, value) in line.iter().enumerate() {
                    let (r, t) = if channel_major { (i, j) } else { (j, i) };
                    let expected = if j < inner {
                        expected[r * n + t]
                    } else {
                        guard.to_bits()
                    };
                    assert_eq!(
                        value.to_bits(),
                        expected,
                        "{what}: {} row {r} token {t} of {height}x{cols} at width {n}",
                        isa.name(),
                    );
                }
            }
        }
    }
}

struct Lut {
    tables: Vec<u8>,
    indices: Vec<u8>,
}

impl Lut {
    fn new(
        random: &mut Random,
        rows: usize,
        cols: usize,
        bits: u8,
        group: usize,
        wild: bool,
    ) -> Self {
        let entries = rows.div_ceil(group) << bits;
        let tables = if wild {
            random.wild_halves(entries)
        } else {
            random.halves(entries)
        };
        Self {
            tables: tables.iter().flat_map(|v| v.to_le_bytes()).collect(),
            indices: random.bytes((rows * cols * usize::from(bits)).div_ceil(8)),
        }
    }
}

#[test]
fn lut_products_equal_the_twin_at_every_width() {
    let pool = Pool::new(2);
    let mut random = Random(1);
    let (rows, cols) = (40, 300);
    let lut = Lut::new(&mut random, rows, cols, 4, 32, false);
    let w = LutWeights::new(rows, cols, 4, 32, &lut.tables, &lut.indices).unwrap();
    for n in 1..=70 {
        let x = random.halves(n * cols);
        check(&pool, Rows::Lut(w), &x, n, "4 bits");
    }
}

#[test]
fn lut_products_equal_the_twin_for_odd_shapes_and_every_index_width() {
    let pool = Pool::new(3);
    let mut random = Random(2);
    for bits in [1, 2, 3, 4, 6, 8] {
        for (rows, cols, group) in [
            (1, 1, 1),
            (3, 7, 2),
            (17, 127, 16),
            (33, 128, 32),
            (16, 129, 1),
            (5, 513, 4),
            (50, 640, 7),
            (64, 1024, 32),
            (31, 1281, 64),
        ] {
            let lut = Lut::new(&mut random, rows, cols, bits, group, false);
            let w = LutWeights::new(rows, cols, bits, group, &lut.tables, &lut.indices).unwrap();
            for n in [1, 2, 3, 4, 5, 7, 13] {
                let x = random.halves(n * cols);
                check(
                    &pool,
                    Rows::Lut(w),
                    &x,
                    n,
                    &format!("{bits} bits, groups of {group}"),
                );
            }
        }
    }
}

#[test]
fn subnormals_infinities_and_nan_equal_the_twin() {
    let pool = Pool::new(2);
    let mut random = Random(3);
    for bits in [3, 4, 8] {
        for (rows, cols) in [(20, 7), (20, 135), (32, 256)] {
            let lut = Lut::new(&mut random, rows, cols, bits, 16, true);
            let w = LutWeights::new(rows, cols, bits, 16, &lut.tables, &lut.indices).unwrap();
            for n in [1, 3, 9] {
                let x = random.wild_halves(n * cols);
                check(&pool, Rows::Lut(w), &x, n, "wild");
                // Subnormal inputs and results.
                let tiny: Vec<f16> = x
                    .iter()
                    .map(|v| f16::from_bits(v.to_bits() & 0x83FF))
                    .collect();
                check(&pool, Rows::Lut(w), &tiny, n, "subnormal");
            }
        }
    }
}

#[test]
fn weights_at_any_byte_offset_equal_the_twin() {
    let pool = Pool::new(1);
    let mut random = Random(4);
    let (rows, cols) = (18, 384);
    let lut = Lut::new(&mut random, rows, cols, 4, 6, false);
    for offset in 0..17 {
        let shifted = |v: &[u8]| [&vec![0xEE; offset][..], v].concat();
        let (tables, indices) = (shifted(&lut.tables), shifted(&lut.indices));
        let w = LutWeights::new(rows, cols, 4, 6, &tables[offset..], &indices[offset..]).unwrap();
        for n in [1, 6] {
            let x = random.halves(n * cols);
            check(&pool, Rows::Lut(w), &x, n, "offset");
        }
    }
}

#[test]
fn dense_products_equal_the_twin() {
    let pool = Pool::new(2);
    let mut random = Random(5);
    for (rows, cols) in [(1, 1), (19, 100), (16, 128), (37, 641)] {
        let len = rows * cols;
        let halves = random.halves(len);
        let wild = random.wild_halves(len);
        let singles: Vec<f32> = (0..len).map(|_| random.unit() * 3.0).collect();
        let bytes: Vec<i8> = random.bytes(len).into_iter().map(|b| b as i8).collect();
        let scales: Vec<f32> = (0..rows).map(|_| random.unit() / 64.0).collect();
        for n in [1, 2, 6, 17] {
            let x = random.halves(n * cols);
            for (what, values) in [
                ("f16", DenseValues::F16(&halves)),
                ("wild f16", DenseValues::F16(&wild)),
                ("f32", DenseValues::F32(&singles)),
                (
                    "i8",
                    DenseValues::I8 {
                        values: &bytes,
                        scales: &scales,
                    },
                ),
            ] {
                let w = DenseWeights::new(rows, cols, values).unwrap();
                check(&pool, Rows::Dense(w), &x, n, what);
            }
        }
    }
}

#[test]
fn a_row_is_the_same_at_any_width_place_and_thread_count() {
    let mut random = Random(6);
    let (rows, cols) = (200, 1536);
    let lut = Lut::new(&mut random, rows, cols, 4, 32, false);
    let w = LutWeights::new(rows, cols, 4, 32, &lut.tables, &lut.indices).unwrap();
    let tokens = random.halves(64 * cols);
    let product = |threads, tokens: &[f16]| {
        let n = tokens.len() / cols;
        let mut x = Activations::new();
        x.pack_rows(tokens, n, cols);
        let mut out = vec![f16::ZERO; n * rows];
        super::lut_matmul(
            &Pool::new(threads),
            &w,
            &x,
            &mut out,
            Layout::RowMajor { stride: rows },
        );
        out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    let all = product(1, &tokens);
    for threads in 1..=3 {
        for n in [1, 2, 4, 5, 16, 63, 64] {
            let from = random.below(64 - n + 1);
            let part = product(threads, &tokens[from * cols..][..n * cols]);
            assert_eq!(
                part,
                all[from * rows..][..n * rows],
                "{n} tokens on {threads} threads"
            );
        }
    }
}
