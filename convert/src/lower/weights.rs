//! Weights of a store as constants of a module, and as input of the teacher.

use anemone_calib::{Error as CalibError, Weights};
use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{Blob, BlobData, BlobId, Elem, Module, TensorType, ValueId};
use anemone_schemas::spec::{FINAL_NORM, LM_HEAD, Linear, ModelSpec, Norm};
use anemone_schemas::store::{Store, StoredLut};

use super::layer::LayerWeights;
use super::plan::ChunkPlan;
use crate::error::Error;

/// A LUT matrix whose bytes the module refers to in the store.
pub(super) struct LinearWeights {
    rows: usize,
    cols: usize,
    groups: usize,
    elem: Elem,
    indices: BlobId,
    tables: BlobId,
}

/// Final norm and output layer.
pub(super) struct HeadWeights {
    pub(super) norm: Vec<f32>,
    pub(super) linear: LinearWeights,
}

/// All weights of a chunk.
pub(super) struct ChunkWeights {
    pub(super) layers: Vec<LayerWeights>,
    pub(super) head: Option<HeadWeights>,
}

impl LinearWeights {
    fn register(
        module: &mut Module,
        store: &Store,
        name: &str,
        [rows, cols]: [usize; 2],
    ) -> Result<Self, Error> {
        let lut = store.lut(name)?;
        if (lut.rows, lut.cols) != (rows, cols) {
            return Err(Error::bad_input(format!(
                "store matrix `{name}` is {}x{}, expected {rows}x{cols}",
                lut.rows, lut.cols
            )));
        }
        if rows % lut.group_rows != 0 {
            return Err(Error::bad_input(format!(
                "store matrix `{name}`: {rows} rows are no multiple of its {}-row tables",
                lut.group_rows
            )));
        }
        let elem = match lut.bits {
            1 => Elem::Ui1,
            2 => Elem::Ui2,
            3 => Elem::Ui3,
            4 => Elem::Ui4,
            6 => Elem::Ui6,
            _ => Elem::Ui8,
        };
        let mut blob = |part: &str, (offset, len): (u64, u64)| {
            module.add_blob(Blob {
                key: format!("{name}.{part}"),
                data: BlobData::File {
                    path: lut.path.clone(),
                    offset,
                    len,
                },
            })
        };
        Ok(Self {
            rows,
            cols,
            groups: rows / lut.group_rows,
            elem,
            indices: blob("indices", lut.indices),
            tables: blob("tables", lut.tables),
        })
    }

    /// `x` `[1, cols, 1, w]` times the matrix as a 1x1 convolution.
    pub(super) fn conv(&self, g: &mut GraphBuilder<'_>, x: ValueId) -> ValueId {
        let entries = 1 << self.elem.bits();
        let indices = g.constant_blob(
            TensorType::new(self.elem, &[self.rows, self.cols, 1, 1]),
            self.indices,
        );
        let tables = g.constant_blob(
            TensorType::new(Elem::F16, &[self.groups, 1, 1, 1, entries, 1]),
            self.tables,
        );
        let dense = g.lut_to_dense(indices, tables, 0);
        g.conv1x1(x, dense)
    }
}

impl ChunkWeights {
    /// Registers every weight of `chunk` with `module`; no weight is read.
    pub(super) fn register(
        module: &mut Module,
        store: &Store,
        spec: &ModelSpec,
        chunk: &ChunkPlan,
    ) -> Result<Self, Error> {
        let norm = |name: &str, len: usize| -> Result<Vec<f32>, Error> {
            let (_, values) = store.dense_f32(name)?;
            if values.len() != len {
                return Err(Error::bad_input(format!(
                    "store tensor `{name}` has {} values, expected {len}",
                    values.len()
                )));
            }
            Ok(values)
        };
        let mut layers = Vec::with_capacity(chunk.layers.len());
        for l in chunk.layers.clone() {
            let mut linear = |linear: Linear| {
                LinearWeights::register(module, store, &linear.tensor(l), linear.shape(spec))
            };
            let scale = |n: Norm| norm(&n.tensor(l), n.width(spec));
            layers.push(LayerWeights {
                q: linear(Linear::Q)?,
                k: linear(Linear::K)?,
                v: linear(Linear::V)?,
                o: linear(Linear::O)?,
                gate: linear(Linear::Gate)?,
                up: linear(Linear::Up)?,
                down: linear(Linear::Down)?,
                input_norm: scale(Norm::Input)?,
                post_norm: scale(Norm::PostAttention)?,
                q_norm: scale(Norm::Q)?,
                k_norm: scale(Norm::K)?,
            });
        }
        let head = if chunk.head {
            Some(HeadWeights {
                norm: norm(FINAL_NORM, spec.hidden)?,
                linear: LinearWeights::register(module, store, LM_HEAD, [spec.vocab, spec.hidden])?,
            })
        } else {
            None
        };
        Ok(Self { layers, head })
    }
}

/// A store seen as the weights of the bf16 model's graph: what the chunk programs
/// compute, without their fp16 arithmetic. This is the simulator of `eval`.
pub struct StoreWeights<'a> {
    /// The store.
    pub store: &'a Store,
    /// Its model.
    pub spec: &'a ModelSpec,
}

impl Weights for StoreWeights<'_> {
    fn spec(&self) -> &ModelSpec {
        self.spec
    }

    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), CalibError> {
        let loaded = match self.store.lut(name) {
            Ok(StoredLut { rows, cols, .. }) => self
                .store
                .load_lut(name)
                .map(|lut| (vec![rows, cols], lut.dequantize())),
            Err(_) => self.store.dense_f32(name),
        };
        loaded.map_err(|e| CalibError::Weight {
            tensor: name.to_string(),
            source: Box::new(e),
        })
    }
}
