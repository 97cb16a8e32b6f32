//! What a chunk program will weigh, before it is written.

use std::path::PathBuf;

use anemone_schemas::aimodel::encode::encoded_len;
use anemone_schemas::spec::{EMBEDDING, LM_HEAD, ModelSpec};
use anemone_schemas::store::StoredLut;

use super::lower_chunk;
use super::plan::{ChunkPlan, TargetPlan};
use super::weights::WeightSource;
use crate::error::Error;

/// Bytes of one chunk program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSize {
    /// Indices, tables, norms and other constants kept as blobs.
    pub weight_bytes: u64,
    /// The program file.
    pub file_bytes: u64,
    /// Operations of all functions, which is what lowering keeps in memory.
    pub operations: usize,
}

/// Memory of a process that does nothing yet, and of the buffer weights pass through.
pub(crate) const BASE_MEMORY: u64 = 8_500_000;
/// Memory of an operation: itself, its values and decomposition, and what lint and
/// writer keep of it. Measured; see `docs/benchmarks.md`.
const MEMORY_PER_OPERATION: u64 = 675;

impl ChunkSize {
    /// Most memory that lowering, linting and writing the chunk take, in bytes; weights
    /// pass through a buffer and do not count.
    pub fn peak_memory(&self) -> u64 {
        BASE_MEMORY + MEMORY_PER_OPERATION * self.operations as u64
    }
}

/// The size of a chunk, exact: the program is lowered and measured but not written,
/// which takes no longer than its graph is long.
///
/// # Errors
/// As [`lower_chunk`].
pub fn chunk_size(
    source: &dyn WeightSource,
    plan: &TargetPlan,
    chunk: &ChunkPlan,
) -> Result<ChunkSize, Error> {
    let module = lower_chunk(source, plan, chunk)?;
    let file_bytes = encoded_len(&module).map_err(|e| Error::unexpected(&e))?;
    let operations = module
        .graphs()
        .iter()
        .map(|g| module.region(g.region).ops.len())
        .sum();
    Ok(ChunkSize {
        weight_bytes: module
            .blobs()
            .iter()
            .map(anemone_schemas::aimodel::ir::Blob::len)
            .sum(),
        file_bytes,
        operations,
    })
}

/// Weights of a model of which only the shapes are known, for planning.
#[derive(Clone, Debug)]
pub struct Shapes<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Bits per index.
    pub bits: u8,
    /// Rows per table.
    pub group_rows: usize,
}

impl Shapes<'_> {
    fn shape(&self, name: &str) -> Result<Vec<usize>, Error> {
        let stored = if name == LM_HEAD && self.spec.tie_word_embeddings {
            EMBEDDING
        } else {
            name
        };
        self.spec
            .tensors()
            .into_iter()
            .find(|(n, _)| n == stored)
            .map(|t| t.1)
            .ok_or_else(|| Error::bad_input(format!("the model has no tensor `{name}`")))
    }
}

impl WeightSource for Shapes<'_> {
    fn matrix(&self, name: &str) -> Result<StoredLut, Error> {
        let shape = self.shape(name)?;
        let (rows, cols) = (shape[0], shape[1]);
        let tables = (rows.div_ceil(self.group_rows) << self.bits) as u64 * 2;
        let indices = (rows * cols * usize::from(self.bits)).div_ceil(8) as u64;
        Ok(StoredLut {
            rows,
            cols,
            bits: self.bits,
            group_rows: self.group_rows,
            vector: 1,
            path: PathBuf::from(name),
            tables: (0, tables),
            indices: (tables, indices),
        })
    }

    /// Values that are all different between norms, as trained ones are, so that no
    /// two norms share a blob.
    fn norm(&self, name: &str) -> Result<Vec<f32>, Error> {
        let shape = self.shape(name)?;
        let seed = name
            .bytes()
            .fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)));
        Ok((0..shape[0] as u32)
            .map(|i| {
                let bits = (seed ^ i.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b) >> 16;
                1.0 + bits as f32 / 65536.0
            })
            .collect())
    }
}
