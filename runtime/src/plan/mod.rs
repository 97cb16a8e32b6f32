//! Functions compiled for execution.

mod compile;
mod execute;
mod fuse;
mod kind;
mod liveness;
mod profile;
mod resolve;
mod run;
mod symbolic;
mod workspace;

use std::sync::{Arc, Mutex};

pub(crate) use compile::compile;
pub(crate) use kind::{AttentionShape, Bytes};
pub use profile::ProfileEntry;
pub use run::{Argmax, Outcome, RunOptions};
pub(crate) use workspace::Workspace;

use crate::program::{FunctionInfo, Shared};
use crate::view::View;
use kind::Step;

/// One function, ready to run.
#[derive(Debug)]
pub struct Plan {
    info: FunctionInfo,
    shared: Arc<Shared>,
    steps: Vec<Step>,
    /// A value per slot: constants are filled in, the rest is `None`.
    constants: Vec<Option<View>>,
    /// Slot of each input, `None` where it is not read.
    inputs: Vec<Option<u32>>,
    /// Slot of each output.
    outputs: Vec<u32>,
    /// Shortest seconds of each step while profiling.
    times: Mutex<Vec<f64>>,
}

impl Plan {
    /// Name, inputs, outputs and states of the function.
    pub fn info(&self) -> &FunctionInfo {
        &self.info
    }
}

#[cfg(test)]
mod tests;
