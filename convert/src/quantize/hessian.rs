//! The statistics of a layer's inputs, checked and brought into the form that
//! the methods use.

use rayon::prelude::*;

use super::linalg::{Factor, factor};
use super::{Calibration, Method, QuantizeError, Settings};

/// Multiples of the damping asked for, tried until the Hessian is positive definite; the
/// last resort is as much as the mean of the diagonal itself.
const DAMPING_LADDER: [f64; 5] = [1.0, 2.0, 5.0, 10.0, 25.0];

/// Columns count in k-means with at least this fraction of the mean weight, so
/// that no table is decided by rounding noise.
const WEIGHT_FLOOR: f64 = 1e-6;

/// A calibration made ready for one method. All matrices that share the inputs (`q`,
/// `k` and `v`; `gate` and `up`) share it, and with it the factorization.
pub struct Prepared<'a> {
    pub(super) calibration: Calibration<'a>,
    /// The method that is used: not the one asked for if there is a fallback.
    pub(super) method: Method,
    /// Weight of each column in k-means.
    pub(super) weights: Vec<f32>,
    /// Mean of the diagonal of the Hessian.
    pub(super) mean_diagonal: f64,
    /// Columns whose inputs were all zero.
    pub(super) dead: Vec<bool>,
    /// The factored Hessian, for methods with error feedback.
    pub(super) rounding: Option<Rounding>,
    /// Why the method can not be used on these statistics.
    pub(super) fallback: Option<String>,
}

/// What rounding with error feedback needs.
pub(super) struct Rounding {
    /// Columns in the order of the factor: those with the least signal first.
    pub(super) order: Vec<usize>,
    pub(super) factor: Factor,
    /// Damping as a fraction of the mean diagonal.
    pub(super) damping: f64,
}

impl<'a> Prepared<'a> {
    pub(super) fn new(
        calibration: Calibration<'a>,
        method: Method,
        settings: &Settings,
    ) -> Result<Self, QuantizeError> {
        check(&calibration)?;
        let n = calibration.cols;
        let dead: Vec<bool> = (0..n).map(|c| calibration.diagonal(c) <= 0.0).collect();
        let mean_diagonal = (0..n).map(|c| calibration.diagonal(c)).sum::<f64>() / n as f64;
        let mut prepared = Self {
            calibration,
            method,
            weights: vec![1.0; n],
            mean_diagonal,
            dead,
            rounding: None,
            fallback: None,
        };
        if method == Method::KMeansUnweighted {
            return Ok(prepared);
        }
        let mean = calibration.sumsq.iter().sum::<f64>() / n as f64;
        if mean <= 0.0 || mean_diagonal <= 0.0 {
            prepared.method = Method::KMeansUnweighted;
            prepared.fallback = Some(
                "unweighted k-means: the inputs are zero on every calibration row".to_string(),
            );
            return Ok(prepared);
        }
        // Relative to the mean: any scale of the inputs fits into f32.
        let relative = calibration.sumsq.iter().map(|s| s / mean);
        prepared.weights = relative.map(|w| w.max(WEIGHT_FLOOR) as f32).collect();
        if method != Method::KMeans {
            match prepared.factor(settings.damping) {
                Ok(rounding) => prepared.rounding = Some(rounding),
                Err(column) => {
                    prepared.method = Method::KMeans;
                    prepared.fallback = Some(format!(
                        "weighted k-means: the Hessian is not positive definite at column {column}, even with its mean diagonal added"
                    ));
                }
            }
        }
        Ok(prepared)
    }

    /// What is added to the diagonal of the Hessian at column `c`. A dead column is no
    /// part of the problem; the mean on its diagonal keeps the matrix invertible.
    pub(super) fn added(&self, c: usize, damping: f64) -> f64 {
        self.mean_diagonal * (damping + f64::from(u8::from(self.dead[c])))
    }

    /// Climbs the damping ladder; the error is the column of the last bad pivot.
    fn factor(&self, damping: f64) -> Result<Rounding, usize> {
        let n = self.calibration.cols;
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| {
            self.calibration
                .diagonal(a)
                .total_cmp(&self.calibration.diagonal(b))
        });
        let steps = DAMPING_LADDER.map(|step| step * damping);
        let mut bad_pivot = 0;
        for damping in steps.into_iter().filter(|&d| d < 1.0).chain([1.0]) {
            // Read along the rows: the factorization fills one column at a time.
            let element = |row: usize, col: usize| {
                let value = f64::from(self.calibration.hessian[order[col] * n + order[row]]);
                if row == col {
                    value + self.added(order[row], damping)
                } else {
                    value
                }
            };
            match factor(n, element) {
                Ok(factor) => {
                    return Ok(Rounding {
                        order,
                        factor,
                        damping,
                    });
                }
                Err(pivot) => bad_pivot = pivot,
            }
        }
        Err(order[bad_pivot])
    }
}

fn check(calibration: &Calibration<'_>) -> Result<(), QuantizeError> {
    let n = calibration.cols;
    let length = |what, expected, found| {
        if expected == found {
            return Ok(());
        }
        Err(QuantizeError::Length {
            name: calibration.name.to_string(),
            what,
            expected,
            found,
        })
    };
    length("Hessian elements", n * n, calibration.hessian.len())?;
    length("sums of squares", n, calibration.sumsq.len())?;
    let not_finite = |what, row, col, value| QuantizeError::NotFinite {
        name: calibration.name.to_string(),
        what,
        row,
        col,
        value,
    };
    if let Some(col) = calibration.sumsq.iter().position(|v| !v.is_finite()) {
        return Err(not_finite("sum of squares", 0, col, calibration.sumsq[col]));
    }
    let bad = calibration
        .hessian
        .par_chunks(n.max(1))
        .enumerate()
        .find_map_first(|(row, line)| {
            let col = line.iter().position(|v| !v.is_finite())?;
            Some((row, col, f64::from(line[col])))
        });
    match bad {
        Some((row, col, value)) => Err(not_finite("Hessian", row, col, value)),
        None => Ok(()),
    }
}
