//! The comparison row of other tools' default: affine groups, rounded to nearest.

use anemone_calib::Weights;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::{LM_HEAD, Linear, ModelSpec};

use crate::quantize::{Matrix, affine_round_trip};

/// Columns that share a scale and a bias (bf16 each).
pub(super) const AFFINE_GROUP: usize = 64;

/// The checkpoint with every matrix rounded to affine groups, as MLX's default does.
pub(super) struct AffineWeights<'a> {
    pub(super) checkpoint: &'a Checkpoint,
}

impl Weights for AffineWeights<'_> {
    fn spec(&self) -> &ModelSpec {
        self.checkpoint.spec()
    }

    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), anemone_calib::Error> {
        let (shape, weights) = self.checkpoint.load(name)?;
        let layers = self.spec().layers;
        let quantized =
            name == LM_HEAD || (0..layers).any(|l| Linear::ALL.iter().any(|m| m.tensor(l) == name));
        if !quantized {
            return Ok((shape, weights));
        }
        let matrix = Matrix {
            name,
            rows: shape[0],
            cols: shape[1],
            data: &weights,
        };
        let rounded = affine_round_trip(matrix, 4, AFFINE_GROUP);
        let rounded = rounded.map_err(|e| anemone_calib::Error::Weight {
            tensor: name.to_string(),
            source: Box::new(e),
        })?;
        Ok((shape, rounded))
    }
}
