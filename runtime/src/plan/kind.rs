//! What a step of a plan does, with every attribute resolved.

use std::sync::Arc;

use anemone_schemas::aimodel::ir::{AttrId, BlobId, Elem};

use crate::kernels::Norm;
use crate::ops::convolution::Conv;
use crate::ops::elementwise::{Binary, Unary};
use crate::ops::layout::{PadMode, Span};
use crate::ops::logic::Compare;
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
    /// Over an axis. This and the following are made from runs of operations.
    RmsNorm(usize, Arc<Norm>),
    /// The axis of a head's channels, and a factor.
    Rope(usize, Option<f32>),
    SiluMul,
    /// Queries, keys, values and mask.
    Attention(AttentionShape),
}

impl Kind {
    /// What a profile calls it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::WeightMatmul { .. } => "product with weights",
            Self::BatchMatmul(_) => "product",
            Self::Conv2d(..) => "convolution",
            Self::RmsNorm(..) => "norm",
            Self::Rope(..) => "rotation",
            Self::SiluMul => "gate",
            Self::Attention(_) => "attention",
            Self::Softmax(_) => "softmax",
            Self::Argmax(_) | Self::Reduce(..) => "reduction",
            Self::Unary(_) | Self::Binary(..) | Self::Compare(..) | Self::Not | Self::Select(_) => {
                "elementwise"
            }
            Self::ReadHandle { .. } | Self::WriteHandle(_) => "state access",
            Self::SliceUpdate(_) | Self::SliceUpdateRuntime => "state update",
            Self::Reshape(_) | Self::Transpose(_) | Self::Broadcast(_) | Self::Split(..) => "view",
            Self::Slice(_) | Self::SliceRuntime | Self::Concat(_) => "slice or concatenation",
            Self::LutToDense(..) | Self::ShiftScale | Self::Dequantize(_) => "dense weights",
            _ => "other",
        }
    }
}

/// Extents of a fused attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionShape {
    pub(crate) heads: usize,
    /// Groups of heads that share keys and values.
    pub(crate) groups: usize,
    /// Channels of a head.
    pub(crate) depth: usize,
    pub(crate) slots: usize,
    /// Rows of the call.
    pub(crate) width: usize,
    /// Mask `[1,1,w,C]` and result `[1,H,w,d]`; otherwise `[1,C,1,w]` and `[1,H,d,w]`.
    pub(crate) by_rows: bool,
}

/// Bytes of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bytes {
    Blob(BlobId),
    Inline(AttrId),
}

/// Weights `[rows, cols]` in the program.
#[derive(Clone, Debug)]
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
    /// Row-major bytes with a sign, and a factor for each row.
    Int8 {
        rows: usize,
        cols: usize,
        values: Bytes,
        scales: Arc<[f32]>,
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
    /// The axis of the first result that counts the rows of the call.
    pub(crate) tokens: Option<usize>,
    pub(crate) place: Place,
}

/// Where an operation stands in the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// The graph.
    pub(crate) graph: String,
    /// Position in the graph.
    pub(crate) index: usize,
    pub(crate) op: String,
}
