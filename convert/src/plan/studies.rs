//! The plans of `tune` and `ablate`.

use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::lut::{DEFAULT_GROUP_ROWS, LutShape};
use anemone_schemas::spec::{LM_HEAD, Linear, ModelSpec};
use anemone_schemas::store::Store;

use super::cost::{self, BASE_MEMORY, TEXT_MEMORY, layer_memory, layer_products, product};
use super::{Plan, Step, Work, refine};
use crate::commands::ablate::{self, AblateOptions, STUDENTS};
use crate::commands::files::list;
use crate::commands::quantize::QuantizeOptions;
use crate::commands::training::HELD_OUT;
use crate::commands::tune::TuneOptions;
use crate::error::Error;

/// Memory of a value in training: itself, its unit and Adam's two means in f64.
const PER_VALUE: u64 = 24;

pub(super) fn products(products: f64) -> Work {
    Work {
        products,
        ..Work::default()
    }
}

/// The plan of `tune`: the store it makes has the bytes of the one it starts from.
///
/// # Errors
/// A checkpoint or store that cannot be used.
pub fn tune(options: &TuneOptions) -> Result<Plan, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let store = Store::open(&options.store)?;
    let spec = checkpoint.spec();
    let mut steps = training(options, spec).to_vec();
    steps.push(Step::new(
        "tuned store",
        store_bytes(&store)?,
        Work::default(),
    ));
    let mut plan = Plan::new("tune", steps)?;
    let tables = (store.manifest().matrices.iter())
        .map(|m| (m.rows.div_ceil(m.group_rows) << m.bits) as u64 * m.vector as u64)
        .sum::<u64>();
    plan.peak_memory = training_memory(options, spec, tables);
    plan.output = Some(options.output.clone());
    Ok(plan)
}

/// Bytes of all files of a store.
pub(super) fn store_bytes(store: &Store) -> Result<u64, Error> {
    let files = list(store.dir()).map_err(|e| Error::io(store.dir(), &e))?;
    let sizes = files
        .iter()
        .filter_map(|f| store.dir().join(f).metadata().ok());
    Ok(sizes.map(|meta| meta.len()).sum())
}

/// What `tune` computes.
fn training(options: &TuneOptions, spec: &ModelSpec) -> [Step; 3] {
    let window = options.window.min(spec.max_position);
    let layers = spec.layers as f64 * layer_products(spec, window);
    let head = product([spec.vocab, spec.hidden]);
    let held_out = options.tokens as f64 / HELD_OUT as f64;
    let step_tokens = options.step_tokens.min(options.tokens) as f64;
    // Forward, forward again on the way back, and two products for each there; the
    // teacher's output layer beside the student's three.
    let one_step = step_tokens * (4.0 * layers + 4.0 * head);
    [
        Step::new("teacher", 0, products(options.tokens as f64 * layers)),
        Step::new(
            "store on text kept out, before and after",
            0,
            products(2.0 * held_out * (layers + 2.0 * head)),
        ),
        Step::new(
            format!("{} steps", options.steps),
            0,
            products(options.steps as f64 * one_step),
        ),
    ]
}

/// The most that `tune` holds, with so many values in tables.
fn training_memory(options: &TuneOptions, spec: &ModelSpec, tables: u64) -> u64 {
    let window = options.window.min(spec.max_position);
    let step_tokens = options.step_tokens.min(options.tokens);
    let largest = Linear::ALL.iter().map(|l| product(l.shape(spec)) as u64);
    let largest = largest.max().unwrap_or(0);
    let row = spec.hidden as u64 * 4;
    // The inputs of all layers for a step, the teacher's end of all windows, two output
    // layers, and the logits of a window with their gradients.
    let states = step_tokens as u64 * row * (spec.layers as u64 + 4) + options.tokens as u64 * row;
    let heads = 2 * product([spec.vocab, spec.hidden]) as u64 * 4;
    let logits = 4 * (window * spec.vocab * 4) as u64;
    BASE_MEMORY
        + TEXT_MEMORY
        + PER_VALUE * tables
        + states
        + heads
        + logits
        + 2 * layer_memory(spec)
        + largest * 9
}

/// The plan of `ablate`: one pair of passes, a store for each row, one evaluation.
///
/// # Errors
/// A checkpoint that cannot be used.
pub fn ablate(options: &AblateOptions) -> Result<Plan, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let spec = checkpoint.spec();
    let mut shared = Vec::new();
    let mut stores = Vec::new();
    let (mut peak_memory, mut scratch_bytes) = (0, 0);
    let mut notes = Vec::new();
    let all = ablate::recipes(options)
        .into_iter()
        .flat_map(|(quantize, recipes)| {
            let last = recipes.len() - 1;
            let recipes = recipes.into_iter().enumerate();
            recipes.map(move |(at, recipe)| (quantize.clone(), recipe, at == last))
        });
    for ((quantize, recipe, last), name) in all.zip(ablate::store_names()) {
        let lacks_head = !recipe.head;
        let one = cost::quantize(&QuantizeOptions {
            output: recipe.output,
            method: recipe.method,
            guided: recipe.guided,
            rules: recipe.rules,
            ..quantize
        })?;
        peak_memory = one.peak_memory.max(peak_memory);
        scratch_bytes = one.scratch_bytes.max(scratch_bytes);
        notes = one.notes;
        // What writes nothing is reading and the passes, which stores made together share; the
        // longest come with gradients, and those are their last one's.
        let (own, passes): (Vec<Step>, Vec<Step>) =
            one.steps.into_iter().partition(|s| s.bytes > 0);
        if last {
            shared.extend(passes);
        }
        let mut sum = Step::new(format!("store `{name}`"), 0, Work::default());
        for step in own {
            if !(lacks_head && step.what == LM_HEAD) {
                sum.bytes += step.bytes;
                sum.work.add(&step.work);
            }
        }
        stores.push(sum);
    }
    let mut passes = Step::new("statistics of all layers", 0, Work::default());
    for step in &shared {
        passes.work.add(&step.work);
    }
    let window = options.window.min(spec.max_position);
    let tokens = (options.eval_tokens * cost::sets(&options.text)) as f64;
    let layers = spec.layers as f64 * layer_products(spec, window);
    let head = product([spec.vocab, spec.hidden]);
    let [mut students, last] = STUDENTS;
    let mut heads = 2 * (students - 1) + last;
    // The same matrices as in the store that they start from, and an output layer of six bits.
    let [rows, cols] = [spec.vocab, spec.hidden];
    let output_layer = LutShape::new(rows, cols, 6, DEFAULT_GROUP_ROWS)
        .map_err(|e| Error::usage(e.to_string()))?
        .file_len();
    let bytes = stores.last().map_or(0, |s| s.bytes) + output_layer;
    let mut further = Vec::new();
    let mut follow = |name: &str, work: &[Step]| {
        let mut sum = Step::new(format!("store `{name}`"), bytes, Work::default());
        for step in work {
            sum.work.add(&step.work);
        }
        further.push(sum);
        (students, heads) = (students + 1, heads + 2);
    };
    if let Some(refine) = options.refine() {
        follow("refined", &refine::work(&refine, spec));
        peak_memory = peak_memory.max(refine::memory(&refine, spec));
        scratch_bytes = scratch_bytes.max(refine::scratch(&refine, spec));
    }
    if let Some(tune) = options.tune() {
        follow("tuned", &training(&tune, spec));
        // Sixteen values for 32 rows.
        let rows = Linear::ALL.iter().map(|l| l.shape(spec)[0]).sum::<usize>() * spec.layers;
        peak_memory = peak_memory.max(training_memory(&tune, spec, rows as u64 / 2));
    }
    let measured = tokens * ((students + 1) as f64 * layers + (heads + 1) as f64 * head);
    let mut steps = vec![passes];
    steps.extend(stores);
    steps.extend(further);
    steps.push(Step::new(
        format!("{heads} measurements"),
        0,
        products(measured),
    ));
    let mut plan = Plan::new("ablate", steps)?;
    let hidden = tokens * spec.hidden as f64 * 4.0;
    let kept = hidden * (students + 1) as f64 + head * 4.0 * (heads + 1) as f64;
    let logits = 3 * window * spec.vocab * 4;
    let at_end = BASE_MEMORY + TEXT_MEMORY + layer_memory(spec) + kept as u64 + logits as u64;
    plan.peak_memory = peak_memory.max(at_end);
    plan.scratch_bytes = scratch_bytes;
    plan.output = Some(options.output.clone());
    plan.notes = notes;
    Ok(plan)
}
