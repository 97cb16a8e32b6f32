//! Graphs as wholes: signatures, states and calls.

use std::collections::{HashMap, HashSet};

use super::{Checked, Checker, Origin};
use crate::aimodel::ids::op;
use crate::aimodel::ir::{Attr, Graph, Op, OpId, Type, TypeId, ValueId};

impl<'a> Checker<'a> {
    pub(super) fn graph(&mut self, g: &Graph) -> Checked {
        let graph = self.m.op(g.op);
        if graph.name != op::GRAPH || graph.regions.len() != 1 {
            return self.fail("", format!("`{}` is not a graph of one region", graph.name));
        }
        self.region(g.region, op::OUTPUT)?;
        let types = |values: &[(Option<&str>, ValueId)]| -> Vec<TypeId> {
            values.iter().map(|v| self.m.value_type(v.1)).collect()
        };
        let declared = graph.prop("functionType").map(|t| self.m.attr(t));
        let matches = match declared {
            Some(Attr::Type(t)) => match self.m.ty(*t) {
                Type::Function { inputs, results } => {
                    *inputs == types(&g.inputs) && *results == types(&g.outputs)
                }
                _ => false,
            },
            _ => false,
        };
        if !matches {
            return self.fail(
                "",
                "its type is not that of its arguments and results".into(),
            );
        }
        for (what, values) in [("arguments", &g.inputs), ("results", &g.outputs)] {
            let mut seen = HashSet::new();
            if let Some(twice) = values.iter().filter_map(|v| v.0).find(|n| !seen.insert(*n)) {
                return self.fail("", format!("two {what} are called `{twice}`"));
            }
        }
        self.states(g)
    }

    /// A graph returns one token for each of its states, in their order, and each
    /// ends a chain of reads and writes of that state.
    fn states(&self, g: &Graph) -> Checked {
        let states: Vec<ValueId> = g
            .inputs
            .iter()
            .map(|i| i.1)
            .filter(|&v| matches!(self.type_of(v), Type::Handle(_)))
            .collect();
        let tokens: Vec<ValueId> = g
            .outputs
            .iter()
            .map(|o| o.1)
            .filter(|&v| *self.type_of(v) == Type::Token)
            .collect();
        if states.len() != tokens.len() {
            return self.fail(
                "",
                format!(
                    "takes {} states and returns {} tokens, expected one for each",
                    states.len(),
                    tokens.len()
                ),
            );
        }
        // A chain does not fork: what two operations on one state that follow the
        // same token leave in it would depend on their order. A first token may
        // be shared by states.
        let mut followed = HashSet::new();
        for &id in &self.m.region(g.region).ops {
            let (state, token) = match self.m.op(id) {
                step if step.name == op::READ_HANDLE => (step.operands[0], step.operands[1]),
                step if step.name == op::WRITE_HANDLE => (step.operands[0], step.operands[2]),
                _ => continue,
            };
            if !followed.insert((state, token)) {
                return self.fail("", "two operations on a state follow the same token".into());
            }
        }
        for (i, (&state, &token)) in states.iter().zip(&tokens).enumerate() {
            self.token_chain(i, state, token)?;
        }
        Ok(())
    }

    /// Follows a token back to its start. Every step is defined before the one
    /// that uses it, so this ends.
    fn token_chain(&self, i: usize, state: ValueId, mut token: ValueId) -> Checked {
        loop {
            let Some(&(_, Origin::Result(id, result))) = self.defined.get(&token) else {
                return Ok(());
            };
            let step = self.m.op(id);
            let holder = match step.name.as_str() {
                op::CREATE_TOKEN => return Ok(()),
                op::READ_HANDLE => {
                    token = step.operands[1];
                    step.operands[0]
                }
                op::WRITE_HANDLE => {
                    token = step.operands[2];
                    step.operands[0]
                }
                op::INVOKE => {
                    // The callee returns one token per state it is given.
                    let earlier = step.results[..result]
                        .iter()
                        .filter(|&&r| *self.type_of(r) == Type::Token)
                        .count();
                    let given = step
                        .operands
                        .iter()
                        .filter(|&&v| matches!(self.type_of(v), Type::Handle(_)))
                        .nth(earlier);
                    return match given {
                        Some(&given) if given == state => Ok(()),
                        _ => self.fail("", wrong_state(i)),
                    };
                }
                other => {
                    return self.fail(
                        "",
                        format!(
                            "the token of state {i} comes from `{other}`, which no state accepts"
                        ),
                    );
                }
            };
            if holder != state {
                return self.fail("", wrong_state(i));
            }
        }
    }

    pub(super) fn invoke(&self, call: &'a Op) -> Checked {
        let Some(name) = callee(
            self.m.attr(call.prop("callee").expect("in the schema")),
            |a| self.m.attr(a),
        ) else {
            return self.fail(&call.name, "its callee is not a symbol".into());
        };
        let Some(graph) = self.m.graph(name) else {
            return self.fail(&call.name, format!("there is no function `{name}`"));
        };
        let types = |values: Vec<ValueId>| -> Vec<TypeId> {
            values.into_iter().map(|v| self.m.value_type(v)).collect()
        };
        let takes = types(graph.inputs.iter().map(|i| i.1).collect());
        let gives = types(graph.outputs.iter().map(|o| o.1).collect());
        if takes != types(call.operands.clone()) {
            return self.fail(&call.name, format!("`{name}` takes other types"));
        }
        if gives != types(call.results.clone()) {
            return self.fail(&call.name, format!("`{name}` returns other types"));
        }
        Ok(())
    }

    /// No function may reach itself: functions whose callees are all done are
    /// taken away until none is left.
    pub(super) fn calls(&mut self) -> Checked {
        let graphs = self.m.graphs();
        let mut open: HashMap<&str, HashSet<&str>> = HashMap::new();
        for g in &graphs {
            let mut callees = HashSet::new();
            let mut ops: Vec<OpId> = self.m.region(g.region).ops.clone();
            while let Some(id) = ops.pop() {
                let op = self.m.op(id);
                if let Some(attr) = op.prop("callee") {
                    callees.extend(callee(self.m.attr(attr), |a| self.m.attr(a)));
                }
                for &r in &op.regions {
                    ops.extend_from_slice(&self.m.region(r).ops);
                }
            }
            open.insert(g.name, callees);
        }
        let mut order: Vec<&str> = graphs.iter().map(|g| g.name).collect();
        loop {
            let before = order.len();
            let done: Vec<&str> = order
                .iter()
                .copied()
                .filter(|g| open[g].iter().all(|c| !open.contains_key(c)))
                .collect();
            for name in &done {
                open.remove(name);
            }
            order.retain(|name| open.contains_key(name));
            if order.is_empty() {
                return Ok(());
            }
            if order.len() == before {
                order[0].clone_into(&mut self.function);
                return self.fail("", "reaches itself through its calls".into());
            }
        }
    }
}

fn wrong_state(i: usize) -> String {
    format!("the token returned for state {i} belongs to another state")
}

/// The function a call names.
fn callee<'m>(
    attr: &'m Attr,
    get: impl Fn(crate::aimodel::ir::AttrId) -> &'m Attr,
) -> Option<&'m str> {
    let Attr::ParamConstant { value, .. } = attr else {
        return None;
    };
    match get(*value) {
        Attr::SymbolRef(path) => match &path[..] {
            [name] => Some(name),
            _ => None,
        },
        _ => None,
    }
}
