//! Weighted k-means in one dimension, close to the exact optimum in linear time.
//!
//! Given values `v` with weights `w`, find k table values `t` that minimise
//!
//! ```text
//! f(t) = sum_i w_i min_k (v_i - t_k)^2
//! ```
//!
//! In one dimension the clusters of an optimum are intervals of the sorted values, so
//! dynamic programming finds it: with `D[c][j]` the least cost of splitting the first `j`
//! values into `c` intervals,
//!
//! ```text
//! D[c][j] = min_{i < j} D[c-1][i] + cost(i, j)
//! ```
//!
//! where `cost` is O(1) from prefix sums. The minimising `i` never decreases with `j`
//! (`cost` satisfies the quadrangle inequality), so a layer is filled by divide
//! and conquer in O(n log n): Grønlund, Larsen, Mathiasen, Nielsen, Schneider, Song, *Fast
//! Exact k-Means, k-Medians and Bregman Divergence Clustering in 1D*, 2017
//! (arXiv:1701.07204), section 2.
//!
//! A table serves 32 rows of thousands of columns, so n is above 100 000, and the real
//! code differs in three ways:
//!
//! 1. **The dynamic program sees 32 bins per table value instead of all values.** Their edges
//!    follow the density at which an optimal quantizer itself places its values,
//!    (weight density)^(1/3) (Panter and Dite, *Quantization distortion in pulse-count
//!    modulation with nonuniform spacing of levels*, 1951): every cluster is then cut
//!    into about equally many bins, and a far outlier has a bin of its own. Up to that
//!    many distinct values the solution is exact.
//! 2. **Weighted Lloyd steps on the real values follow**, each in O(k log n) thanks to the
//!    prefix sums over the sorted values. They remove what the bins cost: the program has
//!    found the basin of the global optimum, the steps walk to its bottom.
//! 3. **Sorting is the most expensive part**, so it is a radix sort on the bits of the
//!    values with the weight as payload. Passes in which all digits are equal are skipped;
//!    for weights that were bf16 that is one of the three.

/// Bins of the dynamic program for each table value.
const BINS_PER_VALUE: usize = 32;

/// How often gaps between outliers are cut down to the share of a bin. Each time their excess
/// over the rest shrinks by the number of bins.
const CUTS: usize = 3;

/// Most Lloyd steps; they end earlier when no value changes its cluster.
const LLOYD_STEPS: usize = 24;

/// The buffers of one thread.
#[derive(Debug, Default)]
pub(super) struct KMeans {
    keyed: Vec<u64>,
    swap: Vec<u64>,
    points: Points,
    bins: Vec<usize>,
    layer: Vec<f64>,
    next: Vec<f64>,
    splits: Vec<u32>,
}

impl KMeans {
    /// The `k` ascending table values for finite `points` of (value, weight), weights
    /// above zero. If there are fewer than `k` distinct values, the largest one repeats.
    ///
    /// # Panics
    /// If there are no points.
    pub(super) fn solve(&mut self, points: impl Iterator<Item = (f32, f32)>, k: usize) -> Vec<f64> {
        self.solve_binned(points, k, k * BINS_PER_VALUE)
    }

    fn solve_binned(
        &mut self,
        points: impl Iterator<Item = (f32, f32)>,
        k: usize,
        bins: usize,
    ) -> Vec<f64> {
        self.keyed.clear();
        self.keyed
            .extend(points.map(|(v, w)| u64::from(ordered_bits(v)) << 32 | u64::from(w.to_bits())));
        radix_sort(&mut self.keyed, &mut self.swap);
        self.points.collect(&self.keyed);
        let distinct = self.points.values.len();
        assert!(distinct > 0, "k-means needs points");
        if distinct <= k {
            let mut table = self.points.values.clone();
            table.resize(k, self.points.values[distinct - 1]);
            return table;
        }
        self.choose_bins(bins);
        let edges = self.split_bins(k);
        let mut table = self.points.lloyd(edges);
        table.resize(k, table[table.len() - 1]);
        table
    }

    /// Fills `bins` with the edges of at most `limit` bins over the distinct values.
    fn choose_bins(&mut self, limit: usize) {
        let n = self.points.values.len();
        self.bins.clear();
        if n <= limit {
            self.bins.extend(0..=n);
            return;
        }
        // The integral of density^(1/3) over the gap between two neighbours, which hold half
        // of their weights each: (w / d)^(1/3) d. In units of the whole, so that no values are
        // too small for f32.
        let values = &self.points.values;
        let range = values[n - 1] - values[0];
        let whole = self.points.weight_between(0, n);
        let lengths = &mut self.layer;
        lengths.clear();
        lengths.extend((1..n).map(|at| {
            let width = (values[at] - values[at - 1]) / range;
            let weight = self.points.weight_between(at - 1, at + 1) / whole;
            f64::from(((weight * width * width) as f32).cbrt())
        }));
        // A gap that is longer than a share has an edge however long it is; cut down to a
        // share, it leaves the others to the rest.
        let mut total: f64 = lengths.iter().sum();
        for _ in 0..CUTS {
            let share = total / (limit - 1) as f64;
            for length in lengths.iter_mut() {
                *length = length.min(share);
            }
            total = lengths.iter().sum();
        }
        // An edge in each gap in which the sum passes a multiple of a share.
        self.bins.push(0);
        let (mut sum, mut shares) = (0.0, 0);
        for (before, length) in lengths.iter().enumerate() {
            sum += length;
            let passed = (sum / total * (limit - 1) as f64) as usize;
            if passed > shares {
                self.bins.push(before + 1);
                shares = passed;
            }
        }
        self.bins.push(n);
    }

    /// The dynamic program over the bins; returns the `k + 1` edges of the clusters as
    /// indices of distinct values.
    fn split_bins(&mut self, k: usize) -> Vec<usize> {
        let n = self.bins.len() - 1;
        let k = k.min(n);
        let sums: Vec<[f64; 2]> = self.bins.iter().map(|&at| self.points.sums[at]).collect();
        self.layer.clear();
        self.layer.extend((0..=n).map(|j| gain(sums[0], sums[j])));
        self.next.clear();
        self.next.resize(n + 1, 0.0);
        self.splits.clear();
        self.splits.resize((k - 1) * (n + 1), 0);
        for (c, splits) in self.splits.chunks_exact_mut(n + 1).enumerate() {
            // With c + 2 clusters there are at least that many bins, one for each.
            let layer = Layer {
                sums: &sums,
                before: &self.layer,
            };
            layer.fill(&mut self.next, splits, (c + 2, n), (c + 1, n - 1));
            std::mem::swap(&mut self.layer, &mut self.next);
        }
        let mut edges = vec![n; k + 1];
        for c in (0..k - 1).rev() {
            edges[c + 1] = self.splits[c * (n + 1) + edges[c + 2]] as usize;
        }
        edges[0] = 0;
        edges.into_iter().map(|at| self.bins[at]).collect()
    }
}

/// One layer of the dynamic program. The part of the cost that does not depend on the
/// clusters, sum w v², is left out; what remains is a gain to maximise.
struct Layer<'a> {
    sums: &'a [[f64; 2]],
    before: &'a [f64],
}

impl Layer<'_> {
    /// Fills `best[low..=high]`, whose splits lie in `from..=to`.
    fn fill(
        &self,
        best: &mut [f64],
        splits: &mut [u32],
        (low, high): (usize, usize),
        (from, to): (usize, usize),
    ) {
        if low > high {
            return;
        }
        let middle = low.midpoint(high);
        let mut found = (f64::NEG_INFINITY, from);
        for i in from..=to.min(middle - 1) {
            let value = self.before[i] + gain(self.sums[i], self.sums[middle]);
            if value > found.0 {
                found = (value, i);
            }
        }
        best[middle] = found.0;
        splits[middle] = found.1 as u32;
        self.fill(best, splits, (low, middle - 1), (from, found.1));
        self.fill(best, splits, (middle + 1, high), (found.1, to));
    }
}

/// (sum w v)² / sum w of an interval, from the prefix sums [sum w, sum w v] at its ends.
fn gain(from: [f64; 2], to: [f64; 2]) -> f64 {
    let weight = to[0] - from[0];
    let moment = to[1] - from[1];
    if weight > 0.0 {
        moment * moment / weight
    } else {
        0.0
    }
}

/// The distinct values in ascending order with prefix sums.
#[derive(Debug, Default)]
struct Points {
    /// Ascending.
    values: Vec<f64>,
    /// `[sum w, sum w (v - center)]` before each value and at the end. Without the shift a
    /// group far from zero would lose its digits in the differences.
    sums: Vec<[f64; 2]>,
    center: f64,
}

impl Points {
    fn collect(&mut self, sorted: &[u64]) {
        self.values.clear();
        self.sums.clear();
        self.sums.push([0.0; 2]);
        let value = |key: u64| f64::from(from_ordered_bits((key >> 32) as u32));
        self.center = sorted.first().map_or(0.0, |&first| {
            0.5 * (value(first) + value(sorted[sorted.len() - 1]))
        });
        let [mut weight, mut moment] = [0.0; 2];
        for same in sorted.chunk_by(|a, b| a >> 32 == b >> 32) {
            let v = value(same[0]);
            let w: f64 = same
                .iter()
                .map(|&key| f64::from(f32::from_bits(key as u32)))
                .sum();
            weight += w;
            moment += w * (v - self.center);
            self.values.push(v);
            self.sums.push([weight, moment]);
        }
    }

    fn weight_between(&self, from: usize, to: usize) -> f64 {
        self.sums[to][0] - self.sums[from][0]
    }

    /// Weighted Lloyd steps from the clusters with these edges; returns their means.
    fn lloyd(&self, mut edges: Vec<usize>) -> Vec<f64> {
        let mut means: Vec<f64> = edges
            .windows(2)
            .map(|edge| self.mean(edge[0], edge[1]).unwrap_or(self.center))
            .collect();
        for _ in 0..LLOYD_STEPS {
            let mut moved = false;
            for c in 1..means.len() {
                let border = 0.5 * (means[c - 1] + means[c]);
                let edge = self.values.partition_point(|&v| v <= border);
                moved |= edge != edges[c];
                edges[c] = edge;
            }
            if !moved {
                break;
            }
            for (mean, edge) in means.iter_mut().zip(edges.windows(2)) {
                // An empty cluster keeps its value, which keeps the order.
                *mean = self.mean(edge[0], edge[1]).unwrap_or(*mean);
            }
        }
        means
    }

    fn mean(&self, from: usize, to: usize) -> Option<f64> {
        let weight = self.weight_between(from, to);
        (weight > 0.0).then(|| self.center + (self.sums[to][1] - self.sums[from][1]) / weight)
    }
}

/// The bits of a finite number, so that they ascend with it; both zeros are the same.
fn ordered_bits(v: f32) -> u32 {
    let bits = (v + 0.0).to_bits();
    if bits >> 31 == 0 {
        bits | 1 << 31
    } else {
        !bits
    }
}

fn from_ordered_bits(bits: u32) -> f32 {
    f32::from_bits(if bits >> 31 == 1 {
        bits & !(1 << 31)
    } else {
        !bits
    })
}

/// Sorts by the upper 32 bits, stably: three passes over digits of 11, 11 and 10 bits.
fn radix_sort(keyed: &mut Vec<u64>, swap: &mut Vec<u64>) {
    const DIGIT: usize = 1 << 11;
    const SHIFTS: [u32; 3] = [32, 43, 54];
    let digit = |key: u64, shift: u32| (key >> shift) as usize % DIGIT;
    let mut counts = vec![[0u32; DIGIT]; SHIFTS.len()];
    for &key in keyed.iter() {
        for (count, shift) in counts.iter_mut().zip(SHIFTS) {
            count[digit(key, shift)] += 1;
        }
    }
    swap.clear();
    swap.resize(keyed.len(), 0);
    for (mut places, shift) in counts.into_iter().zip(SHIFTS) {
        if places.contains(&(keyed.len() as u32)) {
            continue;
        }
        let mut start = 0;
        for place in &mut places {
            start += std::mem::replace(place, start);
        }
        for &key in keyed.iter() {
            let place = &mut places[digit(key, shift)];
            swap[*place as usize] = key;
            *place += 1;
        }
        std::mem::swap(keyed, swap);
    }
}

#[cfg(test)]
mod tests;
