//! Do two modules hold the same program?
//!
//! Handles differ between a module that was built and one that was decoded, so
//! what they refer to is compared: graphs in order, operations one by one, values
//! by the place that defines them, blobs by key and bytes.

use std::collections::{HashMap, HashSet};

use super::ir::{Attr, AttrId, Module, OpId, RegionId, Type, TypeId, ValueId};

/// The first difference found, `None` if the programs are the same. The feature
/// version is left out: a built module has none before it is written.
///
/// Blobs must be in memory or mapped.
pub fn difference(a: &Module, b: &Module) -> Option<String> {
    let mut c = Comparison {
        a,
        b,
        values: HashMap::new(),
        attrs: HashSet::new(),
        types: HashSet::new(),
    };
    c.ops(&a.graphs, &b.graphs).err()
}

struct Comparison<'a> {
    a: &'a Module,
    b: &'a Module,
    /// The value of `b` that stands for a value of `a`.
    values: HashMap<ValueId, ValueId>,
    /// Pairs known to be equal, since entries are shared a lot.
    attrs: HashSet<(AttrId, AttrId)>,
    types: HashSet<(TypeId, TypeId)>,
}

type Same = Result<(), String>;

fn equal<T: PartialEq + std::fmt::Debug>(what: &str, a: &T, b: &T) -> Same {
    if a == b {
        return Ok(());
    }
    Err(format!("{what}: {a:?} and {b:?}"))
}

impl Comparison<'_> {
    fn ops(&mut self, a: &[OpId], b: &[OpId]) -> Same {
        equal("number of operations", &a.len(), &b.len())?;
        a.iter().zip(b).try_for_each(|(&a, &b)| self.op(a, b))
    }

    fn op(&mut self, a: OpId, b: OpId) -> Same {
        let (a, b) = (self.a.op(a), self.b.op(b));
        equal("operation", &a.name, &b.name)?;
        let within = |e| format!("in `{}`: {e}", a.name);
        equal("number of operands", &a.operands.len(), &b.operands.len()).map_err(within)?;
        for (x, y) in a.operands.iter().zip(&b.operands) {
            equal("operand", &self.values.get(x), &Some(y)).map_err(within)?;
        }
        self.define(&a.results, &b.results).map_err(within)?;
        equal("number of attributes", &a.props.len(), &b.props.len()).map_err(within)?;
        for (&(x, i), &(y, j)) in a.props.iter().zip(&b.props) {
            equal("attribute name", &x, &y).map_err(within)?;
            self.attr(i, j).map_err(within)?;
        }
        self.attr(a.loc, b.loc).map_err(within)?;
        equal("number of regions", &a.regions.len(), &b.regions.len()).map_err(within)?;
        for (&x, &y) in a.regions.iter().zip(&b.regions) {
            self.region(x, y).map_err(within)?;
        }
        Ok(())
    }

    fn region(&mut self, a: RegionId, b: RegionId) -> Same {
        let (a, b) = (self.a.region(a), self.b.region(b));
        self.define(&a.args, &b.args)?;
        for (&x, &y) in a.arg_locs.iter().zip(&b.arg_locs) {
            self.attr(x, y)?;
        }
        self.ops(&a.ops, &b.ops)
    }

    fn define(&mut self, a: &[ValueId], b: &[ValueId]) -> Same {
        equal("number of values", &a.len(), &b.len())?;
        for (&x, &y) in a.iter().zip(b) {
            self.ty(self.a.value_type(x), self.b.value_type(y))?;
            self.values.insert(x, y);
        }
        Ok(())
    }

    fn types(&mut self, a: &[TypeId], b: &[TypeId]) -> Same {
        equal("number of types", &a.len(), &b.len())?;
        a.iter().zip(b).try_for_each(|(&a, &b)| self.ty(a, b))
    }

    fn ty(&mut self, a: TypeId, b: TypeId) -> Same {
        if !self.types.insert((a, b)) {
            return Ok(());
        }
        match (self.a.ty(a), self.b.ty(b)) {
            (Type::Tensor(x), Type::Tensor(y)) => {
                equal("element", &x.elem, &y.elem)?;
                equal("shape", &x.shape, &y.shape)?;
                match (x.encoding, y.encoding) {
                    (Some(x), Some(y)) => self.attr(x, y),
                    (x, y) => equal("encoding", &x.is_some(), &y.is_some()),
                }
            }
            (
                Type::Function { inputs, results },
                Type::Function {
                    inputs: other_inputs,
                    results: other_results,
                },
            ) => {
                self.types(inputs, other_inputs)?;
                self.types(results, other_results)
            }
            (Type::Handle(x), Type::Handle(y)) | (Type::Unresolved(x), Type::Unresolved(y)) => {
                self.ty(*x, *y)
            }
            (x, y) => equal("type", x, y),
        }
    }

    fn attr(&mut self, a: AttrId, b: AttrId) -> Same {
        if !self.attrs.insert((a, b)) {
            return Ok(());
        }
        let (a, b) = (self.a.attr(a), self.b.attr(b));
        if let (Attr::Resource(x), Attr::Resource(y)) = (a, b) {
            let (x, y) = (self.a.blob(*x), self.b.blob(*y));
            equal("blob key", &x.key, &y.key)?;
            return match (x.bytes(), y.bytes()) {
                (Some(p), Some(q)) if p == q => Ok(()),
                _ => Err(format!("blob `{}` differs", x.key)),
            };
        }
        // Everything an attribute refers to is compared in its place, and what
        // remains with the references taken out.
        let (x, y) = (links(a), links(b));
        equal("number of attributes", &x.attrs.len(), &y.attrs.len())?;
        for (&i, &j) in x.attrs.iter().zip(&y.attrs) {
            self.attr(i, j)?;
        }
        self.types(&x.types, &y.types)?;
        equal("attribute", &x.rest, &y.rest)
    }
}

struct Links {
    attrs: Vec<AttrId>,
    types: Vec<TypeId>,
    /// The attribute with every reference replaced by a fixed one.
    rest: Attr,
}

fn links(attr: &Attr) -> Links {
    const NOWHERE: AttrId = AttrId(u32::MAX);
    const NOTHING: TypeId = TypeId(u32::MAX);
    let mut rest = attr.clone();
    let (mut attrs, mut types) = (vec![], vec![]);
    {
        let mut attr = |a: &mut AttrId| attrs.push(std::mem::replace(a, NOWHERE));
        let mut ty = |t: &mut TypeId| types.push(std::mem::replace(t, NOTHING));
        match &mut rest {
            Attr::Type(t) | Attr::ParamDecl { ty: t, .. } => ty(t),
            Attr::Array(items) | Attr::Opaque { items, .. } | Attr::Dictionary(items) => {
                items.iter_mut().for_each(attr);
            }
            Attr::ParamConstant { value, ty: t } => {
                attr(value);
                ty(t);
            }
            Attr::SourceLocation { file: a, .. }
            | Attr::CompileUnit { file: a, .. }
            | Attr::MetadataData(a)
            | Attr::Metadata { data: a, .. }
            | Attr::OpaqueLocation(a) => attr(a),
            Attr::Subprogram {
                ty: t,
                compile_unit,
                file,
                ..
            } => {
                ty(t);
                attr(compile_unit);
                attr(file);
            }
            Attr::Location {
                source,
                scope,
                fused,
                metadata,
            } => {
                attr(source);
                attr(scope);
                fused.iter_mut().chain(metadata).for_each(attr);
            }
            Attr::String(_)
            | Attr::Integer { .. }
            | Attr::Float { .. }
            | Attr::Dense { .. }
            | Attr::Resource(_)
            | Attr::HwConstraints { .. }
            | Attr::SymbolRef(_)
            | Attr::Enum { .. }
            | Attr::File { .. }
            | Attr::Unit => {}
        }
    }
    Links { attrs, types, rest }
}
