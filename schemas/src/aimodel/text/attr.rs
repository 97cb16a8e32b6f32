//! Types and attributes as text.

use std::fmt::Write;

use crate::aimodel::ids;
use crate::aimodel::ir::{Attr, AttrId, DYNAMIC, Module, TensorType, Type, TypeId};

/// Longest text of one attribute or type. Entries share what they refer to, so
/// the text of a small table of them could be of any length.
const MAX_CHARS: usize = 4096;
/// Deepest nesting that is spelled out, so that the recursion here has a bound of its
/// own.
const MAX_DEPTH: usize = 32;

/// Spells one attribute or type, cut off at a bound.
pub(super) struct Spelling<'a> {
    m: &'a Module,
    out: String,
    depth: usize,
}

impl<'a> Spelling<'a> {
    pub(super) fn new(m: &'a Module) -> Self {
        Self {
            m,
            out: String::new(),
            depth: 0,
        }
    }

    pub(super) fn finish(mut self) -> String {
        if self.full() {
            self.out.push('…');
        }
        self.out
    }

    fn full(&self) -> bool {
        self.out.len() > MAX_CHARS
    }

    fn push(&mut self, text: &str) {
        self.out.push_str(text);
    }

    fn quoted(&mut self, text: &str) {
        let _ = write!(self.out, "{text:?}");
    }

    fn list<T: Copy>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, T)) {
        for (i, &item) in items.iter().enumerate() {
            if self.full() {
                return;
            }
            if i > 0 {
                self.push(", ");
            }
            each(self, item);
        }
    }

    fn type_list(&mut self, types: &[TypeId]) {
        self.push("(");
        self.list(types, |s, t| s.ty(s.m.ty(t)));
        self.push(")");
    }

    /// Runs `spell` one level deeper, unless there is no room.
    fn nested(&mut self, spell: impl FnOnce(&mut Self)) {
        if self.full() {
            return;
        }
        if self.depth == MAX_DEPTH {
            self.push("…");
            return;
        }
        self.depth += 1;
        spell(self);
        self.depth -= 1;
    }

    pub(super) fn ty(&mut self, ty: &Type) {
        self.nested(|s| s.plain_type(ty));
    }

    pub(super) fn attr(&mut self, id: AttrId) {
        self.nested(|s| s.plain_attr(s.m.attr(id)));
    }

    fn plain_type(&mut self, ty: &Type) {
        match ty {
            Type::Elem(elem) => self.push(elem.name()),
            Type::Tensor(t) => self.tensor(t),
            Type::Function { inputs, results } => {
                self.type_list(inputs);
                self.push(" -> ");
                self.type_list(results);
            }
            Type::Handle(inner) => {
                self.push("handle<");
                self.ty(self.m.ty(*inner));
                self.push(">");
            }
            Type::Token => self.push("token"),
            Type::ParamSymbol => self.push("param.symbol"),
            Type::ParamType => self.push("param.type"),
            Type::Unresolved(inner) => {
                self.push("unresolved<");
                self.ty(self.m.ty(*inner));
                self.push(">");
            }
        }
    }

    fn tensor(&mut self, t: &TensorType) {
        self.push("tensor<");
        for &d in &t.shape {
            if d == DYNAMIC {
                self.push("?x");
            } else {
                let _ = write!(self.out, "{d}x");
            }
        }
        self.push(t.elem.name());
        if let Some(encoding) = t.encoding {
            self.push(", ");
            self.attr(encoding);
        }
        self.push(">");
    }

    fn plain_attr(&mut self, attr: &Attr) {
        match attr {
            Attr::String(s) => self.quoted(s),
            Attr::Integer {
                bits,
                unsigned,
                value,
            } => {
                let sign = if *unsigned { "ui" } else { "si" };
                let _ = write!(self.out, "{value} : {sign}{bits}");
            }
            Attr::Float { bits: 32, raw } => {
                let _ = write!(self.out, "{:?} : f32", f32::from_bits(*raw as u32));
            }
            Attr::Float { bits: 64, raw } => {
                let _ = write!(self.out, "{:?} : f64", f64::from_bits(*raw));
            }
            Attr::Float { bits, raw } => {
                let _ = write!(self.out, "{raw:#x} : f{bits}");
            }
            Attr::Type(t) => self.ty(self.m.ty(*t)),
            Attr::Array(items) => {
                self.push("[");
                self.list(items, Self::attr);
                self.push("]");
            }
            Attr::Dictionary(items) => {
                self.push("{");
                self.list(items, Self::attr);
                self.push("}");
            }
            Attr::Dense { splat, bytes } => {
                let splat = if *splat { "splat, " } else { "" };
                let _ = write!(self.out, "dense<{splat}{} bytes>", bytes.len());
            }
            Attr::Resource(blob) => {
                let _ = write!(self.out, "resource<{:?}>", self.m.blob(*blob).key);
            }
            Attr::Opaque { name, items } => {
                self.quoted(name);
                self.push(" = [");
                self.list(items, Self::attr);
                self.push("]");
            }
            Attr::ParamDecl { name, ty } => {
                self.push("param ");
                self.quoted(name);
                self.push(" : ");
                self.ty(self.m.ty(*ty));
            }
            Attr::HwConstraints {
                alignments,
                interleave,
                backing,
            } => {
                let name = ids::BACKINGS.iter().find(|b| b.1 == *backing);
                let name = name.map_or("?", |b| b.2);
                let _ = write!(
                    self.out,
                    "hw_constraints<{name}, alignments {alignments:?}, interleave {interleave:?}>"
                );
            }
            Attr::SymbolRef(path) => {
                let _ = write!(self.out, "@{}", path.join("::@"));
            }
            Attr::ParamConstant { value, ty } => {
                self.attr(*value);
                self.push(" : ");
                self.ty(self.m.ty(*ty));
            }
            Attr::Enum { code, value } => {
                let known = ids::ENUMS.iter().find(|e| e.0 == *code);
                let name = known.map_or("?", |e| e.1);
                let case = known.and_then(|e| e.2.get(usize::try_from(*value).ok()?));
                match case {
                    Some(case) => {
                        let _ = write!(self.out, "{name}<{case}>");
                    }
                    None => {
                        let _ = write!(self.out, "{name}<{value}>");
                    }
                }
            }
            Attr::Unit => self.push("unit"),
            Attr::MetadataData(value) | Attr::OpaqueLocation(value) => self.attr(*value),
            Attr::Metadata { name, data } => {
                self.quoted(name);
                self.push(" = ");
                self.attr(*data);
            }
            Attr::File { name, .. } | Attr::Subprogram { name, .. } => self.quoted(name),
            Attr::SourceLocation { file, range } => {
                self.attr(*file);
                let _ = write!(self.out, ":{}:{}", range[0], range[1]);
            }
            Attr::CompileUnit { file, .. } => self.attr(*file),
            Attr::Location {
                source, metadata, ..
            } => {
                self.push("loc(");
                self.attr(*source);
                self.push(" ");
                self.list(metadata, Self::attr);
                self.push(")");
            }
        }
    }
}
