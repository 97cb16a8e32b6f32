//! The output side of the objective.

use crate::quantize::{OutputHessian, QuantizeError, Settings};

/// O for the bands of a matrix, damped; without one, the identity.
pub(in crate::quantize) struct OutputMetric {
    /// Rows of a band.
    rows: usize,
    /// Rows of a block; a whole number of bands.
    size: usize,
    blocks: Option<Vec<f32>>,
    /// What the blocks were divided by.
    mean: f64,
}

impl OutputMetric {
    pub(in crate::quantize) fn new(
        output: Option<OutputHessian<'_>>,
        name: &str,
        rows: usize,
        settings: &Settings,
    ) -> Result<Self, QuantizeError> {
        let Some(OutputHessian { blocks, rows: size }) = output else {
            return Ok(Self {
                rows: settings.group_rows,
                size: settings.group_rows,
                blocks: None,
                mean: 1.0,
            });
        };
        let band = settings.output_rows.min(size).max(1);
        let length = |what, expected, found| QuantizeError::Length {
            name: name.to_string(),
            what,
            expected,
            found,
        };
        if !band.is_multiple_of(settings.group_rows) {
            let expected = band.next_multiple_of(settings.group_rows);
            return Err(length("rows of a band, as whole groups", expected, band));
        }
        if !size.is_multiple_of(band) {
            let expected = size.next_multiple_of(band);
            return Err(length(
                "rows of an output block, as whole bands",
                expected,
                size,
            ));
        }
        let expected = rows.div_ceil(size) * size * size;
        if blocks.len() != expected {
            let found = blocks.len();
            return Err(length("elements of the output Hessian", expected, found));
        }
        if let Some(at) = blocks.iter().position(|v| !v.is_finite()) {
            return Err(QuantizeError::NotFinite {
                name: name.to_string(),
                what: "output Hessian",
                row: at / size,
                col: at % size,
                value: blocks[at].into(),
            });
        }
        let diagonal = |row: usize| row * size + row % size;
        let mean = (0..rows)
            .map(|r| f64::from(blocks[diagonal(r)]))
            .sum::<f64>()
            / rows as f64;
        let mean = if mean > 0.0 { mean } else { 1.0 };
        let mut blocks: Vec<f32> = blocks
            .iter()
            .map(|v| (f64::from(*v) / mean) as f32)
            .collect();
        for row in 0..rows {
            blocks[diagonal(row)] += settings.output_damping as f32;
        }
        Ok(Self {
            rows: band,
            size,
            blocks: Some(blocks),
            mean,
        })
    }

    /// Rows of a band.
    pub(in crate::quantize) fn rows(&self) -> usize {
        self.rows
    }

    /// What O was divided by to have a mean diagonal of one.
    pub(in crate::quantize) fn mean(&self) -> f64 {
        self.mean
    }

    /// O of the band from row `first` on that has `height` rows, row-major.
    pub(super) fn block(&self, first: usize, height: usize) -> Vec<f32> {
        let size = self.size;
        let start = first % size;
        (0..height * height)
            .map(|at| {
                let (r, c) = (at / height, at % height);
                match &self.blocks {
                    Some(blocks) => blocks[(first + r) * size + start + c],
                    None => f32::from(u8::from(r == c)),
                }
            })
            .collect()
    }
}
