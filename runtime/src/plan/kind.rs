//! What a step of a plan does, with every attribute resolved.

use anemone_schemas::aimodel::ir::{AttrId, BlobId, Elem};

use crate::ops::convolution::Conv;
use crate::ops::elementwise::{Binary, Compare, Unary};
use crate::ops::layout::{PadMode, Span};
use crate::ops::rare::Rare;
use crate::ops::rows::Reduce;

/// An executable operation.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Unary(Unary),
    /// Shape of the result.
    Binary(Binary, Vec<usize>),
    Compare(Compare, Vec<usize>),
    Not,
    Select(Vec<usize>),
    Cast(Elem),
    Reshape(Vec<usize>),
    Transpose(Vec<usize>),
    Broadcast(Vec<usize>),
    Concat(usize),
    /// Axis and sizes.
    Split(usize, Vec<usize>),
    Slice(Vec<Span>),
    /// Start, end and strides are operands.
    SliceRuntime,
    SliceUpdate(Vec<Span>),
    SliceUpdateRuntime,
    Pad(Vec<(usize, usize)>, PadMode),
    Tile(Vec<usize>),
    GatherNd(Vec<usize>),
    GatherAlongAxis(usize),
    Range(usize),
    Reduce(Reduce, Vec<usize>),
    Softmax(usize),
    Argmax(usize),
    /// Broadcast batch axes.
    BatchMatmul(Vec<usize>),
    /// Shape of the result.
    Conv2d(Conv, Vec<usize>),
    /// A product with constant weights that stay in the file.
    WeightMatmul {
        weights: WeightsRef,
        /// Channels on axis 1 of `[n, c, h, w]`; otherwise on the last axis.
        channels_first: bool,
        shape: Vec<usize>,
    },
    /// Axis and shape of the result.
    LutToDense(usize, Vec<usize>),
    ShiftScale,
    Dequantize(usize),
    /// One that is not worth a kind of its own.
    Rare(Rare),
    /// The state, and whether its buffer moves out because the next access is a
    /// write.
    ReadHandle {
        state: usize,
        take: bool,
    },
    WriteHandle(usize),
}

/// Bytes of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bytes {
    Blob(BlobId),
    Inline(AttrId),
}

/// Weights `[rows, cols]` in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightsRef {
    Lut {
        rows: usize,
        cols: usize,
        bits: u8,
        group_rows: usize,
        tables: Bytes,
        indices: Bytes,
    },
    /// Row-major f16.
    Dense {
        rows: usize,
        cols: usize,
        values: Bytes,
    },
}

/// An operand: where its value is, and whether this step reads it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arg {
    pub(crate) slot: u32,
    pub(crate) last: bool,
}

/// One operation of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) kind: Kind,
    pub(crate) args: Vec<Arg>,
    /// A slot per result; `None` if nobody reads it.
    pub(crate) results: Vec<Option<u32>>,
    /// Declared shapes of the results.
    pub(crate) shapes: Vec<Vec<usize>>,
    pub(crate) place: Place,
}

/// Where an operation stands in the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The graph.
    pub(crate) graph: String,
    /// Position in the graph.
    pub(crate) index: usize,
    pub(crate) op: String,
}
