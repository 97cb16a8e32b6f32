//! What a program is made of, in numbers.
//!
//! One structure for both forms in which it is shown, JSON and text, so that they
//! cannot disagree.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::{self, Display};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::encode::feature_version;
use super::ids;
use super::ir::{Attr, BlobId, Graph, Module, Op, OpId, RegionId, Type, ValueId};
use super::text::type_name;

/// A program's functions, operations and bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// Feature version the program declares, as `20260317`.
    pub feature_version: u32,
    /// All functions in order, private ones included.
    pub functions: Vec<FunctionSummary>,
    /// How often each operation occurs, decompositions of composite ones left out.
    pub operations: BTreeMap<String, u64>,
    /// Bytes of the program file by what they are for.
    pub bytes: RoleBytes,
}

/// One function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FunctionSummary {
    /// Name.
    pub name: String,
    /// Whether it can only be invoked from within the program.
    pub private: bool,
    /// Operations, decompositions of composite ones left out.
    pub operations: u64,
    /// Tensors passed with every call.
    pub inputs: Vec<ValueSummary>,
    /// Tensors returned.
    pub outputs: Vec<ValueSummary>,
    /// Tensors the caller lends, read and written in place.
    pub states: Vec<ValueSummary>,
}

/// An argument or result of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ValueSummary {
    /// The name a caller binds it by.
    pub name: Option<String>,
    /// Element type, as `f16`.
    pub elem: String,
    /// Extents, outermost first; absent where only the call knows them.
    pub shape: Vec<Option<u64>>,
    /// The whole type as MLIR spells it.
    pub r#type: String,
}

/// Bytes of a program file. A blob of several roles counts as the first of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RoleBytes {
    /// Indices into look-up tables.
    pub indices: u64,
    /// Look-up tables.
    pub tables: u64,
    /// Quantized weights of `blockwise_shift_scale` and `dequantize`.
    pub quantized: u64,
    /// Scales and offsets of quantized weights.
    pub scales: u64,
    /// Weights of normalizations.
    pub norms: u64,
    /// All other constants that are blobs.
    pub constants: u64,
    /// Blobs no operation refers to.
    pub unused: u64,
    /// The rest of the file: operations, types, attributes with the constants in
    /// them, padding.
    pub program: u64,
    /// The whole file.
    pub total: u64,
}

/// Roles in the order in which they take precedence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Indices,
    Tables,
    Quantized,
    Scales,
    Norms,
    Constants,
}

/// Summarizes a program of `file_bytes` bytes.
pub fn summarize(m: &Module, file_bytes: u64) -> Summary {
    let mut operations: BTreeMap<String, u64> = BTreeMap::new();
    let mut functions = vec![];
    for graph in m.graphs() {
        let function = function(m, &graph, &mut operations);
        functions.push(function);
    }
    Summary {
        feature_version: feature_version(m),
        functions,
        operations,
        bytes: bytes(m, file_bytes),
    }
}

fn function(m: &Module, g: &Graph, histogram: &mut BTreeMap<String, u64>) -> FunctionSummary {
    let mut operations = 0;
    let mut open: Vec<OpId> = m.region(g.region).ops.clone();
    while let Some(id) = open.pop() {
        let op = m.op(id);
        operations += 1;
        *histogram.entry(op.name.clone()).or_default() += 1;
        if op.name.contains('.') {
            for &region in &op.regions {
                open.extend_from_slice(&m.region(region).ops);
            }
        }
    }
    let mut inputs = vec![];
    let mut states = vec![];
    for &(name, value) in &g.inputs {
        let ty = m.ty(m.value_type(value));
        let list = match ty {
            Type::Handle(_) => &mut states,
            _ => &mut inputs,
        };
        list.push(value_summary(m, name, value));
    }
    // The tokens among the results order the states and carry nothing.
    let carries = |v: &ValueId| *m.ty(m.value_type(*v)) != Type::Token;
    FunctionSummary {
        name: g.name.to_owned(),
        private: g.private,
        operations,
        inputs,
        outputs: g
            .outputs
            .iter()
            .filter(|(_, v)| carries(v))
            .map(|&(name, v)| value_summary(m, name, v))
            .collect(),
        states,
    }
}

fn value_summary(m: &Module, name: Option<&str>, value: ValueId) -> ValueSummary {
    let ty = m.ty(m.value_type(value));
    let held = match ty {
        Type::Handle(inner) => m.ty(*inner),
        other => other,
    };
    let (elem, shape) = match held {
        Type::Tensor(t) => (
            t.elem.name().to_owned(),
            t.shape.iter().map(|&d| u64::try_from(d).ok()).collect(),
        ),
        other => (type_name(m, other), vec![]),
    };
    ValueSummary {
        name: name.map(str::to_owned),
        elem,
        shape,
        r#type: type_name(m, ty),
    }
}

fn bytes(m: &Module, file_bytes: u64) -> RoleBytes {
    let mut roles: HashMap<BlobId, Role> = HashMap::new();
    let mut seen: HashSet<RegionId> = HashSet::new();
    let mut open: Vec<OpId> = m.graphs.clone();
    while let Some(id) = open.pop() {
        for &region in &m.op(id).regions {
            if seen.insert(region) {
                region_roles(m, region, &mut roles);
                open.extend_from_slice(&m.region(region).ops);
            }
        }
    }
    let mut bytes = RoleBytes {
        total: file_bytes,
        program: file_bytes,
        ..RoleBytes::default()
    };
    for (i, blob) in m.blobs().iter().enumerate() {
        let len = blob.len();
        bytes.program = bytes.program.saturating_sub(len);
        *match roles.get(&BlobId(i as u32)) {
            Some(Role::Indices) => &mut bytes.indices,
            Some(Role::Tables) => &mut bytes.tables,
            Some(Role::Quantized) => &mut bytes.quantized,
            Some(Role::Scales) => &mut bytes.scales,
            Some(Role::Norms) => &mut bytes.norms,
            Some(Role::Constants) => &mut bytes.constants,
            None => &mut bytes.unused,
        } += len;
    }
    bytes
}

/// What the blobs of a region are used for, by the operations that read them.
fn region_roles(m: &Module, region: RegionId, roles: &mut HashMap<BlobId, Role>) {
    let mut blobs: HashMap<ValueId, BlobId> = HashMap::new();
    let mut defined: HashMap<ValueId, &Op> = HashMap::new();
    let mut note = |blob: BlobId, role: Role| {
        let known = roles.entry(blob).or_insert(role);
        *known = role.min(*known);
    };
    for &id in &m.region(region).ops {
        let op = m.op(id);
        if op.name == ids::op::CONSTANT
            && let Some(value) = op.prop("value")
            && let Attr::Resource(blob) = m.attr(value)
            && let Some(&result) = op.results.first()
        {
            blobs.insert(result, *blob);
            note(*blob, Role::Constants);
        }
        for (i, operand) in op.operands.iter().enumerate() {
            if let Some(&blob) = blobs.get(operand) {
                note(blob, role(op, i, &defined));
            }
        }
        for &result in &op.results {
            defined.insert(result, op);
        }
    }
}

fn role(op: &Op, operand: usize, defined: &HashMap<ValueId, &Op>) -> Role {
    let name = |op: &Op| {
        let name = op.name.strip_prefix("primitive.").unwrap_or(&op.name);
        let end = name.rfind("_v").unwrap_or(name.len());
        let name = &name[..end];
        name.strip_prefix("broadcasting_")
            .unwrap_or(name)
            .to_owned()
    };
    match (name(op).as_str(), operand) {
        ("lut_to_dense", 0) => Role::Indices,
        ("lut_to_dense", 1) => Role::Tables,
        ("blockwise_shift_scale" | "dequantize", 0) => Role::Quantized,
        ("blockwise_shift_scale" | "dequantize", _) => Role::Scales,
        // `x * rsqrt(..) * weight`
        ("mul", _) => {
            let other = op.operands.get(1 - operand.min(1));
            let scaled = other.and_then(|v| defined.get(v)).is_some_and(|inner| {
                name(inner) == "mul"
                    && inner
                        .operands
                        .iter()
                        .any(|v| defined.get(v).is_some_and(|op| name(op) == "rsqrt"))
            });
            if scaled { Role::Norms } else { Role::Constants }
        }
        _ => Role::Constants,
    }
}

impl Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "feature version {}", self.feature_version)?;
        for function in &self.functions {
            let private = if function.private { "private " } else { "" };
            writeln!(
                f,
                "{private}{}: {} operations",
                function.name, function.operations
            )?;
            for (kind, values) in [
                ("in   ", &function.inputs),
                ("out  ", &function.outputs),
                ("state", &function.states),
            ] {
                for v in values {
                    let name = v.name.as_deref().unwrap_or("_");
                    writeln!(f, "  {kind} {name}: {}", v.r#type)?;
                }
            }
        }
        writeln!(f, "operations")?;
        for (name, count) in &self.operations {
            writeln!(f, "  {count:>12} {name}")?;
        }
        writeln!(f, "bytes")?;
        let b = &self.bytes;
        for (role, bytes) in [
            ("indices", b.indices),
            ("tables", b.tables),
            ("quantized", b.quantized),
            ("scales", b.scales),
            ("norms", b.norms),
            ("constants", b.constants),
            ("unused", b.unused),
            ("program", b.program),
            ("total", b.total),
        ] {
            if bytes > 0 {
                writeln!(f, "  {bytes:>12} {role}")?;
            }
        }
        Ok(())
    }
}
