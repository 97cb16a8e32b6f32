//! A program: functions over shared constants.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anemone_schemas::aimodel::ir::{Attr, AttrId, Elem, Graph, Module, TensorType, Type, ValueId};

use crate::error::ProgramError;
use crate::kernels::Pool;
use crate::plan::{self, Plan};
use crate::tensor::Data;
use crate::view::View;

/// An input, output or state of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Declared element type.
    pub elem: Elem,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
}

impl Port {
    /// Element type of the tensor that is passed: full width.
    pub(crate) fn storage(&self) -> Elem {
        Data::zeros(self.elem, 0).map_or(self.elem, |d| d.elem())
    }
}

/// The interface of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Function name.
    pub name: String,
    /// Tensors passed with every call.
    pub inputs: Vec<Port>,
    /// Tensors returned.
    pub outputs: Vec<Port>,
    /// Tensors that outlive the call.
    pub states: Vec<Port>,
}

/// An opened program.
#[derive(Debug)]
pub struct Program {
    shared: Arc<Shared>,
    functions: Vec<FunctionInfo>,
}

/// What the plans of a program share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) module: Module,
    pub(crate) pool: Arc<Pool>,
    /// Constants in their storage form, made once for all functions.
    constants: Mutex<HashMap<(AttrId, Elem), Arc<Data>>>,
    workspace: Mutex<Option<plan::Workspace>>,
    profiling: AtomicBool,
}

impl Program {
    /// Opens an `.aimodel` folder; calls run on one thread per core. Weights are mapped,
    /// not read: `anemone-convert verify` is what compares hashes.
    ///
    /// # Errors
    /// If the folder cannot be decoded or a function's interface is not usable.
    pub fn open(asset: &Path) -> Result<Self, ProgramError> {
        Self::open_with(asset, Arc::new(Pool::new(0)))
    }

    /// As [`Program::open`], with the threads to run on.
    ///
    /// # Errors
    /// As [`Program::open`].
    pub fn open_with(asset: &Path, pool: Arc<Pool>) -> Result<Self, ProgramError> {
        let module =
            anemone_schemas::aimodel::asset::map_asset(asset).map_err(|e| ProgramError::Open {
                path: asset.to_path_buf(),
                source: Box::new(e),
            })?;
        Self::from_module(module, pool)
    }

    /// A program that is in memory.
    ///
    /// # Errors
    /// If the program is not well formed or a function's interface not usable.
    pub fn from_module(module: Module, pool: Arc<Pool>) -> Result<Self, ProgramError> {
        anemone_schemas::aimodel::check::check(&module)?;
        let functions = module
            .graphs()
            .iter()
            .filter(|g| !g.private)
            .map(|g| function_info(&module, g))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shared: Arc::new(Shared {
                module,
                pool,
                constants: Mutex::default(),
                workspace: Mutex::default(),
                profiling: AtomicBool::new(false),
            }),
            functions,
        })
    }

    /// The public functions, in program order.
    pub fn functions(&self) -> &[FunctionInfo] {
        &self.functions
    }

    /// Compiles a function.
    ///
    /// # Errors
    /// If there is no such public function or one of its operations cannot be
    /// executed.
    pub fn plan(&self, name: &str) -> Result<Plan, ProgramError> {
        self.compile(name, true)
    }

    /// As [`Program::plan`], but with one step per operation: slower, and the oracle
    /// of what fusing may not change.
    ///
    /// # Errors
    /// As [`Program::plan`].
    pub fn plan_unfused(&self, name: &str) -> Result<Plan, ProgramError> {
        self.compile(name, false)
    }

    /// Whether runs measure their steps ([`Plan::profile`]).
    pub fn set_profiling(&self, on: bool) {
        self.shared.profiling.store(on, Ordering::Relaxed);
    }

    fn compile(&self, name: &str, fusing: bool) -> Result<Plan, ProgramError> {
        let info = self
            .functions
            .iter()
            .find(|f| f.name == name)
            .ok_or_else(|| ProgramError::NoFunction {
                name: name.to_owned(),
                available: self.functions.iter().map(|f| f.name.clone()).collect(),
            })?;
        plan::compile(&self.shared, info, fusing)
    }
}

fn function_info(module: &Module, graph: &Graph<'_>) -> Result<FunctionInfo, ProgramError> {
    let fail = |problem: String| ProgramError::Signature {
        function: graph.name.to_owned(),
        problem,
    };
    let port = |role: &str, name: Option<&str>, t: &TensorType| {
        let name = name.ok_or_else(|| fail(format!("{role} has no name")))?;
        let shape = t
            .dims()
            .ok_or_else(|| fail(format!("{role} `{name}` has a dynamic shape")))?;
        if Data::zeros(t.elem, 0).is_none() {
            return Err(fail(format!("{role} `{name}` is of {}", t.elem.name())));
        }
        Ok(Port {
            name: name.to_owned(),
            elem: t.elem,
            shape,
        })
    };
    let mut info = FunctionInfo {
        name: graph.name.to_owned(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        states: Vec::new(),
    };
    for &(name, value) in &graph.inputs {
        match module.ty(module.value_type(value)) {
            Type::Tensor(t) => info.inputs.push(port("an input", name, t)?),
            Type::Handle(inner) => match module.ty(*inner) {
                Type::Tensor(t) => info.states.push(port("a state", name, t)?),
                _ => return Err(fail("a state does not hold a tensor".into())),
            },
            _ => return Err(fail("an argument is neither a tensor nor a state".into())),
        }
    }
    for &(name, value) in &graph.outputs {
        match module.ty(module.value_type(value)) {
            Type::Tensor(t) => info.outputs.push(port("an output", name, t)?),
            Type::Token => {}
            _ => return Err(fail("a result is neither a tensor nor a token".into())),
        }
    }
    Ok(info)
}

impl Shared {
    pub(crate) fn profiling(&self) -> bool {
        self.profiling.load(Ordering::Relaxed)
    }

    pub(crate) fn take_workspace(&self) -> plan::Workspace {
        let mut slot = self
            .workspace
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        slot.take().unwrap_or_default()
    }

    pub(crate) fn put_workspace(&self, workspace: plan::Workspace) {
        let mut slot = self
            .workspace
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *slot = Some(workspace);
    }

    /// Bytes that are at hand: in memory or mapped.
    pub(crate) fn bytes(&self, source: plan::Bytes) -> Option<&[u8]> {
        match source {
            plan::Bytes::Blob(blob) => self.module.blob(blob).bytes(),
            plan::Bytes::Inline(attr) => match self.module.attr(attr) {
                Attr::Dense {
                    splat: false,
                    bytes,
                } => Some(bytes),
                _ => None,
            },
        }
    }

    /// A constant as a view; a splat is one element with strides of 0.
    pub(crate) fn constant(&self, value: AttrId, ty: &TensorType) -> Result<View, String> {
        let shape = ty.dims().ok_or("a constant has a dynamic shape")?;
        let count = ty.count().ok_or("a constant is too large")?;
        let splat = matches!(self.module.attr(value), Attr::Dense { splat: true, .. });
        let key = (value, ty.elem);
        let mut cache = self
            .constants
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let data = if let Some(data) = cache.get(&key) {
            Arc::clone(data)
        } else {
            let data = Arc::new(self.constant_data(value, ty.elem, count)?);
            cache.insert(key, Arc::clone(&data));
            data
        };
        if data.len() != if splat { 1 } else { count } {
            return Err(format!(
                "a constant of {count} elements holds {}",
                data.len()
            ));
        }
        let strides = if splat {
            vec![0; shape.len()]
        } else {
            crate::view::row_major(&shape)
        };
        Ok(View {
            data,
            offset: 0,
            shape,
            strides,
        })
    }

    fn constant_data(&self, value: AttrId, elem: Elem, count: usize) -> Result<Data, String> {
        let data = match self.module.attr(value) {
            Attr::Dense { bytes, .. } => Data::from_bytes(elem, bytes),
            Attr::Resource(blob) => {
                let bytes = self.module.blob(*blob).bytes();
                Data::from_packed(elem, count, bytes.ok_or("a constant is not in memory")?)
            }
            _ => return Err("a constant has no elements".into()),
        };
        data.ok_or_else(|| format!("a constant of {} cannot be read", elem.name()))
    }
}

/// The tensor type of a value and its static extents.
pub(crate) fn tensor_shape(module: &Module, value: ValueId) -> Result<(Elem, Vec<usize>), String> {
    let t = module.tensor_type(value).ok_or("a value is not a tensor")?;
    let shape = t.dims().ok_or("a value has a dynamic shape")?;
    Ok((t.elem, shape))
}
