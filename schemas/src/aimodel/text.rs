//! A program as text.

use super::ir::{Module, Type};

/// The dialect's spelling of a type.
pub(crate) fn type_name(_m: &Module, ty: &Type) -> String {
    format!("{ty:?}")
}
