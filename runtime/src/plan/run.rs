//! Running a plan.

use anemone_schemas::aimodel::ir::Elem;

use super::Plan;
use super::execute::Context;
use super::kind::Kind;
use crate::error::RunError;
use crate::kernels;
use crate::ops::cast;
use crate::program::Port;
use crate::tensor::{Data, Tensor};
use crate::view::View;

/// How to run a function.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunOptions {
    /// `(width, live)`: of products over `width` tokens only the first `live` are
    /// computed, the others are zero. For functions whose rows are tokens and do
    /// not mix except through the mask.
    pub live: Option<(usize, usize)>,
    /// Keep the operand of every `argmax`.
    pub keep_argmax_inputs: bool,
}

/// What a run gives back.
#[derive(Debug)]
pub struct Outcome {
    /// Outputs by name, in the order of the function.
    pub outputs: Vec<(String, Tensor)>,
    /// Operands of the `argmax` operations, in program order, if asked for.
    pub argmax: Vec<Argmax>,
}

/// The operand of an `argmax`: scores along one axis.
#[derive(Clone, Debug)]
pub struct Argmax {
    view: View,
    axis: usize,
}

impl Argmax {
    /// Number of scores per row.
    pub fn len(&self) -> usize {
        self.view.shape[self.axis]
    }

    /// Whether a row has no scores.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of rows: the product of the other extents.
    pub fn rows(&self) -> usize {
        let others = |(a, &d)| if a == self.axis { 1 } else { d };
        self.view.shape.iter().enumerate().map(others).product()
    }

    /// The scores of `row`, counted in row-major order of the other axes.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> Vec<f32> {
        assert!(row < self.rows(), "row {row} of {}", self.rows());
        let mut view = self.view.clone();
        let mut rest = row;
        for axis in (0..view.shape.len()).rev() {
            if axis != self.axis {
                let extent = view.shape[axis];
                view = view.sliced(axis, rest % extent, 1, 1);
                rest /= extent;
            }
        }
        let shape = [view.len()];
        match cast::cast(view.reshaped(&shape).contiguous(), Elem::F32).into_data() {
            Data::F32(v) => v,
            _ => Vec::new(),
        }
    }
}

impl Plan {
    /// Runs the function: inputs by name, states by name and changed in place.
    ///
    /// # Errors
    /// If an input or state is missing, unknown or of another type, or if a value
    /// known only now (an index, a slice bound) is out of range. In the latter
    /// case the states hold zeros.
    pub fn run(
        &self,
        inputs: &[(&str, &Tensor)],
        states: &mut [(&str, &mut Tensor)],
    ) -> Result<Vec<(String, Tensor)>, RunError> {
        let outcome = self.run_with(inputs, states, &RunOptions::default())?;
        Ok(outcome.outputs)
    }

    /// As [`Plan::run`], and also returns the operand of every `argmax`: the
    /// logits, where the program only gives out ids.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_with_argmax_inputs(
        &self,
        inputs: &[(&str, &Tensor)],
        states: &mut [(&str, &mut Tensor)],
    ) -> Result<Outcome, RunError> {
        let options = RunOptions {
            keep_argmax_inputs: true,
            ..RunOptions::default()
        };
        self.run_with(inputs, states, &options)
    }

    /// As [`Plan::run`], with options.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_with(
        &self,
        inputs: &[(&str, &Tensor)],
        states: &mut [(&str, &mut Tensor)],
        options: &RunOptions,
    ) -> Result<Outcome, RunError> {
        let given: Vec<(&str, &Tensor)> = states.iter().map(|(n, t)| (*n, &**t)).collect();
        let state_index = self.bind("state", &self.info.states, &given)?;
        let input_index = self.bind("input", &self.info.inputs, inputs)?;

        let mut slots = vec![None; self.constants.len()];
        for (slot, &i) in self.inputs.iter().zip(&input_index) {
            if let Some(slot) = slot {
                slots[*slot as usize] = Some(inputs[i].1.to_view());
            }
        }
        let mut context = Context {
            shared: &self.shared,
            live: options.live,
            states: state_index
                .iter()
                .map(|&i| Some(states[i].1.take_view()))
                .collect(),
            work: self.shared.take_workspace(),
            packed: None,
            masked: None,
        };
        let mut argmax = Vec::new();
        let mut seconds = self.shared.profiling().then(Vec::new);
        let clock = || kernels::clock::seconds(self.shared.pool.threads());
        let result = self.steps.iter().try_for_each(|step| {
            let start = seconds.is_some().then(clock);
            if let Kind::Argmax(axis) = step.kind
                && options.keep_argmax_inputs
                && let Some(view) = self.value(&slots, step.args[0].slot)
            {
                let view = view.clone();
                argmax.push(Argmax { view, axis });
            }
            let done = context.step(step, &mut slots, &self.constants);
            if let (Some(seconds), Some(start)) = (&mut seconds, start) {
                seconds.push(clock() - start);
            }
            done.map_err(|problem| RunError::Op {
                function: step.place.graph.clone(),
                index: step.place.index,
                op: step.place.op.clone(),
                problem,
            })
        });
        let outputs = self
            .info
            .outputs
            .iter()
            .zip(&self.outputs)
            .filter_map(|(port, &slot)| {
                let view = self.value(&slots, slot)?.clone();
                Some((port.name.clone(), Tensor::from_view(view)))
            })
            .collect();
        drop(slots);
        for ((&i, port), view) in state_index
            .iter()
            .zip(&self.info.states)
            .zip(context.states)
        {
            *states[i].1 = match view {
                Some(view) if result.is_ok() => Tensor::from_view(view),
                _ => zero_state(port),
            };
        }
        self.shared.put_workspace(context.work);
        result?;
        if let Some(seconds) = seconds {
            self.record(&seconds);
        }
        Ok(Outcome { outputs, argmax })
    }

    /// The value of a slot, which may be a constant of the plan.
    fn value<'a>(&'a self, slots: &'a [Option<View>], slot: u32) -> Option<&'a View> {
        let slot = slot as usize;
        slots[slot].as_ref().or(self.constants[slot].as_ref())
    }

    /// Index into `given` of each declared port.
    fn bind(
        &self,
        kind: &'static str,
        ports: &[Port],
        given: &[(&str, &Tensor)],
    ) -> Result<Vec<usize>, RunError> {
        let function = || self.info.name.clone();
        for (name, _) in given {
            if !ports.iter().any(|p| p.name == *name) {
                return Err(RunError::Unknown {
                    function: function(),
                    kind,
                    name: (*name).to_owned(),
                });
            }
        }
        ports
            .iter()
            .map(|port| {
                let i = given
                    .iter()
                    .position(|(name, _)| port.name == *name)
                    .ok_or_else(|| RunError::Missing {
                        function: function(),
                        kind,
                        name: port.name.clone(),
                    })?;
                let tensor = given[i].1;
                if port.storage() != tensor.elem() || port.shape != tensor.shape() {
                    return Err(RunError::Type {
                        function: function(),
                        name: port.name.clone(),
                        found: type_name(tensor.elem(), tensor.shape()),
                        expected: type_name(port.elem, &port.shape),
                    });
                }
                Ok(i)
            })
            .collect()
    }
}

fn zero_state(port: &Port) -> Tensor {
    Tensor::zeros(port.elem, &port.shape).expect("the planner admitted the state")
}

fn type_name(elem: Elem, shape: &[usize]) -> String {
    let mut parts: Vec<String> = shape.iter().map(usize::to_string).collect();
    parts.push(elem.name().into());
    format!("tensor<{}>", parts.join("x"))
}
