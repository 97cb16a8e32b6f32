//! Bounds on what the decoder accepts, so that a hostile file costs little.
//!
//! Each is far above what any real program needs: the largest export seen has
//! 3 000 operations in a function and regions three deep. Tables need no bound of
//! their own: every entry takes at least a byte, so a count is compared with the
//! bytes that are left before anything is allocated.

/// Largest extent of a tensor axis; sums of a few thousand stay within `i64`.
pub(crate) const MAX_DIM: u64 = 1 << 40;
/// Most axes of a tensor.
pub(crate) const MAX_RANK: usize = 64;
/// Most results an operation is inferred to have.
pub(crate) const MAX_RESULTS: usize = 1 << 16;
/// Longest chain of attributes and types that refer to one another.
pub(crate) const MAX_ENTRY_DEPTH: u32 = 200;
/// Deepest nesting of regions.
pub(crate) const MAX_REGION_DEPTH: usize = 64;
/// Largest alignment a section or blob may ask for: that of the buffer Apple's loader
/// reads files into, which refuses more.
pub(crate) const MAX_ALIGNMENT: u64 = 16;
/// Longest `metadata.json`. Those of Apple's exporter have 200 bytes; an object of eight
/// bytes takes a hundred times as much memory.
pub(crate) const MAX_METADATA: usize = 1 << 16;
