//! Core AI programs: the `.aimodel` folder and its MLIR bytecode.
//!
//! [`ir`] is the program in memory, [`build`] makes one.

pub mod build;
pub mod ir;
