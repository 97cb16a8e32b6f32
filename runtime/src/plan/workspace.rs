//! Buffers that runs of a program pass on to each other.

use std::sync::Arc;

use half::f16;

use crate::kernels::{Activations, Mask};
use crate::tensor::Data;
use crate::view::View;

/// Most buffers that are kept.
const KEPT: usize = 64;

/// Buffers kept between steps and between runs. Every run takes the same lengths in
/// the same order, so after the first one nothing large is allocated.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    pub(super) activations: Activations,
    pub(super) mask: Mask,
    free: Vec<Vec<f16>>,
}

impl Workspace {
    /// A buffer of `n` elements, zero from `live` on; the others hold anything.
    pub(crate) fn take(&mut self, n: usize, live: usize) -> Vec<f16> {
        match self.free.iter().rposition(|b| b.len() == n) {
            Some(i) => {
                let mut buffer = self.free.swap_remove(i);
                buffer[live..].fill(f16::ZERO);
                buffer
            }
            None => vec![f16::ZERO; n],
        }
    }

    /// Takes back the buffer of a value that nobody else holds.
    pub(crate) fn give(&mut self, view: View) {
        if let Some(Data::F16(buffer)) = Arc::into_inner(view.data)
            && self.free.len() < KEPT
        {
            self.free.push(buffer);
        }
    }
}
