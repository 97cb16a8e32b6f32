//! One element at a time.

use super::{Ctx, Rule, Stop, broadcast_shapes, demand, plain, same_shapes};
use crate::aimodel::ir::{Elem, TensorType};

impl Ctx<'_> {
    pub(super) fn elementwise(&self, name: &str) -> Option<Rule<TensorType>> {
        let base = name.strip_suffix("_v1")?;
        if let Some(base) = base.strip_prefix("broadcasting_") {
            return match base {
                "where" => Some(self.select(true)),
                "batch_matmul" => None,
                _ => Some(self.pairwise(binary_kind(base)?, true)),
            };
        }
        if matches!(base, "sigmoid" | "silu" | "relu") {
            return Some(self.same_as_operand());
        }
        let base = base.strip_prefix("primitive.")?;
        match base {
            "exp" | "tanh" | "sin" | "cos" | "abs" | "round" | "sqrt" | "rsqrt" | "log" | "erf"
            | "gelu" => Some(self.same_as_operand()),
            "not" => Some(self.same_as_operand().and_then(|t| {
                demand!(
                    t.elem == Elem::Bool,
                    "operand 0 is {}, not i1",
                    t.elem.name()
                );
                Ok(t)
            })),
            "where" => Some(self.select(false)),
            "cast" => Some(self.cast()),
            _ => Some(self.pairwise(binary_kind(base)?, false)),
        }
    }

    fn same_as_operand(&self) -> Rule<TensorType> {
        self.arity(1)?;
        Ok(self.tensor(0)?.clone())
    }

    /// The one operation whose result element is free: it is the one given.
    fn cast(&self) -> Rule<TensorType> {
        let x = self.same_as_operand()?;
        let result = self.op.results.first().and_then(|&r| self.m.tensor_type(r));
        let elem = result.ok_or(Stop::Unknown)?.elem;
        Ok(plain(elem, x.shape))
    }

    fn pairwise(&self, kind: Binary, broadcast: bool) -> Rule<TensorType> {
        self.arity(2)?;
        let (x, y) = (self.tensor(0)?, self.tensor(1)?);
        self.same_elem(0, 1)?;
        if matches!(kind, Binary::Logical) {
            demand!(
                x.elem == Elem::Bool,
                "operands are {}, not i1",
                x.elem.name()
            );
        }
        if matches!(kind, Binary::Bitwise) {
            demand!(
                x.elem.is_integer(),
                "operands are {}, not integers",
                x.elem.name()
            );
        }
        let shape = if broadcast {
            broadcast_shapes(&x.shape, &y.shape)?
        } else {
            same_shapes(&x.shape, &y.shape)?
        };
        let elem = match kind {
            Binary::Compare => Elem::Bool,
            Binary::Arithmetic | Binary::Logical | Binary::Bitwise => x.elem,
        };
        Ok(plain(elem, shape))
    }

    fn select(&self, broadcast: bool) -> Rule<TensorType> {
        self.arity(3)?;
        let (c, x, y) = (self.tensor(0)?, self.tensor(1)?, self.tensor(2)?);
        demand!(
            c.elem == Elem::Bool,
            "condition is {}, not i1",
            c.elem.name()
        );
        self.same_elem(1, 2)?;
        let shape = if broadcast {
            broadcast_shapes(&broadcast_shapes(&c.shape, &x.shape)?, &y.shape)?
        } else {
            same_shapes(&same_shapes(&c.shape, &x.shape)?, &y.shape)?
        };
        Ok(plain(x.elem, shape))
    }
}

#[derive(Clone, Copy)]
enum Binary {
    Arithmetic,
    Compare,
    Logical,
    Bitwise,
}

fn binary_kind(base: &str) -> Option<Binary> {
    Some(match base {
        "add" | "sub" | "mul" | "divide" | "maximum" | "minimum" | "pow" | "modulo"
        | "floor_divide" => Binary::Arithmetic,
        "equal" | "not_equal" | "greater" => Binary::Compare,
        "logical_and" | "logical_or" | "logical_xor" => Binary::Logical,
        "bitwise_and" | "bitwise_or" | "bitwise_xor" => Binary::Bitwise,
        _ => return None,
    })
}
