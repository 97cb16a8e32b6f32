//! `drafter`: drafter checkpoint and model folder in, the folder with the drafter's
//! program out.
//!
//! A drafter only works with the model it was trained on, and nothing fails where it is
//! given another: the text is right and next to nothing is accepted. So whatever can be
//! compared is compared before anything is written.

mod form;
mod matrices;
mod place;
mod weights;

use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::asset::{self, Metadata};
use anemone_schemas::aimodel::check;
use anemone_schemas::aimodel::encode::encoded_len;
use anemone_schemas::aimodel::ir::Module;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::drafter::{self, DrafterCheckpoint, DrafterSpec};
use anemone_schemas::exit::Exit;
use anemone_schemas::manifest::{Drafter, DrafterHead, Manifest, RopeTable, TableFile};

use crate::error::Error;
use crate::lower::{DrafterPlan, lower_drafter};
use crate::stop::Stop;
use crate::ui::Ui;

pub use form::WeightForm;

use matrices::Matrices;
use place::Place;
use weights::Tables;

/// Folder of the program in a model folder.
pub(super) const PROGRAM: &str = "drafter.aimodel";
/// The drafter's embedding table where it is not the model's.
pub(super) const EMBEDDING_FILE: &str = "drafter_embedding.f16";
/// New rows of a draft call: one verify call of the model has as many.
const ROWS: usize = 16;
/// New rows of a prefill call: the widest call of the model.
const PREFILL_ROWS: usize = 64;

/// What to convert, and into which folder.
#[derive(Clone, Debug)]
pub struct DrafterOptions {
    /// Drafter checkpoint: `config.json` and safetensors.
    pub drafter: PathBuf,
    /// Model folder made by `target`.
    pub target: PathBuf,
    /// Where to leave the folder with the drafter; the model folder itself if absent.
    pub output: Option<PathBuf>,
    /// The model's bf16 checkpoint, to compare and to share the output layer with.
    pub model: Option<PathBuf>,
    /// Where the output layer comes from.
    pub head: HeadSource,
    /// Form of the weights.
    pub weights: WeightForm,
    /// Worker threads; the result does not depend on them.
    pub jobs: usize,
    /// Replace a drafter that is there.
    pub overwrite: bool,
}

/// Where a drafter's output layer is taken from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadSource {
    /// A checkpoint's if there is one, else the last chunk's.
    #[default]
    Auto,
    /// A checkpoint's: the drafter's, or the model's.
    Exact,
    /// The quantized one of the folder's last chunk.
    Chunk,
}

/// Runs the command. The manifest is replaced last.
///
/// # Errors
/// A checkpoint or folder that is damaged, or that do not fit each other.
pub fn run(options: &DrafterOptions, ui: Ui, stop: &Stop) -> Result<Manifest, Error> {
    let checkpoint = DrafterCheckpoint::open(&options.drafter)?;
    let mut manifest = Manifest::read(&options.target)?;
    fits(checkpoint.spec(), &manifest, options)?;
    if manifest.drafter.is_some() && options.output.is_none() && !options.overwrite {
        return Err(Error::usage(format!(
            "`{}` has a drafter already",
            options.target.display()
        ))
        .hint("pass `--overwrite`, or `-o` with another folder"));
    }
    let stage = ui.stage("drafter", 5);
    let model = options
        .model
        .as_deref()
        .map(|dir| open_model(dir, &manifest))
        .transpose()?;
    stage.step("checks");
    let place = Place::prepare(&options.target, options.output.as_deref())?;
    let mut tables = Tables::new(&checkpoint, &manifest, &options.target, model.as_ref());
    tables.compare(stop)?;
    if !tables.embedding_is_shared() {
        ui.note(&format!(
            "the drafter's embedding is not that of `{}`: if it was trained on another model, \
             few of its guesses will be accepted",
            manifest.model.name
        ));
    }
    stage.step("tables");
    let plan = plan(&checkpoint, &manifest);
    let head = tables.head(options.head)?;
    let scratch = place.scratch().join("weights");
    let matrices = Matrices::new(options.weights, options.jobs, &scratch, stop)?;
    let module = program(&tables, &plan, head, matrices)?;
    stage.step("weights");
    check::check(&module)
        .map_err(|e| Error::new(Exit::Verification, format!("`{PROGRAM}`: {e}")))?;
    let metadata = Metadata {
        producer: Some(crate::PRODUCER.to_string()),
        description: Some(format!("drafter of {}", manifest.model.name)),
        ..Metadata::default()
    };
    asset::write_asset(&place.scratch().join(PROGRAM), &module, &metadata)?;
    let embedding = if tables.embedding_is_shared() {
        manifest.embedding.clone()
    } else {
        tables.write_embedding(&place.scratch().join(EMBEDDING_FILE), stop)?;
        TableFile {
            path: EMBEDDING_FILE.to_string(),
            shape: manifest.embedding.shape,
        }
    };
    stage.step("program");
    stop.check()?;
    manifest.drafter = Some(describe(
        &plan,
        &checkpoint,
        embedding,
        head,
        options.weights,
    ));
    let manifest = place.install(manifest)?;
    stage.step("manifest");
    Ok(manifest)
}

/// What the command will write, in bytes.
pub(crate) struct Sizes {
    /// The program file.
    pub(crate) program: u64,
    /// The drafter's own embedding table, where it is not the model's.
    pub(crate) embedding: Option<u64>,
}

/// The sizes, exact: the program is made with matrices of which only the lengths are
/// known, and measured.
///
/// # Errors
/// As [`run`], but for what only the matrices' values show.
pub(crate) fn sizes(options: &DrafterOptions) -> Result<Sizes, Error> {
    let checkpoint = DrafterCheckpoint::open(&options.drafter)?;
    let manifest = Manifest::read(&options.target)?;
    fits(checkpoint.spec(), &manifest, options)?;
    let model = options.model.as_deref();
    let model = model.map(|dir| open_model(dir, &manifest)).transpose()?;
    let mut tables = Tables::new(&checkpoint, &manifest, &options.target, model.as_ref());
    tables.compare(&Stop::default())?;
    let head = tables.head(options.head)?;
    let matrices = Matrices::outlines(options.weights);
    let module = program(&tables, &plan(&checkpoint, &manifest), head, matrices)?;
    let table = manifest.embedding.shape.iter().product::<usize>() as u64 * 2;
    Ok(Sizes {
        program: encoded_len(&module).map_err(|e| Error::unexpected(&e))?,
        embedding: (!tables.embedding_is_shared()).then_some(table),
    })
}

/// What becomes of a drafter for the model of a folder.
fn plan(checkpoint: &DrafterCheckpoint, folder: &Manifest) -> DrafterPlan {
    DrafterPlan {
        spec: checkpoint.spec().clone(),
        contexts: folder.contexts.clone(),
        rows: ROWS,
        prefill_rows: PREFILL_ROWS,
    }
}

/// The program over all weights of `tables`.
fn program(
    tables: &Tables<'_>,
    plan: &DrafterPlan,
    head: DrafterHead,
    matrices: Matrices<'_>,
) -> Result<Module, Error> {
    let mut module = Module::default();
    let weights = tables.register(&mut module, head, matrices)?;
    lower_drafter(&mut module, plan, &weights);
    Ok(module)
}

/// The manifest's section.
fn describe(
    plan: &DrafterPlan,
    checkpoint: &DrafterCheckpoint,
    embedding: TableFile,
    head: DrafterHead,
    weights: WeightForm,
) -> Drafter {
    let spec = &plan.spec;
    Drafter {
        path: PROGRAM.to_string(),
        kind: spec.kind,
        taps: spec.taps.clone(),
        block: spec.block,
        guesses: spec.guesses(),
        mask_id: spec.mask_id,
        confidences: spec.confidence.is_some(),
        contexts: plan.contexts.clone(),
        rows: plan.rows,
        prefill_rows: plan.prefill_rows,
        spare_slots: plan.spare_slots(),
        layers: spec.layers,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        rope: RopeTable {
            inv_freq: spec.rope.inv_freq(spec.head_dim),
            attention_factor: spec.rope.attention_factor(),
        },
        embedding,
        head,
        weights: weights.name().to_string(),
        source_fingerprint: checkpoint.fingerprint(),
    }
}

/// Whether drafter and model folder agree in everything that shows without weights.
fn fits(spec: &DrafterSpec, folder: &Manifest, options: &DrafterOptions) -> Result<(), Error> {
    let m = &folder.model;
    for (what, drafter, model) in [
        ("a hidden size", spec.hidden, m.hidden),
        ("a vocabulary", spec.vocab, m.vocab),
        ("a number of target layers", spec.target_layers, m.layers),
    ] {
        if drafter != model {
            return Err(Error::bad_input(format!(
                "`{}` is a drafter for {what} of {drafter}, the model in `{}` has {model}",
                options.drafter.display(),
                options.target.display(),
            ))
            .hint("this drafter was trained on another model"));
        }
    }
    let exported: Vec<usize> = folder.chunks.iter().flat_map(|c| c.taps.clone()).collect();
    if !spec.taps.iter().all(|t| exported.contains(t)) {
        let list = |taps: &[usize]| {
            let list: Vec<String> = taps.iter().map(usize::to_string).collect();
            list.join(",")
        };
        let taps = list(&spec.taps);
        return Err(Error::bad_input(format!(
            "the drafter reads the hidden states after layers {taps}, the programs in `{}` give \
             out {}",
            options.target.display(),
            if exported.is_empty() {
                "none".to_string()
            } else {
                list(&exported)
            }
        ))
        .hint(format!(
            "lower the model again: `anemone-convert target STORE -o {} --taps {taps} --chunks {} \
             --max-context {} --overwrite`",
            options.target.display(),
            folder.chunks.len(),
            folder.contexts.last().copied().unwrap_or_default(),
        )));
    }
    Ok(())
}

/// The model's checkpoint, which must be the one the folder was made from.
fn open_model(dir: &Path, folder: &Manifest) -> Result<Checkpoint, Error> {
    let model = Checkpoint::open(dir)?;
    let found = model.fingerprint();
    if found != folder.model.source_fingerprint {
        return Err(Error::bad_input(format!(
            "`{}` is checkpoint {found}, the model folder was made from {}",
            dir.display(),
            folder.model.source_fingerprint
        )));
    }
    Ok(model)
}

/// Names of the drafter's tables that may be the model's.
const SHARED: [&str; 2] = [drafter::EMBEDDING, drafter::LM_HEAD];
