//! Building graphs: one method per operation, with the result types inferred.
//!
//! ```
//! use anemone_schemas::aimodel::build::{GraphBuilder, Input};
//! use anemone_schemas::aimodel::ir::{Elem, Module, TensorType};
//!
//! let mut module = Module::default();
//! let x = Input::Tensor(TensorType::new(Elem::F16, &[1, 8]));
//! let mut g = GraphBuilder::new(&mut module, "main", &[("x", x)]);
//! let y = g.silu(g.arg(0));
//! g.finish(&[("y", y)], &[]);
//! ```
//!
//! A graph that cannot be typed is a mistake of the caller, so every method
//! panics then, with the operation's name and the reason.

mod composite;
mod compute;
mod constant;
mod layout;
mod state;

pub use self::compute::Conv2d;
pub(in crate::aimodel) use self::constant::constant_value;
pub use self::layout::{Bound, Padding, Scatter};

use std::collections::HashMap;

use super::infer::{self, Constants, Stop};
use super::ir::{
    Attr, AttrId, Elem, Module, Op, OpId, Region, RegionId, TensorType, Type, TypeId, ValueId,
};

/// What a graph takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A tensor passed with every call.
    Tensor(TensorType),
    /// A tensor that outlives the call: the caller lends it, the graph reads and
    /// writes it in place.
    State(TensorType),
}

/// Builds one graph of a module.
#[derive(Debug)]
pub struct GraphBuilder<'m> {
    module: &'m mut Module,
    name: String,
    private: bool,
    /// Declaration of the composite operation this graph is the body of.
    composite: Option<AttrId>,
    input_names: Vec<String>,
    loc: AttrId,
    /// Value attribute of every constant of the graph.
    constants: Constants,
    /// The region being filled, innermost last: a composite's decomposition is
    /// built by the same methods as the graph.
    bodies: Vec<Body>,
}

#[derive(Debug)]
struct Body {
    args: Vec<ValueId>,
    ops: Vec<OpId>,
    /// Constants of this region, so that equal ones are one value.
    constants: HashMap<(AttrId, TypeId), ValueId>,
}

impl<'m> GraphBuilder<'m> {
    /// Starts a public graph. Input names are what a caller binds by.
    pub fn new(module: &'m mut Module, name: &str, inputs: &[(&str, Input)]) -> Self {
        let loc = module.unknown_loc();
        let mut args = Vec::with_capacity(inputs.len());
        for (_, input) in inputs {
            let ty = match input {
                Input::Tensor(t) => module.add_type(Type::Tensor(t.clone())),
                Input::State(t) => {
                    let inner = module.add_type(Type::Tensor(t.clone()));
                    module.add_type(Type::Handle(inner))
                }
            };
            args.push(module.add_value(ty));
        }
        Self {
            module,
            name: name.to_owned(),
            private: false,
            composite: None,
            input_names: inputs.iter().map(|(n, _)| (*n).to_owned()).collect(),
            loc,
            constants: Constants::new(),
            bodies: vec![Body {
                args,
                ops: Vec::new(),
                constants: HashMap::new(),
            }],
        }
    }

    /// Makes the graph private: hidden from callers of the program, for
    /// [`Self::invoke`] only.
    pub fn set_private(&mut self) {
        self.private = true;
    }

    /// Makes the graph the private body of a composite operation, which a back end may
    /// know by `name` and replace; `outputs` are its names for the results.
    pub fn set_composite(&mut self, name: &str, outputs: &[&str]) {
        self.private = true;
        let m = &mut *self.module;
        let version = m.add_attr(Attr::Integer {
            bits: 64,
            unsigned: false,
            value: 1,
        });
        let opaque = |m: &mut Module, name: &str, items| {
            let name = name.to_owned();
            m.add_attr(Attr::Opaque { name, items })
        };
        let version = opaque(m, "version", vec![version]);
        let attributes = m.add_attr(Attr::Dictionary(vec![version]));
        let list = |m: &mut Module, names: &[&str]| {
            let strings = names.iter().map(|n| m.add_attr(Attr::String((*n).into())));
            let strings = strings.collect();
            m.add_attr(Attr::Array(strings))
        };
        let inputs: Vec<&str> = self.input_names.iter().map(String::as_str).collect();
        let (inputs, outputs) = (list(m, &inputs), list(m, outputs));
        let parts = vec![
            opaque(m, "input_names", vec![inputs]),
            opaque(m, "op_attrs", vec![attributes]),
            opaque(m, "output_names", vec![outputs]),
        ];
        self.composite = Some(opaque(m, name, parts));
    }

    /// Argument `i`.
    pub fn arg(&self, i: usize) -> ValueId {
        self.bodies[0].args[i]
    }

    /// The module being built.
    pub fn module(&mut self) -> &mut Module {
        self.module
    }

    /// The type of a tensor value.
    pub fn tensor_type(&self, x: ValueId) -> &TensorType {
        self.module
            .tensor_type(x)
            .unwrap_or_else(|| panic!("value {} is not a tensor", x.0))
    }

    /// The element type of a tensor value.
    pub fn elem(&self, x: ValueId) -> Elem {
        self.tensor_type(x).elem
    }

    /// The static shape of a tensor value.
    pub fn shape(&self, x: ValueId) -> Vec<usize> {
        let t = self.tensor_type(x);
        t.dims()
            .unwrap_or_else(|| panic!("value {} has a dynamic shape", x.0))
    }

    /// Ends the graph: named results, then the last token of every state in the
    /// order of the states among the arguments.
    pub fn finish(mut self, outputs: &[(&str, ValueId)], tokens: &[ValueId]) -> OpId {
        let returned: Vec<ValueId> = outputs
            .iter()
            .map(|&(_, v)| v)
            .chain(tokens.iter().copied())
            .collect();
        self.push("dataflow.output_v1", &returned, &[], vec![], vec![]);
        let body = self.bodies.pop().expect("the graph's own body");
        let m = self.module;
        let types = |m: &Module, values: &[ValueId]| -> Vec<TypeId> {
            values.iter().map(|&v| m.value_type(v)).collect()
        };
        let signature = Type::Function {
            inputs: types(m, &body.args),
            results: types(m, &returned),
        };
        let signature = m.add_type(signature);
        let arg_names: Vec<&str> = self.input_names.iter().map(String::as_str).collect();
        let result_names: Vec<&str> = outputs
            .iter()
            .map(|&(n, _)| n)
            .chain(tokens.iter().map(|_| ""))
            .collect();
        let no = flag(m, false);
        let whole = flag(m, self.composite.is_some());
        let mut props = vec![
            ("argAttrs", names(m, &arg_names)),
            ("externalize", no),
            ("functionType", m.add_attr(Attr::Type(signature))),
            ("isPrivate", flag(m, self.private)),
            ("name", m.add_attr(Attr::String(self.name))),
            ("noInline", whole),
            ("paramDecls", m.add_attr(Attr::Array(vec![]))),
            ("resAttrs", names(m, &result_names)),
        ];
        if let Some(declaration) = self.composite {
            props.insert(1, ("compositeDecl", declaration));
        }
        let region = m.add_region(Region {
            arg_locs: vec![self.loc; body.args.len()],
            args: body.args,
            ops: body.ops,
        });
        let graph = m.add_op(Op {
            name: "dataflow.graph_v1".into(),
            operands: vec![],
            results: vec![],
            props,
            regions: vec![region],
            loc: self.loc,
        });
        m.graphs.push(graph);
        graph
    }

    // ---- emitting operations

    /// Appends an operation whose result types are given.
    fn push(
        &mut self,
        name: &str,
        operands: &[ValueId],
        results: &[TypeId],
        props: Vec<(&'static str, AttrId)>,
        regions: Vec<RegionId>,
    ) -> Vec<ValueId> {
        let results: Vec<ValueId> = results.iter().map(|&t| self.module.add_value(t)).collect();
        let op = self.module.add_op(Op {
            name: name.to_owned(),
            operands: operands.to_vec(),
            results: results.clone(),
            props,
            regions,
            loc: self.loc,
        });
        self.body().ops.push(op);
        results
    }

    /// Appends an operation, inferring its result types.
    fn infer_with(
        &mut self,
        name: &str,
        operands: &[ValueId],
        props: Vec<(&'static str, AttrId)>,
        regions: Vec<RegionId>,
    ) -> Vec<ValueId> {
        let op = Op {
            name: name.to_owned(),
            operands: operands.to_vec(),
            results: vec![],
            props,
            regions,
            loc: self.loc,
        };
        let types = match infer::result_types(self.module, &self.constants, &op) {
            Ok(types) => types,
            Err(Stop::Wrong(reason)) => panic!("`{name}` {reason}"),
            Err(Stop::Unknown) => panic!("`{name}` has no static type here"),
        };
        let types: Vec<TypeId> = types.into_iter().map(|t| self.module.add_type(t)).collect();
        self.push(&op.name, operands, &types, op.props, op.regions)
    }

    fn infer(&mut self, name: &str, operands: &[ValueId]) -> ValueId {
        self.infer_with(name, operands, vec![], vec![])[0]
    }

    /// Appends an operation with one tensor result of a given type.
    fn typed(&mut self, name: &str, operands: &[ValueId], result: TensorType) -> ValueId {
        let ty = self.module.add_type(Type::Tensor(result));
        self.push(name, operands, &[ty], vec![], vec![])[0]
    }

    fn body(&mut self) -> &mut Body {
        self.bodies.last_mut().expect("inside a graph")
    }

    /// Builds a region of one block with arguments of `types`, terminated by a
    /// yield of what `fill` returns.
    fn region(
        &mut self,
        types: &[TypeId],
        fill: impl FnOnce(&mut Self, &[ValueId]) -> Vec<ValueId>,
    ) -> RegionId {
        let args: Vec<ValueId> = types.iter().map(|&t| self.module.add_value(t)).collect();
        self.bodies.push(Body {
            args: args.clone(),
            ops: Vec::new(),
            constants: HashMap::new(),
        });
        let yielded = fill(self, &args);
        self.push("dataflow.yield_v1", &yielded, &[], vec![], vec![]);
        let body = self.bodies.pop().expect("pushed above");
        self.module.add_region(Region {
            arg_locs: vec![self.loc; body.args.len()],
            args: body.args,
            ops: body.ops,
        })
    }
}

fn flag(m: &mut Module, on: bool) -> AttrId {
    m.add_attr(Attr::Integer {
        bits: 1,
        unsigned: true,
        value: i64::from(on),
    })
}

/// `argAttrs` or `resAttrs`: an array per value with its `aicode.name`, empty for
/// a value without a name.
fn names(m: &mut Module, names: &[&str]) -> AttrId {
    let mut entries = Vec::with_capacity(names.len());
    for name in names {
        let mut entry = vec![];
        if !name.is_empty() {
            let text = m.add_attr(Attr::String((*name).to_owned()));
            entry.push(m.add_attr(Attr::Opaque {
                name: "aicode.name".into(),
                items: vec![text],
            }));
        }
        entries.push(m.add_attr(Attr::Array(entry)));
    }
    m.add_attr(Attr::Array(entries))
}
