//! One attribute or type.

use super::super::cursor::Cursor;
use super::super::tables::Tables;
use super::super::{Result, malformed};
use super::{Node, State, States};
use crate::aimodel::ids::{self, attr_code, type_code};
use crate::aimodel::ir::{Attr, AttrId, BlobId, DYNAMIC, Elem, Module, TensorType, Type, TypeId};
use crate::aimodel::limits::{MAX_DIM, MAX_RANK};

pub(super) enum Made {
    Attr(Attr),
    Type(Type),
}

/// Stands for an entry that is not resolved yet; what is made with it is dropped.
const PENDING: u32 = u32::MAX;

pub(super) struct Parser<'a, 'b> {
    tables: &'b Tables<'a>,
    blobs: &'b [BlobId],
    m: &'b Module,
    states: &'b States,
    met: Vec<Node>,
}

impl<'a, 'b> Parser<'a, 'b> {
    pub(super) fn new(
        tables: &'b Tables<'a>,
        blobs: &'b [BlobId],
        m: &'b Module,
        states: &'b States,
    ) -> Self {
        Self {
            tables,
            blobs,
            m,
            states,
            met: vec![],
        }
    }

    /// Every entry referred to.
    pub(super) fn into_met(self) -> Vec<Node> {
        self.met
    }

    pub(super) fn entry(&mut self, node: Node, mut c: Cursor) -> Result<Made> {
        let made = match node {
            Node::Attr(_) => Made::Attr(self.attr(&mut c)?),
            Node::Type(_) => Made::Type(self.ty(&mut c)?),
        };
        c.end(match node {
            Node::Attr(_) => "attribute",
            Node::Type(_) => "type",
        })?;
        Ok(made)
    }

    // ---- references

    fn handle(&mut self, node: Node) -> u32 {
        self.met.push(node);
        match self.states.get(node) {
            State::Done { handle, .. } => handle,
            State::New | State::Open => PENDING,
        }
    }

    fn attr_ref(&mut self, c: &mut Cursor) -> Result<AttrId> {
        let i = c.index("attribute", self.states.attrs.len())?;
        Ok(AttrId(self.handle(Node::Attr(i))))
    }

    fn type_ref(&mut self, c: &mut Cursor) -> Result<TypeId> {
        let i = c.index("type", self.states.types.len())?;
        Ok(TypeId(self.handle(Node::Type(i))))
    }

    fn attr_refs(&mut self, c: &mut Cursor) -> Result<Vec<AttrId>> {
        (0..c.count()?).map(|_| self.attr_ref(c)).collect()
    }

    fn type_refs(&mut self, c: &mut Cursor) -> Result<Vec<TypeId>> {
        (0..c.count()?).map(|_| self.type_ref(c)).collect()
    }

    fn string(&self, c: &mut Cursor) -> Result<String> {
        Ok(self.tables.string(c)?.to_owned())
    }

    // ---- types

    fn ty(&mut self, c: &mut Cursor) -> Result<Type> {
        let at = c.offset();
        let code = c.number()?;
        if let Some(&(_, elem)) = ids::ELEMS.iter().find(|(known, _)| *known == code) {
            return Ok(Type::Elem(elem));
        }
        Ok(match code {
            type_code::TENSOR | type_code::TENSOR_ENCODED => {
                let mut t = self.tensor(c)?;
                if code == type_code::TENSOR_ENCODED {
                    t.encoding = Some(self.attr_ref(c)?);
                }
                Type::Tensor(t)
            }
            type_code::FUNCTION => {
                let results = self.type_refs(c)?;
                Type::Function {
                    inputs: self.type_refs(c)?,
                    results,
                }
            }
            type_code::HANDLE => Type::Handle(self.type_ref(c)?),
            type_code::TOKEN => Type::Token,
            type_code::PARAM_SYMBOL => Type::ParamSymbol,
            type_code::PARAM_TYPE => Type::ParamType,
            type_code::UNRESOLVED => Type::Unresolved(self.type_ref(c)?),
            _ => return Err(malformed(at, format!("unknown type code {code}"))),
        })
    }

    fn tensor(&mut self, c: &mut Cursor) -> Result<TensorType> {
        let at = c.offset();
        let rank = c.count()?;
        if rank > MAX_RANK {
            return Err(malformed(
                at,
                format!("a tensor of rank {rank}, at most {MAX_RANK} is supported"),
            ));
        }
        let mut shape = Vec::with_capacity(rank);
        for _ in 0..rank {
            let at = c.offset();
            let d = c.signed()?;
            if d != DYNAMIC && u64::try_from(d).map_or(true, |d| d > MAX_DIM) {
                return Err(malformed(at, format!("a tensor extent of {d}")));
            }
            shape.push(d);
        }
        let at = c.offset();
        let elem = match self.type_ref(c)? {
            TypeId(PENDING) => Elem::Bool,
            id => match self.m.ty(id) {
                Type::Elem(elem) => *elem,
                _ => return Err(malformed(at, "the elements of a tensor are not scalars")),
            },
        };
        Ok(TensorType {
            elem,
            shape,
            encoding: None,
        })
    }

    // ---- attributes

    fn attr(&mut self, c: &mut Cursor) -> Result<Attr> {
        let at = c.offset();
        let code = c.number()?;
        if let Some(&(code, ..)) = ids::ENUMS.iter().find(|e| u64::from(e.0) == code) {
            let value = c.number()?;
            return Ok(Attr::Enum { code, value });
        }
        Ok(match code {
            attr_code::STRING => Attr::String(self.string(c)?),
            attr_code::INTEGER => integer(c)?,
            attr_code::FLOAT => float(c)?,
            attr_code::TYPE => Attr::Type(self.type_ref(c)?),
            attr_code::ARRAY => Attr::Array(self.attr_refs(c)?),
            attr_code::DENSE => {
                let splat = flag(c)?;
                let len = c.len()?;
                Attr::Dense {
                    splat,
                    bytes: c.take(len)?.to_vec(),
                }
            }
            attr_code::RESOURCE => Attr::Resource(self.blobs[c.index("blob", self.blobs.len())?]),
            attr_code::OPAQUE => Attr::Opaque {
                name: self.string(c)?,
                items: self.attr_refs(c)?,
            },
            attr_code::PARAM_DECL => Attr::ParamDecl {
                name: self.string(c)?,
                ty: self.type_ref(c)?,
            },
            attr_code::HW_CONSTRAINTS => hw_constraints(c)?,
            attr_code::SYMBOL_REF => Attr::SymbolRef(
                (0..c.count()?)
                    .map(|_| self.string(c))
                    .collect::<Result<_>>()?,
            ),
            attr_code::PARAM_CONSTANT => Attr::ParamConstant {
                value: self.attr_ref(c)?,
                ty: self.type_ref(c)?,
            },
            attr_code::DICTIONARY => Attr::Dictionary(self.attr_refs(c)?),
            attr_code::UNIT => Attr::Unit,
            _ => match self.debug_attr(code, c)? {
                Some(attr) => attr,
                None => return Err(malformed(at, format!("unknown attribute code {code}"))),
            },
        })
    }

    fn debug_attr(&mut self, code: u64, c: &mut Cursor) -> Result<Option<Attr>> {
        Ok(Some(match code {
            attr_code::FILE => Attr::File {
                name: self.string(c)?,
                directory: self.string(c)?,
                sha256: self.string(c)?,
            },
            attr_code::SOURCE_LOCATION => Attr::SourceLocation {
                file: self.attr_ref(c)?,
                range: [c.number()?, c.number()?, c.number()?, c.number()?],
            },
            attr_code::COMPILE_UNIT => Attr::CompileUnit {
                language: self.string(c)?,
                file: self.attr_ref(c)?,
                producer: self.string(c)?,
                optimized: c.number()?,
                flags: self.string(c)?,
                files: c.number()?,
            },
            attr_code::METADATA_DATA => Attr::MetadataData(self.attr_ref(c)?),
            attr_code::METADATA => Attr::Metadata {
                name: self.string(c)?,
                data: self.attr_ref(c)?,
            },
            attr_code::SUBPROGRAM => Attr::Subprogram {
                ty: self.type_ref(c)?,
                compile_unit: self.attr_ref(c)?,
                file: self.attr_ref(c)?,
                name: self.string(c)?,
                linkage_name: self.string(c)?,
                flags: c.number()?,
            },
            attr_code::LOCATION => Attr::Location {
                source: self.attr_ref(c)?,
                scope: self.attr_ref(c)?,
                fused: self.attr_refs(c)?,
                metadata: self.attr_refs(c)?,
            },
            attr_code::OPAQUE_LOCATION => Attr::OpaqueLocation(self.attr_ref(c)?),
            _ => return Ok(None),
        }))
    }
}

/// A raw byte that is 0 or 1.
fn flag(c: &mut Cursor) -> Result<bool> {
    let at = c.offset();
    match c.byte()? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(malformed(at, format!("a flag byte of {other}"))),
    }
}

fn bits(c: &mut Cursor, widest: u64) -> Result<u32> {
    let at = c.offset();
    let bits = c.number()?;
    if bits == 0 || bits > widest {
        return Err(malformed(at, format!("a number of {bits} bits")));
    }
    Ok(bits as u32)
}

fn integer(c: &mut Cursor) -> Result<Attr> {
    let bits = bits(c, 64)?;
    let unsigned = flag(c)?;
    let value = if bits > 8 {
        c.signed()?
    } else if unsigned {
        i64::from(c.byte()?)
    } else {
        i64::from(c.byte()? as i8)
    };
    Ok(Attr::Integer {
        bits,
        unsigned,
        value,
    })
}

fn float(c: &mut Cursor) -> Result<Attr> {
    let bits = bits(c, 64)?;
    let raw = c.signed()? as u64 & (u64::MAX >> (64 - bits));
    Ok(Attr::Float { bits, raw })
}

fn hw_constraints(c: &mut Cursor) -> Result<Attr> {
    let mut factors = || -> Result<Vec<i64>> { (0..c.count()?).map(|_| c.signed()).collect() };
    let (alignments, interleave) = (factors()?, factors()?);
    let at = c.offset();
    let code = c.number()?;
    let Some(&(_, backing, _)) = ids::BACKINGS.iter().find(|b| b.0 == code) else {
        return Err(malformed(at, format!("unknown memory kind {code}")));
    };
    Ok(Attr::HwConstraints {
        alignments,
        interleave,
        backing,
    })
}
