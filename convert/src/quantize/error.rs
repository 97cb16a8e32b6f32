//! What can stop the quantization of a matrix.

use anemone_schemas::lut::LutError;

/// Why a matrix was not quantized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// Input of another length than its shape asks for.
    #[error("`{name}`: expected {expected} {what}, found {found}")]
    Length {
        /// The matrix or calibration site.
        name: String,
        /// Which input.
        what: &'static str,
        /// What the shape asks for.
        expected: usize,
        /// What is there.
        found: usize,
    },
    /// A weight or statistic that is infinite or not a number.
    #[error("`{name}`: {what} at row {row}, column {col} is {value}, expected a finite number")]
    NotFinite {
        /// The matrix or calibration site.
        name: String,
        /// `weight`, `Hessian`, ...
        what: &'static str,
        /// Row.
        row: usize,
        /// Column.
        col: usize,
        /// The value.
        value: f64,
    },
    /// A table value beyond the range of f16.
    #[error(
        "`{name}`: table value {value} of rows {first_row}.. is beyond the range of f16; hint: scale the tensor down in the checkpoint"
    )]
    F16Range {
        /// The matrix.
        name: String,
        /// First row of the group.
        first_row: usize,
        /// The value.
        value: f64,
    },
    /// A shape, index width or group size that no lookup-table matrix can have.
    #[error("`{name}`: {source}")]
    Lut {
        /// The matrix.
        name: String,
        /// What is wrong.
        source: LutError,
    },
    /// A setting out of range.
    #[error("setting `{setting}` is {value}, expected {expected}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// The allowed range.
        expected: &'static str,
    },
    /// The worker threads could not be started.
    #[error("could not start {jobs} worker threads: {source}")]
    Threads {
        /// How many.
        jobs: usize,
        /// What the system said.
        source: rayon::ThreadPoolBuildError,
    },
}
