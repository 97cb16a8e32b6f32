//! The operations of [`crate::ops::rare`].

use anemone_schemas::aimodel::ir::{Elem, enum_code};

use super::{Resolved, Resolver, Result, broadcast};
use crate::ops::rare::{Bitwise, Combine, Rare};
use crate::plan::kind::Kind;

impl Resolver<'_> {
    pub(super) fn rare(&self, name: &str) -> Result<Resolved> {
        match name {
            "primitive.scatter_nd_v1" => self.scatter_nd(),
            "primitive.scatter_along_axis_v1" => self.scatter_along_axis(),
            "primitive.reverse_v1" => {
                self.arity(2)?;
                let shape = &self.args[0].shape;
                let axes = self.axes(1, shape.len())?;
                self.done(Kind::Rare(Rare::Reverse(axes)), &[0], shape)
            }
            "sort_v1" => {
                self.result_elem(self.args.first().map_or(Elem::Bool, |a| a.elem))?;
                self.sort(Rare::Sort)
            }
            "primitive.argsort_v1" => {
                self.result_elem(Elem::Si32)?;
                self.sort(Rare::Argsort)
            }
            "primitive.bitwise_and_v1" | "broadcasting_bitwise_and_v1" => {
                self.bitwise(Bitwise::And)
            }
            "primitive.bitwise_or_v1" | "broadcasting_bitwise_or_v1" => self.bitwise(Bitwise::Or),
            "primitive.bitwise_xor_v1" | "broadcasting_bitwise_xor_v1" => {
                self.bitwise(Bitwise::Xor)
            }
            _ => Err("the runtime cannot execute this operation".into()),
        }
    }

    /// The region says how old and new are combined; Apple's verifier admits one that
    /// yields the new element.
    fn scatter_nd(&self) -> Result<Resolved> {
        self.arity(3)?;
        self.integers(1)?;
        self.same_elem(0, 2)?;
        let replaces = self.op.regions.first().is_some_and(|&r| {
            let region = self.module.region(r);
            let yielded = region
                .ops
                .first()
                .map(|&op| &self.module.op(op).operands[..]);
            region.ops.len() == 1 && region.args.len() == 2 && yielded == Some(&region.args[1..])
        });
        demand!(replaces, "its region does not yield its second argument");
        let (x, idx) = (&self.args[0].shape, &self.args[1].shape);
        let (depth, lead) = idx.split_last().ok_or("indices have rank 0")?;
        demand!(
            *depth <= x.len(),
            "indices of depth {depth} into rank {}",
            x.len()
        );
        let updates = [lead, &x[*depth..]].concat();
        demand!(
            self.args[2].shape == updates,
            "updates of shape {:?}, expected {updates:?}",
            self.args[2].shape
        );
        self.done(Kind::Rare(Rare::ScatterNd), &[0, 1, 2], x)
    }

    fn scatter_along_axis(&self) -> Result<Resolved> {
        self.arity(4)?;
        self.integers(1)?;
        self.same_elem(0, 2)?;
        let how = match self.enumeration("scatter_mode", enum_code::SCATTER_MODE)? {
            0 => Combine::Update,
            1 => Combine::Add,
            2 => Combine::Sub,
            3 => Combine::Mul,
            4 => Combine::Div,
            5 => Combine::Max,
            6 => Combine::Min,
            other => return Err(format!("scatter mode {other} is not known")),
        };
        if how != Combine::Update {
            self.numbers(0)?;
        }
        let (x, idx) = (&self.args[0].shape, &self.args[1].shape);
        let axis = self.axis(3, x.len())?;
        let fits = x.len() == idx.len() && (0..x.len()).all(|a| a == axis || idx[a] <= x[a]);
        demand!(
            fits && self.args[2].shape == *idx,
            "indices of shape {idx:?} and updates of shape {:?} into {x:?} along axis {axis}",
            self.args[2].shape
        );
        let op = Rare::ScatterAlongAxis(axis, how);
        self.done(Kind::Rare(op), &[0, 1, 2], x)
    }

    fn sort(&self, op: impl Fn(usize) -> Rare) -> Result<Resolved> {
        self.arity(4)?;
        self.numbers(0)?;
        self.elem(2, &[Elem::Bool])?;
        demand!(
            self.args[2].shape.iter().product::<usize>() == 1,
            "whether to sort descending is not one bool"
        );
        let shape = &self.args[0].shape;
        let axis = self.axis(1, shape.len())?;
        self.done(Kind::Rare(op(axis)), &[0, 2], shape)
    }

    fn bitwise(&self, op: Bitwise) -> Result<Resolved> {
        self.arity(2)?;
        self.integers(0)?;
        self.same_elem(0, 1)?;
        self.result_elem(self.args[0].elem)?;
        let shape = broadcast(&self.args[0].shape, &self.args[1].shape)?;
        self.done(
            Kind::Rare(Rare::Bitwise(op, shape.clone())),
            &[0, 1],
            &shape,
        )
    }
}
