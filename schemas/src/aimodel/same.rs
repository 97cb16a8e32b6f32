//! Do two modules hold the same program?
//!
//! Handles differ between a module that was built and one that was decoded, so
//! what they refer to is compared: graphs in order, operations one by one, values
//! by the place that defines them, blobs by key and bytes. Attributes and types are
//! compared from a list of pairs, since they nest as deep as a file likes.

use std::collections::{HashMap, HashSet};

use super::ir::links::Link;
use super::ir::{Attr, AttrId, BlobId, Module, OpId, RegionId, Type, TypeId, ValueId};

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
        open: vec![],
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
    /// Pairs met and not yet compared.
    open: Vec<Pair>,
}

enum Pair {
    Attrs(AttrId, AttrId),
    Types(TypeId, TypeId),
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

    fn ty(&mut self, a: TypeId, b: TypeId) -> Same {
        self.open.push(Pair::Types(a, b));
        self.entries()
    }

    fn attr(&mut self, a: AttrId, b: AttrId) -> Same {
        self.open.push(Pair::Attrs(a, b));
        self.entries()
    }

    /// Compares the pairs met, and those they refer to.
    fn entries(&mut self) -> Same {
        while let Some(pair) = self.open.pop() {
            match pair {
                Pair::Attrs(a, b) if self.attrs.insert((a, b)) => {
                    let (mut x, mut y) = (self.a.attr(a).clone(), self.b.attr(b).clone());
                    if let (Attr::Resource(x), Attr::Resource(y)) = (&x, &y) {
                        self.blob(*x, *y)?;
                        continue;
                    }
                    self.linked(take_links(&mut x), take_links(&mut y))?;
                    equal("attribute", &x, &y)?;
                }
                Pair::Types(a, b) if self.types.insert((a, b)) => {
                    let (mut x, mut y) = (self.a.ty(a).clone(), self.b.ty(b).clone());
                    self.linked(take_type_links(&mut x), take_type_links(&mut y))?;
                    equal("type", &x, &y)?;
                }
                Pair::Attrs(..) | Pair::Types(..) => {}
            }
        }
        Ok(())
    }

    /// What two entries refer to is compared in its place.
    fn linked(&mut self, x: Vec<Link>, y: Vec<Link>) -> Same {
        equal("number of references", &x.len(), &y.len())?;
        for pair in x.into_iter().zip(y) {
            self.open.push(match pair {
                (Link::Attr(a), Link::Attr(b)) => Pair::Attrs(a, b),
                (Link::Type(a), Link::Type(b)) => Pair::Types(a, b),
                (a, b) => return equal("reference", &a, &b),
            });
        }
        Ok(())
    }

    fn blob(&self, x: BlobId, y: BlobId) -> Same {
        let (x, y) = (self.a.blob(x), self.b.blob(y));
        equal("blob key", &x.key, &y.key)?;
        match (x.bytes(), y.bytes()) {
            (Some(p), Some(q)) if p == q => Ok(()),
            _ => Err(format!("blob `{}` differs", x.key)),
        }
    }
}

/// Replaces every reference by a fixed one.
fn take_links(attr: &mut Attr) -> Vec<Link> {
    let mut links = vec![];
    attr.each_link(|link| links.push(link.take()));
    links
}

fn take_type_links(ty: &mut Type) -> Vec<Link> {
    let mut links = vec![];
    ty.each_link(|link| links.push(link.take()));
    links
}
