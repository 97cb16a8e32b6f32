//! Batched matrix product of strided f16 or f32 operands, for attention.
//!
//! ```text
//! out[m][n] = round(sum over k, in order, of a[m][k] * b[k][n])      (fused, f32)
//! ```
//! The vector axis is n: a panel of 32 columns of b is converted to f32 as
//! `[k][32]`, and a tile of up to eight rows of a stays in registers while k
//! runs. Every element is one chain of fused multiply-adds over k, so its bits do
//! not depend on the tile it fell into, on the extents m and n, on the thread or
//! on the instruction set.
//!
//! Zeros at the end of k add nothing, so a tile stops where the rest of its rows or
//! of its panel is zero: masked keys have weight zero, slots not yet written are
//! zero, and so are rows that nobody asked for. (An infinity against such a zero
//! is therefore not seen.)
//!
//! Converting is the larger cost for narrow products. Rows of a are cheap to
//! convert when k is contiguous, panels of b when n is; since
//! `out' = b' a'`, the product may as well be computed transposed. [`transposes`] picks
//! the form that moves fewer elements against the grain.

use half::f16;

use super::activations::{LANES, Lanes};
use super::products::{Products, flat_mut};
use super::simd::{Isa, Kernel, Simd};
use super::{Pool, convert};

/// A strided matrix per batch, in a buffer of f16 or f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) row: usize,
    pub(crate) col: usize,
}

impl<T> Operand<'_, T> {
    /// The transposed matrix.
    pub(crate) fn flipped(self) -> Self {
        Self {
            row: self.col,
            col: self.row,
            ..self
        }
    }
}

/// Element types of the product.
pub(crate) trait Real: Copy + Send + Sync + 'static {
    fn widen(src: &[Self], dst: &mut [f32]);
    fn narrow(src: &[f32], dst: &mut [Self]);
    fn to_f32(self) -> f32;
}

impl Real for f16 {
    fn widen(src: &[Self], dst: &mut [f32]) {
        convert::widen(src, dst);
    }
    fn narrow(src: &[f32], dst: &mut [Self]) {
        convert::narrow(src, dst);
    }
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
}

impl Real for f32 {
    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }
    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }
    fn to_f32(self) -> f32 {
        self
    }
}

/// Whether to compute the transposed product, given extents and strides
/// `(row, col)` of a `[m, k]` and b `[k, n]`.
pub(crate) fn transposes(m: usize, n: usize, a: (usize, usize), b: (usize, usize)) -> bool {
    let cost = |against: bool, n: usize| if against { n } else { 0 };
    let plain = cost(a.1 != 1, m) + cost(b.1 != 1, n);
    let swapped = cost(b.0 != 1, n) + cost(a.0 != 1, m);
    swapped < plain
}

/// One product of a batch: `a` `[m, k]` times `b` `[k, n]` into `out`, row-major
/// `[m, n]`.
pub(crate) struct Product<'a, T> {
    pub(crate) a: Operand<'a, T>,
    pub(crate) b: Operand<'a, T>,
    pub(crate) out: &'a mut [T],
}

/// Products below this many multiply-adds are not worth a thread.
const SERIAL: usize = 1 << 18;

/// Computes all `products` of extents `m, k, n`.
///
/// # Panics
/// If an operand is shorter than its strides reach or `out` is not `m * n` long.
pub(crate) fn batch<T: Real>(
    pool: &Pool,
    m: usize,
    k: usize,
    n: usize,
    products: Vec<Product<'_, T>>,
) {
    if m == 0 || n == 0 {
        return;
    }
    for p in &products {
        assert_eq!(p.out.len(), m * n, "output of a product");
        if k > 0 {
            assert!((m - 1) * p.a.row + (k - 1) * p.a.col < p.a.data.len());
            assert!((k - 1) * p.b.row + (n - 1) * p.b.col < p.b.data.len());
        }
    }
    let isa = Isa::detect();
    let work = m * k * n * products.len();
    if work < SERIAL || products.len() == 1 && m < 2 {
        for mut p in products {
            let product = &mut p;
            isa.run(One { m, k, n, product });
        }
        return;
    }
    // Rows are split only as far as the batch leaves threads idle.
    let parts = if products.len() >= pool.threads() {
        1
    } else {
        pool.threads().div_ceil(products.len()).min(m)
    };
    let rows = m.div_ceil(parts);
    let mut tasks = Vec::new();
    for p in products {
        for (i, out) in p.out.chunks_mut(rows * n).enumerate() {
            let a = Operand {
                data: p.a.data.get(i * rows * p.a.row..).unwrap_or(&[]),
                ..p.a
            };
            tasks.push(std::sync::Mutex::new(Some(Product { a, b: p.b, out })));
        }
    }
    pool.run(tasks.len(), |i| {
        let task = tasks[i].lock().ok().and_then(|mut t| t.take());
        if let Some(mut p) = task {
            let (m, product) = (p.out.len() / n, &mut p);
            isa.run(One { m, k, n, product });
        }
    });
}

/// Rows of a register tile.
const MR: usize = 8;
/// Columns of a panel.
const NR: usize = 2 * LANES;
/// Elements read at a time along a strided operand's k.
const RUN: usize = 64;

/// One product of `m` rows of a.
struct One<'p, 'a, T> {
    m: usize,
    k: usize,
    n: usize,
    product: &'p mut Product<'a, T>,
}

impl<T: Real> Kernel for One<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { m, k, n, product } = self;
        let mut a = vec![0.0f32; m * k];
        pack_rows(&product.a, m, k, &mut a);
        let mut panel = vec![Lanes::default(); k * NR / LANES];
        let panel = flat_mut(&mut panel);
        let mut tile = [Lanes::default(); MR * NR / LANES];
        let tile = flat_mut(&mut tile);
        for n0 in (0..n).step_by(NR) {
            let cols = NR.min(n - n0);
            pack_panel(&product.b, k, n0, cols, NR, panel);
            let panel_end = panel
                .iter()
                .rposition(|&x| x != 0.0)
                .map_or(0, |i| i / NR + 1);
            let mut i = 0;
            while i < m {
                // As many rows as leave registers for their sums.
                let rows = match m - i {
                    8.. if S::TILE_ROWS >= 4 => 8,
                    4.. if S::TILE_ROWS >= 4 => 4,
                    2.. => 2,
                    _ => 1,
                };
                let left = &a[i * k..(i + rows) * k];
                let tile_of = Products {
                    left,
                    left_row: k,
                    right: panel,
                    right_step: NR,
                    steps: live_columns(left, k).min(panel_end),
                    out: tile,
                    out_row: NR,
                };
                match (rows, cols > LANES) {
                    (8, true) => tile_of.run::<S, 8, 2>(s, false),
                    (4, true) => tile_of.run::<S, 4, 2>(s, false),
                    (2, true) => tile_of.run::<S, 2, 2>(s, false),
                    (_, true) => tile_of.run::<S, 1, 2>(s, false),
                    (8, false) => tile_of.run::<S, 8, 1>(s, false),
                    (4, false) => tile_of.run::<S, 4, 1>(s, false),
                    (2, false) => tile_of.run::<S, 2, 1>(s, false),
                    (_, false) => tile_of.run::<S, 1, 1>(s, false),
                };
                for (r, row) in tile.chunks_exact(NR).take(rows).enumerate() {
                    let at = (i + r) * n + n0;
                    T::narrow(&row[..cols], &mut product.out[at..at + cols]);
                }
                i += rows;
            }
        }
    }
}

/// One more than the last column in which a row of `a` `[..][k]` is not zero.
fn live_columns(a: &[f32], k: usize) -> usize {
    a.chunks_exact(k.max(1))
        .filter_map(|row| row.iter().rposition(|&x| x != 0.0))
        .max()
        .map_or(0, |i| i + 1)
}

/// `dst` `[m][k]` in f32.
fn pack_rows<T: Real>(a: &Operand<'_, T>, m: usize, k: usize, dst: &mut [f32]) {
    if a.col == 1 {
        for i in 0..m {
            T::widen(&a.data[i * a.row..][..k], &mut dst[i * k..(i + 1) * k]);
        }
        return;
    }
    let mut line = vec![0.0; m];
    for j in 0..k {
        if a.row == 1 {
            T::widen(&a.data[j * a.col..][..m], &mut line);
        } else {
            for (i, l) in line.iter_mut().enumerate() {
                *l = a.data[i * a.row + j * a.col].to_f32();
            }
        }
        for (i, &x) in line.iter().enumerate() {
            dst[i * k + j] = x;
        }
    }
}

/// `dst` `[k][nr]` in f32, zeros beyond `cols`.
fn pack_panel<T: Real>(
    b: &Operand<'_, T>,
    k: usize,
    n0: usize,
    cols: usize,
    nr: usize,
    dst: &mut [f32],
) {
    if cols < nr {
        dst.fill(0.0);
    }
    if b.col == 1 {
        for j in 0..k {
            T::widen(
                &b.data[j * b.row + n0..][..cols],
                &mut dst[j * nr..j * nr + cols],
            );
        }
        return;
    }
    // Against the grain: short runs along k, so that the panel rows written stay
    // in the first-level cache.
    let mut line = [0.0f32; RUN];
    for j0 in (0..k).step_by(RUN) {
        let run = RUN.min(k - j0);
        for c in 0..cols {
            let at = (n0 + c) * b.col + j0 * b.row;
            if b.row == 1 {
                T::widen(&b.data[at..at + run], &mut line[..run]);
            } else {
                for (j, l) in line[..run].iter_mut().enumerate() {
                    *l = b.data[at + j * b.row].to_f32();
                }
            }
            for (j, &x) in line[..run].iter().enumerate() {
                dst[(j0 + j) * nr + c] = x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f16> {
        let mut s = seed;
        (0..n)
            .map(|_| {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f16::from_f32((s >> 8) as f32 / (1 << 23) as f32 - 1.0)
            })
            .collect()
    }

    fn reference(
        m: usize,
        k: usize,
        n: usize,
        a: &Operand<'_, f16>,
        b: &Operand<'_, f16>,
    ) -> Vec<f16> {
        let mut out = Vec::new();
        for i in 0..m {
            for j in 0..n {
                let sum = (0..k).fold(0.0f32, |s, x| {
                    let (x, y) = (a.data[i * a.row + x * a.col], b.data[x * b.row + j * b.col]);
                    f32::from(x).mul_add(f32::from(y), s)
                });
                out.push(f16::from_f32(sum));
            }
        }
        out
    }

    #[test]
    fn any_extent_and_any_strides_give_the_bits_of_the_definition() {
        let pool = Pool::new(2);
        for (m, k, n) in [
            (1, 1, 1),
            (3, 5, 7),
            (16, 64, 48),
            (9, 33, 31),
            (64, 128, 17),
            (13, 200, 65),
        ] {
            let (mut da, mut db) = (noise(m * k, 1), noise(k * n, 2));
            da[m * k / 2..].fill(f16::ZERO);
            db[k * n * 3 / 4..].fill(f16::ZERO);
            for (ra, ca) in [(k, 1), (1, m)] {
                for (rb, cb) in [(n, 1), (1, k)] {
                    let a = Operand {
                        data: &da,
                        row: ra,
                        col: ca,
                    };
                    let b = Operand {
                        data: &db,
                        row: rb,
                        col: cb,
                    };
                    let mut out = vec![f16::ZERO; m * n];
                    batch(
                        &pool,
                        m,
                        k,
                        n,
                        vec![Product {
                            a,
                            b,
                            out: &mut out,
                        }],
                    );
                    assert_eq!(out, reference(m, k, n, &a, &b), "{m} {k} {n}");
                }
            }
        }
    }
}
