//! Tables of vectors: an index stands for the weights of 2 or 4 rows below each other.
//!
//! With b bits per weight and vectors of d rows an index has b d bits, and the 2^(b d) entries may
//! lie where the weights do, instead of on the grid of all combinations of 2^b values. The
//! search begins on that grid, with the best values for single weights, and takes Lloyd steps:
//! every vector to its nearest entry, every entry to the weighted mean of its vectors. Neither can
//! raise the error, so vectors are never worse than single weights before rounding to f16.
//!
//! Entries are in lexicographic order, which the format asks for.

use std::cmp::Ordering;
use std::ops::Range;

use anemone_schemas::lut::LutShape;
use half::f16;

use super::Matrix;
use super::codebook::{nearest_vector, vectorized};
use super::kmeans::KMeans;

/// Most Lloyd steps, and the part of the error below which another is not worth it.
const STEPS: usize = 20;
const ENOUGH: f64 = 1e-3;

/// Vectors that are looked at for each entry, at most: those of evenly spread columns.
const PER_ENTRY: usize = 256;

/// The table of the rows of a group; columns have weights above zero.
pub(super) fn table(
    matrix: Matrix<'_>,
    rows: Range<usize>,
    weights: &[f32],
    shape: LutShape,
    kmeans: &mut KMeans,
) -> Vec<f64> {
    let d = shape.vector;
    let points = rows.clone().flat_map(|r| {
        let row = matrix.row(r).iter().copied();
        row.zip(weights.iter().copied())
    });
    let single = kmeans.solve(points, 1 << (usize::from(shape.bits) / d));
    let mut table = grid(&single, d);

    let per_column = rows.len() / d;
    let step = (per_column * matrix.cols).div_ceil(PER_ENTRY * shape.entries());
    let mut vectors = Vec::new();
    let mut of_vectors = Vec::new();
    for c in (0..matrix.cols).step_by(step.max(1)) {
        vectors.extend(rows.clone().map(|r| matrix.row(r)[c]));
        of_vectors.extend(std::iter::repeat_n(f64::from(weights[c]), per_column));
    }
    let mut last = f64::INFINITY;
    for _ in 0..STEPS {
        let (error, next) = lloyd(&table, &vectors, &of_vectors, d);
        table = next;
        if error >= last * (1.0 - ENOUGH) {
            break;
        }
        last = error;
    }
    // What is stored must be in order, so rounding comes first.
    let stored: Vec<f64> = table.iter().map(|&v| f16::from_f64(v).to_f64()).collect();
    let mut entries: Vec<&[f64]> = stored.chunks_exact(d).collect();
    entries.sort_by(|a, b| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    entries.concat()
}

/// All vectors of `d` of these values.
fn grid(values: &[f64], d: usize) -> Vec<f64> {
    let count = values.len().pow(d as u32);
    let entry =
        |at: usize| (0..d).map(move |k| values[at / values.len().pow(k as u32) % values.len()]);
    (0..count).flat_map(entry).collect()
}

/// The error with this table, and the next table.
fn lloyd(table: &[f64], vectors: &[f32], weights: &[f64], d: usize) -> (f64, Vec<f64>) {
    let narrow: Vec<f32> = table.iter().map(|&v| v as f32).collect();
    let mut sums = vec![0.0f64; table.len()];
    let mut counts = vec![0.0f64; table.len() / d];
    let mut error = 0.0;
    for (x, &weight) in vectors.chunks_exact(d).zip(weights) {
        let at = vectorized(|| nearest_vector(&narrow, x)) as usize;
        counts[at] += weight;
        let entry = &table[at * d..][..d];
        for ((sum, &x), t) in sums[at * d..][..d].iter_mut().zip(x).zip(entry) {
            *sum += weight * f64::from(x);
            error += weight * (f64::from(x) - t).powi(2);
        }
    }
    let mut next = table.to_vec();
    let means = next
        .chunks_exact_mut(d)
        .zip(sums.chunks_exact(d))
        .zip(&counts);
    for ((entry, sums), &count) in means.filter(|m| *m.1 > 0.0) {
        for (value, sum) in entry.iter_mut().zip(sums) {
            *value = sum / count;
        }
    }
    (error, next)
}

#[cfg(test)]
mod tests {
    use anemone_schemas::lut::LutMatrix;

    use crate::quantize::testing::Problem;
    use crate::quantize::{Method, Settings, quantize_matrix};

    fn quantized(problem: &Problem, method: Method, bits: u8, vector: usize) -> LutMatrix {
        let settings = Settings {
            bits,
            vector,
            ..Settings::default()
        };
        let (matrix, calibration) = (problem.matrix(), problem.calibration());
        let found = quantize_matrix(matrix, calibration, method, settings, 2);
        found.unwrap().0
    }

    #[test]
    fn vectors_are_no_worse_than_single_weights_and_longer_ones_better_still() {
        let problem = Problem::new(5, 64, 400);
        for method in [Method::KMeansUnweighted, Method::KMeans, Method::Gptq] {
            let errors = [1, 2, 4].map(|vector| {
                let lut = quantized(&problem, method, 2, vector);
                assert_eq!((lut.bits, lut.vector), (2 * vector as u8, vector));
                assert_eq!(lut.indices.len(), 64 * 400 / 4);
                match method {
                    Method::KMeansUnweighted => {
                        let pairs = lut.dequantize().into_iter().zip(&problem.weights);
                        pairs.map(|(q, w)| f64::from(q - w).powi(2)).sum()
                    }
                    _ => problem.objective(&lut.dequantize()),
                }
            });
            let [one, two, four] = errors;
            assert!(
                two < 0.99 * one && four < 0.97 * two,
                "{method:?}: {errors:?}"
            );
        }
    }

    #[test]
    fn every_vector_has_the_entry_nearest_to_it() {
        let problem = Problem::new(6, 40, 30);
        let lut = quantized(&problem, Method::KMeansUnweighted, 2, 2);
        let codes = lut.codes();
        let weight = |row: usize, col: usize| f64::from(problem.weights[row * 30 + col]);
        for (at, code) in codes.iter().enumerate() {
            let (row, col) = (at / 30 * 2, at % 30);
            let table = lut.table(row / lut.group_rows);
            let distance = |entry: &[f32]| {
                let of = |k: usize| (f64::from(entry[k]) - weight(row + k, col)).powi(2);
                of(0) + of(1)
            };
            let distances: Vec<f64> = table.chunks(2).map(distance).collect();
            let least = distances.iter().copied().fold(f64::INFINITY, f64::min);
            assert!(distances[usize::from(*code)] <= least + 1e-9);
        }
    }
}
