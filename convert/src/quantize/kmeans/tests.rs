use linfa::DatasetBase;
use linfa::traits::Fit;
use linfa_clustering::KMeans as LinfaKMeans;
use ndarray::Array2;
use proptest::prelude::*;
use rand_xoshiro::Xoshiro256Plus;
use rand_xoshiro::rand_core::SeedableRng;

use super::*;
use crate::quantize::testing::Random;

fn solve(points: &[(f32, f32)], k: usize) -> Vec<f64> {
    KMeans::default().solve(points.iter().copied(), k)
}

fn cost(points: &[(f32, f32)], table: &[f64]) -> f64 {
    points
        .iter()
        .map(|&(v, w)| {
            let nearest = table
                .iter()
                .map(|t| (f64::from(v) - t).powi(2))
                .fold(f64::MAX, f64::min);
            f64::from(w) * nearest
        })
        .sum()
}

/// The optimum by the plain dynamic program over all points, O(k n²), with
/// the cost of an interval summed about its mean.
fn optimum(points: &[(f32, f32)], k: usize) -> f64 {
    let mut sorted = points.to_vec();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let n = sorted.len();
    let mut interval = vec![vec![0.0; n + 1]; n + 1];
    for i in 0..n {
        for j in i + 1..=n {
            let part = &sorted[i..j];
            let weight: f64 = part.iter().map(|p| f64::from(p.1)).sum();
            let mean = part
                .iter()
                .map(|p| f64::from(p.0) * f64::from(p.1))
                .sum::<f64>()
                / weight;
            interval[i][j] = cost(part, &[mean]);
        }
    }
    let mut best = interval[0].clone();
    for _ in 1..k {
        best = (0..=n)
            .map(|j| {
                (0..=j)
                    .map(|i| best[i] + interval[i][j])
                    .fold(f64::MAX, f64::min)
            })
            .collect();
    }
    best[n]
}

proptest! {
    #[test]
    fn small_inputs_reach_the_optimum(
        values in prop::collection::vec((-4i32..4, -1000i32..1000, 1u32..1000), 1..60),
        k in 1usize..17, offset in -100i32..100
    ) {
        let points: Vec<(f32, f32)> = values
            .into_iter()
            .map(|(coarse, fine, w)| {
                (offset as f32 + coarse as f32 + fine as f32 * 1e-4, w as f32)
            })
            .collect();
        let (found, best) = (cost(&points, &solve(&points, k)), optimum(&points, k));
        prop_assert!(found <= best * (1.0 + 1e-9) + 1e-9, "{} against {}", found, best);
    }
}

/// n points of a distribution, with weights that vary as column sums of squares do.
fn points(seed: u64, n: usize, value: impl Fn(&mut Random) -> f64) -> Vec<(f32, f32)> {
    let mut random = Random::new(seed);
    (0..n)
        .map(|_| {
            let v = value(&mut random) as f32;
            (v, (1.5 * random.normal()).exp() as f32)
        })
        .collect()
}

fn distributions(n: usize) -> Vec<(&'static str, Vec<(f32, f32)>)> {
    let heavy = |r: &mut Random| {
        // Student's t with three degrees of freedom.
        let chi: f64 = (0..3).map(|_| r.normal().powi(2)).sum();
        0.02 * r.normal() / (chi / 3.0).sqrt()
    };
    let mut outliers = points(3, n, |r| 0.02 * r.normal());
    outliers.extend([(-9.0, 0.5), (7.0, 2.0), (7.5, 0.1)]);
    let mut far = points(6, n, |r| 0.02 * r.normal());
    far.extend([(-6e4, 1.0), (5e4, 1.0), (6e4, 1.0)]);
    vec![
        ("far outliers", far),
        ("normal", points(1, n, |r| 0.02 * r.normal())),
        ("heavy tails", points(2, n, heavy)),
        ("outliers", outliers),
        ("far from zero", points(4, n, |r| 1.0 + 1e-3 * r.normal())),
        (
            "two lumps",
            points(5, n, |r| r.normal().signum() + 1e-3 * r.normal()),
        ),
    ]
}

#[test]
fn bins_cost_almost_nothing() {
    // The oracle is the program over all values, which the test above compares with
    // brute force.
    for (name, points) in distributions(30_000) {
        let exact = KMeans::default().solve_binned(points.iter().copied(), 16, usize::MAX);
        let (found, best) = (cost(&points, &solve(&points, 16)), cost(&points, &exact));
        assert!(found <= best * 1.0005, "{name}: {found} against {best}");
    }
}

#[test]
fn linfa_is_never_better_on_unweighted_points() {
    for (name, mut points) in distributions(800) {
        for point in &mut points {
            point.1 = 1.0;
        }
        let ours = cost(&points, &solve(&points, 16));
        // Scaled to unit variance: its tolerance is absolute.
        let n = points.len() as f64;
        let mean = points.iter().map(|p| f64::from(p.0)).sum::<f64>() / n;
        let variance = points
            .iter()
            .map(|p| (f64::from(p.0) - mean).powi(2))
            .sum::<f64>()
            / n;
        let scale = variance.sqrt();
        let column: Vec<f64> = points
            .iter()
            .map(|p| (f64::from(p.0) - mean) / scale)
            .collect();
        let data = DatasetBase::from(Array2::from_shape_vec((column.len(), 1), column).unwrap());
        let model = LinfaKMeans::params_with_rng(16, Xoshiro256Plus::seed_from_u64(7))
            .n_runs(3)
            .tolerance(1e-9)
            .fit(&data)
            .unwrap();
        let table: Vec<f64> = model.centroids().iter().map(|c| c * scale + mean).collect();
        let theirs = cost(&points, &table);
        assert!(
            ours <= theirs * (1.0 + 1e-6),
            "{name}: {ours} against {theirs}"
        );
    }
}

#[test]
fn few_distinct_values_are_kept_exactly() {
    let points = [
        (0.5, 1.0),
        (-1.0, 2.0),
        (0.5, 3.0),
        (1e-3, 1e-9),
        (-0.0, 1.0),
        (0.0, 1.0),
    ];
    let table = solve(&points, 16);
    let expected = [-1.0, 0.0, f64::from(1e-3f32), 0.5];
    assert_eq!(table[..4], expected);
    assert_eq!(table[4..], [0.5; 12]);
    assert_eq!(solve(&[(3.0, 1.0); 5], 4), [3.0; 4]);
    // Only apart below the precision of bf16.
    let points: Vec<(f32, f32)> = (0..16).map(|i| (1.0 + i as f32 * 1e-6, 1.0)).collect();
    assert!(cost(&points, &solve(&points, 16)) == 0.0);
}

#[test]
fn a_value_of_no_weight_does_not_draw_the_table() {
    let mut points: Vec<(f32, f32)> = (0..32).map(|i| ((i % 16) as f32, 1.0)).collect();
    points.push((1000.0, 1e-12));
    let table = solve(&points, 16);
    assert!(cost(&points[..32], &table) < 1e-6, "{table:?}");
}

#[test]
fn radix_sort_agrees_with_the_standard_sort() {
    let mut random = Random::new(9);
    for n in [0, 1, 2, 1000] {
        let values: Vec<f32> = (0..n).map(|_| random.normal() as f32).collect();
        let mut keyed: Vec<u64> = values
            .iter()
            .map(|&v| u64::from(ordered_bits(v)) << 32)
            .collect();
        radix_sort(&mut keyed, &mut Vec::new());
        let mut expected = values;
        expected.sort_by(f32::total_cmp);
        let found: Vec<f32> = keyed
            .iter()
            .map(|k| from_ordered_bits((k >> 32) as u32))
            .collect();
        assert_eq!(found, expected);
    }
}
