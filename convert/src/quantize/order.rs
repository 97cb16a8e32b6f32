//! An order of the MLP's channels in which neighbours suit one table.
//!
//! `down(silu(gate x) * up x)` stays the same if the rows of `gate` and `up` and the columns of
//! `down` change places together. Of the rows as they come, 32 neighbours share a table although
//! nothing makes them alike: what spreads widely and what spreads little, what leans to one side
//! and what to the other. Which rows become neighbours is free, and worth a tenth of the error of
//! these two matrices and more. Wanted is a division of the channels into groups with the least
//!
//! ```text
//! sum over groups and both matrices M   1/E_M  min_t  sum_r a_r sum_c h_c min_k (M[r, c] - t_k)²
//!
//! a_r  how much the loss minds errors of an output: Σ g² of its gradient
//! h_c  how large the input is: Σ x²
//! E_M  the same sum for the groups to begin with: both matrices count alike
//! ```
//!
//! That is k-means with tables for centres and groups of one size. Its two steps
//! alternate, neither of which can raise the sum: the best tables of the groups, and then
//! the best groups for these tables, which is an assignment of rows to places ([`assign`]).
//!
//! A row is compared with every table, thousands of weights with hundreds of tables. The real
//! code therefore sees a row as the weight `a_r Σ h_c` that it has in each of 256
//! intervals of the matrix's values. The cost of all rows with all tables is then a product of two
//! small matrices.

mod assign;
#[cfg(test)]
mod tests;

use rayon::prelude::*;

use super::Matrix;
use super::kmeans::KMeans;
use assign::assign;

/// Intervals that values are sorted into.
const BINS: usize = 256;

/// Where intervals become wider, in standard deviations: those at the middle are a
/// thirtieth of one.
const LINEAR: f64 = 4.0;

/// Values of a table.
const VALUES: usize = 16;

/// Most alternations of tables and groups, and the least gain for another.
const ROUNDS: usize = 10;
const ENOUGH: f64 = 1e-3;

/// Part of the mean that is added to the weight of each column and row, for what the text did
/// not show.
const COLUMN_FLOOR: f64 = 0.05;
const ROW_FLOOR: f64 = 0.1;

/// A matrix whose rows take part.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// It.
    pub matrix: Matrix<'a>,
    /// Weight of each column: Σ x².
    pub columns: &'a [f64],
    /// Weight of each row: Σ g².
    pub rows: &'a [f64],
}

/// An order of rows and what it is worth.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    /// Which row comes at each place. Groups in the order of their first rows, rows of a group
    /// as they came.
    pub order: Vec<u32>,
    /// Error with this order over that with the rows as they came, both with tables of
    /// their own; at most 1.
    pub ratio: f64,
}

/// Finds an order of the rows of matrices that must keep in step, in groups of `group_rows`.
///
/// # Panics
/// If matrices differ in rows, or weights in length from what they weigh.
pub fn fit_order(matrices: &[Rows<'_>], group_rows: usize) -> Fitted {
    let count = matrices.first().map_or(0, |m| m.matrix.rows);
    let mut parts: Vec<Part> = matrices.iter().map(Part::new).collect();
    let given: Vec<usize> = (0..count).collect();
    for part in &mut parts {
        let error = part.tables(&given, group_rows).1;
        part.share = if error > 0.0 { 1.0 / error } else { 0.0 };
    }
    let whole = parts.iter().filter(|p| p.share > 0.0).count() as f64;
    let mut best = Fitted {
        order: (0..count as u32).collect(),
        ratio: 1.0,
    };
    if whole == 0.0 || count <= group_rows {
        return best;
    }
    let mut order = by_scale(&parts, count, group_rows);
    let mut last = f64::INFINITY;
    for _ in 0..ROUNDS {
        let found: Vec<_> = parts.iter().map(|p| p.tables(&order, group_rows)).collect();
        let error = found.iter().map(|f| f.1).sum::<f64>() / whole;
        if error < best.ratio {
            best.ratio = error;
            best.order = tidy(&order, group_rows);
        }
        if error > last * (1.0 - ENOUGH) {
            break;
        }
        last = error;
        let mut costs = vec![0.0; count * count.div_ceil(group_rows)];
        for (part, (tables, _)) in parts.iter().zip(&found) {
            part.add_costs(tables, &mut costs);
        }
        order = assign(&costs, count, group_rows);
    }
    best
}

/// A matrix as the order sees it.
struct Part {
    /// What its errors are multiplied by.
    share: f64,
    /// Mean value in each interval.
    centres: Vec<f32>,
    /// Weight of a row in each interval: row-major, [`BINS`] columns.
    weights: Vec<f32>,
    /// Weighted mean of a row's squares.
    scales: Vec<f64>,
}

impl Part {
    fn new(rows: &Rows<'_>) -> Self {
        let Matrix {
            rows: count,
            cols,
            data,
            ..
        } = rows.matrix;
        assert_eq!((rows.columns.len(), rows.rows.len()), (cols, count));
        let columns = floored(rows.columns, COLUMN_FLOOR);
        let of_rows = floored(rows.rows, ROW_FLOOR);
        let scales: Vec<f64> = data
            .par_chunks(cols)
            .map(|row| {
                let squares = row.iter().zip(&columns);
                squares
                    .map(|(w, h)| h * f64::from(*w) * f64::from(*w))
                    .sum::<f64>()
                    / cols as f64
            })
            .collect();
        let deviation = (scales.iter().sum::<f64>() / count as f64).sqrt();
        let unit = if deviation > 0.0 {
            1.0 / deviation
        } else {
            0.0
        };
        let mut weights = vec![0.0f32; count * BINS];
        let sums: Vec<Vec<f64>> = weights
            .par_chunks_mut(BINS)
            .zip(data.par_chunks(cols))
            .zip(&of_rows)
            .map(|((weights, row), of_row)| {
                let mut own = vec![[0.0f64; 2]; BINS];
                for (w, h) in row.iter().zip(&columns) {
                    let sum = &mut own[interval(f64::from(*w) * unit)];
                    sum[0] += h;
                    sum[1] += h * f64::from(*w);
                }
                for (weight, sum) in weights.iter_mut().zip(&own) {
                    *weight = (of_row * sum[0]) as f32;
                }
                own.iter().flatten().map(|s| s * of_row).collect()
            })
            .collect();
        let mut total = vec![0.0; 2 * BINS];
        for sums in &sums {
            for (total, sum) in total.iter_mut().zip(sums) {
                *total += sum;
            }
        }
        let means = total.as_chunks::<2>().0.iter();
        let centres =
            means.map(|[weight, sum]| if *weight > 0.0 { sum / weight } else { 0.0 } as f32);
        Self {
            share: 1.0,
            centres: centres.collect(),
            weights,
            scales,
        }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.weights[row * BINS..][..BINS]
    }

    /// The best table of each group, and the sum of all errors with them.
    fn tables(&self, order: &[usize], group_rows: usize) -> (Vec<[f32; VALUES]>, f64) {
        let groups: Vec<&[usize]> = order.chunks(group_rows).collect();
        let found: Vec<([f32; VALUES], f64)> = groups
            .into_par_iter()
            .map_init(KMeans::default, |kmeans, group| {
                let mut sums = vec![0.0f64; BINS];
                for &row in group {
                    for (sum, weight) in sums.iter_mut().zip(self.row(row)) {
                        *sum += f64::from(*weight);
                    }
                }
                let points = self.centres.iter().zip(&sums).filter(|p| *p.1 as f32 > 0.0);
                let mut table = [0.0; VALUES];
                if points.clone().next().is_some() {
                    let points = points.map(|(centre, sum)| (*centre, *sum as f32));
                    let solved = kmeans.solve(points, VALUES);
                    for (value, solved) in table.iter_mut().zip(solved) {
                        *value = solved as f32;
                    }
                }
                let errors = self.errors(&table);
                let error = errors.iter().zip(&sums).map(|(e, s)| f64::from(*e) * s);
                (table, error.sum())
            })
            .collect();
        let error = found.iter().map(|f| f.1).sum::<f64>() * self.share;
        (found.into_iter().map(|f| f.0).collect(), error)
    }

    /// Squared distance of each centre from the nearest value.
    fn errors(&self, table: &[f32; VALUES]) -> Vec<f32> {
        let distance = |c: f32| {
            table
                .iter()
                .map(|t| (t - c) * (t - c))
                .fold(f32::MAX, f32::min)
        };
        self.centres.iter().map(|&c| distance(c)).collect()
    }

    /// Adds what each row would cost with each table: row-major, a column for each table.
    fn add_costs(&self, tables: &[[f32; VALUES]], costs: &mut [f32]) {
        let count = tables.len();
        let mut by_bin = vec![0.0f32; BINS * count];
        for (group, table) in tables.iter().enumerate() {
            for (bin, error) in self.errors(table).iter().enumerate() {
                by_bin[bin * count + group] = error * self.share as f32;
            }
        }
        costs
            .par_chunks_mut(count)
            .zip(self.weights.par_chunks(BINS))
            .for_each(|(costs, weights)| {
                for (weight, errors) in weights.iter().zip(by_bin.chunks(count)) {
                    for (cost, error) in costs.iter_mut().zip(errors) {
                        *cost += weight * error;
                    }
                }
            });
    }
}

/// The interval of a value in units of the standard deviation.
fn interval(u: f64) -> usize {
    // From -LINEAR to LINEAR, and less steep the farther out.
    let bent = u / (1.0 + u.abs() / LINEAR);
    let at = (bent + LINEAR) / (2.0 * LINEAR) * BINS as f64;
    (at as usize).min(BINS - 1)
}

/// Weights with a part of their mean added, scaled to a mean of 1; all alike if they are all zero.
fn floored(weights: &[f64], part: f64) -> Vec<f64> {
    let mean = weights.iter().sum::<f64>() / weights.len().max(1) as f64;
    if mean.is_finite() && mean > 0.0 {
        let scaled = weights.iter().map(|w| (w / mean + part) / (1.0 + part));
        scaled.collect()
    } else {
        vec![1.0; weights.len()]
    }
}

/// Where to begin: strips of rows by their scale in the last matrix, each by that in the first.
fn by_scale(parts: &[Part], count: usize, group_rows: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let sort = |rows: &mut [usize], part: &Part| {
        rows.sort_by(|&a, &b| part.scales[a].total_cmp(&part.scales[b]).then(a.cmp(&b)));
    };
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
        return order;
    };
    sort(&mut order, last);
    if parts.len() > 1 {
        let groups = count.div_ceil(group_rows);
        let strip = (groups as f64).sqrt().ceil() as usize * group_rows;
        order.chunks_mut(strip).for_each(|rows| sort(rows, first));
    }
    order
}

/// The same groups, in the order of their first rows, with their rows as they came. A smaller
/// last group stays last.
fn tidy(order: &[usize], group_rows: usize) -> Vec<u32> {
    let mut groups: Vec<Vec<u32>> = order
        .chunks(group_rows)
        .map(|group| {
            let mut rows: Vec<u32> = group.iter().map(|&row| row as u32).collect();
            rows.sort_unstable();
            rows
        })
        .collect();
    let whole = order.len() / group_rows;
    groups[..whole].sort_unstable();
    groups.concat()
}
