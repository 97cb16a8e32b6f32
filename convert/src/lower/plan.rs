//! Which layers, contexts and widths go into which program.

use std::ops::Range;

use anemone_schemas::spec::ModelSpec;

use super::forms::Forms;
use super::size::chunk_size;
use super::weights::WeightSource;
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
    /// The forms of the graph.
    pub forms: Forms,
}

/// How many chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// This many.
    Count(usize),
    /// As few as keep every program file within this many bytes.
    MaxBytes(u64),
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
    let contexts = std::iter::successors(Some(MIN_CONTEXT), |c| Some(c * 2))
        .take_while(|&c| c <= max_context)
        .collect();
    let mut plan = TargetPlan {
        spec: spec.clone(),
        chunks: vec![ChunkPlan {
            layers: 0..spec.layers,
            taps: taps.to_vec(),
            head: true,
        }],
        contexts,
        widths: vec![16, 64],
        with_logits,
        forms: Forms::default(),
    };
    plan.divide(chunks)?;
    Ok(plan)
}

impl TargetPlan {
    /// The plan with its layers divided otherwise.
    ///
    /// # Errors
    /// If the number is out of range, or single layers are larger than allowed.
    pub fn rechunk(mut self, chunks: Chunks, source: &dyn WeightSource) -> Result<Self, Error> {
        let limit = match chunks {
            Chunks::Count(n) => {
                self.divide(n)?;
                return Ok(self);
            }
            Chunks::MaxBytes(limit) => limit,
        };
        let mut largest = 0;
        for n in 1..=self.spec.layers {
            self.divide(n)?;
            largest = 0;
            for chunk in &self.chunks {
                largest = largest.max(chunk_size(source, &self, chunk)?.file_bytes);
            }
            if largest <= limit {
                return Ok(self);
            }
        }
        Err(Error::usage(format!(
            "no chunk may have more than {limit} bytes, but with one layer each the largest has \
             {largest}"
        )))
    }

    /// Runs of nearly equal length, the longer ones first.
    fn divide(&mut self, chunks: usize) -> Result<(), Error> {
        let layers = self.spec.layers;
        if chunks == 0 || chunks > layers {
            return Err(Error::usage(format!("{chunks} chunks for {layers} layers")));
        }
        let taps: Vec<usize> = self.chunks.iter().flat_map(|c| c.taps.clone()).collect();
        let (each, longer) = (layers / chunks, layers % chunks);
        let mut next = 0;
        self.chunks = (0..chunks)
            .map(|i| {
                let layers = next..next + each + usize::from(i < longer);
                next = layers.end;
                ChunkPlan {
                    taps: taps
                        .iter()
                        .copied()
                        .filter(|t| layers.contains(t))
                        .collect(),
                    head: layers.end == self.spec.layers,
                    layers,
                }
            })
            .collect();
        Ok(())
    }
}
