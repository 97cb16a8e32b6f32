//! Attributes.

use super::{AttrId, BlobId, TypeId};

/// Memory kind of a hardware constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "Apple's names")]
pub enum Backing {
    IoSurface,
    MtlBuffer,
    Heap,
}

/// An attribute of the `aicode` dialect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "field names are the specification's")]
pub enum Attr {
    String(String),
    Integer {
        bits: u32,
        unsigned: bool,
        value: i64,
    },
    /// Raw IEEE bits, zero-extended.
    Float {
        bits: u32,
        raw: u64,
    },
    Type(TypeId),
    Array(Vec<AttrId>),
    /// Inline elements; one element only if `splat`.
    Dense {
        splat: bool,
        bytes: Vec<u8>,
    },
    Resource(BlobId),
    /// A named list: `"aicode.name" = [..]`, composite declarations.
    Opaque {
        name: String,
        items: Vec<AttrId>,
    },
    ParamDecl {
        name: String,
        ty: TypeId,
    },
    HwConstraints {
        alignments: Vec<i64>,
        interleave: Vec<i64>,
        backing: Backing,
    },
    SymbolRef(Vec<String>),
    ParamConstant {
        value: AttrId,
        ty: TypeId,
    },
    /// An enumeration of one varint (padding mode, approximation, scatter mode,
    /// scan combiner, compilation, interpolation, four-character code): the code
    /// on the wire and the case.
    Enum {
        code: u32,
        value: u64,
    },
    File {
        name: String,
        directory: String,
        sha256: String,
    },
    SourceLocation {
        file: AttrId,
        /// Start line, start column, end line, end column.
        range: [u64; 4],
    },
    CompileUnit {
        language: String,
        file: AttrId,
        producer: String,
        optimized: u64,
        flags: String,
        files: u64,
    },
    MetadataData(AttrId),
    Metadata {
        name: String,
        data: AttrId,
    },
    Subprogram {
        ty: TypeId,
        compile_unit: AttrId,
        file: AttrId,
        name: String,
        linkage_name: String,
        flags: u64,
    },
    Location {
        source: AttrId,
        scope: AttrId,
        /// Locations fused into this one.
        fused: Vec<AttrId>,
        metadata: Vec<AttrId>,
    },
    Dictionary(Vec<AttrId>),
    Unit,
    OpaqueLocation(AttrId),
}

/// Wire codes of the enumeration attributes ([`Attr::Enum`]).
pub mod enum_code {
    /// `circular, constant, reflect, replicate, symmetric`.
    pub const PADDING_MODE: u32 = 17;
    /// `none, tanh`.
    pub const APPROXIMATE: u32 = 19;
    /// `update, add, sub, mul, div, max, min`.
    pub const SCATTER_MODE: u32 = 20;
    /// `sum, product, min, max`.
    pub const SCAN_COMBINER: u32 = 25;
    /// A four-character code.
    pub const FOURCC: u32 = 27;
    /// `full, partial, finalized`.
    pub const COMPILATION: u32 = 28;
    /// `linear, nearest`.
    pub const INTERPOLATION_MODE: u32 = 43;
}
