//! The output side of the objective.

use crate::quantize::{OutputHessian, QuantizeError, Settings};

/// O for the groups of a matrix, damped; without one, the identity.
pub(in crate::quantize) struct OutputMetric {
    group_rows: usize,
    blocks: Option<Vec<f32>>,
}

impl OutputMetric {
    pub(in crate::quantize) fn new(
        output: Option<OutputHessian<'_>>,
        name: &str,
        rows: usize,
        settings: &Settings,
    ) -> Result<Self, QuantizeError> {
        let size = settings.group_rows;
        let Some(OutputHessian { blocks }) = output else {
            return Ok(Self {
                group_rows: size,
                blocks: None,
            });
        };
        let expected = rows.div_ceil(size) * size * size;
        if blocks.len() != expected {
            return Err(QuantizeError::Length {
                name: name.to_string(),
                what: "elements of the output Hessian",
                expected,
                found: blocks.len(),
            });
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
            group_rows: size,
            blocks: Some(blocks),
        })
    }

    /// The block of a group that has `height` rows, row-major.
    pub(super) fn block(&self, group: usize, height: usize) -> Vec<f32> {
        let size = self.group_rows;
        (0..height * height)
            .map(|at| {
                let (r, c) = (at / height, at % height);
                match &self.blocks {
                    Some(blocks) => blocks[(group * size + r) * size + c],
                    None => f32::from(u8::from(r == c)),
                }
            })
            .collect()
    }
}
