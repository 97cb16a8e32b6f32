//! The operations, on views. Shapes and element types were checked when the
//! program was planned; only what is known at run time can still fail.

pub(crate) mod cast;
pub(crate) mod convolution;
pub(crate) mod elementwise;
pub(crate) mod fused;
pub(crate) mod gather;
pub(crate) mod layout;
pub(crate) mod logic;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod quantized;
pub(crate) mod rare;
pub(crate) mod rows;

use half::{bf16, f16};

use crate::kernels;

/// Floating point storage that is computed with in f32.
pub(crate) trait Float: Copy + Default + Into<f32> + 'static {
    fn load(src: &[Self], dst: &mut [f32]);
    fn store(src: &[f32], dst: &mut [Self]);
}

impl Float for f16 {
    fn load(src: &[Self], dst: &mut [f32]) {
        kernels::widen(src, dst);
    }
    fn store(src: &[f32], dst: &mut [Self]) {
        kernels::narrow(src, dst);
    }
}

impl Float for bf16 {
    fn load(src: &[Self], dst: &mut [f32]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = s.to_f32();
        }
    }
    fn store(src: &[f32], dst: &mut [Self]) {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = Self::from_f32(*s);
        }
    }
}

impl Float for f32 {
    fn load(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }
    fn store(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }
}

/// Runs `$body` with `$v` bound to the vector of a floating point buffer, or
/// `$other` for any other element type.
macro_rules! each_float {
    ($data:expr, $v:ident => $body:expr, else => $other:expr) => {
        match $data {
            $crate::tensor::Data::F16($v) => $body,
            $crate::tensor::Data::Bf16($v) => $body,
            $crate::tensor::Data::F32($v) => $body,
            _ => $other,
        }
    };
}
pub(crate) use each_float;

/// Loads a strided run.
pub(crate) fn load_run<T: Float>(src: &[T], at: usize, step: usize, dst: &mut [f32]) {
    match step {
        1 => T::load(&src[at..at + dst.len()], dst),
        0 => dst.fill(src[at].into()),
        _ => {
            for (i, d) in dst.iter_mut().enumerate() {
                *d = src[at + i * step].into();
            }
        }
    }
}
