//! placeholder
pub mod kernels;
