//! From an operation and its constant operands to a [`Kind`].
//!
//! What the kernels of an operation take for granted (element types, ranks,
//! extents that agree) is established here, so that a program from a file can
//! only fail at plan time, with the operation named.

use anemone_schemas::aimodel::ir::{Attr, Elem, Module, Op, enum_code};

use super::kind::Kind;
use crate::ops::elementwise::{Binary, Unary};
use crate::ops::logic::Compare;
use crate::ops::rows::Reduce;
use crate::program::tensor_shape;
use crate::tensor::Data;

type Result<T> = std::result::Result<T, String>;

macro_rules! demand {
    ($cond:expr, $($arg:tt)*) => { if !$cond { return Err(format!($($arg)*)); } };
}

mod compute;
mod layout;
mod rare;

/// Element type and extents of a value.
#[derive(Clone, Debug)]
pub(super) struct Typed {
    pub(super) elem: Elem,
    pub(super) shape: Vec<usize>,
}

impl Typed {
    fn is_float(&self) -> bool {
        matches!(self.elem, Elem::F16 | Elem::Bf16 | Elem::F32)
    }

    fn is_integer(&self) -> bool {
        !self.is_float() && self.elem != Elem::Bool
    }

    fn storage(&self) -> Elem {
        Data::zeros(self.elem, 0).map_or(self.elem, |d| d.elem())
    }

    fn rank(&self) -> usize {
        self.shape.len()
    }
}

/// An operation with what is known about it.
pub(super) struct Resolver<'a> {
    pub(super) module: &'a Module,
    pub(super) op: &'a Op,
    pub(super) args: Vec<Typed>,
    /// Integers of the operands that are constants of integers.
    pub(super) ints: &'a dyn Fn(usize) -> Option<Vec<i64>>,
    pub(super) results: Vec<Typed>,
}

/// A kind, and which operands are its values.
pub(super) struct Resolved {
    pub(super) kind: Kind,
    pub(super) data: Vec<usize>,
}

impl<'a> Resolver<'a> {
    pub(super) fn new(
        module: &'a Module,
        op: &'a Op,
        ints: &'a dyn Fn(usize) -> Option<Vec<i64>>,
    ) -> Result<Self> {
        let typed = |values: &[_]| -> Result<Vec<Typed>> {
            values
                .iter()
                .map(|&v| {
                    let (elem, shape) = tensor_shape(module, v)?;
                    demand!(
                        Data::zeros(elem, 0).is_some(),
                        "the runtime does not compute with element type `{}`",
                        elem.name()
                    );
                    Ok(Typed { elem, shape })
                })
                .collect()
        };
        Ok(Self {
            module,
            op,
            args: typed(&op.operands)?,
            ints,
            results: typed(&op.results)?,
        })
    }

    pub(super) fn resolve(&self) -> Result<Resolved> {
        let name = self.op.name.as_str();
        let expected = if name == "primitive.split_v1" {
            self.results.len().max(1)
        } else {
            1
        };
        demand!(
            self.results.len() == expected,
            "has {} results, expected {expected}",
            self.results.len()
        );
        let base = name.strip_suffix("_v1").unwrap_or("");
        let pairwise = base
            .strip_prefix("broadcasting_")
            .or_else(|| base.strip_prefix("primitive."))
            .unwrap_or("");
        if let Some(op) = unary(base) {
            return self.unary(op);
        }
        if let Some(op) = binary(pairwise) {
            return self.binary(op);
        }
        if let Some(op) = compare(pairwise) {
            return self.compare(op);
        }
        if let Some(op) = reduction(base) {
            return self.reduce(op);
        }
        match name {
            "primitive.gelu_v1" => {
                let tanh = self.enumeration("approximate", enum_code::APPROXIMATE)? == 1;
                self.unary(if tanh { Unary::GeluTanh } else { Unary::Gelu })
            }
            "primitive.not_v1" => {
                self.arity(1)?;
                self.elem(0, &[Elem::Bool])?;
                self.done(Kind::Not, &[0], &self.args[0].shape)
            }
            "primitive.where_v1" | "broadcasting_where_v1" => self.select(),
            "primitive.cast_v1" => {
                self.arity(1)?;
                let elem = self.results[0].elem;
                demand!(elem.bits() >= 8, "cannot cast to `{}`", elem.name());
                self.done(Kind::Cast(elem), &[0], &self.args[0].shape)
            }
            "primitive.reshape_v2" | "primitive.expand_dims_v1" | "primitive.shrink_dims_v1" => {
                self.reshape()
            }
            "primitive.transpose_v1" => self.transpose(),
            "primitive.broadcast_to_v1" | "primitive.broadcast_in_dims_v1" => self.broadcast(),
            "primitive.concat_v1" => self.concat(),
            "primitive.split_v1" => self.split(),
            "primitive.slice_v1" => self.slice(),
            "primitive.slice_update_v1" => self.slice_update(),
            "primitive.pad_v1" => self.pad(),
            "tile_v2" => self.tile(),
            "primitive.gather_nd_v1" => self.gather_nd(),
            "primitive.gather_along_axis_v1" => self.gather_along_axis(),
            "primitive.range_v1" => self.range(),
            "softmax_v1" => {
                self.arity(2)?;
                self.floats(0)?;
                let axis = self.axis(1, self.args[0].rank())?;
                demand!(self.args[0].shape[axis] > 0, "axis {axis} is empty");
                self.done(Kind::Softmax(axis), &[0], &self.args[0].shape)
            }
            "argmax_v1" => self.argmax(),
            "primitive.batch_matmul_v1" | "broadcasting_batch_matmul_v1" => self.batch_matmul(),
            "primitive.conv2d_v1" => self.conv2d(),
            "primitive.lut_to_dense_v1" => self.lut_to_dense(),
            "primitive.blockwise_shift_scale_v2" => self.shift_scale(),
            "dequantize_v2" => self.dequantize(),
            _ => self.rare(name),
        }
    }

    fn done(&self, kind: Kind, data: &[usize], shape: &[usize]) -> Result<Resolved> {
        let declared = &self.results[0].shape;
        demand!(
            declared == shape,
            "result is declared {declared:?}, but has shape {shape:?}"
        );
        Ok(Resolved {
            kind,
            data: data.to_vec(),
        })
    }

    fn arity(&self, n: usize) -> Result<()> {
        let have = self.args.len();
        demand!(have == n, "takes {n} operands, has {have}");
        Ok(())
    }

    fn elem(&self, i: usize, accepted: &[Elem]) -> Result<()> {
        let have = self.args[i].elem;
        demand!(
            accepted.contains(&have),
            "operand {i} of element type `{}` is not supported",
            have.name()
        );
        Ok(())
    }

    fn floats(&self, i: usize) -> Result<()> {
        self.elem(i, &[Elem::F16, Elem::Bf16, Elem::F32])
    }

    fn numbers(&self, i: usize) -> Result<()> {
        demand!(self.args[i].elem != Elem::Bool, "operand {i} is `i1`");
        Ok(())
    }

    fn integers(&self, i: usize) -> Result<()> {
        demand!(
            self.args[i].is_integer(),
            "operand {i} is `{}`, not integers",
            self.args[i].elem.name()
        );
        Ok(())
    }

    fn same_elem(&self, i: usize, j: usize) -> Result<()> {
        let (a, b) = (&self.args[i], &self.args[j]);
        demand!(
            a.storage() == b.storage(),
            "operand {i} is `{}`, operand {j} `{}`",
            a.elem.name(),
            b.elem.name()
        );
        Ok(())
    }

    fn result_elem(&self, elem: Elem) -> Result<()> {
        let declared = self.results[0].elem;
        demand!(
            declared == elem,
            "result is declared `{}`, but is `{}`",
            declared.name(),
            elem.name()
        );
        Ok(())
    }

    fn constant(&self, i: usize) -> Result<Vec<i64>> {
        (self.ints)(i).ok_or_else(|| format!("operand {i} must be a constant of integers"))
    }

    fn sizes(&self, i: usize) -> Result<Vec<usize>> {
        self.constant(i)?
            .into_iter()
            .map(|v| usize::try_from(v).map_err(|_| format!("operand {i} holds the size {v}")))
            .collect()
    }

    fn axes(&self, i: usize, rank: usize) -> Result<Vec<usize>> {
        let mut axes = Vec::new();
        for v in self.constant(i)? {
            let from_start = if v < 0 { v + rank as i64 } else { v };
            let axis = usize::try_from(from_start).ok().filter(|&a| a < rank);
            let axis = axis.ok_or_else(|| format!("axis {v} is outside rank {rank}"))?;
            demand!(!axes.contains(&axis), "axis {v} appears twice");
            axes.push(axis);
        }
        Ok(axes)
    }

    fn axis(&self, i: usize, rank: usize) -> Result<usize> {
        match self.axes(i, rank)?[..] {
            [axis] => Ok(axis),
            _ => Err(format!("operand {i} must hold one axis")),
        }
    }

    fn enumeration(&self, name: &str, code: u32) -> Result<u64> {
        match self.op.prop(name).map(|a| self.module.attr(a)) {
            Some(&Attr::Enum { code: c, value }) if c == code => Ok(value),
            None => Ok(u64::from(code == enum_code::PADDING_MODE)),
            Some(_) => Err(format!("attribute `{name}` is not of its kind")),
        }
    }
}

/// numpy broadcasting.
fn broadcast(x: &[usize], y: &[usize]) -> Result<Vec<usize>> {
    let rank = x.len().max(y.len());
    let at = |s: &[usize], i: usize| (i + s.len()).checked_sub(rank).map_or(1, |j| s[j]);
    (0..rank)
        .map(|i| match (at(x, i), at(y, i)) {
            (a, b) if a == b => Ok(a),
            (1, b) => Ok(b),
            (a, 1) => Ok(a),
            _ => Err(format!("shapes {x:?} and {y:?} do not broadcast")),
        })
        .collect()
}

fn unary(base: &str) -> Option<Unary> {
    Some(match base {
        "primitive.exp" => Unary::Exp,
        "primitive.tanh" => Unary::Tanh,
        "primitive.sin" => Unary::Sin,
        "primitive.cos" => Unary::Cos,
        "primitive.abs" => Unary::Abs,
        "primitive.round" => Unary::Round,
        "primitive.sqrt" => Unary::Sqrt,
        "primitive.rsqrt" => Unary::Rsqrt,
        "primitive.log" => Unary::Log,
        "primitive.erf" => Unary::Erf,
        "sigmoid" => Unary::Sigmoid,
        "silu" => Unary::Silu,
        "relu" => Unary::Relu,
        _ => return None,
    })
}

fn binary(base: &str) -> Option<Binary> {
    Some(match base {
        "add" => Binary::Add,
        "sub" => Binary::Sub,
        "mul" => Binary::Mul,
        "divide" => Binary::Divide,
        "maximum" => Binary::Maximum,
        "minimum" => Binary::Minimum,
        "pow" => Binary::Pow,
        "modulo" => Binary::Modulo,
        "floor_divide" => Binary::FloorDivide,
        _ => return None,
    })
}

fn compare(base: &str) -> Option<Compare> {
    Some(match base {
        "equal" => Compare::Equal,
        "not_equal" => Compare::NotEqual,
        "greater" => Compare::Greater,
        "logical_and" => Compare::And,
        "logical_or" => Compare::Or,
        "logical_xor" => Compare::Xor,
        _ => return None,
    })
}

fn reduction(base: &str) -> Option<Reduce> {
    Some(match base {
        "reduce_sum" => Reduce::Sum,
        "reduce_mean" => Reduce::Mean,
        "reduce_max" => Reduce::Max,
        "reduce_min" => Reduce::Min,
        "reduce_product" => Reduce::Product,
        _ => return None,
    })
}
