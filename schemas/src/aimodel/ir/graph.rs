//! Functions, read from their attributes.

use super::{Attr, AttrId, Module, OpId, RegionId, ValueId};

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
