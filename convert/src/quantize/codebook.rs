//! Tables of values and the search for the nearest one.

#![allow(
    clippy::inline_always,
    reason = "code must be inlined into `vectorized` to be compiled for its instructions"
)]

use half::f16;

use super::QuantizeError;

/// One table of ascending values, or of vectors, per group of rows.
#[derive(Clone, Debug)]
pub(super) struct Codebook {
    entries: usize,
    /// Rows that an entry has values for.
    vector: usize,
    values: Vec<f32>,
    /// Midpoints of neighbours: `entries - 1` per table.
    midpoints: Vec<f32>,
}

impl Codebook {
    pub(super) fn new(entries: usize, values: Vec<f32>) -> Self {
        Self::of_vectors(entries, 1, values)
    }

    /// Entries of `vector` values, one after the other.
    pub(super) fn of_vectors(entries: usize, vector: usize, values: Vec<f32>) -> Self {
        // Between vectors there is no one midpoint.
        let tables = values.chunks_exact(entries).filter(|_| vector == 1);
        let midpoints = tables
            .flat_map(|table| table.windows(2).map(|pair| 0.5 * (pair[0] + pair[1])))
            .collect();
        Self {
            entries,
            vector,
            values,
            midpoints,
        }
    }

    pub(super) fn table(&self, group: usize) -> &[f32] {
        let values = self.entries * self.vector;
        &self.values[group * values..][..values]
    }

    pub(super) fn midpoints(&self, group: usize) -> &[f32] {
        &self.midpoints[group * (self.entries - 1)..][..self.entries - 1]
    }

    /// Rows that an entry has values for.
    pub(super) fn vector(&self) -> usize {
        self.vector
    }

    /// Rounds the weights `x` of rows of a group below each other: a code for each vector, and the
    /// values it stands for.
    #[inline(always)]
    pub(super) fn round(&self, group: usize, x: &[f32], codes: &mut [u32], q: &mut [f32]) {
        let table = self.table(group);
        if self.vector == 1 {
            nearest(self.midpoints(group), x, codes);
            for (q, &code) in q.iter_mut().zip(codes.iter()) {
                *q = table[code as usize];
            }
            return;
        }
        let vectors = x.chunks_exact(self.vector).zip(codes);
        for ((x, code), q) in vectors.zip(q.chunks_exact_mut(self.vector)) {
            *code = nearest_vector(table, x);
            q.copy_from_slice(&table[*code as usize * x.len()..][..x.len()]);
        }
    }

    /// All values, table after table.
    pub(super) fn into_values(self) -> Vec<f32> {
        self.values
    }
}

/// Rounds a table value to f16.
pub(super) fn round_to_f16(value: f64, name: &str, first_row: usize) -> Result<f32, QuantizeError> {
    let rounded = f16::from_f64(value);
    if rounded.is_finite() {
        Ok(rounded.to_f32())
    } else {
        Err(QuantizeError::F16Range {
            name: name.to_string(),
            first_row,
            value,
        })
    }
}

/// The indices of the values nearest to `x`: for ascending values that is the number of
/// midpoints below. A tie goes to the smaller value. Counting has no branches, so it
/// vectorizes over `x`, and for 16 values it is faster than a search.
#[inline(always)]
pub(super) fn nearest(midpoints: &[f32], x: &[f32], codes: &mut [u32]) {
    const LANES: usize = 16;
    let mut blocks = x.chunks_exact(LANES);
    let mut out = codes.chunks_exact_mut(LANES);
    for (x, codes) in (&mut blocks).zip(&mut out) {
        let mut count = [0u32; LANES];
        for &m in midpoints {
            for lane in 0..LANES {
                count[lane] += u32::from(x[lane] > m);
            }
        }
        codes.copy_from_slice(&count);
    }
    for (x, code) in blocks.remainder().iter().zip(out.into_remainder()) {
        *code = nearest_one(midpoints, *x);
    }
}

/// [`nearest`] for one number.
#[inline(always)]
pub(super) fn nearest_one(midpoints: &[f32], x: f32) -> u32 {
    midpoints.iter().map(|&m| u32::from(x > m)).sum()
}

/// The index of the vector of a table nearest to `x`; the first of those equally near.
#[inline(always)]
pub(super) fn nearest_vector(table: &[f32], x: &[f32]) -> u32 {
    let mut best = (f32::INFINITY, 0);
    for (at, entry) in table.chunks_exact(x.len()).enumerate() {
        let distance = entry.iter().zip(x).map(|(e, x)| (e - x) * (e - x)).sum();
        if distance < best.0 {
            best = (distance, at as u32);
        }
    }
    best.1
}

/// Runs `work` compiled for the vector instructions this machine has. The closure must be
/// made of inlined code; additions and products keep their order, so the bits of the
/// result are the same everywhere.
#[inline]
pub(super) fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::testing::Random;

    #[test]
    fn nearest_finds_the_smallest_distance_and_the_smaller_value_on_ties() {
        let mut random = Random::new(3);
        for entries in [2, 4, 16, 64] {
            let mut values: Vec<f32> = (0..entries).map(|_| random.normal() as f32).collect();
            values.sort_by(f32::total_cmp);
            values[1] = values[0];
            let book = Codebook::new(entries, values.clone());
            let mut x: Vec<f32> = (0..77).map(|_| random.normal() as f32).collect();
            x.extend(&values);
            x.extend(book.midpoints(0));
            let mut codes = vec![0; x.len()];
            vectorized(|| nearest(book.midpoints(0), &x, &mut codes));
            for (&x, &code) in x.iter().zip(&codes) {
                let distance = |v: f32| (f64::from(v) - f64::from(x)).abs();
                let best = values.iter().map(|&v| distance(v)).fold(f64::MAX, f64::min);
                let found = distance(values[code as usize]);
                // A midpoint is rounded to f32, and so is the choice at it.
                assert!(found <= best + 1e-6, "{x}: {found} against {best}");
            }
        }
        assert_eq!(nearest_one(&[0.5, 1.5], 1.5), 1);
    }
}
