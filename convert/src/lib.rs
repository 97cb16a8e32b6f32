//! From a checkpoint to a model folder.

pub mod quantize;
