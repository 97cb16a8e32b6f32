//! Running a plan.

use anemone_schemas::aimodel::ir::Elem;
use half::f16;

use super::Plan;
use super::kind::{Kind, Step, WeightsRef};
use crate::error::RunError;
use crate::kernels::{Activations, DenseValues, DenseWeights, LutWeights};
use crate::ops::layout::Span;
use crate::ops::{convolution, elementwise, gather, layout, matmul, quantized, rare, rows};
use crate::program::{Port, Shared};
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
        match elementwise::cast(view.reshaped(&shape).contiguous(), Elem::F32).into_data() {
            Data::F32(v) => v,
            _ => Vec::new(),
        }
    }
}

/// Buffers kept between runs of a program.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    activations: Activations,
}

struct Context<'a> {
    shared: &'a Shared,
    live: Option<(usize, usize)>,
    states: Vec<Option<View>>,
    work: Workspace,
    /// The slot whose value `work.activations` holds, and its channel axis.
    packed: Option<(u32, bool)>,
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

        let mut slots = self.constants.clone();
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
        };
        let mut argmax = Vec::new();
        let result = self.steps.iter().try_for_each(|step| {
            if let Kind::Argmax(axis) = step.kind
                && options.keep_argmax_inputs
                && let Some(view) = &slots[step.args[0].slot as usize]
            {
                let view = view.clone();
                argmax.push(Argmax { view, axis });
            }
            context
                .step(step, &mut slots)
                .map_err(|problem| RunError::Op {
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
                let view = slots[slot as usize].clone()?;
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
        Ok(Outcome { outputs, argmax })
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

impl Context<'_> {
    fn step(&mut self, step: &Step, slots: &mut [Option<View>]) -> Result<(), String> {
        let mut args: Vec<View> = Vec::with_capacity(step.args.len());
        for arg in &step.args {
            let slot = &mut slots[arg.slot as usize];
            let value = if arg.last { slot.take() } else { slot.clone() };
            args.push(value.ok_or("an operand has no value")?);
        }
        let results = execute(self, &step.kind, args, step.args.first().map(|a| a.slot))?;
        for ((slot, shape), value) in step.results.iter().zip(&step.shapes).zip(results) {
            if value.shape != *shape {
                return Err(format!(
                    "result has shape {:?}, declared {shape:?}",
                    value.shape
                ));
            }
            if let Some(slot) = slot {
                slots[*slot as usize] = Some(value);
            }
        }
        Ok(())
    }

    fn live(&self, tokens: usize) -> usize {
        match self.live {
            Some((width, live)) if width == tokens => live.min(tokens),
            _ => tokens,
        }
    }
}

/// Runs one constant operation while planning.
pub(super) fn fold(shared: &Shared, kind: &Kind, args: Vec<View>) -> Result<Vec<View>, String> {
    let mut context = Context {
        shared,
        live: None,
        states: Vec::new(),
        work: Workspace::default(),
        packed: None,
    };
    execute(&mut context, kind, args, None)
}

fn execute(
    cx: &mut Context<'_>,
    kind: &Kind,
    args: Vec<View>,
    first_slot: Option<u32>,
) -> Result<Vec<View>, String> {
    let mut args = args.into_iter();
    let mut next = || args.next().ok_or("an operand is missing");
    let pool = &cx.shared.pool;
    let one = match kind {
        Kind::Unary(op) => elementwise::unary(*op, next()?),
        Kind::Binary(op, shape) => elementwise::binary(*op, next()?, next()?, shape),
        Kind::Compare(op, shape) => elementwise::compare(*op, next()?, next()?, shape),
        Kind::Not => elementwise::not(next()?),
        Kind::Select(shape) => elementwise::select(next()?, next()?, next()?, shape),
        Kind::Cast(elem) => elementwise::cast(next()?, *elem),
        Kind::Reshape(shape) => next()?.reshaped(shape),
        Kind::Transpose(perm) => next()?.transposed(perm),
        Kind::Broadcast(shape) => next()?.broadcast(shape),
        Kind::Concat(axis) => layout::concat(&args.collect::<Vec<_>>(), *axis),
        Kind::Split(axis, sizes) => {
            let x = next()?;
            let mut at = 0;
            return Ok(sizes
                .iter()
                .map(|&n| {
                    at += n;
                    x.clone().sliced(*axis, at - n, n, 1)
                })
                .collect());
        }
        Kind::Slice(spans) => layout::slice(next()?, spans),
        Kind::SliceRuntime => {
            let x = next()?;
            let spans = runtime_spans(&x.shape, [next()?, next()?, next()?])?;
            layout::slice(x, &spans)
        }
        Kind::SliceUpdate(spans) => layout::slice_update(next()?, spans, next()?),
        Kind::SliceUpdateRuntime => {
            let x = next()?;
            let spans = runtime_spans(&x.shape, [next()?, next()?, next()?])?;
            let update = next()?;
            let shape: Vec<usize> = spans.iter().map(|s| s.len).collect();
            if shape != update.shape {
                return Err(format!(
                    "the slice has shape {shape:?}, the update {:?}",
                    update.shape
                ));
            }
            layout::slice_update(x, &spans, update)
        }
        Kind::Pad(pads, mode) => layout::pad(&next()?, pads, *mode, &next()?),
        Kind::Tile(reps) => layout::tile(next()?, reps),
        Kind::GatherNd(shape) => gather::gather_nd(next()?, next()?, shape)?,
        Kind::GatherAlongAxis(axis) => gather::gather_along_axis(next()?, next()?, *axis)?,
        Kind::Range(len) => gather::range(&next()?, &next()?, *len),
        Kind::Reduce(op, axes) => rows::reduce(*op, next()?, axes),
        Kind::Softmax(axis) => rows::softmax(next()?, *axis),
        Kind::Argmax(axis) => rows::argmax(next()?, *axis),
        Kind::BatchMatmul(batch) => matmul::batch_matmul(pool, next()?, next()?, batch),
        Kind::Conv2d(conv, shape) => convolution::conv2d(pool, next()?, next()?, conv, shape),
        Kind::WeightMatmul {
            weights,
            channels_first,
            shape,
        } => weight_matmul(cx, weights, *channels_first, shape, next()?, first_slot)?,
        Kind::LutToDense(axis, shape) => quantized::lut_to_dense(next()?, next()?, *axis, shape),
        Kind::ShiftScale => quantized::shift_scale(next()?, next()?, next()?, next()?),
        Kind::Dequantize(axis) => quantized::dequantize(next()?, next()?, next()?, next()?, *axis),
        Kind::Rare(op) => rare::rare(op, args.collect())?,
        Kind::ReadHandle { state, take } => {
            let cell = &mut cx.states[*state];
            let value = if *take { cell.take() } else { cell.clone() };
            value.ok_or("the state was moved out")?
        }
        Kind::WriteHandle(state) => {
            cx.states[*state] = Some(next()?);
            return Ok(Vec::new());
        }
    };
    Ok(vec![one])
}

fn weight_matmul(
    cx: &mut Context<'_>,
    weights: &WeightsRef,
    channels_first: bool,
    shape: &[usize],
    x: View,
    slot: Option<u32>,
) -> Result<View, String> {
    let x = if channels_first {
        x.transposed(&[0, 2, 3, 1])
    } else {
        x
    };
    let channels = *x.shape.last().ok_or("the operand has rank 0")?;
    let tokens = x.len().checked_div(channels).unwrap_or(0);
    let key = slot.map(|s| (s, channels_first));
    if key.is_none() || cx.packed != key {
        let live = cx.live(tokens);
        let flat = x.reshaped(&[tokens, channels]);
        matmul::pack(&flat, live, &mut cx.work.activations);
        cx.packed = key;
    }
    let w = cx.shared.weights(weights)?;
    let y = matmul::weight_matmul(
        &cx.shared.pool,
        &w,
        &cx.work.activations,
        tokens,
        Vec::new(),
    );
    let rows = y.shape[1];
    Ok(if channels_first {
        let [n, _, h, w] = shape[..] else {
            return Err("the result is not of rank 4".into());
        };
        y.reshaped(&[n, h, w, rows]).transposed(&[0, 3, 1, 2])
    } else {
        y.reshaped(shape)
    })
}

impl Shared {
    fn weights(&self, w: &WeightsRef) -> Result<matmul::Weights<'_>, String> {
        let bytes = |b| self.bytes(b).ok_or("the weights are not in memory");
        Ok(match *w {
            WeightsRef::Lut {
                rows,
                cols,
                bits,
                group_rows,
                tables,
                indices,
            } => {
                let w = LutWeights::new(
                    rows,
                    cols,
                    bits,
                    group_rows,
                    bytes(tables)?,
                    bytes(indices)?,
                );
                matmul::Weights::Lut(w.map_err(|e| e.to_string())?)
            }
            WeightsRef::Dense { rows, cols, values } => {
                let values: &[f16] = bytemuck::try_cast_slice(bytes(values)?)
                    .map_err(|e| format!("the weights are misaligned: {e}"))?;
                let w = DenseWeights::new(rows, cols, DenseValues::F16(values));
                matmul::Weights::Dense(w.map_err(|e| e.to_string())?)
            }
        })
    }

    /// Whether the weights can be read where they are.
    pub(super) fn check_weights(&self, w: &WeightsRef) -> Result<(), String> {
        self.weights(w).map(|_| ())
    }
}

/// Spans from start, end and stride tensors.
fn runtime_spans(dims: &[usize], bounds: [View; 3]) -> Result<Vec<Span>, String> {
    let [start, end, step] = bounds.map(|v| v.into_data().ints().unwrap_or_default());
    if [&start, &end, &step].iter().any(|v| v.len() != dims.len()) {
        return Err(format!("slice bounds do not have the rank {}", dims.len()));
    }
    (0..dims.len())
        .map(|a| {
            Span::new(dims[a], start[a], end[a], step[a])
                .ok_or_else(|| format!("axis {a} has a stride of 0"))
        })
        .collect()
}
