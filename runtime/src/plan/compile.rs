//! From a graph to a list of steps.
//!
//! Invoked graphs are compiled in place. Constants, table look-ups of constants,
//! constant integers that are scaled, and transposes of these stay symbolic until
//! an operation reads them: a product with such weights becomes one step that
//! reads the file's own bytes, and anything else gets the dense tensor. Operations
//! on constants only are done now, if the result is small.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use anemone_schemas::aimodel::ir::{Attr, Elem, Graph, Op, TensorType, Type, ValueId};

use super::kind::{Arg, Kind, Place, Step};
use super::resolve::{Resolved, Resolver};
use super::symbolic::{Ref, symbolic};
use super::{Plan, execute, fuse, liveness};
use crate::error::ProgramError;
use crate::program::{FunctionInfo, Shared, tensor_shape};
use crate::view::View;

/// Invoked graphs nest at most this deep.
const MAX_DEPTH: usize = 32;
/// Steps of one plan: invoked graphs count at every call.
const MAX_STEPS: usize = 1 << 20;
/// Elements of an operation done at plan time.
const MAX_FOLDED: usize = 1 << 16;

/// Compiles a public function; without `fusing`, one step per operation.
pub(crate) fn compile(
    shared: &Arc<Shared>,
    info: &FunctionInfo,
    fusing: bool,
) -> Result<Plan, ProgramError> {
    let mut c = Compiler {
        shared,
        steps: Vec::new(),
        constants: Vec::new(),
        halves: HashSet::new(),
        symbolic: HashMap::new(),
        stack: Vec::new(),
    };
    let signature = |problem: &str| ProgramError::Signature {
        function: info.name.clone(),
        problem: problem.to_owned(),
    };
    let graph = shared
        .module
        .graph(&info.name)
        .ok_or_else(|| signature("is not a graph"))?;
    let mut args = Vec::new();
    let mut states = 0;
    for &(_, value) in &graph.inputs {
        args.push(match shared.module.ty(shared.module.value_type(value)) {
            Type::Handle(_) => {
                states += 1;
                Ref::State(states - 1)
            }
            _ => Ref::Slot(c.slot()),
        });
    }
    let results = c.graph(&graph, &args)?;
    let mut outputs = Vec::new();
    for r in results {
        if !matches!(r, Ref::Token) {
            let place = Place {
                graph: info.name.clone(),
                index: 0,
                op: "dataflow.output_v1".into(),
            };
            outputs.push(c.value(&r, &place)?);
        }
    }
    if outputs.len() != info.outputs.len() {
        return Err(signature(
            "returns another number of tensors than it declares",
        ));
    }
    let Compiler {
        mut steps,
        constants,
        mut halves,
        ..
    } = c;
    if fusing {
        let inputs = args.iter().filter_map(slot_of).zip(&info.inputs);
        let mut shapes = HashMap::new();
        for (slot, port) in inputs {
            shapes.insert(slot, port.shape.clone());
            halves.extend((port.elem == Elem::F16).then_some(slot));
        }
        fuse::fuse(&mut steps, &constants, &shapes, &halves);
        fuse::mark_tokens(&mut steps);
    }
    liveness::analyse(&mut steps, &outputs, |slot| {
        constants[slot as usize].is_some()
    });
    let read = |slot: u32| {
        outputs.contains(&slot) || steps.iter().any(|s| s.args.iter().any(|a| a.slot == slot))
    };
    let inputs = args
        .iter()
        .filter_map(slot_of)
        .map(|slot| read(slot).then_some(slot))
        .collect();
    Ok(Plan {
        info: info.clone(),
        shared: Arc::clone(shared),
        steps,
        constants,
        inputs,
        outputs,
        times: Mutex::default(),
    })
}

fn slot_of(r: &Ref) -> Option<u32> {
    match r {
        Ref::Slot(slot) => Some(*slot),
        _ => None,
    }
}

struct Compiler<'a> {
    shared: &'a Shared,
    steps: Vec<Step>,
    /// A value per slot, where it is known.
    constants: Vec<Option<View>>,
    /// Slots of steps whose values are f16.
    halves: HashSet<u32>,
    /// Slots of symbolic values that had to be made dense.
    symbolic: HashMap<String, u32>,
    /// Names of the graphs being compiled.
    stack: Vec<String>,
}

fn fail(place: &Place, problem: impl Into<String>) -> ProgramError {
    ProgramError::Op {
        function: place.graph.clone(),
        index: place.index,
        op: place.op.clone(),
        problem: problem.into(),
    }
}

impl Compiler<'_> {
    fn slot(&mut self) -> u32 {
        self.constants.push(None);
        self.constants.len() as u32 - 1
    }

    /// Compiles the body of `graph` with `args`, and returns what it outputs.
    fn graph(&mut self, graph: &Graph<'_>, args: &[Ref]) -> Result<Vec<Ref>, ProgramError> {
        let module = &self.shared.module;
        let region = module.region(graph.region);
        let mut env: HashMap<ValueId, Ref> = HashMap::new();
        env.extend(region.args.iter().copied().zip(args.iter().cloned()));
        self.stack.push(graph.name.to_owned());
        for (index, &id) in region.ops.iter().enumerate() {
            let op = module.op(id);
            let place = Place {
                graph: graph.name.to_owned(),
                index,
                op: op.name.clone(),
            };
            let operands = op
                .operands
                .iter()
                .map(|v| env.get(v).cloned())
                .collect::<Option<Vec<Ref>>>()
                .ok_or_else(|| fail(&place, "reads a value before it is defined"))?;
            if op.name == "dataflow.output_v1" {
                self.stack.pop();
                return Ok(operands);
            }
            let results = self.op(op, operands, &place)?;
            if results.len() != op.results.len() {
                return Err(fail(
                    &place,
                    "has another number of results than it declares",
                ));
            }
            env.extend(op.results.iter().copied().zip(results));
            if self.steps.len() > MAX_STEPS {
                return Err(fail(&place, format!("more than {MAX_STEPS} operations")));
            }
        }
        let end = Place {
            graph: graph.name.to_owned(),
            index: region.ops.len(),
            op: "dataflow.output_v1".into(),
        };
        Err(fail(&end, "is missing"))
    }

    fn op(&mut self, op: &Op, args: Vec<Ref>, place: &Place) -> Result<Vec<Ref>, ProgramError> {
        match op.name.as_str() {
            "primitive.constant_v1" => {
                let value = op
                    .prop("value")
                    .ok_or_else(|| fail(place, "has no value"))?;
                let ty = op
                    .results
                    .first()
                    .and_then(|&r| self.shared.module.tensor_type(r));
                let ty = ty.ok_or_else(|| fail(place, "is not a tensor"))?;
                Ok(vec![Ref::Constant(value, ty.clone())])
            }
            "dataflow.create_token_v1" | "dataflow.join_token_v1" => Ok(vec![Ref::Token]),
            "dataflow.read_handle_v1" => {
                let state = state_of(&args, place)?;
                let kind = Kind::ReadHandle { state, take: false };
                let value = self.push(
                    kind,
                    Vec::new(),
                    &op.results[..1.min(op.results.len())],
                    place,
                )?;
                Ok(value.into_iter().chain([Ref::Token]).collect())
            }
            "dataflow.write_handle_v1" => {
                let state = state_of(&args, place)?;
                let value = args.get(1).ok_or_else(|| fail(place, "writes nothing"))?;
                let slot = self.value(value, place)?;
                self.push(Kind::WriteHandle(state), vec![slot], &[], place)?;
                Ok(vec![Ref::Token])
            }
            "dataflow.invoke_v1" => self.invoke(op, &args, place),
            "ax.copy_with_constraints_v1" | "ax.copy_discarding_constraints_v1" => Ok(args),
            _ => self.compute(op, &args, place),
        }
    }

    fn invoke(&mut self, op: &Op, args: &[Ref], place: &Place) -> Result<Vec<Ref>, ProgramError> {
        let module = &self.shared.module;
        let callee = op.prop("callee").and_then(|a| match module.attr(a) {
            Attr::ParamConstant { value, .. } => match module.attr(*value) {
                Attr::SymbolRef(path) => path.first().cloned(),
                _ => None,
            },
            _ => None,
        });
        let callee = callee.ok_or_else(|| fail(place, "has no callee"))?;
        let graph = module
            .graph(&callee)
            .ok_or_else(|| fail(place, format!("callee `{callee}` does not exist")))?;
        if self.stack.contains(&callee) {
            return Err(fail(place, format!("`{callee}` invokes itself")));
        }
        if self.stack.len() >= MAX_DEPTH {
            return Err(fail(place, format!("graphs nest deeper than {MAX_DEPTH}")));
        }
        if graph.inputs.len() != args.len() {
            let n = graph.inputs.len();
            return Err(fail(
                place,
                format!("`{callee}` takes {n} arguments, given {}", args.len()),
            ));
        }
        for (i, (&(_, want), &have)) in graph.inputs.iter().zip(&op.operands).enumerate() {
            if module.value_type(want) != module.value_type(have) {
                return Err(fail(
                    place,
                    format!("argument {i} has another type in `{callee}`"),
                ));
            }
        }
        self.graph(&graph, args)
    }

    fn compute(&mut self, op: &Op, args: &[Ref], place: &Place) -> Result<Vec<Ref>, ProgramError> {
        let shared = self.shared;
        let known: Vec<Option<View>> = args
            .iter()
            .map(|r| match r {
                Ref::Slot(s) => self.constants[*s as usize].clone(),
                Ref::Constant(value, ty) if ty.count().is_some_and(|n| n <= MAX_FOLDED) => {
                    shared.constant(*value, ty).ok()
                }
                _ => None,
            })
            .collect();
        let ints = |i: usize| {
            let view: &View = known.get(i)?.as_ref()?;
            view.clone().into_data().ints()
        };
        let resolver = Resolver::new(&shared.module, op, &ints).map_err(|e| fail(place, e))?;
        let Resolved { kind, data } = resolver.resolve().map_err(|e| fail(place, e))?;
        if let Some(symbolic) = symbolic(&kind, args, place) {
            return Ok(vec![symbolic]);
        }
        if let Some((kind, x)) = self.shared.weight_matmul(&kind, args, op) {
            let slot = self.value(&args[x], place)?;
            return self.push(kind, vec![slot], &op.results, place);
        }
        // Done now if everything is known and small.
        let values: Option<Vec<View>> = data.iter().map(|&i| known[i].clone()).collect();
        let small = op.results.iter().all(|&r| {
            let n = shared.module.tensor_type(r).and_then(TensorType::count);
            n.is_some_and(|n| n <= MAX_FOLDED)
        });
        if let Some(values) = values
            && small
        {
            let views = execute::fold(shared, &kind, values).map_err(|e| fail(place, e))?;
            return Ok(views
                .into_iter()
                .map(|v| {
                    let slot = self.slot();
                    self.constants[slot as usize] = Some(v);
                    Ref::Slot(slot)
                })
                .collect());
        }
        let slots = data
            .iter()
            .map(|&i| self.value(&args[i], place))
            .collect::<Result<Vec<u32>, _>>()?;
        self.push(kind, slots, &op.results, place)
    }

    /// A step, with a new slot for each of `results`.
    fn push(
        &mut self,
        kind: Kind,
        args: Vec<u32>,
        results: &[ValueId],
        place: &Place,
    ) -> Result<Vec<Ref>, ProgramError> {
        let mut shapes = Vec::new();
        let mut slots = Vec::new();
        for &r in results {
            let (elem, shape) = tensor_shape(&self.shared.module, r).map_err(|e| fail(place, e))?;
            shapes.push(shape);
            slots.push(self.slot());
            self.halves
                .extend(slots.last().filter(|_| elem == Elem::F16));
        }
        self.steps.push(Step {
            kind,
            args: args
                .into_iter()
                .map(|slot| Arg { slot, last: false })
                .collect(),
            results: slots.iter().copied().map(Some).collect(),
            shapes,
            tokens: None,
            place: place.clone(),
        });
        Ok(slots.into_iter().map(Ref::Slot).collect())
    }

    /// The slot of a value; a symbolic one is made dense, once.
    fn value(&mut self, r: &Ref, place: &Place) -> Result<u32, ProgramError> {
        let key = match r {
            Ref::Slot(slot) => return Ok(*slot),
            Ref::State(_) => return Err(fail(place, "reads a state as a tensor")),
            Ref::Token => return Err(fail(place, "reads a token as a tensor")),
            other => format!("{other:?}"),
        };
        if let Some(&slot) = self.symbolic.get(&key) {
            return Ok(slot);
        }
        let slot = match r {
            Ref::Constant(value, ty) => {
                let view = self
                    .shared
                    .constant(*value, ty)
                    .map_err(|e| fail(place, e))?;
                let slot = self.slot();
                self.constants[slot as usize] = Some(view);
                slot
            }
            Ref::Lut(lut) => {
                let indices = Ref::Constant(lut.indices.0, lut.indices.1.clone());
                let table = Ref::Constant(lut.table.0, lut.table.1.clone());
                let kind = Kind::LutToDense(lut.axis, lut.shape.clone());
                self.dense(kind, &[indices, table], &lut.shape, &lut.place)?
            }
            Ref::Scaled(scaled) => {
                let constant = |(value, ty): &(_, TensorType)| Ref::Constant(*value, ty.clone());
                let operands = scaled.operands.each_ref().map(constant);
                self.dense(Kind::ShiftScale, &operands, &scaled.shape, &scaled.place)?
            }
            Ref::Transposed(inner) => {
                let mut shape = match &**inner {
                    Ref::Constant(_, ty) => ty.dims().unwrap_or_default(),
                    Ref::Lut(lut) => lut.shape.clone(),
                    Ref::Scaled(scaled) => scaled.shape.clone(),
                    _ => Vec::new(),
                };
                shape.reverse();
                let inner = std::slice::from_ref(&**inner);
                self.dense(Kind::Transpose(vec![1, 0]), inner, &shape, place)?
            }
            Ref::Slot(_) | Ref::State(_) | Ref::Token => unreachable!("returned above"),
        };
        self.symbolic.insert(key, slot);
        Ok(slot)
    }

    /// The slot of a step that makes a symbolic value dense.
    fn dense(
        &mut self,
        kind: Kind,
        operands: &[Ref],
        shape: &[usize],
        place: &Place,
    ) -> Result<u32, ProgramError> {
        let args: Result<Vec<Arg>, ProgramError> = (operands.iter())
            .map(|r| {
                Ok(Arg {
                    slot: self.value(r, place)?,
                    last: false,
                })
            })
            .collect();
        let slot = self.slot();
        self.steps.push(Step {
            kind,
            args: args?,
            results: vec![Some(slot)],
            shapes: vec![shape.to_vec()],
            tokens: None,
            place: place.clone(),
        });
        Ok(slot)
    }
}

fn state_of(args: &[Ref], place: &Place) -> Result<usize, ProgramError> {
    match args.first() {
        Some(Ref::State(state)) => Ok(*state),
        _ => Err(fail(place, "operand 0 is not a state")),
    }
}
