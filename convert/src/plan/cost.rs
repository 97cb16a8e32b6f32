//! Steps, bytes, memory and work of each command.

use std::fs;
use std::path::Path;

use anemone_calib::{GROUP_ROWS, LOGITS};
use anemone_schemas::checkpoint::{Checkpoint, Head};
use anemone_schemas::lut::BITS;
use anemone_schemas::manifest::Manifest;
use anemone_schemas::spec::{EMBEDDING, LM_HEAD, Linear, ModelSpec, Site};

use super::{Plan, Step, Work};
use crate::commands::demo::DemoOptions;
use crate::commands::drafter::{self, DrafterOptions};
use crate::commands::eval::EvalOptions;
use crate::commands::files::list;
use crate::commands::package::PackageOptions;
use crate::commands::quantize::{Bits, ORDER_TOKENS, QuantizeOptions};
use crate::commands::target::{self, TargetOptions};
use crate::commands::text::TextSource;
use crate::commands::verify;
use crate::error::Error;
use crate::quantize::{Method, OUTPUT_ROWS};
use crate::synth::SynthOptions;

/// Code, tokenizer and whatever else every command holds.
pub(super) const BASE_MEMORY: u64 = 96 << 20;
/// Reading text into tokens: as measured with the built-in text.
pub(super) const TEXT_MEMORY: u64 = 256 << 20;
/// Multiply-adds of one layer for one token in a window of `window`.
pub(super) fn layer_products(spec: &ModelSpec, window: usize) -> f64 {
    let linears: f64 = Linear::ALL.iter().map(|l| product(l.shape(spec))).sum();
    // Scores and mix, half of them masked but computed.
    linears + 2.0 * (window * spec.heads * spec.head_dim) as f64
}

pub(super) fn product(shape: [usize; 2]) -> f64 {
    shape[0] as f64 * shape[1] as f64
}

/// Weights of one layer in f32, and what its activations take beside.
pub(super) fn layer_memory(spec: &ModelSpec) -> u64 {
    let linears: f64 = Linear::ALL.iter().map(|l| product(l.shape(spec))).sum();
    linears as u64 * 4 + activations(spec) as u64
}

/// What a group of windows has within a layer, bytes.
fn activations(spec: &ModelSpec) -> usize {
    let row = 6 * spec.hidden + 3 * spec.intermediate + 3 * spec.heads * spec.head_dim;
    GROUP_ROWS * row * 4
}

/// The plan of `quantize`.
///
/// # Errors
/// A checkpoint that cannot be used, or settings out of range.
pub fn quantize(options: &QuantizeOptions) -> Result<Plan, Error> {
    let checkpoint = options.open()?;
    let spec = checkpoint.spec();
    options.check_rules(&options.rules, spec)?;
    let mut recipe = options.recipe();
    if let Some(target) = options.target_bpw {
        // Bits are not chosen yet: as if all had the least that reach the budget.
        let enough = BITS.into_iter().find(|&bits| f64::from(bits) >= target);
        recipe.settings.bits = enough.unwrap_or(8);
    }
    let feedback = |name: &str| {
        let options = recipe.matrix(name);
        let kmeans = [Method::KMeans, Method::KMeansUnweighted].contains(&options.method);
        !kmeans && matches!(options.bits, Bits::Table(_))
    };
    let work = |name: &str, shape: [usize; 2]| Work {
        points: match recipe.matrix(name).bits {
            Bits::Table(_) => product(shape),
            Bits::Int8 | Bits::Fp16 => 0.0,
        },
        feedback: if feedback(name) {
            product(shape) * shape[1] as f64
        } else {
            0.0
        },
        refinement: if feedback(name) && recipe.matrix(name).method == Method::TwoSided {
            product(shape) * shape[1] as f64
        } else {
            0.0
        },
        ..Work::default()
    };
    let factor = |cols: usize, factored: bool| {
        if factored { (cols as f64).powi(3) } else { 0.0 }
    };
    let measured = options.target_bpw.is_some();
    let gradients = recipe.needs_gradients() || measured;
    let mut gptq = feedback(LM_HEAD);
    // Backward costs two products where forward costs one, after a forward of its own.
    let mut passes = if gradients { 4.0 } else { 1.0 };
    if measured {
        passes += 4.0;
    }
    let tokens = options.tokens as f64;
    let window = options.window.min(spec.max_position);

    let read: u64 = weights_len(&options.model);
    let mut steps = vec![Step::new(
        "read and hash the checkpoint",
        0,
        Work {
            hashed: read as f64,
            ..Work::default()
        },
    )];
    // Of some of the text: forward, and backward with a forward of its own.
    let ordering = if options.fit_order {
        options.tokens.min(ORDER_TOKENS) as f64 * 4.0
    } else {
        0.0
    };
    for layer in 0..spec.layers {
        let mut products = (tokens * passes + ordering) * layer_products(spec, window);
        let mut factors = 0.0;
        for site in Site::OF_LAYER {
            products += tokens * (site.width(spec) as f64).powi(2) / 2.0;
            let mut readers = Linear::ALL.iter().filter(|l| l.site() == site);
            let factored = readers.any(|l| feedback(&l.tensor(layer)));
            factors += factor(site.width(spec), factored);
            gptq |= factored;
        }
        let teacher = Work {
            products,
            factors,
            ..Work::default()
        };
        steps.push(Step::new(format!("layer {layer}: statistics"), 0, teacher));
        for linear in Linear::ALL {
            let (name, shape) = (linear.tensor(layer), linear.shape(spec));
            let (bytes, work) = (recipe.bytes(&name, shape)?, work(&name, shape));
            steps.push(Step::new(name, bytes, work));
        }
    }
    let head = [spec.vocab, spec.hidden];
    let mut head_work = work(LM_HEAD, head);
    head_work.products = tokens * (spec.hidden as f64).powi(2) / 2.0;
    head_work.factors = factor(spec.hidden, feedback(LM_HEAD));
    steps.push(Step::new(LM_HEAD, recipe.bytes(LM_HEAD, head)?, head_work));
    let norms: usize = spec
        .architecture
        .norms()
        .iter()
        .map(|n| n.width(spec))
        .sum();
    let dense = (norms * spec.layers + spec.hidden + spec.vocab * spec.hidden) * 2;
    steps.push(Step::new(
        "norms and embedding",
        dense as u64,
        Work::default(),
    ));

    let mut plan = Plan::new("quantize", steps)?;
    let hessians: usize = Site::OF_LAYER
        .iter()
        .map(|s| s.width(spec).pow(2) * 4)
        .sum();
    let hidden = options.tokens * spec.hidden * 4;
    // A matrix in f32, its codes twice; the factor in f64.
    let quantizing =
        |[rows, cols]: [usize; 2]| rows * cols * 7 + if gptq { cols * cols * 8 } else { 0 };
    let largest = Linear::ALL.iter().map(|l| quantizing(l.shape(spec))).max();
    // With gradients, each site has two Hessians and each matrix blocks of its outputs.
    let of_gradients = |bytes: usize| if gradients { bytes } else { 0 };
    let blocks = |rows: usize| of_gradients(rows * OUTPUT_ROWS * 4);
    let of_layer: usize = Linear::ALL.iter().map(|l| blocks(l.shape(spec)[0])).sum();
    // On the way through a layer Hessians are filled up to their diagonal only.
    let of_group = of_gradients(activations(spec) / 2);
    let in_layer = layer_memory(spec) as usize + of_group + hidden + hessians + of_layer;
    let in_matrices = hidden + hessians + of_gradients(hessians) + of_layer + largest.unwrap_or(0);
    let distributions = of_gradients(6 * LOGITS * 4);
    let at_head = (spec.vocab * spec.hidden * 4 + distributions).max(quantizing(head))
        + hidden
        + spec.hidden.pow(2) * 8
        + blocks(spec.vocab);
    plan.peak_memory = BASE_MEMORY + TEXT_MEMORY + in_layer.max(in_matrices).max(at_head) as u64;
    plan.output = Some(options.output.clone());
    if gradients || options.fit_order {
        plan.scratch_bytes = (hidden * spec.layers) as u64;
    }
    plan.notes.extend(checkpoint.notes().iter().cloned());
    if let Some(layers) = options.layers {
        plan.notes.push(format!(
            "only the first {layers} layers: the result is marked as partial"
        ));
    } else {
        let ignored = checkpoint.ignored().iter();
        let ignored = ignored.map(|i| format!("`{}` is left aside: {}", i.tensor, i.reason));
        plan.notes.extend(ignored);
    }
    if checkpoint.head() == Head::Tied && recipe.has_table(LM_HEAD) {
        plan.notes.push(format!(
            "`{LM_HEAD}` is the embedding: the output layer gets tables, `{EMBEDDING}` stays fp16"
        ));
    }
    let widest = Site::OF_LAYER
        .iter()
        .map(|s| s.width(spec))
        .max()
        .unwrap_or(0);
    if gptq && options.tokens < 2 * widest {
        plan.notes.push(format!(
            "{} calibration tokens for inputs {widest} wide: at least {} are better",
            options.tokens,
            2 * widest
        ));
    }
    Ok(plan)
}

/// Bytes of the weight files of a checkpoint.
fn weights_len(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|e| e.path().extension().is_some_and(|x| x == "safetensors"))
        .filter_map(|e| fs::metadata(e.path()).ok())
        .map(|meta| meta.len())
        .sum()
}

/// The plan of `target`, exact to the byte of every program.
///
/// # Errors
/// As the command itself.
pub fn target(options: &TargetOptions) -> Result<Plan, Error> {
    let sizes = target::sizes(options)?;
    let steps = (sizes.files.into_iter())
        .map(|(what, bytes)| {
            let work = Work {
                hashed: 2.0 * bytes as f64,
                ..Work::default()
            };
            Step::new(what, bytes, work)
        })
        .collect();
    let mut plan = Plan::new("target", steps)?;
    plan.peak_memory = sizes.peak_memory;
    plan.output = Some(options.output.clone());
    Ok(plan)
}

/// The plan of `drafter`, exact to the byte of the program. For that, tables are compared
/// with the model's as the command itself does.
///
/// # Errors
/// As the command itself.
pub fn drafter(options: &DrafterOptions) -> Result<Plan, Error> {
    let sizes = drafter::sizes(options)?;
    let manifest = Manifest::read(&options.target)?;
    let m = &manifest.model;
    let table = (m.vocab * m.hidden) as u64 * 2;
    let step = |what, bytes: u64| {
        let work = Work {
            hashed: 2.0 * bytes as f64,
            ..Work::default()
        };
        Step::new(what, bytes, work)
    };
    let mut steps = vec![step("drafter program", sizes.program)];
    steps.extend((sizes.embedding).map(|bytes| step("drafter's embedding", bytes)));
    if options.output.is_some() {
        let whole = manifest.files.values().map(|f| f.bytes).sum();
        steps.push(Step::new(
            "copy of the model folder",
            whole,
            Work::default(),
        ));
    }
    let mut plan = Plan::new("drafter", steps)?;
    // Tables are compared and converted in f32.
    plan.peak_memory = BASE_MEMORY + 2 * table;
    plan.scratch_bytes = sizes.program;
    plan.output = Some(
        options
            .output
            .clone()
            .unwrap_or_else(|| options.target.clone()),
    );
    Ok(plan)
}

/// Sets of evaluation text.
pub(super) fn sets(text: &[TextSource]) -> usize {
    match text.len() {
        // The built-in ones.
        0 => 3,
        given => given,
    }
}

/// The plan of `eval`.
///
/// # Errors
/// A checkpoint that cannot be used.
pub fn eval(options: &EvalOptions) -> Result<Plan, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let spec = checkpoint.spec();
    let window = options.window.min(spec.max_position);
    let tokens = (options.tokens * sets(&options.text)) as f64;
    let forward = |what: &str| {
        let layers = spec.layers as f64 * layer_products(spec, window);
        let head = product([spec.vocab, spec.hidden]);
        let work = Work {
            products: tokens * (layers + head),
            ..Work::default()
        };
        Step::new(what, 0, work)
    };
    let mut steps = vec![forward("teacher")];
    if options.store.is_some() {
        steps.push(forward("store, in the teacher's graph"));
    }
    if options.folder.is_some() {
        steps.push(forward("folder, on its programs"));
    }
    let mut plan = Plan::new("eval", steps)?;
    let students = usize::from(options.store.is_some());
    let hidden = tokens as usize * spec.hidden * 4 * 2;
    let head = spec.vocab * spec.hidden * 4;
    let logits = window * spec.vocab * 4;
    let end = (hidden + head) * (1 + students) + 3 * logits;
    plan.peak_memory = BASE_MEMORY + TEXT_MEMORY + layer_memory(spec) + end as u64;
    Ok(plan)
}

/// The plan of `package`: everything is read and hashed, the descriptions are written.
///
/// # Errors
/// A folder that is no model folder.
pub fn package(options: &PackageOptions) -> Result<Plan, Error> {
    let folder = &options.folder;
    let manifest = verify::programs(folder)?;
    let files = list(folder).map_err(|e| Error::io(folder, &e))?;
    let bytes: u64 = manifest.files.values().map(|f| f.bytes).sum();
    let hash = Work {
        hashed: bytes as f64,
        ..Work::default()
    };
    let steps = vec![
        Step::new("model card and bundle metadata", 64 << 10, Work::default()),
        Step::new(format!("hash {} files", files.len()), 0, hash),
        Step::new("manifest", 64 << 10, Work::default()),
    ];
    let mut plan = Plan::new("package", steps)?;
    plan.peak_memory = BASE_MEMORY;
    plan.output = Some(folder.clone());
    Ok(plan)
}

/// The plan of `demo`. The built-in model is always the same, so are these figures.
///
/// # Errors
/// If the machine's memory cannot be read.
pub fn demo(options: &DemoOptions) -> Result<Plan, Error> {
    let steps = [
        ("checkpoint", 4_600_000),
        ("two stores", 5_000_000),
        ("two model folders", 9_000_000),
        ("report, card and manifest", 100_000),
    ];
    let steps = steps.map(|(what, bytes)| Step::new(what, bytes, Work::default()));
    let mut plan = Plan::new("demo", steps.into())?;
    plan.peak_memory = 512 << 20;
    plan.output = Some(options.output.clone());
    Ok(plan)
}

/// The plan of `synth`.
///
/// # Errors
/// A layer count out of range.
pub fn synth(options: &SynthOptions) -> Result<Plan, Error> {
    let steps = crate::synth::sizes(options)?
        .into_iter()
        .map(|(file, bytes)| Step::new(file, bytes, Work::default()))
        .collect();
    let mut plan = Plan::new("synth", steps)?;
    plan.peak_memory = BASE_MEMORY + (64 << 20);
    plan.output = Some(options.output.clone());
    Ok(plan)
}
