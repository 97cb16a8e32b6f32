//! Where a forward pass gets its weights.

use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::ModelSpec;

use crate::Error;

/// A model's tensors in f32, whether stored so or reconstructed.
///
/// Names are the checkpoint's. `lm_head.weight` is the embedding table in a tied model.
pub trait Weights: Sync {
    /// The model's dimensions.
    fn spec(&self) -> &ModelSpec;

    /// A tensor's shape and elements, row-major.
    ///
    /// # Errors
    /// [`Error::Checkpoint`], or [`Error::Weight`] with a cause of one's own.
    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error>;

    /// Rows of a matrix in the order of `ids`. To be overridden where rows can be had
    /// without the whole matrix, which for an embedding table may be gigabytes.
    ///
    /// # Errors
    /// As [`Weights::load`]. `ids` are within the matrix.
    fn rows(&self, name: &str, ids: &[u32]) -> Result<Vec<f32>, Error> {
        let (shape, data) = self.load(name)?;
        let width: usize = shape.iter().skip(1).product();
        Ok(ids
            .iter()
            .flat_map(|&id| &data[id as usize * width..(id as usize + 1) * width])
            .copied()
            .collect())
    }
}

impl Weights for Checkpoint {
    fn spec(&self) -> &ModelSpec {
        self.spec()
    }

    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), Error> {
        Ok(self.read_f32(name)?)
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<Vec<f32>, Error> {
        Ok(self.read_rows_f32(name, ids)?)
    }
}
