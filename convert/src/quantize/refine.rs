//! One more round over a quantized matrix, with the gradient of the whole model.

use anemone_schemas::lut::LutMatrix;
use anemone_schemas::store::MatrixReport;
use half::f16;
use rayon::prelude::*;

use super::codebook::Codebook;
use super::tile::{Rounded, Tile};
use super::two_sided::{Gradient, OutputMetric, Refinement};
use super::{Matrix, OutputHessian, Prepared, QuantizeError, Quantizer, report};

/// A quantized matrix on its way, and what moves it.
pub struct Round<'a> {
    /// Codes and tables so far.
    pub lut: &'a LutMatrix,
    /// Gradient of the mean divergence per position at those, row-major.
    pub gradient: &'a [f32],
    /// What gathers from round to round, row-major; zeros at first.
    pub pull: &'a mut [f32],
    /// How far the matrix's own gradient may go, relative to its size.
    pub rate: f64,
}

impl Quantizer {
    /// Tables and codes chosen again, so that the matrix makes up for what the others do to the
    /// loss. Rounds and passes of the settings count for nothing here: this is one of each.
    ///
    /// # Errors
    /// As [`Quantizer::quantize`], or parts of `round` that do not fit the matrix.
    pub fn refine(
        &self,
        matrix: Matrix<'_>,
        prepared: &Prepared<'_>,
        output: OutputHessian<'_>,
        round: &mut Round<'_>,
    ) -> Result<(LutMatrix, MatrixReport), QuantizeError> {
        let shape = self.shape(matrix, prepared)?;
        let lengths = [
            (
                "weights of the quantized matrix",
                round.lut.shape().rows * round.lut.shape().cols,
            ),
            ("elements of the gradient", round.gradient.len()),
            ("elements of the pull", round.pull.len()),
        ];
        for (what, found) in lengths {
            if found != matrix.data.len() {
                return Err(QuantizeError::Length {
                    name: matrix.name.to_string(),
                    what,
                    expected: matrix.data.len(),
                    found,
                });
            }
        }
        if let Some(at) = round.gradient.iter().position(|v| !v.is_finite()) {
            return Err(QuantizeError::NotFinite {
                name: matrix.name.to_string(),
                what: "gradient",
                row: at / matrix.cols,
                col: at % matrix.cols,
                value: round.gradient[at].into(),
            });
        }
        let metric = OutputMetric::new(Some(output), matrix.name, matrix.rows, &self.settings)?;
        let positions = prepared.calibration.rows as f64;
        let scale = positions * prepared.mean_diagonal / metric.mean();
        let tables = (0..shape.groups()).flat_map(|group| round.lut.table(group));
        let book = Codebook::new(shape.entries(), tables.collect());
        let codes = round.lut.codes();
        let tiles = Tile::cut(matrix, shape.group_rows, Some(metric.rows()));
        let part = tiles.first().map_or(1, Tile::height) * matrix.cols;
        let (tables, rounded): (Vec<Vec<f32>>, Vec<Rounded>) = self.pool.install(|| {
            tiles
                .par_iter()
                .zip(codes.par_chunks(part))
                .zip(round.gradient.par_chunks(part))
                .zip(round.pull.par_chunks_mut(part))
                .map(|(((tile, codes), values), pull)| {
                    let damping = self.settings.damping;
                    let mut state = Refinement::new(tile, &book, codes, prepared, damping, &metric);
                    let gradient = Gradient {
                        values,
                        scale,
                        rate: round.rate,
                    };
                    state.follow(&gradient, pull);
                    state.run_once(matrix.name)?;
                    Ok(state.finish())
                })
                .collect::<Result<Vec<_>, QuantizeError>>()
                .map(|done| done.into_iter().unzip())
        })?;
        let report = report(matrix, prepared, &rounded);
        let codes: Vec<u8> = rounded.into_iter().flat_map(|tile| tile.codes).collect();
        let tables = tables.concat();
        let tables = tables.iter().map(|&v| f16::from_f32(v).to_bits()).collect();
        let lut = LutMatrix::from_codes(shape, tables, &codes)
            .map_err(|source| matrix.lut_error(source))?;
        Ok((lut, report))
    }
}

#[cfg(test)]
mod tests;
