//! Core AI programs: the `.aimodel` folder and its MLIR bytecode.
//!
//! [`ir`] is the program in memory, [`build`] makes one, [`check`] says whether it
//! is well formed, [`encode`] and [`decode`] go to and from bytes, [`asset`] is the
//! folder around them, [`text`] and [`summary`] show a program to people, [`same`] compares
//! two and [`opt`] makes one smaller. The constants of the wire format are in one file,
//! `ids.rs`, and what a hostile file may ask for in another, `limits.rs`.

pub mod asset;
pub mod build;
pub mod check;
pub mod decode;
pub mod encode;
mod ids;
mod infer;
pub mod ir;
mod limits;
pub mod opt;
pub mod same;
pub mod summary;
#[cfg(test)]
mod tests;
pub mod text;
mod varint;
