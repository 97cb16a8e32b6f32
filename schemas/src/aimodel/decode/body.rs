//! Operations and regions.

use super::cursor::Cursor;
use super::entries::Entries;
use super::tables::Tables;
use super::{DecodeError, Problem, Result, malformed};
use crate::aimodel::ids::{self, op_mask, section};
use crate::aimodel::ir::{Attr, AttrId, Module, Op, OpId, Region, ValueId};
use crate::aimodel::limits::MAX_REGION_DEPTH;

/// Reads the operations: the asset, in it the graphs, in them the rest.
pub(super) fn read(tables: &Tables, entries: &Entries, m: &mut Module) -> Result<()> {
    let mut reader = Reader { tables, entries, m };
    let mut c = tables.ir.clone();
    let at = c.offset();
    let (count, has_args) = c.flagged()?;
    if count != 1 || has_args {
        return Err(malformed(
            at,
            format!("{count} top-level operations, expected one without arguments"),
        ));
    }
    let at = c.offset();
    let (asset, regions) = reader.op(&mut c, &[])?;
    if asset.name != ids::op::ASSET || regions != 1 {
        return Err(malformed(
            at,
            format!(
                "the top-level operation is `{}` with {regions} regions, expected `{}` with one",
                asset.name,
                ids::op::ASSET
            ),
        ));
    }
    reader.m.version = match asset.prop("version") {
        Some(version) => Some(reader.version(at, version)?),
        None => None,
    };
    reader.m.source = asset.prop("source");
    reader.m.loc = Some(asset.loc);
    let owner = reader.m.add_op(asset);
    reader.regions(&mut c, owner, regions)?;
    c.end("IR section")?;
    let body = reader.m.op(owner).regions[0];
    let graphs = reader.m.region(body).ops.clone();
    m.graphs = graphs;
    Ok(())
}

struct Reader<'a, 'b> {
    tables: &'b Tables<'a>,
    entries: &'b Entries,
    m: &'b mut Module,
}

/// A region being read.
struct Open<'a> {
    /// The operation it belongs to.
    owner: OpId,
    /// The rest of the nested section.
    c: Cursor<'a>,
    /// Regions of the owner that follow in the same section.
    regions_left: usize,
    region: Region,
    /// Values defined so far, by number.
    values: Vec<ValueId>,
    /// How many there will be.
    announced: u64,
    ops_left: usize,
}

impl<'a> Reader<'a, '_> {
    fn version(&self, at: usize, attr: AttrId) -> Result<u32> {
        match self.m.attr(attr) {
            Attr::Integer { value, .. } => u32::try_from(*value).ok(),
            _ => None,
        }
        .ok_or_else(|| malformed(at, "the feature version is not a 32-bit integer"))
    }

    /// Reads the regions of `owner` and of everything nested, with a stack of the
    /// regions that are open.
    fn regions(&mut self, c: &mut Cursor<'a>, owner: OpId, count: usize) -> Result<()> {
        let mut stack = vec![self.open(c, owner, count)?];
        while let Some(mut top) = stack.pop() {
            if top.ops_left > 0 {
                top.ops_left -= 1;
                let (op, regions) = self.op(&mut top.c, &top.values)?;
                top.values.extend_from_slice(&op.results);
                let id = self.m.add_op(op);
                top.region.ops.push(id);
                if regions == 0 {
                    stack.push(top);
                    continue;
                }
                if stack.len() >= MAX_REGION_DEPTH {
                    return Err(top.c.error(Problem::TooLarge {
                        what: "the depth of nested regions",
                        value: stack.len() as u64 + 1,
                        max: MAX_REGION_DEPTH as u64,
                    }));
                }
                let nested = self.open(&mut top.c, id, regions)?;
                stack.push(top);
                stack.push(nested);
                continue;
            }
            if top.announced != top.values.len() as u64 {
                return Err(malformed(
                    top.c.offset(),
                    format!(
                        "the region defines {} values, {} announced",
                        top.values.len(),
                        top.announced
                    ),
                ));
            }
            let region = self.m.add_region(top.region);
            self.m.op_mut(top.owner).regions.push(region);
            if top.regions_left == 0 {
                top.c.end("nested IR section")?;
            } else {
                stack.push(self.region(top.c, top.owner, top.regions_left)?);
            }
        }
        Ok(())
    }

    /// Enters the nested section with the regions of an operation.
    fn open(&mut self, c: &mut Cursor<'a>, owner: OpId, count: usize) -> Result<Open<'a>> {
        let s = c.section()?;
        if s.id != section::IR {
            return Err(DecodeError {
                offset: s.offset as u64,
                problem: Problem::Section(s.id),
            });
        }
        self.region(s.payload, owner, count)
    }

    /// Starts the first of `count` regions.
    fn region(&mut self, mut c: Cursor<'a>, owner: OpId, count: usize) -> Result<Open<'a>> {
        let at = c.offset();
        let blocks = c.number()?;
        if blocks != 1 {
            return Err(malformed(
                at,
                format!("a region of {blocks} blocks, expected one"),
            ));
        }
        let announced = c.number()?;
        let at = c.clone();
        let (ops, has_args) = c.flagged()?;
        let ops_left = at.count_of(ops)?;
        let mut region = Region::default();
        if has_args {
            for _ in 0..c.count()? {
                let at = c.clone();
                let (ty, has_loc) = c.flagged()?;
                let ty = self.entries.ty_at(&at, ty)?;
                if !has_loc {
                    return Err(malformed(
                        at.offset(),
                        "a block argument without a location",
                    ));
                }
                region.args.push(self.m.add_value(ty));
                region.arg_locs.push(self.entries.attr(&mut c)?);
            }
            let at = c.offset();
            if c.byte()? != 0 {
                return Err(malformed(at, "use-list orders are not supported"));
            }
        }
        Ok(Open {
            owner,
            c,
            regions_left: count - 1,
            values: region.args.clone(),
            region,
            announced,
            ops_left,
        })
    }

    /// Reads an operation up to its regions, and how many those are.
    fn op(&mut self, c: &mut Cursor<'a>, values: &[ValueId]) -> Result<(Op, usize)> {
        let at = c.clone();
        let name = self.tables.op_names[c.index("operation name", self.tables.op_names.len())?];
        let wrong = |problem: String| {
            at.error(Problem::Op {
                op: name.to_owned(),
                problem,
            })
        };
        let mask = c.byte()?;
        let unsupported = mask
            & (op_mask::ATTR_DICTIONARY | op_mask::SUCCESSORS | op_mask::USE_LIST_ORDER | 0x80);
        if unsupported != 0 {
            return Err(wrong(format!(
                "has parts that are not supported (mask {unsupported:#04x})"
            )));
        }
        let loc = self.entries.attr(c)?;
        let props = if mask & op_mask::PROPERTIES == 0 {
            vec![]
        } else {
            let i = c.index("property entry", self.tables.props.len())?;
            self.props(name, &wrong, self.tables.props[i].clone())?
        };
        for prop in ids::props(name).unwrap_or(&[]) {
            if !prop.optional && !props.iter().any(|(n, _)| *n == prop.name) {
                return Err(wrong(format!("lacks its attribute `{}`", prop.name)));
            }
        }
        let mut results = vec![];
        if mask & op_mask::RESULTS != 0 {
            for _ in 0..c.count()? {
                let ty = self.entries.ty(c)?;
                results.push(self.m.add_value(ty));
            }
        }
        let mut operands = vec![];
        if mask & op_mask::OPERANDS != 0 {
            for _ in 0..c.count()? {
                operands.push(values[c.index("value", values.len())?]);
            }
        }
        let mut regions = 0;
        if mask & op_mask::REGIONS != 0 {
            let at = c.clone();
            let (count, isolated) = c.flagged()?;
            regions = at.count_of(count)?;
            if regions == 0 || !isolated {
                return Err(wrong(format!(
                    "has {regions} regions that see the values around them, which is not supported"
                )));
            }
        }
        let op = Op {
            name: name.to_owned(),
            operands,
            results,
            props,
            regions: vec![],
            loc,
        };
        Ok((op, regions))
    }

    /// Reads a property entry by the attributes the operation is known to have.
    fn props(
        &self,
        name: &str,
        wrong: &dyn Fn(String) -> DecodeError,
        mut c: Cursor,
    ) -> Result<Vec<(&'static str, AttrId)>> {
        let Some(schema) = ids::props(name) else {
            return Err(wrong("has attributes of an unknown layout".into()));
        };
        let mut props = vec![];
        for prop in schema {
            if !prop.optional {
                props.push((prop.name, self.entries.attr(&mut c)?));
                continue;
            }
            let at = c.clone();
            let (attr, present) = c.flagged()?;
            if present {
                props.push((prop.name, self.entries.attr_at(&at, attr)?));
            }
        }
        c.end("property entry")?;
        Ok(props)
    }
}
