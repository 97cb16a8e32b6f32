//! Bounds on what the decoder accepts, so that a hostile file costs little.
//!
//! Each is far above what any real program needs: the largest export seen has
//! 3 000 operations per function and 10 000 attributes.

/// Largest extent of a tensor axis; sums of a few thousand stay within `i64`.
pub(crate) const MAX_DIM: u64 = 1 << 40;
/// Most axes of a tensor.
pub(crate) const MAX_RANK: usize = 64;
/// Most operands or results of one operation.
pub(crate) const MAX_OPERANDS: usize = 1 << 16;
