//! Core AI programs: the `.aimodel` folder and its MLIR bytecode.
//!
//! [`ir`] is the program in memory, [`build`] makes one, [`check`] says whether it
//! is well formed, [`encode`] and [`decode`] go to and from bytes, [`asset`] is the
//! folder around them, [`text`] shows a program to people and [`same`] compares two. The constants of the
//! wire format are in one file, `ids.rs`.

pub mod asset;
pub mod build;
pub mod check;
pub mod decode;
pub mod encode;
mod ids;
mod infer;
pub mod ir;
mod limits;
pub mod same;
#[cfg(test)]
mod tests;
pub mod text;
mod varint;
