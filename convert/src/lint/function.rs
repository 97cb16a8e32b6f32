//! One function of a program, with what the rules ask about: who defines a value,
//! who uses it, what a constant holds.

use std::collections::HashMap;

use anemone_schemas::aimodel::ir::{
    Attr, BlobData, Elem, Graph, Module, Op, TensorType, Type, ValueId,
};
use half::{bf16, f16};

/// Largest constant whose elements a rule looks at one by one.
const FEW: usize = 4096;

/// A graph and its index.
pub(super) struct Function<'a> {
    pub(super) m: &'a Module,
    pub(super) graph: Graph<'a>,
    /// Name in the composite declaration, if the graph is a composite's body.
    pub(super) composite: Option<&'a str>,
    pub(super) ops: Vec<&'a Op>,
    defined: HashMap<ValueId, usize>,
    users: HashMap<ValueId, Vec<usize>>,
}

impl<'a> Function<'a> {
    pub(super) fn new(m: &'a Module, graph: Graph<'a>) -> Self {
        let ops: Vec<&Op> = m
            .region(graph.region)
            .ops
            .iter()
            .map(|&o| m.op(o))
            .collect();
        let mut defined = HashMap::new();
        let mut users: HashMap<ValueId, Vec<usize>> = HashMap::new();
        for (i, op) in ops.iter().enumerate() {
            defined.extend(op.results.iter().map(|&r| (r, i)));
            for &v in &op.operands {
                users.entry(v).or_default().push(i);
            }
        }
        let composite = m
            .op(graph.op)
            .prop("compositeDecl")
            .and_then(|a| match m.attr(a) {
                Attr::Opaque { name, .. } => Some(name.as_str()),
                _ => None,
            });
        Self {
            m,
            graph,
            composite,
            ops,
            defined,
            users,
        }
    }

    pub(super) fn tensor(&self, v: ValueId) -> Option<&'a TensorType> {
        self.m.tensor_type(v)
    }

    /// The tensor a state holds.
    pub(super) fn state(&self, v: ValueId) -> Option<&'a TensorType> {
        match self.m.ty(self.m.value_type(v)) {
            Type::Handle(inner) => match self.m.ty(*inner) {
                Type::Tensor(t) => Some(t),
                _ => None,
            },
            _ => None,
        }
    }

    pub(super) fn dims(&self, v: ValueId) -> Option<Vec<usize>> {
        self.tensor(v)?.dims()
    }

    /// Index of the operation that defines a value; none for arguments.
    pub(super) fn definition(&self, v: ValueId) -> Option<usize> {
        self.defined.get(&v).copied()
    }

    /// The defining operation, if its name is one of `names`.
    pub(super) fn made_by(&self, v: ValueId, names: &[&str]) -> Option<&'a Op> {
        let op = self.ops[self.definition(v)?];
        names.contains(&base(op)).then_some(op)
    }

    pub(super) fn users(&self, v: ValueId) -> impl Iterator<Item = &'a Op> + '_ {
        self.users
            .get(&v)
            .into_iter()
            .flatten()
            .map(|&i| self.ops[i])
    }

    pub(super) fn input(&self, name: &str) -> Option<ValueId> {
        named(&self.graph.inputs, name)
    }

    pub(super) fn output(&self, name: &str) -> Option<ValueId> {
        named(&self.graph.outputs, name)
    }

    /// Goes back over operations that only move elements.
    pub(super) fn source(&self, mut v: ValueId) -> ValueId {
        const MOVES: [&str; 7] = [
            "reshape",
            "transpose",
            "expand_dims",
            "shrink_dims",
            "broadcast_to",
            "broadcast_in_dims",
            "copy_discarding_constraints",
        ];
        while let Some(op) = self.made_by(v, &MOVES) {
            v = op.operands[0];
        }
        v
    }

    /// Whether a value is a weight: a constant or one decompressed from constants.
    pub(super) fn is_weight(&self, v: ValueId) -> bool {
        let v = self.source(v);
        self.made_by(
            v,
            &[
                "constant",
                "lut_to_dense",
                "blockwise_shift_scale",
                "dequantize",
            ],
        )
        .is_some()
    }

    /// Elements of a small constant as integers.
    pub(super) fn ints(&self, v: ValueId) -> Option<Vec<i64>> {
        self.elements(v, |elem, bytes| {
            let mut raw = [0u8; 8];
            let signed = matches!(elem, Elem::Si8 | Elem::Si16 | Elem::Si32 | Elem::Si64);
            let unsigned = matches!(elem, Elem::Ui8 | Elem::Ui16 | Elem::Ui32 | Elem::Ui64);
            if !signed && !unsigned {
                return None;
            }
            if signed && bytes[bytes.len() - 1] & 0x80 != 0 {
                raw = [0xff; 8];
            }
            raw[..bytes.len()].copy_from_slice(bytes);
            Some(i64::from_le_bytes(raw))
        })
    }

    /// Elements of a small constant as floats.
    pub(super) fn floats(&self, v: ValueId) -> Option<Vec<f64>> {
        self.elements(v, float)
    }

    fn elements<T: Clone>(
        &self,
        v: ValueId,
        read: impl Fn(Elem, &[u8]) -> Option<T>,
    ) -> Option<Vec<T>> {
        let op = self.made_by(v, &["constant"])?;
        let t = self.tensor(v)?;
        let count = t.count().filter(|&n| n <= FEW)?;
        let width = t.elem.bits() / 8;
        let (splat, bytes) = match self.m.attr(op.prop("value")?) {
            Attr::Dense { splat, bytes } => (*splat, bytes.as_slice()),
            Attr::Resource(blob) => (false, self.m.blob(*blob).bytes()?),
            _ => return None,
        };
        if width == 0 {
            return None;
        }
        let mut all: Vec<T> = bytes
            .chunks_exact(width)
            .map(|b| read(t.elem, b))
            .collect::<Option<_>>()?;
        if splat {
            all = vec![all.first()?.clone(); count];
        }
        Some(all)
    }

    /// Offsets along each axis, where known: a constant, or a concatenation of
    /// constants and run-time values.
    pub(super) fn offsets(&self, v: ValueId) -> Vec<Option<i64>> {
        if let Some(known) = self.ints(v) {
            return known.into_iter().map(Some).collect();
        }
        if let Some(op) = self.made_by(v, &["concat"]) {
            return op.operands[1..]
                .iter()
                .flat_map(|&p| self.offsets(p))
                .collect();
        }
        let count = self.tensor(v).and_then(TensorType::count).unwrap_or(0);
        vec![None; count.min(FEW)]
    }
}

fn named(values: &[(Option<&str>, ValueId)], name: &str) -> Option<ValueId> {
    values.iter().find(|(n, _)| *n == Some(name)).map(|v| v.1)
}

/// Name of an operation without dialect, version and `broadcasting_`, which change
/// nothing for the rules.
pub(super) fn base(op: &Op) -> &str {
    let name = op.name.rsplit('.').next().unwrap_or(&op.name);
    let name = match name.rsplit_once("_v") {
        Some((base, version)) if version.bytes().all(|b| b.is_ascii_digit()) => base,
        _ => name,
    };
    name.strip_prefix("broadcasting_").unwrap_or(name)
}

pub(super) fn is_float(elem: Elem) -> bool {
    !matches!(elem, Elem::Bool) && !is_integer(elem)
}

pub(super) fn is_integer(elem: Elem) -> bool {
    matches!(
        elem,
        Elem::Si64
            | Elem::Si32
            | Elem::Si16
            | Elem::Si8
            | Elem::Si4
            | Elem::Si2
            | Elem::Ui64
            | Elem::Ui32
            | Elem::Ui16
            | Elem::Ui8
            | Elem::Ui6
            | Elem::Ui4
            | Elem::Ui3
            | Elem::Ui2
            | Elem::Ui1
    )
}

fn float(elem: Elem, bytes: &[u8]) -> Option<f64> {
    Some(match (elem, bytes) {
        (Elem::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f64(),
        (Elem::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f64(),
        (Elem::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (Elem::F64, bytes) => f64::from_le_bytes(bytes.try_into().ok()?),
        _ => return None,
    })
}

/// Index of the first infinity or NaN of a float constant, however large.
pub(super) fn first_non_finite(m: &Module, elem: Elem, value: &Attr) -> Option<usize> {
    let width = elem.bits() / 8;
    let find = |bytes: &[u8]| {
        bytes
            .chunks_exact(width)
            .position(|b| float(elem, b).is_some_and(|v| !v.is_finite()))
    };
    match value {
        Attr::Dense { bytes, .. } => find(bytes),
        Attr::Resource(blob) => {
            let blob = m.blob(*blob);
            match (&blob.data, blob.bytes()) {
                (_, Some(bytes)) => find(bytes),
                (BlobData::File { path, offset, len }, None) => {
                    find(&read_range(path, *offset, *len).ok()?)
                }
                _ => None,
            }
        }
        _ => None,
    }
}

fn read_range(path: &std::path::Path, offset: u64, len: u64) -> std::io::Result<Vec<u8>> {
    use std::io::{Read, Seek, SeekFrom};
    let mut file = std::fs::File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}
