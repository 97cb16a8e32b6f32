//! Matrix products on candle, whose f32 kernels come from the `gemm` crate. They
//! split a product by rows and columns of the result, never along the sum, so the
//! result does not depend on the number of threads.

use candle_core::{Device, Tensor};

use crate::Error;

/// A row-major matrix that owns its elements.
pub(crate) fn matrix(data: Vec<f32>, rows: usize, cols: usize) -> Result<Tensor, Error> {
    Ok(Tensor::from_vec(data, (rows, cols), &Device::Cpu)?)
}

/// `x Wᵀ`, row-major `[rows, out]`: a linear layer whose `weight` is `[out, in]`.
pub(crate) fn linear(x: &Tensor, weight: &Tensor) -> Result<Vec<f32>, Error> {
    elements(&x.matmul(&weight.t()?)?)
}

/// All elements, row-major.
pub(crate) fn elements(x: &Tensor) -> Result<Vec<f32>, Error> {
    Ok(x.flatten_all()?.to_vec1()?)
}
