//! Products of two f16 matrices: the attention of a program.
//!
//! Both kernels accumulate in f32 and round once, and an element depends only
//! on its own row and column, so a result does not change with the number of
//! rows of a call.
//!
//! - [`gemm_f16`] sums each element in the order of `k`, one multiply-add after
//!   the other. Lanes are columns of the result, so a row of `b` is used for
//!   several rows of `a` at once.
//! - [`gemm_f16_bt`] takes `b` transposed. Lanes are columns of the operands:
//!   lane `l` sums `k = l, l + 16, ...` in this order, and the lanes are added
//!   as those of the matrix kernels.

#![expect(unsafe_code, reason = "register tiles read through raw pointers")]

use super::activations::{LANES, Lanes};
use super::simd::{Isa, Kernel, Simd};
use half::f16;
use std::cell::RefCell;

/// A row-major f16 matrix inside a larger buffer.
#[derive(Debug, Clone, Copy)]
pub struct MatrixRef<'a> {
    data: &'a [f16],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> MatrixRef<'a> {
    /// The matrix whose element `(i, j)` is `data[i * stride + j]`.
    ///
    /// # Panics
    ///
    /// When `cols` exceeds `stride`, or `data` ends before the last row.
    pub fn new(data: &'a [f16], rows: usize, cols: usize, stride: usize) -> Self {
        assert_fits(data.len(), rows, cols, stride);
        Self {
            data,
            rows,
            cols,
            stride,
        }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    fn row(&self, i: usize) -> &'a [f16] {
        &self.data[i * self.stride..][..self.cols]
    }
}

fn assert_fits(len: usize, rows: usize, cols: usize, stride: usize) {
    assert!(cols <= stride, "a stride of {stride} for {cols} columns");
    let needed = match rows.checked_sub(1) {
        None => Some(0),
        Some(last) => last.checked_mul(stride).and_then(|v| v.checked_add(cols)),
    };
    assert!(
        needed.is_some_and(|v| v <= len),
        "a buffer of {len} elements for {rows} rows of {stride}"
    );
}

thread_local! {
    /// Widened rows of `a`, kept between calls.
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// `out[i * stride + j] = f16(sum over k of a[i][k] * b[k][j])`.
///
/// # Panics
///
/// When the columns of `a` are not the rows of `b`, or `out` is too short.
pub fn gemm_f16(a: MatrixRef, b: MatrixRef, out: &mut [f16], stride: usize) {
    assert_eq!(
        a.cols, b.rows,
        "columns of the left and rows of the right matrix"
    );
    assert_fits(out.len(), a.rows, b.cols, stride);
    WIDE.with_borrow_mut(|wide| {
        Isa::detect().run(Gemm {
            a,
            b,
            out,
            stride,
            wide,
        });
    });
}

/// `out[i * stride + j] = f16(sum over k of a[i][k] * b[j][k])`.
///
/// # Panics
///
/// When `a` and `b` have different columns, or `out` is too short.
pub fn gemm_f16_bt(a: MatrixRef, b: MatrixRef, out: &mut [f16], stride: usize) {
    assert_eq!(
        a.cols, b.cols,
        "columns of the left and of the right matrix"
    );
    assert_fits(out.len(), a.rows, b.rows, stride);
    WIDE.with_borrow_mut(|wide| {
        Isa::detect().run(GemmBt {
            a,
            b,
            out,
            stride,
            wide,
        });
    });
}

struct Gemm<'a> {
    a: MatrixRef<'a>,
    b: MatrixRef<'a>,
    out: &'a mut [f16],
    stride: usize,
    wide: &'a mut Vec<f32>,
}

impl Kernel for Gemm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let depth = self.a.cols;
        self.wide.resize(self.a.rows * depth, 0.0);
        for i in 0..self.a.rows {
            let row = &mut self.wide[i * depth..][..depth];
            widen_row(s, self.a.row(i), row);
        }
        let mut i = 0;
        while i < self.a.rows {
            // As many rows as leave registers for two vectors each.
            let left = self.a.rows - i;
            i += if left >= 8 && S::TILE_ROWS >= 4 {
                self.rows::<S, 8>(s, i)
            } else if left >= 3 {
                // Rows past the last repeat it and are not written.
                self.rows::<S, 4>(s, i)
            } else {
                self.rows::<S, 1>(s, i)
            };
        }
    }
}

impl Gemm<'_> {
    /// Rows `first..first + R` of the result.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(&mut self, s: S, first: usize) -> usize {
        let cols = self.b.cols;
        let mut j = 0;
        while cols - j >= 2 * LANES {
            self.tile::<S, R, 2>(s, first, j);
            j += 2 * LANES;
        }
        while j < cols {
            self.tile::<S, R, 1>(s, first, j);
            j += LANES;
        }
        R
    }

    /// `R` rows by `16 C` columns of the result, or fewer columns at the end.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const C: usize>(&mut self, s: S, first: usize, j: usize) {
        let depth = self.a.cols;
        let live = (self.b.cols - j).min(C * LANES);
        let row = |r: usize| (first + r).min(self.a.rows - 1);
        let mut a = [self.wide.as_ptr(); R];
        for r in 0..R {
            a[r] = self.wide[row(r) * depth..].as_ptr();
        }
        let mut sums = [[s.splat(0.0); C]; R];
        if live == C * LANES {
            for k in 0..depth {
                // SAFETY: row `k` of `b` has `16 C` columns from `j`, and row
                // `r` of `a` was widened to `depth` elements.
                unsafe {
                    let b = self.b.data.as_ptr().add(k * self.b.stride + j);
                    let mut vectors = [s.splat(0.0); C];
                    for c in 0..C {
                        vectors[c] = s.load_f16(b.add(c * LANES));
                    }
                    for r in 0..R {
                        let factor = s.splat(*a[r].add(k));
                        for c in 0..C {
                            sums[r][c] = s.mul_add(factor, vectors[c], sums[r][c]);
                        }
                    }
                }
            }
        } else {
            for k in 0..depth {
                let mut padded = [f16::ZERO; LANES];
                padded[..live].copy_from_slice(&self.b.row(k)[j..]);
                // SAFETY: as above; here `C` is one.
                unsafe {
                    let vector = s.load_f16(padded.as_ptr());
                    for r in 0..R {
                        sums[r][0] = s.mul_add(s.splat(*a[r].add(k)), vector, sums[r][0]);
                    }
                }
            }
        }
        for r in 0..R.min(self.a.rows - first) {
            let mut rounded = [[f16::ZERO; LANES]; C];
            for c in 0..C {
                // SAFETY: sixteen elements.
                unsafe { s.store_f16(sums[r][c], rounded[c].as_mut_ptr()) };
            }
            let out = &mut self.out[(first + r) * self.stride + j..][..live];
            out.copy_from_slice(&rounded.as_flattened()[..live]);
        }
    }
}

struct GemmBt<'a> {
    a: MatrixRef<'a>,
    b: MatrixRef<'a>,
    out: &'a mut [f16],
    stride: usize,
    wide: &'a mut Vec<f32>,
}

/// Rows and columns of the register tile of [`GemmBt`].
const SQUARE: usize = 4;

impl Kernel for GemmBt<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            a,
            b,
            out,
            stride,
            wide,
        } = self;
        let whole = a.cols / LANES * LANES;
        let padded = a.cols.next_multiple_of(LANES);
        wide.clear();
        wide.resize(a.rows * padded, 0.0);
        for i in 0..a.rows {
            widen_row(s, a.row(i), &mut wide[i * padded..][..a.cols]);
        }
        for i in (0..a.rows).step_by(SQUARE) {
            for j in (0..b.rows).step_by(SQUARE) {
                let mut left = [wide.as_ptr(); SQUARE];
                let mut right = [b.data.as_ptr(); SQUARE];
                let mut ends = [[f16::ZERO; LANES]; SQUARE];
                for q in 0..SQUARE {
                    // Rows past the last repeat it and are not written.
                    left[q] = wide[(i + q).min(a.rows - 1) * padded..].as_ptr();
                    let row = b.row((j + q).min(b.rows - 1));
                    right[q] = row.as_ptr();
                    ends[q][..a.cols - whole].copy_from_slice(&row[whole..]);
                }
                let mut sums = [[s.splat(0.0); SQUARE]; SQUARE];
                for k in (0..padded).step_by(LANES) {
                    if k == whole {
                        for q in 0..SQUARE {
                            right[q] = ends[q].as_ptr().wrapping_sub(k);
                        }
                    }
                    // SAFETY: `left` is padded to whole vectors; `right` has
                    // sixteen elements from `k`, in place or in `ends`.
                    unsafe {
                        let mut vectors = [s.splat(0.0); SQUARE];
                        for q in 0..SQUARE {
                            vectors[q] = s.load_f16(right[q].wrapping_add(k));
                        }
                        for p in 0..SQUARE {
                            let factor = s.load(left[p].add(k));
                            for q in 0..SQUARE {
                                sums[p][q] = s.mul_add(factor, vectors[q], sums[p][q]);
                            }
                        }
                    }
                }
                let mut acc = [Lanes::default(); LANES];
                let mut rounded = [f16::ZERO; LANES];
                // SAFETY: every access is to sixteen elements.
                unsafe {
                    for p in 0..SQUARE {
                        for q in 0..SQUARE {
                            s.store(sums[p][q], acc[p * SQUARE + q].0.as_mut_ptr());
                        }
                    }
                    s.store_f16(s.reduce(acc.as_ptr()), rounded.as_mut_ptr());
                }
                let live = SQUARE.min(b.rows - j);
                for (p, rounded) in rounded.as_chunks::<SQUARE>().0.iter().enumerate() {
                    if i + p < a.rows {
                        let out = &mut out[(i + p) * stride + j..][..live];
                        out.copy_from_slice(&rounded[..live]);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn widen_row<S: Simd>(s: S, from: &[f16], to: &mut [f32]) {
    for at in (0..from.len()).step_by(LANES) {
        super::simd::store_f32(s, super::simd::load_f16(s, from, at), to, at);
    }
}

#[cfg(test)]
mod tests {
    use super::super::scalar;
    use super::super::twin_tests::Random;
    use super::*;

    const SHAPES: [(usize, usize, usize); 9] = [
        (1, 1, 1),
        (1, 128, 300),
        (2, 5, 16),
        (3, 33, 31),
        (4, 64, 32),
        (7, 17, 47),
        (16, 128, 100),
        (21, 40, 65),
        (9, 0, 5),
    ];

    /// Runs both kernels on every instruction set over strided operands of
    /// ordinary and of arbitrary bit patterns.
    fn check(
        columns_of_b: impl Fn(usize, usize) -> (usize, usize),
        element: impl Fn(&MatrixRef, &MatrixRef, usize, usize) -> f32,
        run: impl Fn(Isa, MatrixRef, MatrixRef, &mut [f16], usize),
    ) {
        let mut random = Random(7);
        for (m, k, n) in SHAPES {
            for wild in [false, true] {
                let (rows, cols) = columns_of_b(k, n);
                let mut halves = |len| {
                    if wild {
                        random.wild_halves(len)
                    } else {
                        random.halves(len)
                    }
                };
                let (x, y) = (halves(m * (k + 2)), halves(rows * (cols + 5)));
                let a = MatrixRef::new(&x, m, k, k + 2);
                let b = MatrixRef::new(&y, rows, cols, cols + 5);
                for isa in Isa::all() {
                    let guard = f16::from_bits(0x5A5A);
                    let stride = n + 1;
                    let mut out = vec![guard; m * stride];
                    run(isa, a, b, &mut out, stride);
                    for (at, value) in out.iter().enumerate() {
                        let (i, j) = (at / stride, at % stride);
                        let expected = if j < n {
                            scalar::narrow(element(&a, &b, i, j))
                        } else {
                            guard
                        };
                        assert_eq!(
                            value.to_bits(),
                            expected.to_bits(),
                            "{} ({i}, {j}) of {m}x{k}x{n}",
                            isa.name()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn products_sum_in_the_order_of_k() {
        check(
            |k, n| (k, n),
            |a, b, i, j| {
                (0..a.cols).fold(0.0, |sum, k| {
                    a.row(i)[k].to_f32().mul_add(b.row(k)[j].to_f32(), sum)
                })
            },
            |isa, a, b, out, stride| {
                isa.run(Gemm {
                    a,
                    b,
                    out,
                    stride,
                    wide: &mut Vec::new(),
                });
            },
        );
    }

    #[test]
    fn transposed_products_sum_sixteen_lanes() {
        check(
            |k, n| (n, k),
            |a, b, i, j| {
                let mut acc = [0.0_f32; LANES];
                for k in 0..a.cols.next_multiple_of(LANES) {
                    let get = |row: &[f16]| row.get(k).map_or(0.0, |v| v.to_f32());
                    acc[k % LANES] = get(a.row(i)).mul_add(get(b.row(j)), acc[k % LANES]);
                }
                scalar::reduce(acc)
            },
            |isa, a, b, out, stride| {
                isa.run(GemmBt {
                    a,
                    b,
                    out,
                    stride,
                    wide: &mut vec![9.0; 3],
                });
            },
        );
    }
}
