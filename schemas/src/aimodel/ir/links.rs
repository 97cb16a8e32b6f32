//! What attributes and types refer to.

use super::{Attr, AttrId, Type, TypeId};

/// A reference to an attribute or a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    Attr(AttrId),
    Type(TypeId),
}

/// A reference where it stands.
pub(crate) enum Place<'a> {
    Attr(&'a mut AttrId),
    Type(&'a mut TypeId),
}

impl Place<'_> {
    /// What stands there.
    pub(crate) fn get(&self) -> Link {
        match self {
            Self::Attr(a) => Link::Attr(**a),
            Self::Type(t) => Link::Type(**t),
        }
    }

    /// What stands there, leaving one that is the same everywhere.
    pub(crate) fn take(self) -> Link {
        let link = self.get();
        match self {
            Self::Attr(a) => *a = AttrId(u32::MAX),
            Self::Type(t) => *t = TypeId(u32::MAX),
        }
        link
    }
}

impl Attr {
    /// Every reference in it, in a fixed order.
    pub(crate) fn each_link(&mut self, mut each: impl FnMut(Place<'_>)) {
        let attr = Place::Attr;
        match self {
            Self::Type(t) | Self::ParamDecl { ty: t, .. } => each(Place::Type(t)),
            Self::Array(items) | Self::Opaque { items, .. } | Self::Dictionary(items) => {
                items.iter_mut().map(attr).for_each(each);
            }
            Self::ParamConstant { value, ty } => {
                each(attr(value));
                each(Place::Type(ty));
            }
            Self::SourceLocation { file: a, .. }
            | Self::CompileUnit { file: a, .. }
            | Self::MetadataData(a)
            | Self::Metadata { data: a, .. }
            | Self::OpaqueLocation(a) => each(attr(a)),
            Self::Subprogram {
                ty,
                compile_unit,
                file,
                ..
            } => {
                each(Place::Type(ty));
                each(attr(compile_unit));
                each(attr(file));
            }
            Self::Location {
                source,
                scope,
                fused,
                metadata,
            } => {
                each(attr(source));
                each(attr(scope));
                fused.iter_mut().chain(metadata).map(attr).for_each(each);
            }
            Self::String(_)
            | Self::Integer { .. }
            | Self::Float { .. }
            | Self::Dense { .. }
            | Self::Resource(_)
            | Self::HwConstraints { .. }
            | Self::SymbolRef(_)
            | Self::Enum { .. }
            | Self::File { .. }
            | Self::Unit => {}
        }
    }
}

impl Type {
    /// Every reference in it, in a fixed order.
    pub(crate) fn each_link(&mut self, mut each: impl FnMut(Place<'_>)) {
        match self {
            Self::Tensor(t) => t.encoding.iter_mut().map(Place::Attr).for_each(each),
            Self::Function { inputs, results } => {
                let types = results.iter_mut().chain(inputs);
                types.map(Place::Type).for_each(each);
            }
            Self::Handle(t) | Self::Unresolved(t) => each(Place::Type(t)),
            Self::Elem(_) | Self::Token | Self::ParamSymbol | Self::ParamType => {}
        }
    }
}
