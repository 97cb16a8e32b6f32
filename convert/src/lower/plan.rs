//! Which layers, contexts and widths go into which program.

use std::ops::Range;

use anemone_schemas::spec::ModelSpec;

use crate::error::Error;

/// Longest context exported. At 32768 the engine's compiler fails and Core AI
/// runs the program elsewhere without an error, an order of magnitude slower.
pub(super) const MAX_CONTEXT: usize = 16384;
/// Smallest context exported.
const MIN_CONTEXT: usize = 256;

/// One chunk program to be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    /// Decoder layers.
    pub layers: Range<usize>,
    /// Layers of this chunk whose output leaves as `tap_{layer}`.
    pub taps: Vec<usize>,
    /// Whether final norm and output layer are in it.
    pub head: bool,
}

/// All chunk programs of a model.
#[derive(Clone, Debug)]
pub struct TargetPlan {
    /// The model.
    pub spec: ModelSpec,
    /// Chunks in order.
    pub chunks: Vec<ChunkPlan>,
    /// Context sizes, ascending.
    pub contexts: Vec<usize>,
    /// Call widths, ascending.
    pub widths: Vec<usize>,
    /// Whether the last chunk also has `logits_{C}_{w}` functions.
    pub with_logits: bool,
}

/// Name of the function for a context and a width.
pub fn function_name(context: usize, width: usize) -> String {
    format!("extend_{context}_{width}")
}

/// Divides `spec.layers` into `chunks` runs of nearly equal length, the longer
/// ones first since the last chunk also holds the output layer, with contexts
/// doubling from 256 up to `max_context`.
///
/// # Errors
/// If `chunks`, `max_context` or a tap is out of range.
pub fn plan_chunks(
    spec: &ModelSpec,
    chunks: usize,
    max_context: usize,
    taps: &[usize],
    with_logits: bool,
) -> Result<TargetPlan, Error> {
    if chunks == 0 || chunks > spec.layers {
        return Err(Error::usage(format!(
            "{chunks} chunks for {} layers",
            spec.layers
        )));
    }
    if max_context > MAX_CONTEXT {
        return Err(Error::usage(format!(
            "context {max_context} is over {MAX_CONTEXT}: the engine's compiler fails on longer \
             ones and the program then runs elsewhere, without an error and ten times slower"
        )));
    }
    if max_context < MIN_CONTEXT || !max_context.is_power_of_two() {
        return Err(Error::usage(format!(
            "context {max_context}: expected a power of two from {MIN_CONTEXT} to {MAX_CONTEXT}"
        )));
    }
    if max_context > spec.max_position {
        return Err(Error::usage(format!(
            "context {max_context} is over the {} positions the model was made for",
            spec.max_position
        )));
    }
    if let Some(tap) = taps.iter().find(|&&t| t + 1 >= spec.layers) {
        return Err(Error::usage(format!(
            "tap after layer {tap}: expected a layer before the last of {}",
            spec.layers
        )));
    }
    let (each, longer) = (spec.layers / chunks, spec.layers % chunks);
    let mut next = 0;
    let plans = (0..chunks)
        .map(|i| {
            let layers = next..next + each + usize::from(i < longer);
            next = layers.end;
            ChunkPlan {
                taps: taps
                    .iter()
                    .copied()
                    .filter(|t| layers.contains(t))
                    .collect(),
                head: layers.end == spec.layers,
                layers,
            }
        })
        .collect();
    let contexts = std::iter::successors(Some(MIN_CONTEXT), |c| Some(c * 2))
        .take_while(|&c| c <= max_context)
        .collect();
    Ok(TargetPlan {
        spec: spec.clone(),
        chunks: plans,
        contexts,
        widths: vec![16, 64],
        with_logits,
    })
}
