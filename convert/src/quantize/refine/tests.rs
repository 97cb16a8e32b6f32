//! Rounds make up for an error that lies elsewhere.

use super::*;
use crate::quantize::testing::{Problem, Random, correlated_hessian};
use crate::quantize::{Method, Settings};

const ROWS: usize = 96;
const COLS: usize = 160;

/// A matrix at whose outputs another one adds the error C x.
struct Beside {
    problem: Problem,
    other: Vec<f32>,
    output: Vec<f32>,
}

impl Beside {
    fn new() -> Self {
        let mut random = Random::new(11);
        let problem = Problem::new(7, ROWS, COLS);
        // About as large as what quantizing leaves.
        let other = (0..ROWS * COLS)
            .map(|_| (0.002 * random.normal()) as f32)
            .collect();
        let output = correlated_hessian(&mut random, ROWS, 300);
        Self {
            problem,
            other,
            output,
        }
    }

    fn output(&self) -> OutputHessian<'_> {
        OutputHessian {
            blocks: &self.output,
            rows: ROWS,
        }
    }

    /// `½ tr(O F H Fᵀ) / positions` with F = Q - W + C, and its gradient O F H / positions, term
    /// by term. O is divided by the positions, as gradients at single positions add up to it.
    fn loss(&self, q: &[f32]) -> (f64, Vec<f32>) {
        let f: Vec<f64> = (0..ROWS * COLS)
            .map(|i| {
                f64::from(q[i]) - f64::from(self.problem.weights[i]) + f64::from(self.other[i])
            })
            .collect();
        let positions = self.problem.samples as f64;
        let mean = self.problem.sumsq.iter().sum::<f64>() / COLS as f64;
        let fh: Vec<f64> = (0..ROWS * COLS)
            .map(|i| {
                let (r, c) = (i / COLS, i % COLS);
                let terms = (0..COLS)
                    .map(|k| f[r * COLS + k] * f64::from(self.problem.hessian[k * COLS + c]));
                terms.sum::<f64>()
            })
            .collect();
        // Statistics of the outputs are summed with |x|², so H counts by its ratios alone.
        let gradient: Vec<f64> = (0..ROWS * COLS)
            .map(|i| {
                let (r, c) = (i / COLS, i % COLS);
                let terms =
                    (0..ROWS).map(|k| f64::from(self.output[r * ROWS + k]) * fh[k * COLS + c]);
                terms.sum::<f64>() / (positions * mean)
            })
            .collect();
        let loss = 0.5 * gradient.iter().zip(&f).map(|(g, f)| g * f).sum::<f64>();
        (loss, gradient.iter().map(|&g| g as f32).collect())
    }
}

fn quantized(quantizer: &Quantizer, beside: &Beside) -> LutMatrix {
    let problem = &beside.problem;
    let prepared = quantizer.prepare(problem.calibration(), Method::TwoSided);
    let made = quantizer.quantize(problem.matrix(), &prepared.unwrap(), Some(beside.output()));
    made.unwrap().0
}

#[test]
fn rounds_make_up_for_an_error_elsewhere_and_not_without_one() {
    let quantizer = Quantizer::new(Settings::default(), 1).unwrap();
    let mut beside = Beside::new();
    let run = |beside: &Beside| {
        let mut lut = quantized(&quantizer, beside);
        let before = beside.loss(&lut.dequantize()).0;
        let problem = &beside.problem;
        let prepared = quantizer
            .prepare(problem.calibration(), Method::KMeans)
            .unwrap();
        let mut pull = vec![0.0; ROWS * COLS];
        for _ in 0..12 {
            let (_, gradient) = beside.loss(&lut.dequantize());
            let mut round = Round {
                lut: &lut,
                gradient: &gradient,
                pull: &mut pull,
                rate: 0.3,
            };
            lut = quantizer
                .refine(problem.matrix(), &prepared, beside.output(), &mut round)
                .unwrap()
                .0;
        }
        (before, beside.loss(&lut.dequantize()).0)
    };
    let (before, after) = run(&beside);
    assert!(after < 0.6 * before, "{before} {after}");
    // Where nothing else is wrong there is little to gain, and nothing is lost.
    beside.other.fill(0.0);
    let (alone, after) = run(&beside);
    assert!(alone < before && after < alone, "{alone} {after}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let quantizer = Quantizer::new(Settings::default(), 1).unwrap();
    let beside = Beside::new();
    let lut = quantized(&quantizer, &beside);
    let problem = &beside.problem;
    let prepared = quantizer
        .prepare(problem.calibration(), Method::KMeans)
        .unwrap();
    let refuse = |gradient: &[f32], pull: &mut [f32]| {
        let mut round = Round {
            lut: &lut,
            gradient,
            pull,
            rate: 0.1,
        };
        let refined = quantizer.refine(problem.matrix(), &prepared, beside.output(), &mut round);
        refined.err().map(|e| e.to_string()).unwrap()
    };
    let mut values = vec![0.0; ROWS * COLS];
    let said = refuse(&values[1..], &mut vec![0.0; ROWS * COLS]);
    assert!(said.contains("gradient"), "{said}");
    let said = refuse(&values, &mut [0.0]);
    assert!(said.contains("pull"), "{said}");
    values[COLS + 2] = f32::NAN;
    let said = refuse(&values, &mut vec![0.0; ROWS * COLS]);
    assert!(said.contains("row 1") && said.contains("NaN"), "{said}");
}
