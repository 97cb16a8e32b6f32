//! The plan of `refine`.

use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::{Linear, ModelSpec, Site};
use anemone_schemas::store::Store;

use super::cost::{BASE_MEMORY, TEXT_MEMORY, layer_memory, layer_products, product};
use super::studies::{products, store_bytes};
use super::{Plan, Step, Work};
use crate::commands::refine::RefineOptions;
use crate::commands::training::HELD_OUT;
use crate::error::Error;
use crate::quantize::OUTPUT_ROWS;

/// The plan of `refine`: the store it makes has the bytes of the one it starts from.
///
/// # Errors
/// A checkpoint or store that cannot be used.
pub fn refine(options: &RefineOptions) -> Result<Plan, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let store = Store::open(&options.store)?;
    let spec = checkpoint.spec();
    let mut steps = work(options, spec).to_vec();
    steps.push(Step::new(
        "refined store",
        store_bytes(&store)?,
        Work::default(),
    ));
    let mut plan = Plan::new("refine", steps)?;
    plan.peak_memory = memory(options, spec);
    plan.scratch_bytes = scratch(options, spec);
    plan.output = Some(options.output.clone());
    Ok(plan)
}

/// What `refine` computes.
pub(super) fn work(options: &RefineOptions, spec: &ModelSpec) -> [Step; 3] {
    let window = options.window.min(spec.max_position);
    let layers = spec.layers as f64 * layer_products(spec, window);
    let head = product([spec.vocab, spec.hidden]);
    let sites: f64 = Site::OF_LAYER
        .iter()
        .map(|s| (s.width(spec) as f64).powi(2))
        .sum();
    let tokens = options.tokens as f64;
    let held_out = tokens / HELD_OUT as f64;
    let round = options.round_tokens.min(options.tokens) as f64;
    // Per weight, its column of the Hessian for tables and again for codes.
    let descent = (Linear::ALL.iter())
        .map(|l| l.shape(spec))
        .map(|[rows, cols]| product([rows, cols]) * cols as f64)
        .sum::<f64>();
    let rounds = options.rounds as f64;
    [
        Step::new(
            "statistics of all layers",
            0,
            products(tokens * (4.0 * layers + spec.layers as f64 * sites + 3.0 * head)),
        ),
        Step::new(
            "teacher, and the store on text kept out, before and after",
            0,
            products(tokens * layers + 2.0 * held_out * (layers + 2.0 * head)),
        ),
        Step::new(
            format!("{} rounds", options.rounds),
            0,
            Work {
                products: rounds * round * (5.0 * layers + 4.0 * head),
                refinement: rounds * spec.layers as f64 * descent / 2.0,
                ..Work::default()
            },
        ),
    ]
}

/// The statistics of all layers with the teacher's hidden states, and the pulls and matrices of
/// three rounds: the one that is made, the one before, and the one before that.
pub(super) fn scratch(options: &RefineOptions, spec: &ModelSpec) -> u64 {
    let hessians: usize = Site::OF_LAYER.iter().map(|s| s.width(spec).pow(2)).sum();
    let shapes = Linear::ALL.iter().map(|l| l.shape(spec));
    let outputs: usize = shapes
        .clone()
        .map(|[rows, _]| rows.div_ceil(OUTPUT_ROWS) * OUTPUT_ROWS * OUTPUT_ROWS)
        .sum();
    let weights: usize = shapes.map(|[rows, cols]| rows * cols).sum();
    let hidden = options.tokens * spec.hidden;
    // A pull has four bytes per weight, a code at most one.
    (spec.layers * ((hessians + outputs + hidden) * 4 + 3 * weights * 5)) as u64
}

/// The most that `refine` holds.
pub(super) fn memory(options: &RefineOptions, spec: &ModelSpec) -> u64 {
    let window = options.window.min(spec.max_position);
    let weights: usize = (Linear::ALL.iter())
        .map(|l| l.shape(spec))
        .map(|[rows, cols]| rows * cols)
        .sum();
    let hessians: usize = Site::OF_LAYER
        .iter()
        .map(|s| s.width(spec).pow(2) * 4)
        .sum();
    let row = spec.hidden * 4;
    // In the rounds: inputs of all layers, the teacher's end of all windows, a layer's
    // gradients and statistics, two output layers, and logits.
    let rounds = options.round_tokens.min(options.tokens) * row * (spec.layers + 4)
        + options.tokens * row
        + weights * 8
        + hessians
        + 2 * spec.vocab * spec.hidden * 4
        + 4 * window * spec.vocab * 4;
    // Before: both directions of a layer with two Hessians of each site.
    let statistics = 2 * (options.tokens * row + hessians) + layer_memory(spec) as usize;
    BASE_MEMORY + TEXT_MEMORY + layer_memory(spec) + rounds.max(statistics) as u64
}
