//! Keys and values of a conversation, one pair of states per chunk.

use anemone_schemas::aimodel::ir::Elem;
use anemone_schemas::manifest::Manifest;
use half::f16;

use super::inputs::Buffers;
use crate::tensor::{Data, Tensor};

/// The states of all chunks at one context size, zeroed at the start: a masked slot
/// still takes part in the products, and must not hold a NaN.
#[derive(Clone, Debug)]
pub struct Cache {
    context: usize,
    /// Keys and values by chunk, `f16[layers, 1, channels, 1, context]`.
    chunks: Vec<[Tensor; 2]>,
    /// Inputs of the last call, of which the next one reuses what is the same.
    buffers: Option<Buffers>,
}

impl Cache {
    pub(super) fn new(manifest: &Manifest) -> Self {
        let context = manifest.contexts[0];
        let chunks = manifest
            .chunks
            .iter()
            .map(|c| {
                let layers = c.layers[1] - c.layers[0];
                let shape = [layers, 1, manifest.model.kv_channels, 1, context];
                let zeros = || Tensor::zeros(Elem::F16, &shape).expect("fp16 of a checked size");
                [zeros(), zeros()]
            })
            .collect();
        Self {
            context,
            chunks,
            buffers: None,
        }
    }

    /// Slots there are now.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Keys and values by chunk, `f16[layers, 1, channels, 1, context]` each.
    pub fn states(&self) -> &[[Tensor; 2]] {
        &self.chunks
    }

    /// The same, to change: slots beyond the text may hold any finite values.
    pub fn states_mut(&mut self) -> &mut [[Tensor; 2]] {
        &mut self.chunks
    }

    /// The inputs of the last call, if it ended well; the caller gives them back.
    pub(super) fn take_buffers(&mut self) -> Option<Buffers> {
        self.buffers.take()
    }

    pub(super) fn put_buffers(&mut self, buffers: Buffers) {
        self.buffers = Some(buffers);
    }

    /// Makes room for `context` slots; what the cache holds stays in its slots.
    pub(super) fn grow(&mut self, context: usize, manifest: &Manifest) {
        if context <= self.context {
            return;
        }
        let old = self.context;
        for (pair, chunk) in self.chunks.iter_mut().zip(&manifest.chunks) {
            let layers = chunk.layers[1] - chunk.layers[0];
            let channels = layers * manifest.model.kv_channels;
            let shape = [layers, 1, manifest.model.kv_channels, 1, context];
            for state in pair {
                let mut wide = vec![f16::ZERO; channels * context];
                if let Data::F16(narrow) = state.data() {
                    for (to, from) in wide.chunks_mut(context).zip(narrow.chunks(old)) {
                        to[..old].copy_from_slice(from);
                    }
                }
                *state = Tensor::new(&shape, wide).expect("the product of the shape");
            }
        }
        self.context = context;
    }
}
