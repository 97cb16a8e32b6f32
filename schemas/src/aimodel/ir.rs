//! The in-memory form of a Core AI program: arenas of types, attributes, values,
//! operations and regions, addressed by `u32` handles.
//!
//! The names are those of the format (`aicode` dialect of MLIR). A [`Module`] is
//! plain data: it can be wrong, and [`super::check`] says so. Types and
//! attributes are interned, so equal ones have equal handles.

mod attr;
mod blob;
mod elem;
mod graph;
pub(crate) mod links;

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::Hash;

use sha2::{Digest, Sha256};

pub use self::attr::{Attr, Backing, enum_code};
pub use self::blob::{Blob, BlobData, BlobError};
pub use self::elem::Elem;
pub use self::graph::Graph;

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
