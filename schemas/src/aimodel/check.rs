//! Is a program well formed?
//!
//! What Apple's loader verifies, said in terms of the function and operation at
//! fault (the loader itself ends the process): values are defined before use in
//! their own region, regions end in their terminator, result types follow from
//! the operands, signatures match bodies, every state has its chain of tokens,
//! and calls reach an existing function without going round.

mod scales;
mod signature;

use std::collections::{HashMap, HashSet};

use super::ids;
use super::infer::{self, Constants, Stop, compatible};
use super::ir::{Attr, AttrId, Elem, Graph, Module, Op, OpId, RegionId, TensorType, Type, ValueId};
use super::limits::MAX_REGION_DEPTH;
use super::text::type_name;

/// The first rule a program breaks, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("function `{function}`{}: {reason}", at_operation(path, op))]
pub struct CheckError {
    /// The function, or where in the program.
    pub function: String,
    /// Position of the operation in the function, then in the regions below;
    /// empty for the function as a whole.
    pub path: Vec<usize>,
    /// Its name.
    pub op: String,
    /// The rule.
    pub reason: String,
}

fn at_operation(path: &[usize], op: &str) -> String {
    if path.is_empty() {
        return String::new();
    }
    let path: Vec<String> = path.iter().map(usize::to_string).collect();
    format!(", operation {} (`{op}`)", path.join("."))
}

/// Checks the whole program.
pub fn check(m: &Module) -> Result<(), CheckError> {
    let mut checker = Checker {
        m,
        constants: Constants::new(),
        defined: HashMap::new(),
        scales: HashSet::new(),
        function: String::new(),
        path: vec![],
    };
    let mut keys = HashSet::new();
    for blob in m.blobs() {
        if !keys.insert(&blob.key) {
            return checker.fail("", format!("two blobs are called `{}`", blob.key));
        }
    }
    let mut names = HashSet::new();
    for &id in &m.graphs {
        let Some(graph) = Graph::of(m, id) else {
            checker.function.clone_from(&m.op(id).name);
            return checker.fail("", "its attributes do not describe a graph".into());
        };
        graph.name.clone_into(&mut checker.function);
        if !names.insert(graph.name) {
            return checker.fail("", "another function has the same name".into());
        }
        checker.graph(&graph)?;
    }
    checker.calls()
}

type Checked = Result<(), CheckError>;

struct Checker<'a> {
    m: &'a Module,
    constants: Constants,
    /// Where a value is defined: its region, and the operation or, for a block
    /// argument, its position.
    defined: HashMap<ValueId, (RegionId, Origin)>,
    /// Constants that were looked at as scales.
    scales: HashSet<AttrId>,
    function: String,
    path: Vec<usize>,
}

#[derive(Clone, Copy)]
enum Origin {
    Argument,
    /// A result: the operation and which one.
    Result(OpId, usize),
}

impl<'a> Checker<'a> {
    fn fail(&self, op: &str, reason: String) -> Checked {
        Err(CheckError {
            function: self.function.clone(),
            path: self.path.clone(),
            op: op.to_owned(),
            reason,
        })
    }

    fn type_of(&self, v: ValueId) -> &'a Type {
        self.m.ty(self.m.value_type(v))
    }

    fn type_text(&self, v: ValueId) -> String {
        type_name(self.m, self.type_of(v))
    }

    fn region(&mut self, id: RegionId, terminator: &str) -> Checked {
        let m = self.m;
        let region = m.region(id);
        if self.path.len() > MAX_REGION_DEPTH {
            return self.fail("", format!("regions nest deeper than {MAX_REGION_DEPTH}"));
        }
        if region.args.len() != region.arg_locs.len() {
            return self.fail("", "a block argument has no location".into());
        }
        for &arg in &region.args {
            self.define(arg, id, Origin::Argument)?;
        }
        let Some((&last, _)) = region.ops.split_last() else {
            return self.fail(
                "",
                format!("a region is empty, it must end in `{terminator}`"),
            );
        };
        for (i, &op_id) in region.ops.iter().enumerate() {
            self.path.push(i);
            let op = m.op(op_id);
            let ends = op.name == ids::op::OUTPUT || op.name == ids::op::YIELD;
            if (op_id == last) != ends || ends && op.name != terminator {
                return self.fail(
                    &op.name,
                    format!("a region must end in `{terminator}` and nowhere before"),
                );
            }
            for &operand in &op.operands {
                if self.defined.get(&operand).is_none_or(|d| d.0 != id) {
                    return self.fail(
                        &op.name,
                        "an operand is not defined before it in the same region".into(),
                    );
                }
            }
            self.op(op)?;
            for (k, &result) in op.results.iter().enumerate() {
                self.define(result, id, Origin::Result(op_id, k))?;
            }
            self.path.pop();
        }
        Ok(())
    }

    fn define(&mut self, v: ValueId, region: RegionId, origin: Origin) -> Checked {
        if let Type::Tensor(t) = self.type_of(v)
            && let Some(encoding) = t.encoding
        {
            let rank = t.shape.len();
            match self.m.attr(encoding) {
                Attr::HwConstraints {
                    alignments,
                    interleave,
                    ..
                } if alignments.len() == rank + 1 && interleave.len() == rank => {}
                Attr::HwConstraints {
                    alignments,
                    interleave,
                    ..
                } => {
                    return self.fail(
                        "",
                        format!(
                            "{} alignments and {} interleave factors for rank {rank}, expected {} and {rank}",
                            alignments.len(),
                            interleave.len(),
                            rank + 1
                        ),
                    );
                }
                _ => return self.fail("", "a tensor encoding is not a hardware constraint".into()),
            }
        }
        if self.defined.insert(v, (region, origin)).is_some() {
            return self.fail("", format!("value {} is defined twice", v.0));
        }
        Ok(())
    }

    fn op(&mut self, op: &'a Op) -> Checked {
        let schema = ids::props(&op.name).unwrap_or(&[]);
        for (name, _) in &op.props {
            if !schema.iter().any(|p| p.name == *name) {
                return self.fail(&op.name, format!("has no attribute `{name}`"));
            }
        }
        for prop in schema {
            if !prop.optional && op.prop(prop.name).is_none() {
                return self.fail(&op.name, format!("lacks its attribute `{}`", prop.name));
            }
        }
        match op.name.as_str() {
            ids::op::ASSET | ids::op::GRAPH => self.fail(&op.name, "is nested".into()),
            ids::op::OUTPUT | ids::op::YIELD => {
                if op.results.is_empty() {
                    Ok(())
                } else {
                    self.fail(&op.name, "has results".into())
                }
            }
            ids::op::CONSTANT => self.constant(op),
            ids::op::INVOKE => self.invoke(op),
            "primitive.reduce_v1" | "primitive.reduce_index_v1" if self.path.len() == 1 => self
                .fail(
                    &op.name,
                    "may only appear in the decomposition of a composite operation".into(),
                ),
            _ => self.computed(op),
        }
    }

    /// An operation whose results follow from its operands.
    fn computed(&mut self, op: &'a Op) -> Checked {
        match infer::result_types(self.m, &self.constants, op) {
            Err(Stop::Wrong(reason)) => return self.fail(&op.name, reason),
            Err(Stop::Unknown) => {}
            Ok(expected) => {
                if expected.len() != op.results.len() {
                    return self.fail(
                        &op.name,
                        format!(
                            "has {} results, expected {}",
                            op.results.len(),
                            expected.len()
                        ),
                    );
                }
                for (i, (expected, &found)) in expected.iter().zip(&op.results).enumerate() {
                    let constrains = op.name == ids::op::COPY_WITH_CONSTRAINTS;
                    if !result_fits(expected, self.type_of(found), constrains) {
                        return self.fail(
                            &op.name,
                            format!(
                                "result {i} is {}, expected {}",
                                self.type_text(found),
                                type_name(self.m, expected)
                            ),
                        );
                    }
                }
            }
        }
        self.scale(op)?;
        for &region in &op.regions {
            self.region(region, ids::op::YIELD)?;
        }
        let scalars;
        let body = if !op.name.contains('.') {
            let types = |values: &[ValueId]| values.iter().map(|&v| self.type_of(v)).collect();
            (types(&op.operands), types(&op.results))
        } else if op.name == "primitive.scatter_nd_v1" {
            scalars = match op.operands.first().map(|&x| self.type_of(x)) {
                Some(Type::Tensor(t)) => Type::Tensor(TensorType::new(t.elem, &[])),
                _ => Type::Tensor(TensorType::new(Elem::F32, &[])),
            };
            (vec![&scalars, &scalars], vec![&scalars])
        } else {
            return Ok(());
        };
        self.body(op, body)
    }

    /// Checks that an operation has one region from `args` to `yielded`.
    fn body(&self, op: &Op, (args, yielded): (Vec<&Type>, Vec<&Type>)) -> Checked {
        let [region] = op.regions[..] else {
            return self.fail(
                &op.name,
                format!("has {} regions, expected one", op.regions.len()),
            );
        };
        let region = self.m.region(region);
        let last = region.ops.last().expect("regions are checked before");
        let sides = [
            ("takes", &region.args, args),
            ("yields", &self.m.op(*last).operands, yielded),
        ];
        for (verb, found, expected) in sides {
            let fits = found.len() == expected.len()
                && found
                    .iter()
                    .zip(&expected)
                    .all(|(&f, e)| result_fits(e, self.type_of(f), false));
            if !fits {
                let show = |types: Vec<String>| types.join(", ");
                return self.fail(
                    &op.name,
                    format!(
                        "its region {verb} ({}), expected ({})",
                        show(found.iter().map(|&v| self.type_text(v)).collect()),
                        show(expected.iter().map(|t| type_name(self.m, t)).collect())
                    ),
                );
            }
        }
        Ok(())
    }

    fn constant(&mut self, op: &Op) -> Checked {
        let value = op.prop("value").expect("checked with the schema");
        let [result] = op.results[..] else {
            return self.fail(&op.name, "does not have one result".into());
        };
        let Type::Tensor(ty) = self.type_of(result) else {
            return self.fail(&op.name, "is not a tensor".into());
        };
        let bits = ty.elem.bits();
        let count = ty.count();
        let inline = |n: usize| n.checked_mul(bits.div_ceil(8)).map(|n| n as u64);
        let (found, expected) = match self.m.attr(value) {
            Attr::Dense { splat: true, bytes } => (bytes.len() as u64, inline(1)),
            Attr::Dense {
                splat: false,
                bytes,
            } => (bytes.len() as u64, count.and_then(inline)),
            Attr::Resource(blob) => (
                self.m.blob(*blob).len(),
                count.and_then(|n| ty.elem.packed_len(n)).map(|n| n as u64),
            ),
            _ => return self.fail(&op.name, "its value has no elements".into()),
        };
        if count.is_none() || expected != Some(found) {
            return self.fail(
                &op.name,
                format!(
                    "{} holds {} bytes, {found} are given",
                    self.type_text(result),
                    expected.map_or_else(|| "no number of".into(), |n| n.to_string())
                ),
            );
        }
        self.constants.insert(result, value);
        Ok(())
    }
}

/// Whether a value of type `found` may stand where `expected` is inferred.
fn result_fits(expected: &Type, found: &Type, constrained: bool) -> bool {
    match (expected, found) {
        (Type::Tensor(e), Type::Tensor(f)) => {
            let encoding = if constrained {
                f.encoding.is_some()
            } else {
                e.encoding == f.encoding
            };
            encoding
                && e.elem == f.elem
                && e.shape.len() == f.shape.len()
                && e.shape
                    .iter()
                    .zip(&f.shape)
                    .all(|(&a, &b)| compatible(a, b))
        }
        _ => expected == found,
    }
}
