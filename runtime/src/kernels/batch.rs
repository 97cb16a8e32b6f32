//! Batched matrix product of strided f16 or f32 operands, for attention.
//!
//! ```text
//! out[m][n] = round(sum over k, in order, of a[m][k] * b[k][n])      (fused, f32)
//! ```
//! The vector axis is n: a panel of [`Isa::nr`] columns of b is converted to f32
//! as `[k][nr]`, and a tile of up to eight rows of a stays in registers while k
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

#![expect(unsafe_code, reason = "vector intrinsics on slices of checked length")]

use half::f16;

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
            one(isa, m, k, n, &mut p);
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
            one(isa, p.out.len() / n, k, n, &mut p);
        }
    });
}

/// Rows of a register tile.
const MR: usize = 8;
/// Columns of the widest panel.
const NR: usize = 32;
/// Elements read at a time along a strided operand's k.
const RUN: usize = 64;

fn one<T: Real>(isa: Isa, m: usize, k: usize, n: usize, p: &mut Product<'_, T>) {
    let nr = isa.nr(n);
    let mut a = vec![0.0f32; m * k];
    pack_rows(&p.a, m, k, &mut a);
    let blocks: Vec<Block> = blocks(m)
        .map(|(start, rows)| Block {
            start,
            rows,
            end: live_columns(&a[start * k..(start + rows) * k], k),
        })
        .collect();
    let mut panel = vec![0.0f32; k * nr];
    let mut tile = [0.0f32; MR * NR];
    for n0 in (0..n).step_by(nr) {
        let cols = nr.min(n - n0);
        pack_panel(&p.b, k, n0, cols, nr, &mut panel);
        let panel_end = panel
            .iter()
            .rposition(|&x| x != 0.0)
            .map_or(0, |i| i / nr + 1);
        for b in &blocks {
            let end = b.end.min(panel_end);
            let rows = &a[b.start * k..(b.start + b.rows) * k];
            isa.tile((b.rows, nr), end, (rows, k), &panel[..end * nr], &mut tile);
            for i in 0..b.rows {
                let at = (b.start + i) * n + n0;
                T::narrow(&tile[i * nr..i * nr + cols], &mut p.out[at..at + cols]);
            }
        }
    }
}

/// Rows of one tile, and where their last nonzero column ends.
struct Block {
    start: usize,
    rows: usize,
    end: usize,
}

/// Splits `m` rows into tiles of 8, 4 and 1.
fn blocks(m: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let rows = match m - start {
            0 => return None,
            MR.. => MR,
            4.. => 4,
            _ => 1,
        };
        start += rows;
        Some((start - rows, rows))
    })
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

/// The instruction set of the register tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Isa {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// Columns of a panel.
    fn nr(self, n: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 if n > 16 => 32,
            _ => 16,
        }
    }

    /// `out[i][j] = sum over k of a[i][k] * panel[k][j]`, where the rows of a lie
    /// `lda` apart.
    fn tile(
        self,
        (rows, nr): (usize, usize),
        k: usize,
        (a, lda): (&[f32], usize),
        panel: &[f32],
        out: &mut [f32],
    ) {
        assert!(k <= lda && a.len() == rows * lda && panel.len() == k * nr);
        assert!(out.len() >= rows * nr);
        match self {
            Self::Scalar => tile_scalar((rows, nr), k, (a, lda), panel, out),
            // SAFETY: `detect` found the features; the lengths were just checked.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe {
                match (rows, nr) {
                    (8, 32) => x86::tile_512::<8, 2>(k, (a, lda), panel, out),
                    (4, 32) => x86::tile_512::<4, 2>(k, (a, lda), panel, out),
                    (1, 32) => x86::tile_512::<1, 2>(k, (a, lda), panel, out),
                    (8, _) => x86::tile_512::<8, 1>(k, (a, lda), panel, out),
                    (4, _) => x86::tile_512::<4, 1>(k, (a, lda), panel, out),
                    _ => x86::tile_512::<1, 1>(k, (a, lda), panel, out),
                }
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe {
                match rows {
                    8 => {
                        x86::tile_256::<4>(k, (&a[..4 * lda], lda), panel, out);
                        x86::tile_256::<4>(k, (&a[4 * lda..], lda), panel, &mut out[4 * nr..]);
                    }
                    4 => x86::tile_256::<4>(k, (a, lda), panel, out),
                    _ => x86::tile_256::<1>(k, (a, lda), panel, out),
                }
            },
        }
    }
}

/// The definition, and the oracle of the vector tiles.
fn tile_scalar(
    (rows, nr): (usize, usize),
    k: usize,
    (a, lda): (&[f32], usize),
    panel: &[f32],
    out: &mut [f32],
) {
    for i in 0..rows {
        let acc = &mut out[i * nr..(i + 1) * nr];
        acc.fill(0.0);
        for j in 0..k {
            let x = a[i * lda + j];
            for (acc, &b) in acc.iter_mut().zip(&panel[j * nr..(j + 1) * nr]) {
                *acc = x.mul_add(b, *acc);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
        _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    /// A tile of `R` rows and `V` vectors of 16.
    ///
    /// # Safety
    /// The processor has AVX-512F; `a` holds `R * lda`
    /// with `k <= lda`, `panel` `k * 16 * V` and
    /// `out` at least `R * 16 * V` elements.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn tile_512<const R: usize, const V: usize>(
        k: usize,
        (a, lda): (&[f32], usize),
        panel: &[f32],
        out: &mut [f32],
    ) {
        let mut acc = [[_mm512_setzero_ps(); V]; R];
        let (pa, pb) = (a.as_ptr(), panel.as_ptr());
        for j in 0..k {
            let mut b = [_mm512_setzero_ps(); V];
            for v in 0..V {
                // SAFETY: j < k, so the vector lies in `panel`.
                b[v] = unsafe { _mm512_loadu_ps(pb.add((j * V + v) * 16)) };
            }
            for i in 0..R {
                // SAFETY: i < R and j < k <= lda, so the element lies in `a`.
                let x = _mm512_set1_ps(unsafe { *pa.add(i * lda + j) });
                for v in 0..V {
                    acc[i][v] = _mm512_fmadd_ps(x, b[v], acc[i][v]);
                }
            }
        }
        for i in 0..R {
            for v in 0..V {
                // SAFETY: the vector lies in the R * 16 * V elements of `out`.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr().add((i * V + v) * 16), acc[i][v]) };
            }
        }
    }

    /// A tile of `R` rows and two vectors of 8.
    ///
    /// # Safety
    /// The processor has AVX2 and FMA; `a` holds `R * lda`
    /// with `k <= lda`, `panel` `k * 16` and
    /// `out` at least `R * 16` elements.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn tile_256<const R: usize>(
        k: usize,
        (a, lda): (&[f32], usize),
        panel: &[f32],
        out: &mut [f32],
    ) {
        let mut acc = [[_mm256_setzero_ps(); 2]; R];
        let (pa, pb) = (a.as_ptr(), panel.as_ptr());
        for j in 0..k {
            // SAFETY: j < k, so both vectors lie in `panel`.
            let b = unsafe {
                [
                    _mm256_loadu_ps(pb.add(j * 16)),
                    _mm256_loadu_ps(pb.add(j * 16 + 8)),
                ]
            };
            for i in 0..R {
                // SAFETY: i < R and j < k <= lda, so the element lies in `a`.
                let x = _mm256_set1_ps(unsafe { *pa.add(i * lda + j) });
                for v in 0..2 {
                    acc[i][v] = _mm256_fmadd_ps(x, b[v], acc[i][v]);
                }
            }
        }
        for i in 0..R {
            for v in 0..2 {
                // SAFETY: the vector lies in the R * 16 elements of `out`.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(i * 16 + v * 8), acc[i][v]) };
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

    #[test]
    fn vector_tiles_equal_the_scalar_tile_bit_for_bit() {
        let isa = Isa::detect();
        for (rows, nr, k) in [
            (8, 16, 37),
            (4, 16, 5),
            (1, 16, 64),
            (8, 32, 33),
            (4, 32, 9),
            (1, 32, 0),
        ] {
            if nr > isa.nr(usize::MAX) {
                continue;
            }
            let mut a = vec![0.0; rows * k];
            let mut panel = vec![0.0; k * nr];
            convert::widen(&noise(rows * k, 3), &mut a);
            convert::widen(&noise(k * nr, 4), &mut panel);
            let (mut fast, mut slow) = ([1.0; MR * NR], [1.0; MR * NR]);
            isa.tile((rows, nr), k, (&a, k), &panel, &mut fast);
            tile_scalar((rows, nr), k, (&a, k), &panel, &mut slow);
            assert_eq!(fast[..rows * nr], slow[..rows * nr]);
        }
    }
}
