use super::*;
use crate::quantize::testing::Random;

/// A matrix whose rows have these standard deviations.
fn rows_of(random: &mut Random, scales: &[f64], cols: usize) -> Vec<f32> {
    let rows = scales
        .iter()
        .flat_map(|&scale| std::iter::repeat_n(scale, cols));
    rows.map(|scale| (scale * random.normal()) as f32).collect()
}

fn matrix(data: &[f32], cols: usize) -> Matrix<'_> {
    Matrix {
        name: "w",
        rows: data.len() / cols,
        cols,
        data,
    }
}

#[test]
fn rows_of_one_scale_become_neighbours() {
    let (count, cols, size) = (24, 256, 4);
    let mut random = Random::new(1);
    let scales = [1.0, 0.3, 3.0];
    let gate: Vec<f64> = (0..count).map(|r| scales[r % 3]).collect();
    let up: Vec<f64> = (0..count).map(|r| scales[r / 2 % 2]).collect();
    let data = [&gate, &up].map(|scales| rows_of(&mut random, scales, cols));
    let (columns, ones) = (vec![1.0; cols], vec![1.0; count]);
    let parts = data.each_ref().map(|data| Rows {
        matrix: matrix(data, cols),
        columns: &columns,
        rows: &ones,
    });
    let found = fit_order(&parts, size);
    // 3 scales times 2 make kinds of 4 rows each: a group for each kind.
    for group in found.order.chunks(size) {
        let kind = |row: &u32| (*row as usize % 3, *row as usize / 2 % 2);
        assert!(
            group.iter().all(|row| kind(row) == kind(&group[0])),
            "{:?}",
            found.order
        );
    }
    assert!(found.ratio < 0.8, "{}", found.ratio);
    assert_eq!(found, fit_order(&parts, size));
}

#[test]
fn rows_that_matter_and_columns_that_matter_decide() {
    // By the first column rows are of two kinds, by the others of two other kinds.
    let (count, cols, size) = (16, 64, 8);
    let mut random = Random::new(2);
    let mut data = vec![0.0f32; count * cols];
    for (row, values) in data.chunks_mut(cols).enumerate() {
        for (c, value) in values.iter_mut().enumerate() {
            let wide = if c < cols / 2 {
                row % 2 == 0
            } else {
                row < count / 2
            };
            *value = (if wide { 1.0 } else { 0.1 } * random.normal()) as f32;
        }
    }
    let ones = vec![1.0; count];
    for (heavy, first_half) in [(0, true), (1, false)] {
        let columns: Vec<f64> = (0..cols)
            .map(|c| if c / (cols / 2) == heavy { 1.0 } else { 0.0 })
            .collect();
        let rows = Rows {
            matrix: matrix(&data, cols),
            columns: &columns,
            rows: &ones,
        };
        let found = fit_order(&[rows], size);
        let even = found.order[..size]
            .iter()
            .all(|row| row % 2 == found.order[0] % 2);
        let low = found.order[..size]
            .iter()
            .all(|row| (*row < 8) == (found.order[0] < 8));
        assert_eq!((even, low), (first_half, !first_half), "{:?}", found.order);
    }
}

#[test]
fn every_order_is_one_of_all_rows_and_no_worse_than_the_given_one() {
    let mut random = Random::new(3);
    for (count, cols, size) in [(1, 3, 32), (33, 5, 32), (70, 40, 32), (64, 7, 8)] {
        let scales: Vec<f64> = (0..count).map(|_| (0.3 * random.normal()).exp()).collect();
        let data = rows_of(&mut random, &scales, cols);
        let weights = |n: usize, random: &mut Random| -> Vec<f64> {
            (0..n).map(|_| random.uniform()).collect()
        };
        let (columns, rows) = (weights(cols, &mut random), weights(count, &mut random));
        let found = fit_order(
            &[Rows {
                matrix: matrix(&data, cols),
                columns: &columns,
                rows: &rows,
            }],
            size,
        );
        let mut sorted = found.order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..count as u32));
        assert!(found.ratio <= 1.0);
    }
}

#[test]
fn a_matrix_without_anything_in_it_stays_as_it_is() {
    let (zeros, nothing) = (vec![0.0; 64 * 4], vec![0.0; 64]);
    let found = fit_order(
        &[Rows {
            matrix: matrix(&zeros, 4),
            columns: &nothing[..4],
            rows: &nothing,
        }],
        32,
    );
    assert!(found.order.into_iter().eq(0..64));
}

/// The least cost of all ways to give rows `from..` their groups.
fn least(costs: &[f32], groups: usize, free: &mut [usize], from: usize) -> f64 {
    if from * groups == costs.len() {
        return 0.0;
    }
    let mut best = f64::INFINITY;
    for group in 0..groups {
        if free[group] > 0 {
            free[group] -= 1;
            let rest = least(costs, groups, free, from + 1);
            best = best.min(f64::from(costs[from * groups + group]) + rest);
            free[group] += 1;
        }
    }
    best
}

#[test]
fn an_assignment_costs_no_more_than_the_best_of_all() {
    let mut random = Random::new(4);
    for (rows, size) in [(9, 3), (8, 3), (7, 1), (5, 8)] {
        let groups = rows_in_groups(rows, size);
        let costs: Vec<f32> = (0..rows * groups.len())
            .map(|_| 1.0 + random.uniform() as f32)
            .collect();
        let order = assign(&costs, rows, size);
        let cost: f64 = order
            .chunks(size)
            .enumerate()
            .flat_map(|(g, chunk)| chunk.iter().map(move |row| (g, row)))
            .map(|(g, row)| f64::from(costs[row * groups.len() + g]))
            .sum();
        let best = least(&costs, groups.len(), &mut groups.clone(), 0);
        // ε is a thousandth of what a row costs at least, which is below 2.
        assert!(cost <= best + 0.002 * rows as f64, "{cost} {best}");
        let mut sorted = order;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..rows));
    }
}

/// The sizes of the groups.
fn rows_in_groups(rows: usize, size: usize) -> Vec<usize> {
    (0..rows)
        .step_by(size)
        .map(|at| size.min(rows - at))
        .collect()
}

#[test]
fn rows_that_all_cost_nothing_get_their_places() {
    let order = assign(&[0.0; 12], 6, 3);
    let mut sorted = order;
    sorted.sort_unstable();
    assert_eq!(sorted, [0, 1, 2, 3, 4, 5]);
}
