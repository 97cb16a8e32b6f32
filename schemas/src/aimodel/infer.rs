//! Result types of operations: the typing rules of the `aicode` dialect.
//!
//! One table serves both sides: [`super::build`] asks for the types of the values
//! it is about to create, [`super::check`] compares them with what a file says.
//! Names of the rules follow the operations; shapes are numpy's unless stated.

mod compute;
mod elementwise;
mod layout;

use std::collections::HashMap;

use super::ir::{Attr, AttrId, DYNAMIC, Elem, Module, Op, TensorType, Type, ValueId};
use super::limits::MAX_DIM;

/// The `value` attribute of every value a `primitive.constant_v1` defines.
pub(crate) type Constants = HashMap<ValueId, AttrId>;

/// Why no result types came out.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The operation is wrong, and why.
    Wrong(String),
    /// The types depend on what only the run knows (a dynamic extent, a runtime
    /// shape operand) or on an operation outside the table.
    Unknown,
}

type Rule<T> = Result<T, Stop>;

macro_rules! wrong {
    ($($arg:tt)*) => { return Err(Stop::Wrong(format!($($arg)*))) };
}
macro_rules! demand {
    ($cond:expr, $($arg:tt)*) => { if !$cond { $crate::aimodel::infer::wrong!($($arg)*) } };
}
use {demand, wrong};

/// The types of the results of `op`, whose own result list is not looked at.
/// A result extent may be [`DYNAMIC`] where any is right.
pub(crate) fn result_types(m: &Module, constants: &Constants, op: &Op) -> Rule<Vec<Type>> {
    Ctx { m, constants, op }.infer()
}

/// Element types an index or shape operand may have.
#[derive(Clone, Copy)]
enum Index {
    Shape,
    Unsigned,
    Signed,
}

impl Index {
    fn accepted(self) -> &'static [Elem] {
        match self {
            Self::Shape => &[Elem::Si16, Elem::Si32, Elem::Ui16, Elem::Ui32],
            Self::Unsigned => &[Elem::Ui16, Elem::Ui32],
            Self::Signed => &[Elem::Si16, Elem::Si32],
        }
    }
}

struct Ctx<'a> {
    m: &'a Module,
    constants: &'a Constants,
    op: &'a Op,
}

impl<'a> Ctx<'a> {
    fn infer(&self) -> Rule<Vec<Type>> {
        let name = self.op.name.as_str();
        if let Some(known) = self.states(name) {
            return known;
        }
        let tensors = match name {
            "ax.copy_with_constraints_v1" | "ax.copy_discarding_constraints_v1" => {
                self.arity(1)?;
                let x = self.any_tensor(0)?;
                vec![TensorType {
                    encoding: None,
                    ..x.clone()
                }]
            }
            "primitive.constant_v1" => return Err(Stop::Unknown),
            _ => match self.elementwise(name) {
                Some(known) => vec![known?],
                None => match self.layout(name) {
                    Some(known) => known?,
                    None => vec![self.compute(name).ok_or(Stop::Unknown)??],
                },
            },
        };
        Ok(tensors.into_iter().map(Type::Tensor).collect())
    }

    /// Tokens and handles.
    fn states(&self, name: &str) -> Option<Rule<Vec<Type>>> {
        Some(match name {
            "dataflow.create_token_v1" => self.arity(0).map(|()| vec![Type::Token]),
            "dataflow.read_handle_v1" => self
                .arity(2)
                .and_then(|()| self.token(1))
                .and_then(|()| Ok(vec![self.handle(0)?, Type::Token])),
            "dataflow.write_handle_v1" => (|| {
                self.arity(3)?;
                self.token(2)?;
                let held = self.handle(0)?;
                let given = self.operand_type(1);
                demand!(
                    *given == held,
                    "writes {} to a state of {}",
                    super::text::type_name(self.m, given),
                    super::text::type_name(self.m, &held)
                );
                Ok(vec![Type::Token])
            })(),
            _ => return None,
        })
    }

    // ---- operands

    fn arity(&self, n: usize) -> Rule<()> {
        let have = self.op.operands.len();
        demand!(have == n, "takes {n} operands, has {have}");
        Ok(())
    }

    fn operand_type(&self, i: usize) -> &'a Type {
        self.m.ty(self.m.value_type(self.op.operands[i]))
    }

    fn any_tensor(&self, i: usize) -> Rule<&'a TensorType> {
        match self.operand_type(i) {
            Type::Tensor(t) => Ok(t),
            other => wrong!(
                "operand {i} is {}, not a tensor",
                super::text::type_name(self.m, other)
            ),
        }
    }

    /// A tensor without hardware constraints, as every computing operation wants.
    fn tensor(&self, i: usize) -> Rule<&'a TensorType> {
        let t = self.any_tensor(i)?;
        demand!(
            t.encoding.is_none(),
            "operand {i} carries hardware constraints, discard them first"
        );
        Ok(t)
    }

    fn handle(&self, i: usize) -> Rule<Type> {
        match self.operand_type(i) {
            Type::Handle(inner) => Ok(self.m.ty(*inner).clone()),
            other => wrong!(
                "operand {i} is {}, not a handle",
                super::text::type_name(self.m, other)
            ),
        }
    }

    fn token(&self, i: usize) -> Rule<()> {
        demand!(
            *self.operand_type(i) == Type::Token,
            "operand {i} is not a token"
        );
        Ok(())
    }

    fn same_elem(&self, i: usize, j: usize) -> Rule<()> {
        let (a, b) = (self.tensor(i)?.elem, self.tensor(j)?.elem);
        demand!(
            a == b,
            "operand {i} is {}, operand {j} is {}",
            a.name(),
            b.name()
        );
        Ok(())
    }

    /// The static extents of operand `i`.
    fn dims(&self, i: usize) -> Rule<Vec<usize>> {
        let t = self.tensor(i)?;
        if t.shape.contains(&DYNAMIC) {
            return Err(Stop::Unknown);
        }
        let mut dims = Vec::with_capacity(t.shape.len());
        for &d in &t.shape {
            match usize::try_from(d) {
                Ok(d) if d as u64 <= MAX_DIM => dims.push(d),
                _ => wrong!("operand {i} has extent {d}"),
            }
        }
        Ok(dims)
    }

    /// Checks that operand `i` is an index tensor of `rank`.
    fn index_operand(&self, i: usize, accepted: Index, rank: usize) -> Rule<()> {
        self.index_elem(i, accepted)?;
        let have = self.tensor(i)?.shape.len();
        demand!(have == rank, "operand {i} has rank {have}, not {rank}");
        Ok(())
    }

    fn index_elem(&self, i: usize, accepted: Index) -> Rule<()> {
        let elem = self.tensor(i)?.elem;
        let accepted = accepted.accepted();
        demand!(
            accepted.contains(&elem),
            "operand {i} is {}, which must be {}",
            elem.name(),
            accepted
                .iter()
                .map(|e| e.name())
                .collect::<Vec<_>>()
                .join(" or ")
        );
        Ok(())
    }

    /// The integers of the constant operand `i`.
    fn ints(&self, i: usize) -> Rule<Vec<i64>> {
        let t = self.tensor(i)?;
        let count = t.count().ok_or(Stop::Unknown)?;
        let attr = self
            .constants
            .get(&self.op.operands[i])
            .ok_or(Stop::Unknown)?;
        constant_ints(self.m, t.elem, count, *attr).ok_or(Stop::Unknown)
    }

    /// A constant operand of sizes.
    fn sizes(&self, i: usize) -> Rule<Vec<usize>> {
        let mut sizes = Vec::new();
        for v in self.ints(i)? {
            match usize::try_from(v) {
                Ok(v) if v as u64 <= MAX_DIM => sizes.push(v),
                _ => wrong!("operand {i} holds the size {v}"),
            }
        }
        Ok(sizes)
    }

    /// Constant axes of a tensor of `rank`, negative ones counted from the end.
    fn axes(&self, i: usize, rank: usize) -> Rule<Vec<usize>> {
        let mut axes = Vec::new();
        for v in self.ints(i)? {
            let from_start = if v < 0 { v + rank as i64 } else { v };
            match usize::try_from(from_start) {
                Ok(a) if a < rank && !axes.contains(&a) => axes.push(a),
                Ok(a) if a < rank => wrong!("axis {v} appears twice"),
                _ => wrong!("axis {v} is outside a tensor of rank {rank}"),
            }
        }
        Ok(axes)
    }

    /// One constant axis given as a rank-0 operand.
    fn axis(&self, i: usize, rank: usize) -> Rule<usize> {
        match self.axes(i, rank)?.as_slice() {
            [axis] => Ok(*axis),
            other => wrong!("operand {i} holds {} axes, not one", other.len()),
        }
    }
}

/// A tensor without constraints.
fn plain(elem: Elem, shape: Vec<i64>) -> TensorType {
    TensorType {
        elem,
        shape,
        encoding: None,
    }
}

fn extents(dims: &[usize]) -> Vec<i64> {
    dims.iter().map(|&d| d as i64).collect()
}

fn same_shapes(x: &[i64], y: &[i64]) -> Rule<Vec<i64>> {
    let agree = x.len() == y.len() && x.iter().zip(y).all(|(&a, &b)| compatible(a, b));
    demand!(agree, "shapes {x:?} and {y:?} differ");
    Ok(x.iter()
        .zip(y)
        .map(|(&a, &b)| if a == DYNAMIC { b } else { a })
        .collect())
}

/// numpy broadcasting: aligned at the last axis, extents equal or 1.
fn broadcast_shapes(x: &[i64], y: &[i64]) -> Rule<Vec<i64>> {
    let rank = x.len().max(y.len());
    let at = |s: &[i64], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |j| s[j]);
    let mut out = Vec::with_capacity(rank);
    for i in 0..rank {
        out.push(match (at(x, i), at(y, i)) {
            (a, b) if a == b => a,
            (1, b) => b,
            (a, 1) => a,
            (DYNAMIC, b) => b,
            (a, DYNAMIC) => a,
            _ => wrong!("shapes {x:?} and {y:?} do not broadcast"),
        });
    }
    Ok(out)
}

/// Whether two extents can be the same.
pub(crate) fn compatible(a: i64, b: i64) -> bool {
    a == b || a == DYNAMIC || b == DYNAMIC
}

/// The integers of a constant of `count` elements, if its bytes are at hand and
/// few enough to be a shape operand.
pub(crate) fn constant_ints(
    m: &Module,
    elem: Elem,
    count: usize,
    value: AttrId,
) -> Option<Vec<i64>> {
    const FEW: usize = 4096;
    if count > FEW {
        return None;
    }
    let (splat, bytes) = match m.attr(value) {
        Attr::Dense { splat, bytes } => (*splat, bytes.as_slice()),
        Attr::Resource(blob) => (false, m.blob(*blob).bytes()?),
        _ => return None,
    };
    let signed = match elem {
        Elem::Si8 | Elem::Si16 | Elem::Si32 | Elem::Si64 => true,
        Elem::Ui8 | Elem::Ui16 | Elem::Ui32 | Elem::Ui64 => false,
        _ => return None,
    };
    let width = elem.bits() / 8;
    let present = if splat { 1 } else { count };
    if bytes.len() != present * width {
        return None;
    }
    let mut out: Vec<i64> = bytes
        .chunks_exact(width)
        .map(|chunk| {
            let mut raw = [0u8; 8];
            if signed && chunk[width - 1] & 0x80 != 0 {
                raw = [0xff; 8];
            }
            raw[..width].copy_from_slice(chunk);
            i64::from_le_bytes(raw)
        })
        .collect();
    if splat {
        out.resize(count, *out.first()?);
    }
    Some(out)
}
