//! What operations refer to by number: strings, types, attributes, properties,
//! operation names and blobs.

use std::collections::HashMap;
use std::hash::Hash;

use super::sections::{dialect_section, offsets, properties, resource_offsets, string_section};
use super::{EncodeError, Layout, put_section};
use crate::aimodel::ids::{self, attr_code, section, type_code};
use crate::aimodel::ir::links::{Link, Place};
use crate::aimodel::ir::{Attr, AttrId, Blob, BlobId, Module, Op, TensorType, Type, TypeId};
use crate::aimodel::varint::{put, put_flagged, put_signed};

/// Numbers in the order things are first met.
struct Numbered<T> {
    items: Vec<T>,
    of: HashMap<T, u64>,
}

impl<T: Clone + Eq + Hash> Numbered<T> {
    fn new() -> Self {
        Self {
            items: vec![],
            of: HashMap::new(),
        }
    }

    fn get(&mut self, item: T) -> u64 {
        let next = self.items.len() as u64;
        let n = *self.of.entry(item.clone()).or_insert(next);
        if n == next {
            self.items.push(item);
        }
        n
    }
}

pub(super) struct Tables<'a> {
    m: &'a Module,
    strings: Numbered<String>,
    /// Encoded attributes and types. Children are numbered first, so an entry's
    /// bytes identify it.
    attrs: Numbered<Vec<u8>>,
    types: Numbered<Vec<u8>>,
    attr_numbers: HashMap<AttrId, u64>,
    type_numbers: HashMap<TypeId, u64>,
    props: Numbered<Vec<u8>>,
    op_names: Numbered<String>,
    blobs: Numbered<BlobId>,
}

impl<'a> Tables<'a> {
    pub(super) fn new(m: &'a Module) -> Self {
        Self {
            m,
            strings: Numbered::new(),
            attrs: Numbered::new(),
            types: Numbered::new(),
            attr_numbers: HashMap::new(),
            type_numbers: HashMap::new(),
            props: Numbered::new(),
            op_names: Numbered::new(),
            blobs: Numbered::new(),
        }
    }

    pub(super) fn blobs(&self) -> &[BlobId] {
        &self.blobs.items
    }

    pub(super) fn op_name(&mut self, name: &str) -> u64 {
        self.op_names.get(name.to_owned())
    }

    pub(super) fn props(&mut self, entry: Vec<u8>) -> u64 {
        self.props.get(entry)
    }

    /// The property entry of an operation, if its kind has one.
    pub(super) fn op_props(&mut self, op: &Op) -> Result<Option<u64>, EncodeError> {
        let wrong = |problem: String| EncodeError::Props {
            op: op.name.clone(),
            problem,
        };
        let schema = ids::props(&op.name).unwrap_or(&[]);
        for (name, _) in &op.props {
            if !schema.iter().any(|p| p.name == *name) {
                return Err(wrong(format!("has no attribute `{name}`")));
            }
        }
        if schema.is_empty() {
            return Ok(None);
        }
        let mut entry = vec![];
        for prop in schema {
            match (op.prop(prop.name), prop.optional) {
                (Some(attr), true) => put_flagged(&mut entry, self.attr(attr)?, true),
                (Some(attr), false) => put(&mut entry, self.attr(attr)?),
                (None, true) => put(&mut entry, 0),
                (None, false) => {
                    return Err(wrong(format!("lacks its attribute `{}`", prop.name)));
                }
            }
        }
        Ok(Some(self.props.get(entry)))
    }

    /// The number of a type.
    pub(super) fn ty(&mut self, id: TypeId) -> Result<u64, EncodeError> {
        self.number(Link::Type(id))
    }

    /// The number of an attribute.
    pub(super) fn attr(&mut self, id: AttrId) -> Result<u64, EncodeError> {
        self.number(Link::Attr(id))
    }

    /// Numbers an entry after all it refers to. A stack of its own holds the entries
    /// that wait, since they nest as deep as a file likes.
    fn number(&mut self, root: Link) -> Result<u64, EncodeError> {
        if let Some(n) = self.numbered(root) {
            return Ok(n);
        }
        let m = self.m;
        let mut stack = vec![root];
        while let Some(&top) = stack.last() {
            let height = stack.len();
            if self.numbered(top).is_none() {
                let wait = |place: Place<'_>| {
                    let link = place.get();
                    if self.numbered(link).is_none() {
                        stack.push(link);
                    }
                };
                match top {
                    Link::Attr(id) => m.attr(id).clone().each_link(wait),
                    Link::Type(id) => m.ty(id).clone().each_link(wait),
                }
                if stack.len() > height {
                    // The first one goes first.
                    stack[height..].reverse();
                    continue;
                }
                match top {
                    Link::Attr(id) => {
                        let n = self.plain_attr(m.attr(id))?;
                        self.attr_numbers.insert(id, n);
                    }
                    Link::Type(id) => {
                        let n = self.plain_type(m.ty(id))?;
                        self.type_numbers.insert(id, n);
                    }
                }
            }
            stack.pop();
        }
        Ok(self.numbered(root).expect("the root was numbered last"))
    }

    fn numbered(&self, link: Link) -> Option<u64> {
        match link {
            Link::Attr(id) => self.attr_numbers.get(&id),
            Link::Type(id) => self.type_numbers.get(&id),
        }
        .copied()
    }

    fn plain_type(&mut self, ty: &Type) -> Result<u64, EncodeError> {
        let mut e = vec![];
        match ty {
            Type::Elem(elem) => {
                let code = ids::ELEMS.iter().find(|(_, known)| known == elem);
                put(&mut e, code.expect("every element has a code").0);
            }
            Type::Tensor(t) => self.tensor(&mut e, t)?,
            Type::Function { inputs, results } => {
                put(&mut e, type_code::FUNCTION);
                for side in [results, inputs] {
                    let numbers = side
                        .iter()
                        .map(|&t| self.ty(t))
                        .collect::<Result<Vec<_>, _>>()?;
                    put_list(&mut e, &numbers);
                }
            }
            Type::Handle(inner) => {
                let inner = self.ty(*inner)?;
                put_all(&mut e, &[type_code::HANDLE, inner]);
            }
            Type::Token => put(&mut e, type_code::TOKEN),
            Type::ParamSymbol => put(&mut e, type_code::PARAM_SYMBOL),
            Type::ParamType => put(&mut e, type_code::PARAM_TYPE),
            Type::Unresolved(inner) => {
                let inner = self.ty(*inner)?;
                put_all(&mut e, &[type_code::UNRESOLVED, inner]);
            }
        }
        Ok(self.types.get(e))
    }

    fn tensor(&mut self, e: &mut Vec<u8>, t: &TensorType) -> Result<(), EncodeError> {
        let mut elem = vec![];
        let code = ids::ELEMS.iter().find(|(_, known)| *known == t.elem);
        put(&mut elem, code.expect("every element has a code").0);
        let elem = self.types.get(elem);
        put(
            e,
            if t.encoding.is_some() {
                type_code::TENSOR_ENCODED
            } else {
                type_code::TENSOR
            },
        );
        put(e, t.shape.len() as u64);
        for &d in &t.shape {
            put_signed(e, d);
        }
        put(e, elem);
        if let Some(encoding) = t.encoding {
            put(e, self.attr(encoding)?);
        }
        Ok(())
    }

    fn attrs(&mut self, ids: &[AttrId]) -> Result<Vec<u64>, EncodeError> {
        ids.iter().map(|&a| self.attr(a)).collect()
    }

    fn string(&mut self, s: &str) -> Result<u64, EncodeError> {
        if s.contains('\0') {
            return Err(EncodeError::ZeroByte(s.to_owned()));
        }
        Ok(self.strings.get(s.to_owned()))
    }

    /// The location that says "unknown", for a program without any.
    pub(super) fn unknown_loc(&mut self) -> Result<u64, EncodeError> {
        let mut e = vec![];
        let (dash, empty) = (self.string("-")?, self.string("")?);
        put_all(&mut e, &[attr_code::FILE, dash, empty, empty]);
        let file = self.attrs.get(std::mem::take(&mut e));
        put_all(&mut e, &[attr_code::SOURCE_LOCATION, file, 0, 0, 0, 0]);
        let source = self.attrs.get(std::mem::take(&mut e));
        put(&mut e, attr_code::UNIT);
        let scope = self.attrs.get(std::mem::take(&mut e));
        put_all(&mut e, &[attr_code::LOCATION, source, scope, 0, 0]);
        Ok(self.attrs.get(e))
    }

    /// The number of an attribute that need not be in the module.
    pub(super) fn plain_attr(&mut self, attr: &Attr) -> Result<u64, EncodeError> {
        let mut e = vec![];
        match attr {
            Attr::String(s) => {
                let s = self.string(s)?;
                put_all(&mut e, &[attr_code::STRING, s]);
            }
            Attr::Integer {
                bits,
                unsigned,
                value,
            } => {
                put_all(&mut e, &[attr_code::INTEGER, u64::from(*bits)]);
                e.push(u8::from(*unsigned));
                if *bits <= 8 {
                    e.push(*value as u8);
                } else {
                    put_signed(&mut e, *value);
                }
            }
            Attr::Float { bits, raw } => {
                put_all(&mut e, &[attr_code::FLOAT, u64::from(*bits)]);
                put_signed(&mut e, *raw as i64);
            }
            Attr::Type(t) => {
                let t = self.ty(*t)?;
                put_all(&mut e, &[attr_code::TYPE, t]);
            }
            Attr::Array(items) => {
                let items = self.attrs(items)?;
                put(&mut e, attr_code::ARRAY);
                put_list(&mut e, &items);
            }
            Attr::Dense { splat, bytes } => {
                put(&mut e, attr_code::DENSE);
                e.push(u8::from(*splat));
                put(&mut e, bytes.len() as u64);
                e.extend_from_slice(bytes);
            }
            Attr::Resource(blob) => {
                let blob = self.blobs.get(*blob);
                put_all(&mut e, &[attr_code::RESOURCE, blob]);
            }
            Attr::Opaque { name, items } => {
                let (name, items) = (self.string(name)?, self.attrs(items)?);
                put_all(&mut e, &[attr_code::OPAQUE, name]);
                put_list(&mut e, &items);
            }
            Attr::ParamDecl { name, ty } => {
                let (name, ty) = (self.string(name)?, self.ty(*ty)?);
                put_all(&mut e, &[attr_code::PARAM_DECL, name, ty]);
            }
            Attr::HwConstraints {
                alignments,
                interleave,
                backing,
            } => {
                put(&mut e, attr_code::HW_CONSTRAINTS);
                for factors in [alignments, interleave] {
                    put(&mut e, factors.len() as u64);
                    for &f in factors {
                        put_signed(&mut e, f);
                    }
                }
                let code = ids::BACKINGS.iter().find(|(_, known, _)| known == backing);
                put(&mut e, code.expect("every backing has a code").0);
            }
            Attr::SymbolRef(path) => {
                let path = path
                    .iter()
                    .map(|s| self.string(s))
                    .collect::<Result<Vec<_>, _>>()?;
                put(&mut e, attr_code::SYMBOL_REF);
                put_list(&mut e, &path);
            }
            Attr::ParamConstant { value, ty } => {
                let (value, ty) = (self.attr(*value)?, self.ty(*ty)?);
                put_all(&mut e, &[attr_code::PARAM_CONSTANT, value, ty]);
            }
            Attr::Enum { code, value } => put_all(&mut e, &[u64::from(*code), *value]),
            Attr::Dictionary(items) => {
                let items = self.attrs(items)?;
                put(&mut e, attr_code::DICTIONARY);
                put_list(&mut e, &items);
            }
            Attr::Unit => put(&mut e, attr_code::UNIT),
            debug => self.debug_attr(&mut e, debug)?,
        }
        Ok(self.attrs.get(e))
    }

    fn debug_attr(&mut self, e: &mut Vec<u8>, attr: &Attr) -> Result<(), EncodeError> {
        match attr {
            Attr::File {
                name,
                directory,
                sha256,
            } => {
                let name = self.string(name)?;
                let rest = [self.string(directory)?, self.string(sha256)?];
                put_all(e, &[attr_code::FILE, name]);
                put_all(e, &rest);
            }
            Attr::SourceLocation { file, range } => {
                let file = self.attr(*file)?;
                put_all(e, &[attr_code::SOURCE_LOCATION, file]);
                put_all(e, range);
            }
            Attr::CompileUnit {
                language,
                file,
                producer,
                optimized,
                flags,
                files,
            } => {
                let (language, file) = (self.string(language)?, self.attr(*file)?);
                let (producer, flags) = (self.string(producer)?, self.string(flags)?);
                put_all(e, &[attr_code::COMPILE_UNIT, language, file, producer]);
                put_all(e, &[*optimized, flags, *files]);
            }
            Attr::MetadataData(value) => {
                let value = self.attr(*value)?;
                put_all(e, &[attr_code::METADATA_DATA, value]);
            }
            Attr::Metadata { name, data } => {
                let (name, data) = (self.string(name)?, self.attr(*data)?);
                put_all(e, &[attr_code::METADATA, name, data]);
            }
            Attr::Subprogram {
                ty,
                compile_unit,
                file,
                name,
                linkage_name,
                flags,
            } => {
                let (ty, unit, file) =
                    (self.ty(*ty)?, self.attr(*compile_unit)?, self.attr(*file)?);
                let (name, linkage) = (self.string(name)?, self.string(linkage_name)?);
                put_all(e, &[attr_code::SUBPROGRAM, ty, unit, file, name, linkage]);
                put(e, *flags);
            }
            Attr::Location {
                source,
                scope,
                fused,
                metadata,
            } => {
                let (source, scope) = (self.attr(*source)?, self.attr(*scope)?);
                let (fused, metadata) = (self.attrs(fused)?, self.attrs(metadata)?);
                put_all(e, &[attr_code::LOCATION, source, scope]);
                put_list(e, &fused);
                put_list(e, &metadata);
            }
            Attr::OpaqueLocation(value) => {
                let value = self.attr(*value)?;
                put_all(e, &[attr_code::OPAQUE_LOCATION, value]);
            }
            other => unreachable!("{other:?} carries no debug information"),
        }
        Ok(())
    }

    /// Everything of the file before the resource section.
    pub(super) fn into_header(
        mut self,
        ir: &[u8],
        blobs: &[&Blob],
        layout: &Layout,
    ) -> Result<Vec<u8>, EncodeError> {
        let dialect = self.string(ids::DIALECT)?;
        let names = std::mem::replace(&mut self.op_names, Numbered::new()).items;
        let names = names
            .iter()
            .map(|n| self.string(n))
            .collect::<Result<Vec<_>, _>>()?;
        let keys = blobs
            .iter()
            .map(|b| self.string(&b.key))
            .collect::<Result<Vec<_>, _>>()?;

        let mut out = ids::MAGIC.to_vec();
        put(&mut out, ids::BYTECODE_VERSION);
        out.extend_from_slice(ids::PRODUCER.as_bytes());
        out.push(0);
        let mut section = |id, payload: Vec<u8>| put_section(&mut out, id, &payload);
        section(section::DIALECT, dialect_section(dialect, &names));
        let (attrs, types) = (&self.attrs.items, &self.types.items);
        section(section::ATTR_TYPE_OFFSET, offsets(attrs, types));
        section(
            section::ATTR_TYPE,
            [attrs.concat(), types.concat()].concat(),
        );
        section(section::IR, ir.to_vec());
        section(section::RESOURCE_OFFSET, resource_offsets(&keys, layout));
        section(section::STRING, string_section(&self.strings.items));
        section(section::PROPERTIES, properties(&self.props.items));
        Ok(out)
    }
}

pub(super) fn put_all(out: &mut Vec<u8>, numbers: &[u64]) {
    for &n in numbers {
        put(out, n);
    }
}

fn put_list(out: &mut Vec<u8>, numbers: &[u64]) {
    put(out, numbers.len() as u64);
    put_all(out, numbers);
}
