//! The in-memory form of a Core AI program: arenas of types, attributes, values,
//! operations and regions, addressed by `u32` handles.
//!
//! The names are those of the format (`aicode` dialect of MLIR). A [`Module`] is
//! plain data: it can be wrong, and [`super::check`] says so. Types and
//! attributes are interned, so equal ones have equal handles.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::Hash;
use std::path::PathBuf;

use sha2::{Digest, Sha256};

use crate::mapped::MappedFile;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// The handle as an arena index.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

handle!(
    /// A [`Type`] of the module.
    TypeId
);
handle!(
    /// An [`Attr`] of the module.
    AttrId
);
handle!(
    /// An SSA value; numbers are unique in the whole module.
    ValueId
);
handle!(
    /// An [`Op`] of the module.
    OpId
);
handle!(
    /// A [`Region`] of the module.
    RegionId
);
handle!(
    /// A [`Blob`] of the module.
    BlobId
);

/// Element type of a tensor (`FORMAT.md` section 4; the names are the dialect's).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Elem {
    Bool,
    F64,
    F32,
    F16,
    Bf16,
    F8E5M2,
    F8E4M3,
    Tf32,
    F4E2M1,
    F8E8M0,
    ComplexF64,
    ComplexF32,
    ComplexF16,
    ComplexBf16,
    ComplexF8E5M2,
    ComplexF8E4M3,
    Si64,
    Si32,
    Si16,
    Si8,
    Si4,
    Si2,
    Ui64,
    Ui32,
    Ui16,
    Ui8,
    Ui6,
    Ui4,
    Ui3,
    Ui2,
    Ui1,
}

impl Elem {
    /// Bits one element takes in a resource blob; a bool takes a byte.
    pub fn bits(self) -> usize {
        match self {
            Self::ComplexF64 => 128,
            Self::F64 | Self::Si64 | Self::Ui64 | Self::ComplexF32 => 64,
            Self::F32
            | Self::Tf32
            | Self::Si32
            | Self::Ui32
            | Self::ComplexF16
            | Self::ComplexBf16 => 32,
            Self::F16
            | Self::Bf16
            | Self::Si16
            | Self::Ui16
            | Self::ComplexF8E5M2
            | Self::ComplexF8E4M3 => 16,
            Self::Bool | Self::F8E5M2 | Self::F8E4M3 | Self::F8E8M0 | Self::Si8 | Self::Ui8 => 8,
            Self::Ui6 => 6,
            Self::F4E2M1 | Self::Si4 | Self::Ui4 => 4,
            Self::Ui3 => 3,
            Self::Si2 | Self::Ui2 => 2,
            Self::Ui1 => 1,
        }
    }

    /// Bytes of `n` elements in a resource blob: a bit stream, least significant
    /// bit first, without padding between rows. `None` on overflow.
    pub fn packed_len(self, n: usize) -> Option<usize> {
        Some(n.checked_mul(self.bits())?.div_ceil(8))
    }

    /// The dialect's name, as in `tensor<1x16xf16>`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "i1",
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E5M2 => "f8E5M2",
            Self::F8E4M3 => "f8E4M3FN",
            Self::Tf32 => "tf32",
            Self::F4E2M1 => "f4E2M1FN",
            Self::F8E8M0 => "f8E8M0FNU",
            Self::ComplexF64 => "complex<f64>",
            Self::ComplexF32 => "complex<f32>",
            Self::ComplexF16 => "complex<f16>",
            Self::ComplexBf16 => "complex<bf16>",
            Self::ComplexF8E5M2 => "complex<f8E5M2>",
            Self::ComplexF8E4M3 => "complex<f8E4M3FN>",
            Self::Si64 => "si64",
            Self::Si32 => "si32",
            Self::Si16 => "si16",
            Self::Si8 => "si8",
            Self::Si4 => "si4",
            Self::Si2 => "si2",
            Self::Ui64 => "ui64",
            Self::Ui32 => "ui32",
            Self::Ui16 => "ui16",
            Self::Ui8 => "ui8",
            Self::Ui6 => "ui6",
            Self::Ui4 => "ui4",
            Self::Ui3 => "ui3",
            Self::Ui2 => "ui2",
            Self::Ui1 => "ui1",
        }
    }
}

/// Dimension value of a dynamic axis.
pub const DYNAMIC: i64 = i64::MIN;

/// A ranked tensor type, with an optional hardware constraint as its encoding.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub elem: Elem,
    /// Extents, outermost first; [`DYNAMIC`] where unknown.
    pub shape: Vec<i64>,
    /// An [`Attr::HwConstraints`], where the tensor carries one.
    pub encoding: Option<AttrId>,
}

impl TensorType {
    /// A tensor without constraints.
    pub fn new(elem: Elem, shape: &[usize]) -> Self {
        Self {
            elem,
            shape: shape.iter().map(|&d| d as i64).collect(),
            encoding: None,
        }
    }

    /// The shape as sizes, or `None` if an axis is dynamic or negative.
    pub fn dims(&self) -> Option<Vec<usize>> {
        self.shape
            .iter()
            .map(|&d| usize::try_from(d).ok())
            .collect()
    }

    /// Number of elements, or `None` if dynamic or too large.
    pub fn count(&self) -> Option<usize> {
        self.dims()?
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
    }
}

/// A type of the `aicode` dialect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// A bare element type.
    Elem(Elem),
    /// A ranked tensor.
    Tensor(TensorType),
    /// A function signature.
    Function {
        /// Argument types.
        inputs: Vec<TypeId>,
        /// Result types.
        results: Vec<TypeId>,
    },
    /// A mutable state holding the inner tensor.
    Handle(TypeId),
    /// Orders the reads and writes of a state.
    Token,
    /// Type of a symbol parameter (`dataflow.invoke`).
    ParamSymbol,
    /// Type of a type parameter.
    ParamType,
    /// Debug information only.
    Unresolved(TypeId),
}

/// Memory kind of a hardware constraint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "Apple's names")]
pub enum Backing {
    IoSurface,
    MtlBuffer,
    Heap,
}

/// An attribute of the `aicode` dialect (`FORMAT.md` section 5).
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

/// One operation. The name is without the `aicode.` prefix, as
/// `primitive.conv2d_v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// Operation name.
    pub name: String,
    /// Values read.
    pub operands: Vec<ValueId>,
    /// Values defined.
    pub results: Vec<ValueId>,
    /// Attributes by name, in alphabetical order; absent optional ones are left out.
    pub props: Vec<(&'static str, AttrId)>,
    /// Nested regions, all isolated from above.
    pub regions: Vec<RegionId>,
    /// Source location.
    pub loc: AttrId,
}

impl Op {
    /// The attribute `name`, if present.
    pub fn prop(&self, name: &str) -> Option<AttrId> {
        self.props.iter().find(|(n, _)| *n == name).map(|p| p.1)
    }
}

/// A region of one block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Block arguments.
    pub args: Vec<ValueId>,
    /// A location for each argument.
    pub arg_locs: Vec<AttrId>,
    /// Operations in order; the last one is the terminator.
    pub ops: Vec<OpId>,
}

/// Bytes of a resource: in memory, in another file, or in the mapped program.
#[derive(Clone, Debug)]
pub enum BlobData {
    /// Owned bytes.
    Bytes(Vec<u8>),
    /// A range of a file, copied only when the program is written.
    File {
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A range of a map, as the decoder leaves it.
    Mapped {
        /// The map.
        file: MappedFile,
        /// First byte.
        offset: usize,
        /// Length in bytes.
        len: usize,
    },
}

/// A named resource; keys are unique in a module.
#[derive(Clone, Debug)]
pub struct Blob {
    /// Resource key.
    pub key: String,
    /// Contents.
    pub data: BlobData,
}

impl Blob {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match &self.data {
            BlobData::Bytes(b) => b.len() as u64,
            BlobData::File { len, .. } => *len,
            BlobData::Mapped { len, .. } => *len as u64,
        }
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, if they are in memory or mapped (not for [`BlobData::File`]).
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.data {
            BlobData::Bytes(b) => Some(b),
            BlobData::File { .. } => None,
            BlobData::Mapped { file, offset, len } => file.get(*offset..offset.checked_add(*len)?),
        }
    }
}

/// An append-only table in which equal entries share a handle.
#[derive(Clone, Debug)]
struct Interner<T> {
    items: Vec<T>,
    index: HashMap<T, u32>,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            index: HashMap::new(),
        }
    }
}

impl<T: Clone + Eq + Hash> Interner<T> {
    fn get(&mut self, item: T) -> u32 {
        if let Some(&i) = self.index.get(&item) {
            return i;
        }
        let i = u32::try_from(self.items.len()).expect("fewer than 2^32 entries");
        self.items.push(item.clone());
        self.index.insert(item, i);
        i
    }
}

/// A whole program: what one `main.mlirb` holds.
#[derive(Clone, Debug, Default)]
pub struct Module {
    types: Interner<Type>,
    attrs: Interner<Attr>,
    values: Vec<TypeId>,
    ops: Vec<Op>,
    regions: Vec<Region>,
    blobs: Vec<Blob>,
    blob_digests: HashMap<[u8; 32], BlobId>,
    /// The `dataflow.graph_v1` operations in order.
    pub graphs: Vec<OpId>,
    /// Feature version of the asset, `None` where the file has none.
    pub version: Option<u32>,
    /// The asset operation's `source` string, which Apple leaves out.
    pub source: Option<AttrId>,
    /// Location of the asset operation.
    pub loc: Option<AttrId>,
}

impl Module {
    /// Interns a type.
    pub fn add_type(&mut self, ty: Type) -> TypeId {
        TypeId(self.types.get(ty))
    }

    /// Interns an attribute.
    pub fn add_attr(&mut self, attr: Attr) -> AttrId {
        AttrId(self.attrs.get(attr))
    }

    /// Adds a value.
    pub fn add_value(&mut self, ty: TypeId) -> ValueId {
        self.values.push(ty);
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds an operation to the arena (not to a region).
    pub fn add_op(&mut self, op: Op) -> OpId {
        self.ops.push(op);
        OpId(self.ops.len() as u32 - 1)
    }

    /// Adds a region to the arena.
    pub fn add_region(&mut self, region: Region) -> RegionId {
        self.regions.push(region);
        RegionId(self.regions.len() as u32 - 1)
    }

    /// Adds a blob.
    pub fn add_blob(&mut self, blob: Blob) -> BlobId {
        self.blobs.push(blob);
        BlobId(self.blobs.len() as u32 - 1)
    }

    /// A blob of these bytes: the one made of equal bytes before, or a new one
    /// whose key is derived from its SHA-256.
    pub fn intern_blob(&mut self, bytes: &[u8]) -> BlobId {
        let digest: [u8; 32] = Sha256::digest(bytes).into();
        if let Some(&id) = self.blob_digests.get(&digest) {
            return id;
        }
        let mut key = String::from("blob_");
        for byte in &digest[..8] {
            let _ = write!(key, "{byte:02x}");
        }
        let id = self.add_blob(Blob {
            key,
            data: BlobData::Bytes(bytes.to_vec()),
        });
        self.blob_digests.insert(digest, id);
        id
    }

    /// The type of a handle.
    ///
    /// # Panics
    /// If the handle is of another module; so do all look-ups here.
    pub fn ty(&self, id: TypeId) -> &Type {
        &self.types.items[id.index()]
    }

    /// The attribute of a handle.
    pub fn attr(&self, id: AttrId) -> &Attr {
        &self.attrs.items[id.index()]
    }

    /// The type of a value.
    pub fn value_type(&self, id: ValueId) -> TypeId {
        self.values[id.index()]
    }

    /// The tensor type of a value, or `None` for handles and tokens.
    pub fn tensor_type(&self, id: ValueId) -> Option<&TensorType> {
        match self.ty(self.value_type(id)) {
            Type::Tensor(t) => Some(t),
            _ => None,
        }
    }

    /// The operation of a handle.
    pub fn op(&self, id: OpId) -> &Op {
        &self.ops[id.index()]
    }

    /// The operation of a handle, to change.
    pub fn op_mut(&mut self, id: OpId) -> &mut Op {
        &mut self.ops[id.index()]
    }

    /// The region of a handle.
    pub fn region(&self, id: RegionId) -> &Region {
        &self.regions[id.index()]
    }

    /// The region of a handle, to change.
    pub fn region_mut(&mut self, id: RegionId) -> &mut Region {
        &mut self.regions[id.index()]
    }

    /// The blob of a handle.
    pub fn blob(&self, id: BlobId) -> &Blob {
        &self.blobs[id.index()]
    }

    /// All blobs in order.
    pub fn blobs(&self) -> &[Blob] {
        &self.blobs
    }

    /// All types in order of their handles.
    pub fn types(&self) -> &[Type] {
        &self.types.items
    }

    /// All attributes in order of their handles.
    pub fn attrs(&self) -> &[Attr] {
        &self.attrs.items
    }

    /// Number of values.
    pub fn value_count(&self) -> usize {
        self.values.len()
    }

    /// The location that says "unknown" in the form Apple's own writer uses.
    pub fn unknown_loc(&mut self) -> AttrId {
        let file = self.add_attr(Attr::File {
            name: "-".into(),
            directory: String::new(),
            sha256: String::new(),
        });
        let source = self.add_attr(Attr::SourceLocation {
            file,
            range: [0; 4],
        });
        let scope = self.add_attr(Attr::Unit);
        self.add_attr(Attr::Location {
            source,
            scope,
            fused: Vec::new(),
            metadata: Vec::new(),
        })
    }

    /// The graph named `name`, private ones included.
    pub fn graph(&self, name: &str) -> Option<Graph<'_>> {
        self.graphs().into_iter().find(|g| g.name == name)
    }

    /// A typed view of every well-formed graph, in order.
    pub fn graphs(&self) -> Vec<Graph<'_>> {
        self.graphs
            .iter()
            .filter_map(|&id| Graph::of(self, id))
            .collect()
    }
}

/// A typed view of a `dataflow.graph_v1`.
#[derive(Clone, Debug)]
pub struct Graph<'a> {
    /// The operation.
    pub op: OpId,
    /// Function name.
    pub name: &'a str,
    /// Whether the function can only be invoked from within the program.
    pub private: bool,
    /// The body.
    pub region: RegionId,
    /// Arguments with their names.
    pub inputs: Vec<(Option<&'a str>, ValueId)>,
    /// Values returned by the terminator, with their names; tokens have none.
    pub outputs: Vec<(Option<&'a str>, ValueId)>,
}

impl<'a> Graph<'a> {
    pub(crate) fn of(m: &'a Module, id: OpId) -> Option<Self> {
        let op = m.op(id);
        let string = |name| match m.attr(op.prop(name)?) {
            Attr::String(s) => Some(s.as_str()),
            _ => None,
        };
        let names = |prop| -> Option<Vec<Option<&'a str>>> {
            let Attr::Array(items) = m.attr(op.prop(prop)?) else {
                return None;
            };
            Some(items.iter().map(|&i| value_name(m, i)).collect())
        };
        let private = matches!(
            m.attr(op.prop("isPrivate")?),
            Attr::Integer { value, .. } if *value != 0
        );
        let region = *op.regions.first()?;
        let body = m.region(region);
        let last = m.op(*body.ops.last()?);
        let zip = |names: Vec<Option<&'a str>>, values: &[ValueId]| {
            (names.len() == values.len())
                .then(|| names.into_iter().zip(values.iter().copied()).collect())
        };
        Some(Self {
            op: id,
            name: string("name")?,
            private,
            region,
            inputs: zip(names("argAttrs")?, &body.args)?,
            outputs: zip(names("resAttrs")?, &last.operands)?,
        })
    }
}

/// The `aicode.name` in one entry of `argAttrs` or `resAttrs`.
fn value_name(m: &Module, entry: AttrId) -> Option<&str> {
    let Attr::Array(items) = m.attr(entry) else {
        return None;
    };
    items.iter().find_map(|&i| match m.attr(i) {
        Attr::Opaque { name, items } if name == "aicode.name" => match m.attr(*items.first()?) {
            Attr::String(s) => Some(s.as_str()),
            _ => None,
        },
        _ => None,
    })
}
