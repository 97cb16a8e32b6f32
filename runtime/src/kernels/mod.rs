//! Matrix kernels.
//!
//! # One order of accumulation
//!
//! A row's result must not depend on the width of the call it was computed in,
//! on its place among the rows, on the number of threads or on the processor:
//! a verify call of sixteen rows has to give exactly the tokens that sixteen
//! single calls give. So the order of additions is part of the interface, and
//! every kernel computes, for output row `r` and token `t`,
//!
//! ```text
//! acc[0..16] = 0
//! for each block of 128 columns, the last padded with zero weights and inputs
//!     for j in 0..8
//!         for lane in 0..16
//!             k = 128 block + 8 lane + j
//!             acc[lane] = fma(w[r][k], x[t][k], acc[lane])
//! for half in 8, 4, 2, 1
//!     acc[i] += acc[i + half]        for i in 0..half
//! out = f16(acc[0])                  to nearest even, every NaN the same
//! ```
//!
//! with f32 arithmetic throughout. Tiling, blocking over columns and spreading
//! rows over threads only regroup independent accumulators; none of them
//! touches the order inside one.
//!
//! # Why these lanes
//!
//! A lane takes eight consecutive columns, and eight indices of `b` bits are
//! exactly `b` bytes, for every supported `b`. With 4-bit indices a block of a
//! row is 64 bytes, and one vector load puts the indices of lane `l` in the
//! 32-bit element `l`. The AVX-512 table lookup (`vpermps`) reads only the low
//! four bits of each element, so index `j` of every lane is looked up after a
//! shift by `4 j` and nothing else: no unpacking, no masking, no widening. The
//! shift by a whole byte comes free from a load one byte further on. That
//! leaves 8 lookups, 4 shifts and 8 multiply-adds for 128 weights, which two
//! vector ports finish in 10 cycles: faster than one core can stream the 64
//! bytes from memory.
//!
//! Activations are brought into the same order once, when they are packed
//! ([`Activations`]), and shared by all matrices that read them.
//!
//! # Parts
//!
//! `weights` checks what comes from files, once; after that no index can leave
//! its table or its matrix. `scalar` is the order above as plain loops: the
//! oracle of every test. The vector kernels are written once over a small
//! trait and instantiated per instruction set.

#![expect(
    clippy::inline_always,
    reason = "inlining is what compiles a generic kernel for its instruction set"
)]

mod activations;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod batch;
pub mod clock;
mod convert;
mod exp;
mod fused;
mod matmul;
mod narrow;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel;
mod pool;
mod portable;
mod products;
pub mod roofline;
mod rows;
mod scalar;
mod simd;
#[cfg(test)]
mod twin_tests;
mod weights;

pub use activations::Activations;
pub(crate) use attention::{Mask, Queries, Shape, Slots, attend};
pub(crate) use batch::{Operand, Product, Real, batch, transposes};
pub(crate) use convert::{narrow, widen};
pub(crate) use exp::exp;
pub(crate) use fused::{Norm, add, largest, rms_norm, rope, silu_mul};
pub use matmul::{Layout, dense_matmul, lut_matmul};
pub use pool::Pool;
pub use simd::isa_name;
pub use weights::{DenseValues, DenseWeights, LutWeights, WeightsError};
