//! Weights of a store as constants of a module, and as input of the teacher.

use std::iter;
use std::ops::Range;

use anemone_calib::{Error as CalibError, Weights};
use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{Blob, BlobData, BlobId, Elem, Module, TensorType, ValueId};
use anemone_schemas::spec::{Architecture, FINAL_NORM, LM_HEAD, Linear, ModelSpec, Norm};
use anemone_schemas::store::{DenseElem, DenseRecord, Store, StoredDense, StoredLut};

use super::forms::{Prescale, slices};
use super::layer::{LayerWeights, NormWeights};
use super::plan::ChunkPlan;
use crate::error::Error;

/// Where the lowering finds weights: a store, or shapes alone.
pub trait WeightSource {
    /// Where the parts of a matrix lie.
    ///
    /// # Errors
    /// If there is no such matrix.
    fn matrix(&self, name: &str) -> Result<StoredLut, Error>;

    /// Where a matrix lies that the source keeps without tables: in fp16, or as integers of
    /// eight bits with the factors of its rows.
    ///
    /// # Errors
    /// If it is neither.
    fn dense(&self, _name: &str) -> Result<Option<Dense>, Error> {
        Ok(None)
    }

    /// The weight of a norm.
    ///
    /// # Errors
    /// If there is no such tensor.
    fn norm(&self, name: &str) -> Result<Vec<f32>, Error>;
}

impl WeightSource for Store {
    fn matrix(&self, name: &str) -> Result<StoredLut, Error> {
        Ok(self.lut(name)?)
    }

    fn dense(&self, name: &str) -> Result<Option<Dense>, Error> {
        let Ok(entries) = Self::dense(self, name) else {
            return Ok(None);
        };
        let scales = match entries.elem {
            DenseElem::F16 => None,
            DenseElem::I8 => Some(Self::dense(self, &DenseRecord::scales(name))?),
            _ => {
                return Err(Error::bad_input(format!(
                    "store matrix `{name}` is f32, expected fp16, int8 or tables"
                )));
            }
        };
        Ok(Some(Dense { entries, scales }))
    }

    fn norm(&self, name: &str) -> Result<Vec<f32>, Error> {
        Ok(self.dense_f32(name)?.1)
    }
}

/// A matrix without tables.
#[derive(Clone, Debug)]
pub struct Dense {
    /// Where its entries lie.
    pub entries: StoredDense,
    /// Where the fp16 factors of its rows lie, if the entries are integers.
    pub scales: Option<StoredDense>,
}

/// A run of rows of a matrix whose bytes the module refers to in the store.
pub(super) struct LinearWeights {
    rows: usize,
    cols: usize,
    form: Form,
}

enum Form {
    F16(BlobId),
    Int8 {
        entries: BlobId,
        scales: BlobId,
    },
    Lut {
        groups: usize,
        vector: usize,
        elem: Elem,
        indices: BlobId,
        tables: BlobId,
    },
}

/// Rows that a slice of a matrix without tables starts at a multiple of.
const DENSE_GROUP: usize = 32;

/// Final norm and output layer.
pub(super) struct HeadWeights {
    pub(super) norm: NormWeights,
    /// The output layer's rows in order.
    pub(super) slices: Vec<LinearWeights>,
}

/// All weights of a chunk.
pub(super) struct ChunkWeights {
    pub(super) layers: Vec<LayerWeights>,
    pub(super) head: Option<HeadWeights>,
}

impl LinearWeights {
    fn register(
        module: &mut Module,
        source: &dyn WeightSource,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Self, Error> {
        let whole = |rows: usize, _: usize| -> Vec<_> { iter::once(0..rows).collect() };
        let mut parts = Self::cut(module, source, name, shape, whole)?;
        Ok(parts.remove(0))
    }

    /// The matrix in parts, at the rows that `slices` says for its rows and those of a table.
    fn cut(
        module: &mut Module,
        source: &dyn WeightSource,
        name: &str,
        shape: [usize; 2],
        slices: impl Fn(usize, usize) -> Vec<Range<usize>>,
    ) -> Result<Vec<Self>, Error> {
        if let Some(dense) = source.dense(name)? {
            let factors = dense.scales.as_ref().map(|s| (s.elem, &s.shape[..]));
            let alone = factors.is_none_or(|f| f == (DenseElem::F16, &shape[..1]));
            if dense.entries.shape != shape || !alone {
                return Err(Error::bad_input(format!(
                    "store matrix `{name}` is {:?} with factors {factors:?}, expected {shape:?}",
                    dense.entries.shape
                )));
            }
            let ranges = slices(shape[0], DENSE_GROUP).into_iter();
            return Ok(ranges
                .map(|range| Self::dense_rows(module, &dense, name, shape, range))
                .collect());
        }
        let lut = find(source, name, shape)?;
        let ranges = slices(lut.rows, lut.group_rows).into_iter();
        Ok(ranges
            .map(|range| Self::rows(module, &lut, name, range))
            .collect())
    }

    /// Rows `range` of a matrix without tables.
    fn dense_rows(
        module: &mut Module,
        dense: &Dense,
        name: &str,
        [_, cols]: [usize; 2],
        range: Range<usize>,
    ) -> Self {
        let mut blob = |part: &str, of: &StoredDense, width: usize| {
            let row = (width * of.elem.size()) as u64;
            module.add_blob(Blob {
                key: format!("{name}.{}.{part}", range.start),
                data: BlobData::File {
                    path: of.path.clone(),
                    offset: of.offset + range.start as u64 * row,
                    len: range.len() as u64 * row,
                },
            })
        };
        let form = match &dense.scales {
            None => Form::F16(blob("f16", &dense.entries, cols)),
            Some(scales) => Form::Int8 {
                entries: blob("entries", &dense.entries, cols),
                scales: blob("scales", scales, 1),
            },
        };
        Self {
            rows: range.len(),
            cols,
            form,
        }
    }

    /// Rows `range` of a matrix; it starts and ends at tables.
    fn rows(module: &mut Module, lut: &StoredLut, name: &str, range: Range<usize>) -> Self {
        let elem = match lut.bits {
            1 => Elem::Ui1,
            2 => Elem::Ui2,
            3 => Elem::Ui3,
            4 => Elem::Ui4,
            6 => Elem::Ui6,
            _ => Elem::Ui8,
        };
        // A table serves a multiple of eight rows, so both parts start at whole bytes.
        let whole = range.len() == lut.rows;
        let mut blob = |part: &str, (offset, len): (u64, u64)| {
            let share = |rows: usize| len * rows as u64 / lut.rows as u64;
            let start = share(range.start);
            let key = if whole {
                format!("{name}.{part}")
            } else {
                format!("{name}.{}.{part}", range.start)
            };
            module.add_blob(Blob {
                key,
                data: BlobData::File {
                    path: lut.path.clone(),
                    offset: offset + start,
                    len: share(range.end) - start,
                },
            })
        };
        Self {
            rows: range.len(),
            cols: lut.cols,
            form: Form::Lut {
                groups: range.len() / lut.group_rows,
                vector: lut.vector,
                elem,
                indices: blob("indices", lut.indices),
                tables: blob("tables", lut.tables),
            },
        }
    }

    /// `x` `[1, cols, 1, w]` times the matrix as a 1x1 convolution.
    pub(super) fn conv(&self, g: &mut GraphBuilder<'_>, x: ValueId) -> ValueId {
        let shape = [self.rows, self.cols, 1, 1];
        let dense = match self.form {
            Form::F16(blob) => g.constant_blob(TensorType::new(Elem::F16, &shape), blob),
            Form::Int8 { entries, scales } => int8_rows(g, shape, entries, scales),
            Form::Lut {
                groups,
                vector,
                elem,
                indices,
                tables,
            } => {
                let entries = 1 << elem.bits();
                let of = [self.rows / vector, self.cols, 1, 1];
                let indices = g.constant_blob(TensorType::new(elem, &of), indices);
                let tables = g.constant_blob(
                    TensorType::new(Elem::F16, &[groups, 1, 1, 1, entries, vector]),
                    tables,
                );
                g.lut_to_dense(indices, tables, 0)
            }
        };
        g.conv1x1(x, dense)
    }
}

/// A constant of integers of eight bits, with an fp16 factor for each row.
pub(super) fn int8_rows<const N: usize>(
    g: &mut GraphBuilder<'_>,
    shape: [usize; N],
    entries: BlobId,
    scales: BlobId,
) -> ValueId {
    let mut by_row = [1; N];
    by_row[0] = shape[0];
    let entries = g.constant_blob(TensorType::new(Elem::Si8, &shape), entries);
    let scales = g.constant_blob(TensorType::new(Elem::F16, &by_row), scales);
    let zero = g.full(Elem::Si8, &by_row, 0.0);
    let shift = g.full(Elem::F16, &by_row, 0.0);
    g.blockwise_shift_scale(entries, scales, zero, shift)
}

/// The matrix `name`, of the right shape and with whole tables.
fn find(
    source: &dyn WeightSource,
    name: &str,
    [rows, cols]: [usize; 2],
) -> Result<StoredLut, Error> {
    let lut = source.matrix(name)?;
    if (lut.rows, lut.cols) != (rows, cols) {
        return Err(Error::bad_input(format!(
            "store matrix `{name}` is {}x{}, expected {rows}x{cols}",
            lut.rows, lut.cols
        )));
    }
    if lut.group_rows % 8 != 0 || rows % lut.group_rows != 0 {
        return Err(Error::bad_input(format!(
            "store matrix `{name}`: {rows} rows in tables of {}, expected whole tables of a \
             multiple of 8 rows",
            lut.group_rows
        )));
    }
    Ok(lut)
}

impl ChunkWeights {
    /// Registers every weight of `chunk` with `module`; no matrix is read.
    pub(super) fn register(
        module: &mut Module,
        source: &dyn WeightSource,
        spec: &ModelSpec,
        prescale: &Prescale,
        chunk: &ChunkPlan,
    ) -> Result<Self, Error> {
        let norm = |name: &str, len: usize| -> Result<NormWeights, Error> {
            let weight = source.norm(name)?;
            if weight.len() != len {
                return Err(Error::bad_input(format!(
                    "store tensor `{name}` has {} values, expected {len}",
                    weight.len()
                )));
            }
            Ok(NormWeights {
                weight,
                shift: prescale.shift(name, len == spec.hidden),
            })
        };
        let mut layers = Vec::with_capacity(chunk.layers.len());
        for l in chunk.layers.clone() {
            let mut linear = |linear: Linear| {
                LinearWeights::register(module, source, &linear.tensor(l), linear.shape(spec))
            };
            let scale = |n: Norm| norm(&n.tensor(l), n.width(spec));
            let head_norms = match spec.architecture {
                Architecture::Llama => None,
                _ => Some([scale(Norm::Q)?, scale(Norm::K)?]),
            };
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
                head_norms,
            });
        }
        let head = if chunk.head {
            let shape = [spec.vocab, spec.hidden];
            Some(HeadWeights {
                norm: norm(FINAL_NORM, spec.hidden)?,
                slices: LinearWeights::cut(module, source, LM_HEAD, shape, slices)?,
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
