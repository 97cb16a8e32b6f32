//! Runs of operations that are done at once.
//!
//! A pattern is recognised by its last operation. That step is replaced by one that
//! reads what the pattern reads; what lay between is dropped later if nobody else
//! reads it. Fused steps give the bits of the operations they replace
//! (`fused_plans_give_the_bits_of_their_operations`), so a pattern that is not
//! recognised costs time and nothing else.

mod attention;
mod tokens;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::kind::{Arg, Kind, Step};
use crate::kernels::Norm;
use crate::ops::elementwise::{Binary, Unary};
use crate::ops::layout::Span;
use crate::ops::rows::Reduce;
use crate::tensor::Data;
use crate::view::View;

pub(super) use tokens::mark_tokens;

/// What is known of the slots while patterns are searched.
struct Graph<'a> {
    steps: &'a [Step],
    /// Step and result that define a slot.
    definitions: HashMap<u32, (usize, usize)>,
    constants: &'a [Option<View>],
    /// Shapes of the inputs.
    inputs: &'a HashMap<u32, Vec<usize>>,
}

/// Replaces what can be fused. Fused steps are of f16, and so must all that they read
/// be: `halves` names the inputs and results of steps that are.
pub(super) fn fuse(
    steps: &mut [Step],
    constants: &[Option<View>],
    inputs: &HashMap<u32, Vec<usize>>,
    halves: &HashSet<u32>,
) {
    let is_half = |slot: &u32| {
        let constant = constants[*slot as usize].as_ref();
        halves.contains(slot) || constant.is_some_and(|v| matches!(&*v.data, Data::F16(_)))
    };
    let mut definitions = HashMap::new();
    for (i, step) in steps.iter().enumerate() {
        for (r, slot) in step.results.iter().enumerate() {
            definitions.extend(slot.map(|slot| (slot, (i, r))));
        }
    }
    for i in 0..steps.len() {
        let graph = Graph {
            steps,
            definitions: std::mem::take(&mut definitions),
            constants,
            inputs,
        };
        let found = graph.find(&graph.steps[i]);
        definitions = graph.definitions;
        if let Some((kind, args)) = found
            && args.iter().all(is_half)
        {
            steps[i].kind = kind;
            steps[i].args = args
                .into_iter()
                .map(|slot| Arg { slot, last: false })
                .collect();
        }
    }
}

/// A fused step: what it does and what it reads.
type Found = (Kind, Vec<u32>);

impl Graph<'_> {
    fn find(&self, step: &Step) -> Option<Found> {
        let args: Vec<u32> = step.args.iter().map(|a| a.slot).collect();
        match (&step.kind, &args[..]) {
            (Kind::Binary(Binary::Mul, _), &[a, b]) => {
                [(a, b), (b, a)].iter().find_map(|&(a, b)| {
                    self.norm(a, b)
                        .or_else(|| self.gate(a, b))
                        .or_else(|| self.scaled_rope(a, b))
                })
            }
            (Kind::Binary(Binary::Add, _), &[a, b]) => self.rope(a, b).or_else(|| self.rope(b, a)),
            (Kind::Concat(_) | Kind::Reshape(_), _) => self.attention(step),
            _ => None,
        }
    }

    /// The step that defines a slot.
    fn step(&self, slot: u32) -> Option<&Step> {
        let &(i, _) = self.definitions.get(&slot)?;
        Some(&self.steps[i])
    }

    /// The step and which of its results the slot is.
    fn result(&self, slot: u32) -> Option<(&Step, usize)> {
        let &(i, r) = self.definitions.get(&slot)?;
        Some((&self.steps[i], r))
    }

    fn shape(&self, slot: u32) -> Option<&[usize]> {
        if let Some((step, r)) = self.result(slot) {
            return step.shapes.get(r).map(Vec::as_slice);
        }
        if let Some(view) = self.constants.get(slot as usize)?.as_ref() {
            return Some(&view.shape);
        }
        self.inputs.get(&slot).map(Vec::as_slice)
    }

    fn unary(&self, slot: u32, op: Unary) -> Option<u32> {
        let step = self.step(slot)?;
        matches!(&step.kind, Kind::Unary(o) if *o == op).then(|| step.args[0].slot)
    }

    fn binary(&self, slot: u32, op: Binary) -> Option<(u32, u32)> {
        let step = self.step(slot)?;
        matches!(&step.kind, Kind::Binary(o, _) if *o == op)
            .then(|| (step.args[0].slot, step.args[1].slot))
    }

    /// The operands of `op`, the one for which `is` holds second.
    fn binary_with<T>(
        &self,
        slot: u32,
        op: Binary,
        is: impl Fn(u32) -> Option<T>,
    ) -> Option<(u32, T)> {
        let (a, b) = self.binary(slot, op)?;
        is(b).map(|v| (a, v)).or_else(|| is(a).map(|v| (b, v)))
    }

    /// The elements of an f16 constant.
    fn halves(&self, slot: u32) -> Option<Vec<half::f16>> {
        let view = self.constants.get(slot as usize)?.as_ref()?;
        match (&*view.data, view.clone()) {
            (Data::F16(_), view) => match view.into_data() {
                Data::F16(v) => Some(v),
                _ => None,
            },
            _ => None,
        }
    }

    fn scalar(&self, slot: u32) -> Option<f32> {
        match self.halves(slot)?[..] {
            [one] => Some(one.to_f32()),
            _ => None,
        }
    }

    /// `x * rsqrt(mean(x * x) + eps) * weight`, perhaps of a scaled `x`.
    fn norm(&self, normed: u32, weight: u32) -> Option<Found> {
        let values = self.halves(weight)?;
        let (x, mean_of) = self.binary_with(normed, Binary::Mul, |inverse| {
            let sum = self.unary(inverse, Unary::Rsqrt)?;
            let (mean, eps) = self.binary_with(sum, Binary::Add, |e| self.scalar(e))?;
            let step = self.step(mean)?;
            match &step.kind {
                Kind::Reduce(Reduce::Mean, axes) if axes.len() == 1 => {
                    let (a, b) = self.binary(step.args[0].slot, Binary::Mul)?;
                    (a == b).then_some((a, axes[0], eps))
                }
                _ => None,
            }
        })?;
        let (squared, axis, eps) = mean_of;
        let shape = self.shape(x)?;
        let mut flat = vec![1; shape.len()];
        flat[axis] = shape[axis];
        if squared != x || self.shape(weight)? != flat {
            return None;
        }
        let scaled = self.binary_with(x, Binary::Mul, |p| self.scalar(p));
        let norm = Norm {
            prescale: scaled.map(|s| s.1),
            eps,
            weight: values,
        };
        let kind = Kind::RmsNorm(axis, Arc::new(norm));
        Some((kind, vec![scaled.map_or(x, |s| s.0)]))
    }

    /// `silu(gate) * up`.
    fn gate(&self, silu: u32, up: u32) -> Option<Found> {
        let gate = self.unary(silu, Unary::Silu)?;
        let same = self.shape(gate)? == self.shape(up)?;
        same.then(|| (Kind::SiluMul, vec![gate, up]))
    }

    /// `x * cos + concat(-x2, x1) * sin`.
    fn rope(&self, straight: u32, turned: u32) -> Option<Found> {
        let (a, b) = self.binary(straight, Binary::Mul)?;
        let (c, d) = self.binary(turned, Binary::Mul)?;
        for (x, cos) in [(a, b), (b, a)] {
            for (halves, sin) in [(c, d), (d, c)] {
                if let Some(axis) = self.turned(x, halves) {
                    let shape = self.shape(x)?;
                    let table = |slot: u32| {
                        self.shape(slot).is_some_and(|t| {
                            t.len() == shape.len()
                                && t[axis] == shape[axis]
                                && t.iter().zip(shape).all(|(t, x)| t == x || *t == 1)
                        })
                    };
                    if table(cos) && table(sin) {
                        return Some((Kind::Rope(axis, None), vec![x, cos, sin]));
                    }
                }
            }
        }
        None
    }

    /// The axis along which `slot` is `x` with its halves exchanged and the first of
    /// them negated.
    fn turned(&self, x: u32, slot: u32) -> Option<usize> {
        let step = self.step(slot)?;
        let (Kind::Concat(axis), [negated, first]) = (&step.kind, &step.args[..]) else {
            return None;
        };
        let (second, sign) = self.binary_with(negated.slot, Binary::Mul, |s| self.scalar(s))?;
        let shape = self.shape(x)?;
        let (axis, half) = (*axis, shape[*axis] / 2);
        let part = |slot: u32, start: usize| {
            let step = self.step(slot)?;
            let Kind::Slice(spans) = &step.kind else {
                return None;
            };
            let whole = spans.iter().enumerate().all(|(a, s)| {
                let (from, len) = if a == axis {
                    (start, half)
                } else {
                    (0, shape[a])
                };
                *s == Span {
                    start: from,
                    len,
                    step: 1,
                }
            });
            (whole && step.args[0].slot == x).then_some(())
        };
        part(second, half)?;
        part(first.slot, 0)?;
        (sign.to_bits() == (-1.0f32).to_bits() && shape[axis] == 2 * half).then_some(axis)
    }

    /// A rotation times a constant.
    fn scaled_rope(&self, rotated: u32, factor: u32) -> Option<Found> {
        let step = self.step(rotated)?;
        let Kind::Rope(axis, None) = step.kind else {
            return None;
        };
        let factor = self.scalar(factor)?;
        let args = step.args.iter().map(|a| a.slot).collect();
        Some((Kind::Rope(axis, Some(factor)), args))
    }
}
