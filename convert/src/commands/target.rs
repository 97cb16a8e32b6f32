//! `target`: quantized store in, model folder of chunk programs out.

mod apple;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::asset::{self, Metadata};
use anemone_schemas::exit::Exit;
use anemone_schemas::manifest::{
    Chunk, FileInfo, FunctionInfo, MANIFEST_VERSION, Manifest, ModelInfo, RopeTable, TableFile,
};
use anemone_schemas::spec::{EMBEDDING, ModelSpec};
use anemone_schemas::store::{DenseElem, Store};

use super::files::{copy_range, digest_folder};
use super::lint::first_error;
use super::notices;
use super::quantize::{MAGNITUDES_FILE, PARTIAL, SPEC_FILE};
use super::recipe::Recipe;
use super::text::open_tokenizer;
use crate::error::Error;
use crate::lower::{
    BASE_MEMORY, ChunkPlan, Chunks, Forms, MAGNITUDE_HEADROOM, MASK_VALUE, Prescale, TargetPlan,
    chunk_size, function_name, lower_chunk, plan_chunks,
};
use crate::stop::Stop;
use crate::ui::Ui;
use crate::work::Work;

pub use apple::run_apple;

/// Folder of the tokenizer files in a model folder.
pub(crate) const TOKENIZER_DIR: &str = "tokenizer";
const EMBEDDING_FILE: &str = "embedding.f16";

/// What to lower and into which programs.
#[derive(Clone, Debug)]
pub struct TargetOptions {
    /// Quantized store.
    pub store: PathBuf,
    /// Model folder to make.
    pub output: PathBuf,
    /// Display name of the model.
    pub name: String,
    /// Number of chunk programs.
    pub chunks: Chunks,
    /// Longest context.
    pub max_context: usize,
    /// Layers whose hidden states leave, for a drafter.
    pub taps: Vec<usize>,
    /// Whether to add functions that return the logits.
    pub with_logits: bool,
    /// Forms of the graph; which rows of the vocabulary are padding is filled in.
    pub forms: Forms,
    /// Scaling of norm inputs; by what the store's calibration saw if absent.
    pub prescale: Option<Prescale>,
}

/// Memory of an open tokenizer for every byte of `tokenizer.json`, measured with Qwen3's.
const TOKENIZER_MEMORY: u64 = 13;
/// The largest file of a tokenizer.
const TOKENIZER_FILE: &str = "tokenizer.json";

impl TargetOptions {
    /// The plan for a store whose tokenizer knows `vocab` ids.
    fn plan(&self, store: &Store, spec: &ModelSpec, vocab: usize) -> Result<TargetPlan, Error> {
        let mut plan = plan_chunks(spec, 1, self.max_context, &self.taps, self.with_logits)?;
        plan.forms = Forms {
            valid_vocab: Some(vocab),
            prescale: match &self.prescale {
                Some(prescale) => prescale.clone(),
                None => calibrated_prescale(store)?,
            },
            ..self.forms.clone()
        };
        plan.rechunk(self.chunks, store)
    }
}

/// Scaling by the norm inputs that the store's calibration saw.
fn calibrated_prescale(store: &Store) -> Result<Prescale, Error> {
    let path = store.dir().join(MAGNITUDES_FILE);
    let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, &e))?;
    let mut table: BTreeMap<String, f32> = serde_json::from_str(&text)
        .map_err(|e| Error::bad_input(format!("`{}`: {e}", path.display())))?;
    for magnitude in table.values_mut() {
        *magnitude *= MAGNITUDE_HEADROOM;
    }
    Ok(Prescale::Magnitudes(table))
}

/// The spec a store was made with.
///
/// # Errors
/// If the store lacks it or it does not parse.
pub(super) fn store_spec(store: &Store) -> Result<ModelSpec, Error> {
    let path = store.dir().join(SPEC_FILE);
    let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, &e))?;
    serde_json::from_str(&text).map_err(|e| Error::bad_input(format!("`{}`: {e}", path.display())))
}

/// What the command would write.
pub(crate) struct Sizes {
    /// Names and bytes, exact for programs and embedding.
    pub(crate) files: Vec<(String, u64)>,
    /// Most memory of the command in bytes: the dearest program's or the tokenizer's,
    /// which are not in memory together.
    pub(crate) peak_memory: u64,
}

/// What the command would write and how much memory it takes, without writing.
///
/// # Errors
/// As [`run`].
pub(crate) fn sizes(options: &TargetOptions) -> Result<Sizes, Error> {
    let store = Store::open(&options.store)?;
    let spec = store_spec(&store)?;
    let vocab = open_tokenizer(store.dir())?.size();
    let plan = options.plan(&store, &spec, vocab)?;
    let mut files = Vec::new();
    let tokenizer = fs::metadata(store.dir().join(TOKENIZER_FILE)).map_or(0, |m| m.len());
    let mut peak_memory = BASE_MEMORY + TOKENIZER_MEMORY * tokenizer;
    for (i, chunk) in plan.chunks.iter().enumerate() {
        let size = chunk_size(&store, &plan, chunk)?;
        let layers = format!("layers {}..{}", chunk.layers.start, chunk.layers.end);
        files.push((format!("chunk_{i}.aimodel, {layers}"), size.file_bytes));
        peak_memory = peak_memory.max(size.peak_memory());
    }
    files.push((EMBEDDING_FILE.to_string(), store.dense(EMBEDDING)?.len));
    Ok(Sizes { files, peak_memory })
}

/// Runs the command. The folder appears whole or not at all.
///
/// # Errors
/// A bad store, options out of range, or an output that exists.
pub fn run(options: &TargetOptions, ui: Ui, stop: &Stop) -> Result<Manifest, Error> {
    let store = Store::open(&options.store)?;
    let spec = store_spec(&store)?;
    let source = open_tokenizer(store.dir())?;
    source.check_fits(spec.vocab)?;
    let (tokenizer_vocab, tokenizer_files) = (source.size(), source.files().to_vec());
    drop(source);
    let plan = options.plan(&store, &spec, tokenizer_vocab)?;
    let recipe = Recipe::new(options, &store, &plan);
    if recipe.is_finished(&options.output) {
        ui.note("the model folder is complete already");
        return Ok(Manifest::read(&options.output)?);
    }
    let mut work = Work::open(&options.output, &recipe.key)?;
    let stage = ui.stage("target", plan.chunks.len() + 2);
    let mut chunks = Vec::new();
    for (i, chunk) in plan.chunks.iter().enumerate() {
        stop.check()?;
        let path = format!("chunk_{i}.aimodel");
        if !work.has(&path)? {
            write_chunk(
                &store,
                &plan,
                chunk,
                &options.name,
                &work.path().join(&path),
            )?;
            work.finished(&path)?;
        }
        chunks.push(Chunk {
            path,
            layers: [chunk.layers.start, chunk.layers.end],
            functions: plan
                .contexts
                .iter()
                .flat_map(|&context| {
                    plan.widths.iter().map(move |&width| FunctionInfo {
                        name: function_name(context, width),
                        context,
                        width,
                    })
                })
                .collect(),
            taps: chunk.taps.clone(),
            head: chunk.head,
        });
        stage.step(&format!("chunk {i}"));
    }
    stop.check()?;
    if !work.has(EMBEDDING_FILE)? {
        write_embedding(&store, &work.path().join(EMBEDDING_FILE))?;
        work.finished(EMBEDDING_FILE)?;
    }
    stage.step("embedding");
    let tokenizer_dir = work.path().join(TOKENIZER_DIR);
    if !work.has(TOKENIZER_DIR)? {
        fs::create_dir(&tokenizer_dir).map_err(|e| Error::io(&tokenizer_dir, &e))?;
        for name in tokenizer_files {
            let (from, to) = (store.dir().join(name), tokenizer_dir.join(name));
            fs::copy(&from, &to).map_err(|e| Error::io(&from, &e))?;
        }
        work.finished(TOKENIZER_DIR)?;
    }
    for file in &store.manifest().files {
        if notices::travels(&file.name) {
            let (from, to) = (store.dir().join(&file.name), work.path().join(&file.name));
            fs::copy(&from, &to).map_err(|e| Error::io(&from, &e))?;
        }
    }
    recipe.write(work.path())?;
    let tokenizer = open_tokenizer(&tokenizer_dir)?;
    let provenance = &store.manifest().provenance;
    let mut stops = tokenizer.stop_ids();
    stops.extend(spec.eos.iter().copied().chain(tokenizer.end_of_turn()));
    stops.sort_unstable();
    stops.dedup();
    let manifest = Manifest {
        format: MANIFEST_VERSION,
        producer: crate::PRODUCER.to_string(),
        model: ModelInfo {
            name: match provenance.settings.get(PARTIAL).and_then(|v| v.as_str()) {
                Some(layers) => format!("{} (partial: layers {layers})", options.name),
                None => options.name.clone(),
            },
            architecture: format!("{:?}", spec.architecture),
            hidden: spec.hidden,
            layers: spec.layers,
            vocab: spec.vocab,
            tokenizer_vocab,
            head_dim: spec.head_dim,
            kv_channels: spec.kv_heads * spec.head_dim,
            tied_head: spec.tie_word_embeddings,
            source_fingerprint: provenance.source_fingerprint.clone(),
            quantization: quantization_name(&store),
        },
        embedding: TableFile {
            path: EMBEDDING_FILE.to_string(),
            shape: [spec.vocab, spec.hidden],
        },
        rope: RopeTable {
            inv_freq: spec.rope.inv_freq(spec.head_dim),
            attention_factor: spec.rope.attention_factor(),
        },
        mask_value: MASK_VALUE,
        stop: stops,
        chunks,
        contexts: plan.contexts.clone(),
        widths: plan.widths.clone(),
        offset_multiple: 4,
        drafter: None,
        files: BTreeMap::new(),
    };
    let manifest = finish(manifest, work.path(), &work.files())?;
    stage.step("manifest");
    work.commit()?;
    Ok(manifest)
}

/// Lowers a chunk and writes its program.
fn write_chunk(
    store: &Store,
    plan: &TargetPlan,
    chunk: &ChunkPlan,
    name: &str,
    path: &Path,
) -> Result<(), Error> {
    let module = lower_chunk(store, plan, chunk)?;
    if let Some(broken) = first_error(&module) {
        return Err(Error::new(
            Exit::Verification,
            format!("`{}`: {broken}", path.display()),
        ));
    }
    let metadata = Metadata {
        producer: Some(crate::PRODUCER.to_string()),
        description: Some(format!(
            "{name}: layers {} to {}",
            chunk.layers.start,
            chunk.layers.end - 1
        )),
        license: notices::base(store.dir()).name().cloned(),
        ..Metadata::default()
    };
    asset::write_asset(path, &module, &metadata)?;
    Ok(())
}

/// Records the digests of all files, of which some are `known`, and writes the manifest.
pub(super) fn finish(
    mut manifest: Manifest,
    folder: &Path,
    known: &BTreeMap<String, FileInfo>,
) -> Result<Manifest, Error> {
    manifest.files = digest_folder(folder, known).map_err(|e| Error::io(folder, &e))?;
    manifest.write(folder).map_err(|e| Error::io(folder, &e))?;
    Ok(manifest)
}

fn write_embedding(store: &Store, to: &Path) -> Result<(), Error> {
    let table = store.dense(EMBEDDING)?;
    if table.elem != DenseElem::F16 {
        return Err(Error::bad_input(format!(
            "`{EMBEDDING}` of `{}` is not fp16",
            store.dir().display()
        )));
    }
    copy_range(&table.path, table.offset, table.len, to).map_err(|e| Error::io(&table.path, &e))
}

/// Name of a store's quantization, such as `lut4-g32 gptq`.
pub(super) fn quantization_name(store: &Store) -> String {
    let m = store.manifest();
    // What most weights have; the output layer often has other bits.
    let mut weights = BTreeMap::new();
    for r in &m.matrices {
        *weights.entry((r.form(), r.group_rows)).or_insert(0) += r.rows * r.cols;
    }
    match weights.into_iter().max_by_key(|(_, count)| *count) {
        None => "fp16".to_string(),
        Some(((form, group), _)) => format!("lut{form}-g{group} {}", m.provenance.method),
    }
}
