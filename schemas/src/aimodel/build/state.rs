//! States, calls between graphs, hardware constraints.

use super::GraphBuilder;
use crate::aimodel::ir::{Attr, AttrId, Backing, TensorType, Type, TypeId, ValueId};

impl GraphBuilder<'_> {
    /// A fresh token: the start of one state's chain of reads and writes.
    pub fn token(&mut self) -> ValueId {
        self.infer("dataflow.create_token_v1", &[])
    }

    /// Reads a state: its tensor and the next token.
    pub fn read_handle(&mut self, state: ValueId, token: ValueId) -> (ValueId, ValueId) {
        let read = self.infer_with("dataflow.read_handle_v1", &[state, token], vec![], vec![]);
        (read[0], read[1])
    }

    /// Writes a whole state and gives the next token.
    pub fn write_handle(&mut self, state: ValueId, tensor: ValueId, token: ValueId) -> ValueId {
        self.infer("dataflow.write_handle_v1", &[state, tensor, token])
    }

    /// Calls a finished graph of the same module and gives its results, tokens
    /// included.
    pub fn invoke(&mut self, callee: &str, args: &[ValueId]) -> Vec<ValueId> {
        let graph = self
            .module
            .graph(callee)
            .unwrap_or_else(|| panic!("no graph `{callee}` to invoke"));
        let types = |values: &[ValueId]| -> Vec<TypeId> {
            values.iter().map(|&v| self.module.value_type(v)).collect()
        };
        let takes = types(&graph.inputs.iter().map(|i| i.1).collect::<Vec<_>>());
        let gives = types(&graph.outputs.iter().map(|o| o.1).collect::<Vec<_>>());
        assert!(
            takes == types(args),
            "`{callee}` is invoked with other types than it takes"
        );
        let symbol = self
            .module
            .add_attr(Attr::SymbolRef(vec![callee.to_owned()]));
        let ty = self.module.add_type(Type::ParamSymbol);
        let callee = self
            .module
            .add_attr(Attr::ParamConstant { value: symbol, ty });
        let none = self.module.add_attr(Attr::Array(vec![]));
        let props = vec![("arg_attrs", none), ("callee", callee), ("res_attrs", none)];
        self.push("dataflow.invoke_v1", args, &gives, props, vec![])
    }

    /// A hardware constraint for a tensor of some rank: one more alignment than
    /// axes, as many interleave factors as axes.
    pub fn hw_constraints(
        &mut self,
        backing: Backing,
        alignments: &[i64],
        interleave: &[i64],
    ) -> AttrId {
        assert!(
            alignments.len() == interleave.len() + 1,
            "{} alignments for {} interleave factors",
            alignments.len(),
            interleave.len()
        );
        self.module.add_attr(Attr::HwConstraints {
            alignments: alignments.to_vec(),
            interleave: interleave.to_vec(),
            backing,
        })
    }

    /// The tensor laid out as the constraint says.
    pub fn copy_with_constraints(&mut self, x: ValueId, constraints: AttrId) -> ValueId {
        let result = TensorType {
            encoding: Some(constraints),
            ..self.tensor_type(x).clone()
        };
        self.typed("ax.copy_with_constraints_v1", &[x], result)
    }

    /// The tensor without its constraint.
    pub fn copy_discarding_constraints(&mut self, x: ValueId) -> ValueId {
        self.infer("ax.copy_discarding_constraints_v1", &[x])
    }
}
