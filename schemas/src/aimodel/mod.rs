//! Core AI programs: the `.aimodel` folder and its MLIR bytecode.
//!
//! [`ir`] is the program in memory, [`build`] makes one.

pub mod build;
mod infer;
pub mod ir;
mod limits;
pub mod text;
