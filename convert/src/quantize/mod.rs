//! From a weight matrix and the statistics of its inputs to a lookup-table matrix.
//!
//! ```text
//! Calibration --prepare--> Prepared --quantize(Matrix)--> LutMatrix + MatrixReport
//! ```
//!
//! A method is a row of stages, each a function from tables and codes to better ones:
//!
//! | method | tables | codes |
//! |---|---|---|
//! | [`Method::KMeansUnweighted`] | k-means | nearest value |
//! | [`Method::KMeans`] | k-means weighted by Σx² of the column | nearest value |
//! | [`Method::Gptq`] | the same | error feedback through the Hessian Σ x xᵀ |
//! | [`Method::TwoSided`] | refit after GPTQ | coordinate descent after GPTQ, in the metric of the loss |
//!
//! Everything here is deterministic: the same inputs and settings give the same bytes,
//! whatever the number of threads. Nothing here reads or writes files.

mod affine;
mod codebook;
mod error;
mod gptq;
mod hessian;
pub(crate) mod int8;
mod kmeans;
mod linalg;
mod order;
mod refine;
mod spent;
mod tile;
mod two_sided;
mod vector;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use anemone_schemas::lut::{DEFAULT_GROUP_ROWS, LutError, LutMatrix, LutShape, is_single, single};
use anemone_schemas::store::MatrixReport;
use half::f16;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

pub use affine::affine_round_trip;
pub use error::QuantizeError;
pub use hessian::Prepared;
pub use order::{Fitted, Rows, fit_order};
pub use refine::Round;

use codebook::{Codebook, round_to_f16};
use kmeans::KMeans;
use spent::{Part, Spent};
use tile::{Rounded, Tile};
use two_sided::{OutputMetric, Refinement};

/// Part of the key of stored matrices: raised whenever the same inputs and settings
/// would give other bytes than before.
pub const CODE_VERSION: u32 = 2;

/// Rows of the blocks of output Hessians that are gathered.
pub const OUTPUT_ROWS: usize = 256;

/// How tables and codes are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Method {
    /// Every weight counts the same.
    KMeansUnweighted,
    /// Every input column counts by its sum of squares.
    KMeans,
    /// [`Method::KMeans`] for the tables, then rounding with error feedback.
    Gptq,
    /// [`Method::Gptq`], then tables and codes refined together, weighted by an
    /// [`OutputHessian`] if there is one.
    TwoSided,
}

impl Method {
    /// The name used in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::KMeansUnweighted => "k-means-unweighted",
            Self::KMeans => "k-means",
            Self::Gptq => "gptq",
            Self::TwoSided => "two-sided",
        }
    }
}

/// What determines the result besides the inputs and the method.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Bits per weight; times `vector` one of [`anemone_schemas::lut::BITS`].
    pub bits: u8,
    /// Rows that an index stands for, one of [`anemone_schemas::lut::VECTORS`]. Beyond 1,
    /// [`Method::TwoSided`] is not possible.
    #[serde(default = "single", skip_serializing_if = "is_single")]
    pub vector: usize,
    /// Rows that share a table.
    pub group_rows: usize,
    /// What is added to the diagonal of the Hessian, as a fraction of its mean. The
    /// usual 0.01 fits the calibration text too closely when that has only 5 to 15 tokens per
    /// column.
    pub damping: f64,
    /// The same for the output Hessian of [`Method::TwoSided`].
    pub output_damping: f64,
    /// Rows of a band: [`Method::TwoSided`] weighs the outputs of a band together, and
    /// those of different bands apart. A multiple of `group_rows`.
    pub output_rows: usize,
    /// How often [`Method::TwoSided`] refits the tables.
    pub rounds: u32,
    /// Most passes over the codes after each refit.
    pub passes: u32,
}

impl Settings {
    /// The shape of a matrix in these tables.
    pub(crate) fn shape(&self, rows: usize, cols: usize) -> Result<LutShape, LutError> {
        let bits = usize::from(self.bits) * self.vector;
        let bits = u8::try_from(bits).unwrap_or(u8::MAX);
        LutShape::new(rows, cols, bits, self.group_rows)?.with_vector(self.vector)
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bits: 4,
            vector: 1,
            group_rows: DEFAULT_GROUP_ROWS,
            damping: 0.05,
            output_damping: 0.1,
            output_rows: OUTPUT_ROWS,
            rounds: 2,
            passes: 2,
        }
    }
}

/// A row-major weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Name of the tensor, for messages.
    pub name: &'a str,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// `rows * cols` finite weights.
    pub data: &'a [f32],
}

impl<'a> Matrix<'a> {
    fn row(&self, row: usize) -> &'a [f32] {
        &self.data[row * self.cols..][..self.cols]
    }

    fn lut_error(&self, source: LutError) -> QuantizeError {
        QuantizeError::Lut {
            name: self.name.to_string(),
            source,
        }
    }

    fn check(&self) -> Result<(), QuantizeError> {
        let expected = self.rows.saturating_mul(self.cols);
        if expected != self.data.len() || expected == 0 {
            return Err(QuantizeError::Length {
                name: self.name.to_string(),
                what: "weights",
                expected: expected.max(1),
                found: self.data.len(),
            });
        }
        match self.data.iter().position(|v| !v.is_finite()) {
            None => Ok(()),
            Some(at) => Err(QuantizeError::NotFinite {
                name: self.name.to_string(),
                what: "weight",
                row: at / self.cols,
                col: at % self.cols,
                value: self.data[at].into(),
            }),
        }
    }
}

/// Statistics of the inputs x of a layer over the calibration rows.
#[derive(Clone, Copy, Debug)]
pub struct Calibration<'a> {
    /// Where in the model, for messages.
    pub name: &'a str,
    /// Input features.
    pub cols: usize,
    /// Σ x xᵀ, `cols * cols`.
    pub hessian: &'a [f32],
    /// Σ x² per column: the diagonal of the Hessian, summed in f64.
    pub sumsq: &'a [f64],
    /// Number of rows.
    pub rows: u64,
}

impl Calibration<'_> {
    fn diagonal(&self, col: usize) -> f64 {
        self.hessian[col * self.cols + col].into()
    }
}

/// Σ g gᵀ of the gradients g of the loss at the outputs of a layer, of which the diagonal
/// blocks are kept.
#[derive(Clone, Copy, Debug)]
pub struct OutputHessian<'a> {
    /// Row-major blocks of `rows * rows`, as many as cover the matrix. Only ratios matter.
    pub blocks: &'a [f32],
    /// Rows of a block; whole bands, of which the last may be the only one.
    pub rows: usize,
}

/// Settings together with the threads that do the work.
#[derive(Debug)]
pub struct Quantizer {
    settings: Settings,
    pool: rayon::ThreadPool,
    spent: Spent,
}

impl Quantizer {
    /// A quantizer with `jobs` threads; 0 means one per core. The number has no
    /// influence on the result.
    ///
    /// # Errors
    /// Settings out of range, or threads that can not be started.
    pub fn new(settings: Settings, jobs: usize) -> Result<Self, QuantizeError> {
        let least = settings.vector;
        settings
            .shape(least, 1)
            .map_err(|source| QuantizeError::Lut {
                name: "settings".to_string(),
                source,
            })?;
        for (setting, value) in [
            ("damping", settings.damping),
            ("output_damping", settings.output_damping),
        ] {
            if !(value > 0.0 && value <= 1.0) {
                return Err(QuantizeError::Setting {
                    setting,
                    value,
                    expected: "above 0 and at most 1",
                });
            }
        }
        if settings.rounds == 0 {
            return Err(QuantizeError::Setting {
                setting: "rounds",
                value: 0.0,
                expected: "at least 1",
            });
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(jobs)
            .build()
            .map_err(|source| QuantizeError::Threads { jobs, source })?;
        Ok(Self {
            settings,
            pool,
            spent: Spent::default(),
        })
    }

    /// Seconds so far by part of the work, summed over threads.
    pub fn seconds(&self) -> [(&'static str, f64); 4] {
        self.spent.seconds()
    }

    /// Checks statistics and does the work that all matrices with these inputs share.
    ///
    /// # Errors
    /// Statistics of the wrong length or with numbers that are not finite. Statistics
    /// that are merely too poor for `method` are no error: a simpler method takes its
    /// place, and the report says so.
    pub fn prepare<'a>(
        &self,
        calibration: Calibration<'a>,
        method: Method,
    ) -> Result<Prepared<'a>, QuantizeError> {
        let work = || Prepared::new(calibration, method, &self.settings);
        self.pool.install(|| self.spent.time(Part::Factorize, work))
    }

    /// The tables alone: bit patterns of f16, as in [`LutMatrix::tables`].
    ///
    /// # Errors
    /// As [`Quantizer::quantize`].
    pub fn tables(
        &self,
        matrix: Matrix<'_>,
        prepared: &Prepared<'_>,
    ) -> Result<Vec<u16>, QuantizeError> {
        let shape = self.shape(matrix, prepared)?;
        let book = self
            .pool
            .install(|| kmeans_tables(matrix, shape, &prepared.weights, &self.spent))?;
        let values = book.into_values().into_iter();
        Ok(values.map(|v| f16::from_f32(v).to_bits()).collect())
    }

    /// Quantizes a matrix. `output` is used by [`Method::TwoSided`] only.
    ///
    /// # Errors
    /// A matrix or output Hessian that does not fit the calibration and settings, or
    /// has numbers that are not finite or beyond the range of f16.
    pub fn quantize(
        &self,
        matrix: Matrix<'_>,
        prepared: &Prepared<'_>,
        output: Option<OutputHessian<'_>>,
    ) -> Result<(LutMatrix, MatrixReport), QuantizeError> {
        let shape = self.shape(matrix, prepared)?;
        let refine = prepared.method == Method::TwoSided;
        if refine && shape.vector > 1 {
            return Err(QuantizeError::Setting {
                setting: "vector",
                value: shape.vector as f64,
                expected: "1 for the two-sided method",
            });
        }
        let metric = OutputMetric::new(output, matrix.name, matrix.rows, &self.settings)?;
        let (tables, rounded) = self.pool.install(|| {
            let book = kmeans_tables(matrix, shape, &prepared.weights, &self.spent)?;
            let rounded: Vec<(Vec<f32>, Rounded)> =
                Tile::cut(matrix, shape.group_rows, refine.then(|| metric.rows()))
                    .par_iter()
                    .map(|tile| {
                        let Some(by) = &prepared.rounding else {
                            let rounded = tile.round_to_nearest(&book, &prepared.calibration);
                            return Ok((Vec::new(), rounded));
                        };
                        let round = || gptq::round(tile, &book, prepared, by);
                        let start = self.spent.time(Part::Gptq, round);
                        if !refine {
                            return Ok((Vec::new(), start));
                        }
                        self.spent.time(Part::TwoSided, || {
                            let mut refinement = Refinement::new(
                                tile,
                                &book,
                                &start.codes,
                                prepared,
                                by.damping,
                                &metric,
                            );
                            refinement.run(&self.settings, matrix.name)?;
                            Ok(refinement.finish())
                        })
                    })
                    .collect::<Result<_, QuantizeError>>()?;
            let (tables, rounded): (Vec<_>, Vec<_>) = rounded.into_iter().unzip();
            let tables = if refine {
                tables.concat()
            } else {
                book.into_values()
            };
            Ok((tables, rounded))
        })?;
        let report = report(matrix, prepared, &rounded);
        let codes: Vec<u8> = rounded.into_iter().flat_map(|tile| tile.codes).collect();
        let tables = tables.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
        let lut = LutMatrix::from_codes(shape, tables, &codes)
            .map_err(|source| matrix.lut_error(source))?;
        Ok((lut, report))
    }

    /// Checks a matrix against the calibration and gives it its shape.
    fn shape(
        &self,
        matrix: Matrix<'_>,
        prepared: &Prepared<'_>,
    ) -> Result<LutShape, QuantizeError> {
        matrix.check()?;
        if matrix.cols != prepared.calibration.cols {
            return Err(QuantizeError::Length {
                name: matrix.name.to_string(),
                what: "columns as in the calibration",
                expected: prepared.calibration.cols,
                found: matrix.cols,
            });
        }
        self.settings
            .shape(matrix.rows, matrix.cols)
            .map_err(|source| matrix.lut_error(source))
    }
}

/// Prepares and quantizes a single matrix.
///
/// # Errors
/// As [`Quantizer::new`], [`Quantizer::prepare`] and [`Quantizer::quantize`].
pub fn quantize_matrix(
    matrix: Matrix<'_>,
    calibration: Calibration<'_>,
    method: Method,
    settings: Settings,
    jobs: usize,
) -> Result<(LutMatrix, MatrixReport), QuantizeError> {
    let quantizer = Quantizer::new(settings, jobs)?;
    let prepared = quantizer.prepare(calibration, method)?;
    quantizer.quantize(matrix, &prepared, None)
}

/// One k-means table per group of rows, rounded to f16.
fn kmeans_tables(
    matrix: Matrix<'_>,
    shape: LutShape,
    weights: &[f32],
    spent: &Spent,
) -> Result<Codebook, QuantizeError> {
    let tables: Vec<Vec<f32>> = (0..shape.groups())
        .into_par_iter()
        .map_init(KMeans::default, |kmeans, group| {
            let first_row = group * shape.group_rows;
            let rows = first_row..(first_row + shape.group_rows).min(matrix.rows);
            let solve = || {
                if shape.vector > 1 {
                    return vector::table(matrix, rows, weights, shape, kmeans);
                }
                let points = rows.flat_map(|r| {
                    let row = matrix.row(r).iter().copied();
                    row.zip(weights.iter().copied())
                });
                kmeans.solve(points, shape.entries())
            };
            spent
                .time(Part::KMeans, solve)
                .into_iter()
                .map(|value| round_to_f16(value, matrix.name, first_row))
                .collect()
        })
        .collect::<Result<_, _>>()?;
    Ok(Codebook::of_vectors(
        shape.entries(),
        shape.vector,
        tables.concat(),
    ))
}

fn report(matrix: Matrix<'_>, prepared: &Prepared<'_>, rounded: &[Rounded]) -> MatrixReport {
    let energy: f64 = matrix.data.iter().map(|&w| f64::from(w).powi(2)).sum();
    let plain: f64 = rounded.iter().map(|tile| tile.plain).sum();
    let weighted: f64 = rounded.iter().map(|tile| tile.weighted).sum();
    MatrixReport {
        method: prepared.method.name().to_string(),
        fallback: prepared.fallback.clone(),
        damping: prepared.rounding.as_ref().map(|by| by.damping),
        plain_error: if energy > 0.0 {
            (plain / energy).sqrt()
        } else {
            0.0
        },
        weighted_error: weighted / prepared.calibration.rows.max(1) as f64,
        dead_columns: prepared.dead.iter().filter(|&&dead| dead).count() as u64,
    }
}
