//! Which axis of a value counts the rows of a call.
//!
//! Of a call of `width` rows often only the first few matter
//! ([`RunOptions::live`](crate::plan::RunOptions)). A product with weights computes
//! only those; the operations between products can do the same if they know the axis.
//! It starts at products and norms over channels, where all other axes but one have
//! extent 1, and passes on through operations that keep rows apart.

use std::collections::HashMap;

use crate::plan::kind::{Kind, Step};

/// Where the rows of a value are.
#[derive(Clone, Copy)]
struct Rows {
    axis: usize,
    extent: usize,
    rank: usize,
}

/// Sets the axis of rows in every step whose first result has one.
pub(in crate::plan) fn mark_tokens(steps: &mut [Step]) {
    let mut known: HashMap<u32, Rows> = HashMap::new();
    for step in steps {
        let shape = step.shapes.first().map_or(&[][..], Vec::as_slice);
        let of = |i: usize| known.get(&step.args.get(i)?.slot).copied();
        // An operand's axis, if the result has the same.
        let kept = |i: usize| {
            let r = of(i)?;
            (r.rank == shape.len() && shape[r.axis] == r.extent).then_some(r.axis)
        };
        step.tokens = match &step.kind {
            Kind::WeightMatmul { channels_first, .. } => {
                let channels = if *channels_first { 1 } else { shape.len() - 1 };
                only_other(shape, channels)
            }
            Kind::RmsNorm(axis, _) => kept(0).or_else(|| only_other(shape, *axis)),
            Kind::Attention(heads) => Some(if heads.by_rows { 2 } else { 3 }),
            Kind::Rope(..) | Kind::Unary(_) => kept(0),
            Kind::SiluMul | Kind::Binary(..) => kept(0).or_else(|| kept(1)),
            Kind::Argmax(axis) => kept(0).filter(|rows| rows != axis),
            Kind::Reduce(_, axes) => kept(0).filter(|rows| !axes.contains(rows)),
            Kind::Transpose(perm) => of(0).and_then(|r| perm.iter().position(|&p| p == r.axis)),
            // Where channels are split or merged and the rows stay last.
            Kind::Reshape(_) => of(0).and_then(|r| {
                let last = r.axis + 1 == r.rank && shape.last() == Some(&r.extent);
                last.then(|| shape.len() - 1)
            }),
            _ => None,
        };
        let rows = step.tokens.map(|axis| Rows {
            axis,
            extent: shape[axis],
            rank: shape.len(),
        });
        for slot in step.results.iter().flatten() {
            known.extend(rows.map(|rows| (*slot, rows)));
        }
    }
}

/// The one axis besides `channels` that is longer than 1.
fn only_other(shape: &[usize], channels: usize) -> Option<usize> {
    let mut others = (0..shape.len()).filter(|&a| a != channels && shape[a] > 1);
    let axis = others.next()?;
    others.next().is_none().then_some(axis)
}
