//! A drafter's weights as constants of a module.

use anemone_schemas::aimodel::build::GraphBuilder;
use anemone_schemas::aimodel::ir::{Blob, BlobData, BlobId, Elem, Module, TensorType, ValueId};

use crate::lower::weights::int8_rows;

/// Everything a drafter's program is built over.
#[derive(Debug)]
pub(crate) struct DrafterWeights {
    /// Projection of the concatenated taps.
    pub(crate) fuse: Linear,
    /// The norm after it.
    pub(crate) fuse_norm: Vec<f32>,
    /// Decoder layers.
    pub(crate) layers: Vec<Layer>,
    /// The norm before the output layer.
    pub(crate) norm: Vec<f32>,
    /// The output layer's rows in order, in one part or more.
    pub(crate) head: Vec<Linear>,
    /// The bias on the previous token.
    pub(crate) markov: Option<Markov>,
    /// The confidence head.
    pub(crate) confidence: Option<ConfidenceWeights>,
}

/// One decoder layer.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the checkpoint")]
pub(crate) struct Layer {
    pub(crate) input_norm: Vec<f32>,
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) o: Linear,
    pub(crate) q_norm: Vec<f32>,
    pub(crate) k_norm: Vec<f32>,
    pub(crate) post_norm: Vec<f32>,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

/// The Markov head: a table of rows by previous token, and a product over them.
#[derive(Debug)]
pub(crate) struct Markov {
    /// Rows by previous token, f16.
    pub(crate) previous: BlobId,
    /// From a row to scores.
    pub(crate) next: Linear,
}

/// The confidence head, f32.
#[derive(Debug)]
pub(crate) struct ConfidenceWeights {
    /// Weights of the hidden state.
    pub(crate) hidden: Vec<f32>,
    /// Weights of the Markov row; none if it does not read it.
    pub(crate) markov: Vec<f32>,
    /// Bias.
    pub(crate) bias: f32,
}

impl Markov {
    pub(super) fn table(&self, g: &mut GraphBuilder<'_>, vocab: usize, rank: usize) -> ValueId {
        g.constant_blob(TensorType::new(Elem::F16, &[vocab, rank]), self.previous)
    }
}

/// A matrix `[rows, cols]` of the module.
#[derive(Debug)]
pub(crate) struct Linear {
    rows: usize,
    cols: usize,
    form: Form,
}

#[derive(Debug)]
enum Form {
    F16(BlobId),
    Lut {
        elem: Elem,
        group_rows: usize,
        indices: BlobId,
        tables: BlobId,
    },
    Int8 {
        entries: BlobId,
        scales: BlobId,
    },
}

/// The bytes of a matrix, not yet in a module.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// Row-major fp16.
    F16(BlobData),
    /// Indices and tables.
    Lut {
        /// Type of an index.
        elem: Elem,
        /// Rows that share a table.
        group_rows: usize,
        /// Packed indices.
        indices: BlobData,
        /// fp16 tables.
        tables: BlobData,
    },
    /// Integers and what they are multiplied by.
    Int8 {
        /// Row-major, eight bits each.
        entries: BlobData,
        /// An fp16 factor for each row.
        scales: BlobData,
    },
}

impl Linear {
    /// Registers a matrix under a name that is unique in the module.
    pub(crate) fn register(
        module: &mut Module,
        name: &str,
        [rows, cols]: [usize; 2],
        part: Part,
    ) -> Self {
        let mut blob = |suffix: &str, data| {
            let key = format!("{name}{suffix}");
            module.add_blob(Blob { key, data })
        };
        let form = match part {
            Part::F16(data) => Form::F16(blob("", data)),
            Part::Lut {
                elem,
                group_rows,
                indices,
                tables,
            } => Form::Lut {
                elem,
                group_rows,
                indices: blob(".indices", indices),
                tables: blob(".tables", tables),
            },
            Part::Int8 { entries, scales } => Form::Int8 {
                entries: blob(".entries", entries),
                scales: blob(".scales", scales),
            },
        };
        Self { rows, cols, form }
    }

    /// Features that come out.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// `x` `[1, n, cols]` times the matrix, `[1, n, rows]`.
    pub(super) fn apply(&self, g: &mut GraphBuilder<'_>, x: ValueId) -> ValueId {
        let dense = match &self.form {
            Form::F16(blob) => {
                g.constant_blob(TensorType::new(Elem::F16, &[self.rows, self.cols]), *blob)
            }
            Form::Lut {
                elem,
                group_rows,
                indices,
                tables,
            } => {
                let of = TensorType::new(*elem, &[self.rows, self.cols]);
                let indices = g.constant_blob(of, *indices);
                let groups = self.rows / group_rows;
                let entries = 1 << elem.bits();
                let of = TensorType::new(Elem::F16, &[groups, 1, entries, 1]);
                let tables = g.constant_blob(of, *tables);
                g.lut_to_dense(indices, tables, 0)
            }
            Form::Int8 { entries, scales } => {
                int8_rows(g, [self.rows, self.cols], *entries, *scales)
            }
        };
        let turned = g.transpose(dense, &[1, 0]);
        g.broadcasting_batch_matmul(x, turned)
    }
}
