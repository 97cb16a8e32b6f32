use half::f16;
use nalgebra::DMatrix;

use super::testing::{Problem, Random};
use super::*;

fn run(problem: &Problem, method: Method, settings: Settings) -> (LutMatrix, MatrixReport) {
    quantize_matrix(problem.matrix(), problem.calibration(), method, settings, 2).unwrap()
}

fn objective(problem: &Problem, method: Method, settings: Settings) -> f64 {
    problem.objective(&run(problem, method, settings).0.dequantize())
}

#[test]
fn every_method_lowers_the_error_of_the_output_further() {
    for (seed, (rows, cols)) in [(32, 48), (64, 200), (96, 300)].into_iter().enumerate() {
        for bits in [2, 3, 4, 6] {
            let problem = Problem::new(seed as u64, rows, cols);
            let settings = Settings {
                bits,
                damping: 0.01,
                ..Settings::default()
            };
            let [weighted, gptq] =
                [Method::KMeans, Method::Gptq].map(|m| objective(&problem, m, settings));
            assert!(gptq < 0.8 * weighted, "{gptq} against {weighted}");
        }
    }
}

#[test]
fn weighting_lowers_the_weighted_error_of_columns_that_matter() {
    // Columns with a strong signal have weights of another size, as trained layers do.
    let mut problem = Problem::new(5, 64, 128);
    problem.hessian.fill(0.0);
    for c in 0..128 {
        problem.hessian[c * 128 + c] = if c % 8 == 0 { 100.0 } else { 1.0 };
        for r in (0..64).filter(|_| c % 8 == 0) {
            problem.weights[r * 128 + c] *= 0.3;
        }
    }
    problem.update_sumsq();
    let [plain, weighted] = [Method::KMeansUnweighted, Method::KMeans]
        .map(|method| run(&problem, method, Settings::default()).1);
    assert!(weighted.weighted_error < 0.5 * plain.weighted_error);
    assert!(weighted.plain_error > plain.plain_error);
}

#[test]
fn the_report_holds_the_measured_errors() {
    let mut problem = Problem::new(11, 70, 90);
    // A dead column: its inputs are zero, its weights are not.
    for i in 0..90 {
        problem.hessian[i * 90 + 7] = 0.0;
        problem.hessian[7 * 90 + i] = 0.0;
    }
    problem.update_sumsq();
    for method in [Method::KMeansUnweighted, Method::KMeans, Method::Gptq] {
        let (lut, report) = run(&problem, method, Settings::default());
        let q = lut.dequantize();
        let objective = problem.objective(&q) / problem.samples as f64;
        let off = report.weighted_error / objective - 1.0;
        assert!(off.abs() < 1e-4, "{method:?} is off by {off}");
        let squares =
            |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v).powi(2)).sum::<f64>();
        let error = squares(&mut q.iter().zip(&problem.weights).map(|(q, w)| q - w));
        let energy = squares(&mut problem.weights.iter().copied());
        let off = report.plain_error / (error / energy).sqrt() - 1.0;
        assert!(off.abs() < 1e-5, "{method:?} is off by {off}");
        assert_eq!(report.method, method.name());
        assert_eq!(report.dead_columns, 1);
        assert_eq!(report.damping.is_some(), method == Method::Gptq);
        // The dead column is rounded like any other.
        for r in 0..70 {
            assert!((q[r * 90 + 7] - problem.weights[r * 90 + 7]).abs() < 0.02);
        }
    }
}

/// GPTQ as the paper writes it, in f64: rows of the upper Cholesky factor of the inverse.
fn textbook_gptq(problem: &Problem, tables: &LutMatrix, damping: f64) -> Vec<f32> {
    let n = problem.cols;
    let mean = problem.sumsq.iter().sum::<f64>() / n as f64;
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| problem.sumsq[b].total_cmp(&problem.sumsq[a]));
    let h = DMatrix::from_fn(n, n, |i, j| {
        let value = f64::from(problem.hessian[order[i] * n + order[j]]);
        value + if i == j { damping * mean } else { 0.0 }
    });
    let upper = h.try_inverse().unwrap().cholesky().unwrap().l().transpose();
    let mut out = vec![0.0; problem.rows * n];
    for row in 0..problem.rows {
        let table = tables.table(row / tables.group_rows);
        let mut w: Vec<f64> = order
            .iter()
            .map(|&c| f64::from(problem.weights[row * n + c]))
            .collect();
        for k in 0..n {
            let q = *table
                .iter()
                .min_by(|a, b| {
                    let distance = |v: f32| (f64::from(v) - w[k]).abs();
                    distance(**a).total_cmp(&distance(**b))
                })
                .unwrap();
            let error = (w[k] - f64::from(q)) / upper[(k, k)];
            for t in k..n {
                w[t] -= error * upper[(k, t)];
            }
            out[row * n + order[k]] = q;
        }
    }
    out
}

#[test]
fn one_factorization_gives_what_gptq_gives() {
    // More columns than a block, and not a multiple of it.
    let problem = Problem::new(21, 40, 300);
    let (lut, report) = run(&problem, Method::Gptq, Settings::default());
    let expected = textbook_gptq(&problem, &lut, report.damping.unwrap());
    let same = lut
        .dequantize()
        .iter()
        .zip(&expected)
        .filter(|(a, b)| a.to_bits() == b.to_bits())
        .count();
    // A tie in one precision can fall the other way in another and shift what follows.
    assert!(
        same as f64 > 0.995 * expected.len() as f64,
        "{same} of {}",
        expected.len()
    );
    let ratio = problem.objective(&lut.dequantize()) / problem.objective(&expected);
    assert!((ratio - 1.0).abs() < 0.005, "{ratio}");
}

#[test]
fn the_bytes_do_not_depend_on_the_number_of_jobs() {
    let problem = Problem::new(31, 300, 260);
    for method in [Method::KMeans, Method::Gptq, Method::TwoSided] {
        let run = |jobs| {
            let settings = Settings::default();
            quantize_matrix(
                problem.matrix(),
                problem.calibration(),
                method,
                settings,
                jobs,
            )
            .unwrap()
        };
        let one = run(1);
        assert!(one == run(2) && one == run(4), "{method:?}");
    }
}

#[test]
fn a_matrix_may_end_within_a_group_and_a_group_may_be_larger_than_a_tile() {
    for group_rows in [1, 32, 48, 1000] {
        let problem = Problem::new(41, 150, 40);
        let settings = Settings {
            group_rows,
            ..Settings::default()
        };
        let [weighted, gptq] =
            [Method::KMeans, Method::Gptq].map(|m| objective(&problem, m, settings));
        assert!(gptq < weighted, "{group_rows}: {gptq} against {weighted}");
        let (lut, _) = run(&problem, Method::Gptq, settings);
        assert_eq!(lut.tables.len(), 150usize.div_ceil(group_rows) * 16);
    }
}

#[test]
fn a_hessian_of_rank_one_is_damped() {
    let mut problem = Problem::new(51, 32, 64);
    let mut random = Random::new(1);
    let x: Vec<f32> = (0..64).map(|_| random.normal() as f32).collect();
    for i in 0..64 {
        for j in 0..64 {
            problem.hessian[i * 64 + j] = x[i] * x[j];
        }
    }
    problem.update_sumsq();
    let (lut, report) = run(&problem, Method::Gptq, Settings::default());
    assert_eq!(report.fallback, None);
    let nearest = objective(&problem, Method::KMeans, Settings::default());
    assert!(problem.objective(&lut.dequantize()) < nearest);
}

#[test]
fn a_hessian_that_is_not_positive_definite_climbs_the_ladder_or_falls_back() {
    let mut problem = Problem::new(52, 32, 64);
    let entry = |i: usize, j: usize| i * 64 + j;
    problem.hessian.fill(0.0);
    for i in 0..64 {
        problem.hessian[entry(i, i)] = 1.0;
    }
    // Eigenvalues 1 ± 1.2: a fifth of the mean diagonal is missing.
    problem.hessian[entry(3, 9)] = 1.2;
    problem.hessian[entry(9, 3)] = 1.2;
    problem.update_sumsq();
    let (_, report) = run(&problem, Method::Gptq, Settings::default());
    assert_eq!((report.damping, report.fallback), (Some(0.25), None));
    // Nothing on the ladder repairs this one.
    problem.hessian[entry(3, 9)] = 5.0;
    problem.hessian[entry(9, 3)] = 5.0;
    let (lut, report) = run(&problem, Method::Gptq, Settings::default());
    let reason = report.fallback.unwrap();
    assert!(
        reason.contains("not positive definite at column 9"),
        "{reason}"
    );
    assert_eq!((report.method.as_str(), report.damping), ("k-means", None));
    assert_eq!(lut, run(&problem, Method::KMeans, Settings::default()).0);
}

#[test]
fn silent_inputs_fall_back_to_unweighted_kmeans() {
    let mut problem = Problem::new(53, 32, 16);
    problem.hessian.fill(0.0);
    problem.update_sumsq();
    let (lut, report) = run(&problem, Method::Gptq, Settings::default());
    assert_eq!(report.method, "k-means-unweighted");
    assert!(
        report
            .fallback
            .unwrap()
            .contains("zero on every calibration row")
    );
    assert_eq!((report.dead_columns, report.weighted_error), (16, 0.0));
    let unweighted = run(&problem, Method::KMeansUnweighted, Settings::default()).0;
    assert_eq!(lut, unweighted);
}

#[test]
fn bad_numbers_are_named() {
    let error = |change: &dyn Fn(&mut Problem)| {
        let mut problem = Problem::new(54, 32, 16);
        change(&mut problem);
        let (matrix, calibration) = (problem.matrix(), problem.calibration());
        quantize_matrix(matrix, calibration, Method::Gptq, Settings::default(), 1)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        error(&|p| p.hessian[5 * 16 + 2] = f32::NAN),
        "`x`: Hessian at row 5, column 2 is NaN, expected a finite number"
    );
    assert_eq!(
        error(&|p| p.sumsq[3] = f64::INFINITY),
        "`x`: sum of squares at row 0, column 3 is inf, expected a finite number"
    );
    assert_eq!(
        error(&|p| p.weights[17] = f32::NEG_INFINITY),
        "`w`: weight at row 1, column 1 is -inf, expected a finite number"
    );
    assert!(error(&|p| p.weights[17] = 1e5).contains("of rows 0.. is beyond the range of f16"));
    assert_eq!(
        error(&|p| p.weights.truncate(500)),
        "`w`: expected 512 weights, found 500"
    );
    assert_eq!(
        error(&|p| p.sumsq.truncate(9)),
        "`x`: expected 16 sums of squares, found 9"
    );
    let wrong = Settings {
        bits: 5,
        ..Settings::default()
    };
    let refused = Quantizer::new(wrong, 1).unwrap_err().to_string();
    assert!(refused.contains("5 bits per index"), "{refused}");
    let wrong = Settings {
        damping: 0.0,
        ..Settings::default()
    };
    let refused = Quantizer::new(wrong, 1).unwrap_err().to_string();
    assert!(refused.contains("setting `damping` is 0"), "{refused}");
}

#[test]
fn weights_that_are_table_values_survive_exactly() {
    let mut problem = Problem::new(61, 64, 80);
    for (i, w) in problem.weights.iter_mut().enumerate() {
        *w = f16::from_f32((i * 7 % 16) as f32 * 0.01 - 0.07).to_f32();
    }
    for method in [Method::KMeans, Method::Gptq, Method::TwoSided] {
        let (lut, report) = run(&problem, method, Settings::default());
        assert_eq!(lut.dequantize(), problem.weights);
        assert!(report.plain_error == 0.0 && report.weighted_error == 0.0);
    }
}

/// Blocks of gradients that share directions, as the features of a layer do.
fn output_blocks(seed: u64, rows: usize, group_rows: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..rows.div_ceil(group_rows))
        .flat_map(|_| testing::correlated_hessian(&mut random, group_rows, 4 * group_rows))
        .collect()
}

/// tr(O E H Eᵀ) summed over the groups, term by term in f64.
fn two_sided_objective(problem: &Problem, blocks: &[f32], group_rows: usize, q: &[f32]) -> f64 {
    let n = problem.cols;
    let e = DMatrix::from_fn(problem.rows, n, |r, c| {
        f64::from(q[r * n + c] - problem.weights[r * n + c])
    });
    let h = DMatrix::from_fn(n, n, |i, j| f64::from(problem.hessian[i * n + j]));
    let ehe = &e * h * e.transpose();
    let mut sum = 0.0;
    for r in 0..problem.rows {
        let first = r / group_rows * group_rows;
        for s in first..(first + group_rows).min(problem.rows) {
            sum += f64::from(blocks[r * group_rows + s - first]) * ehe[(r, s)];
        }
    }
    sum
}

#[test]
fn two_sided_rounding_lowers_the_two_sided_error() {
    // Groups that fill tiles, that are cut short by the end, and that exceed a tile.
    for (rows, group_rows) in [(160, 32), (75, 32), (150, 150)] {
        let problem = Problem::new(71, rows, 260);
        let blocks = output_blocks(72, rows, group_rows);
        let settings = Settings {
            group_rows,
            ..Settings::default()
        };
        let quantizer = Quantizer::new(settings, 2).unwrap();
        let run = |method, output: Option<&[f32]>| {
            let prepared = quantizer.prepare(problem.calibration(), method).unwrap();
            let output = output.map(|blocks| OutputHessian {
                blocks,
                rows: group_rows,
            });
            let (lut, report) = quantizer
                .quantize(problem.matrix(), &prepared, output)
                .unwrap();
            let q = lut.dequantize();
            let off = report.weighted_error * problem.samples as f64 / problem.objective(&q) - 1.0;
            assert!(off.abs() < 1e-3, "{method:?} is off by {off}");
            let both = two_sided_objective(&problem, &blocks, group_rows, &q);
            (problem.objective(&q), both)
        };
        let gptq = run(Method::Gptq, None);
        let one_sided = run(Method::TwoSided, None);
        let two_sided = run(Method::TwoSided, Some(&blocks));
        assert!(one_sided.0 < gptq.0, "{one_sided:?} against {gptq:?}");
        assert!(two_sided.1 < 0.8 * gptq.1, "{two_sided:?} against {gptq:?}");
        assert!(
            two_sided.1 < 0.9 * one_sided.1,
            "{two_sided:?} against {one_sided:?}"
        );
    }
}

#[test]
fn a_wrong_output_hessian_is_named() {
    let problem = Problem::new(73, 40, 16);
    let quantizer = Quantizer::new(Settings::default(), 1).unwrap();
    let prepared = quantizer
        .prepare(problem.calibration(), Method::TwoSided)
        .unwrap();
    let error = |blocks: &[f32]| {
        quantizer
            .quantize(
                problem.matrix(),
                &prepared,
                Some(OutputHessian { blocks, rows: 32 }),
            )
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        error(&[1.0; 1024]),
        "`w`: expected 2048 elements of the output Hessian, found 1024"
    );
    let mut blocks = output_blocks(1, 40, 32);
    blocks[33 * 32 + 5] = f32::NAN;
    assert!(error(&blocks).starts_with("`w`: output Hessian at row 33, column 5 is NaN"));
}

#[test]
fn tables_of_normal_weights_reach_the_lloyd_max_quantizer() {
    // Mean squared error of the best 16 levels for a normal variable of variance 1: Max,
    // *Quantizing for Minimum Distortion*, 1960, table I.
    const MAX_1960: f64 = 0.009_497;
    let (rows, cols) = (128, 1024);
    let mut random = Random::new(91);
    let weights: Vec<f32> = (0..rows * cols)
        .map(|_| (0.02 * random.normal()) as f32)
        .collect();
    let mut hessian = vec![0f32; cols * cols];
    (0..cols).for_each(|c| hessian[c * cols + c] = 1.0);
    let matrix = Matrix {
        name: "w",
        rows,
        cols,
        data: &weights,
    };
    let calibration = Calibration {
        name: "x",
        cols,
        hessian: &hessian,
        sumsq: &vec![1.0; cols],
        rows: 1,
    };
    let settings = Settings {
        group_rows: 128,
        ..Settings::default()
    };
    let method = Method::KMeansUnweighted;
    let report = quantize_matrix(matrix, calibration, method, settings, 1)
        .unwrap()
        .1;
    // The tails make 131072 samples an estimate with a standard deviation of 0.85%.
    let ratio = report.plain_error.powi(2) / MAX_1960;
    assert!((ratio - 1.0).abs() < 0.025, "{ratio}");
}
