//! Runs Core AI programs on the CPU: an executor for the `aicode` operations a
//! transformer needs, and on top of it the engine that turns a model folder into
//! text.
//!
//! A function is compiled once into a [`Plan`]: operations with their attributes
//! resolved, constants in place, and the last use of every value known. Values
//! are strided views of shared buffers, so transposes, reshapes and slices cost
//! nothing until an operation has to read the elements.
//!
//! Numerics: every operation computes in f32 (or exactly), rounds once to the
//! element type of its result, and sums in an order that depends only on the
//! length of the sum. A row of a batch therefore has the same bits whatever the
//! other rows, the width or the number of threads.

pub mod engine;
pub mod error;
pub mod kernels;
mod ops;
mod plan;
mod program;
mod tensor;
mod view;

pub use plan::{Argmax, Outcome, Plan, ProfileEntry, RunOptions};
pub use program::{FunctionInfo, Port, Program};
pub use tensor::{Data, Tensor};
