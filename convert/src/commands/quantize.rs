//! `quantize`: checkpoint and calibration text in, quantized store out.
//!
//! The teacher runs over the calibration windows, forward and, if the method asks for it,
//! backward (`statistics`). What it sees at the four places where a layer reads an input
//! becomes statistics, and the statistics quantize the layer's seven matrices. Everything is
//! measured on the unquantized model, so no matrix depends on another. Several stores may be
//! made at once: they share the passes.
//!
//! Every matrix has a key: the hash of all that determines its bytes. A matrix found
//! in the store under its key is not computed again, so an interrupted run goes on
//! where it stopped and ends in the same bytes; only the teacher starts anew.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anemone_calib::{Corpus, Hidden, StatsBuilder, Teacher, Weights};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::exit::Exit;
use anemone_schemas::spec::{EMBEDDING, FINAL_NORM, LM_HEAD, Linear, ModelSpec, Norm, Site};
use anemone_schemas::store::{DenseElem, Key, Provenance, Store, StoreWriter};
use half::f16;
use serde_json::{Map, Value};

use super::notices;
use super::text::{self, Budget};
use crate::error::Error;
use crate::quantize::{
    CODE_VERSION, Calibration, Matrix, Method, OutputHessian, Quantizer, Settings,
};
use crate::stop::Stop;
use crate::ui::{Stage, Ui};

mod statistics;

use statistics::{LABEL_SEED, Scratch, SiteStats, scratch_dir};

/// File of the store with the largest magnitude at the input of each norm.
pub(super) const MAGNITUDES_FILE: &str = "norm_magnitudes.json";
/// File of the store by which its calibration text is known again.
pub(crate) const CALIBRATION_FILE: &str = "calibration_text.json";
/// File of the store that holds the model's spec.
pub(super) const SPEC_FILE: &str = "model_spec.json";

/// What to quantize and how.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Store to make.
    pub output: PathBuf,
    /// How codes and tables are chosen.
    pub method: Method,
    /// Whether inputs count by the gradient of the loss; see [`Recipe::guided`].
    pub guided: bool,
    /// Bits per weight.
    pub bits: u8,
    /// Exceptions to `bits`.
    pub rules: Vec<BitsRule>,
    /// Calibration text; empty for the built-in one.
    pub calibration: Vec<PathBuf>,
    /// At most this many calibration tokens.
    pub tokens: usize,
    /// Tokens per window.
    pub window: usize,
    /// Worker threads; the result does not depend on them.
    pub jobs: usize,
}

/// Other bits for the matrices whose name holds a text, written `TEXT=BITS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitsRule {
    /// Part of a tensor's name, such as `lm_head` or `layers.0.`.
    pub part: String,
    /// Bits per weight.
    pub bits: u8,
}

impl FromStr for BitsRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (part, bits) = text.rsplit_once('=').ok_or("expected TEXT=BITS")?;
        let bits = bits.parse().map_err(|e| format!("`{bits}`: {e}"))?;
        let part = part.to_string();
        Ok(Self { part, bits })
    }
}

/// What determines a store, apart from model and text.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Store to make.
    pub output: PathBuf,
    /// How codes and tables are chosen.
    pub method: Method,
    /// Whether inputs count by the gradient of the loss, mixed half and half with all
    /// counting the same.
    pub guided: bool,
    /// Damping, rounds and bits.
    pub settings: Settings,
    /// Exceptions to the bits; the last that fits counts.
    pub rules: Vec<BitsRule>,
    /// Whether the output layer is quantized too. Without it a store cannot be lowered, only
    /// compared with others.
    pub head: bool,
}

impl Recipe {
    /// Whether the teacher must run backward for it.
    fn needs_gradients(&self) -> bool {
        self.guided || self.method == Method::TwoSided
    }

    fn bits(&self, name: &str) -> u8 {
        let fitting = self.rules.iter().rev().find(|r| name.contains(&r.part));
        fitting.map_or(self.settings.bits, |rule| rule.bits)
    }

    /// All that changes the result, for the store's provenance.
    fn recorded(&self, corpus: &Corpus, window: usize) -> Result<Map<String, Value>, Error> {
        let mut map = match serde_json::to_value(self.settings) {
            Ok(Value::Object(map)) => map,
            Ok(_) => Map::new(),
            Err(e) => return Err(Error::unexpected(&e)),
        };
        map.insert("guided".into(), self.guided.into());
        if self.needs_gradients() {
            map.insert("label_seed".into(), LABEL_SEED.into());
        }
        let rules = self.rules.iter().map(|r| (r.part.clone(), r.bits.into()));
        let rules: Map<String, Value> = rules.collect();
        if !rules.is_empty() {
            map.insert("bits_for".into(), rules.into());
        }
        map.insert("calibration_tokens".into(), corpus.tokens().into());
        map.insert("calibration_window".into(), window.into());
        map.insert("calibration_seed".into(), text::SEED.into());
        map.insert("code_version".into(), CODE_VERSION.into());
        Ok(map)
    }
}

/// Runs the command.
///
/// # Errors
/// Bad input, no calibration text, or an interruption (exit code 130): the store then
/// holds every finished matrix and the same command goes on.
pub fn run(options: &QuantizeOptions, ui: Ui, stop: &Stop) -> Result<Store, Error> {
    let recipe = Recipe {
        output: options.output.clone(),
        method: options.method,
        guided: options.guided,
        settings: Settings {
            bits: options.bits,
            ..Settings::default()
        },
        rules: options.rules.clone(),
        head: true,
    };
    let mut stores = run_all(options, &[recipe], ui, stop)?;
    Ok(stores.remove(0))
}

/// Makes a store of each recipe; of `options`, model, text and threads count. The
/// stores are what [`run`] would make one by one.
///
/// # Errors
/// As [`run`].
pub fn run_all(
    options: &QuantizeOptions,
    recipes: &[Recipe],
    ui: Ui,
    stop: &Stop,
) -> Result<Vec<Store>, Error> {
    let checkpoint = Checkpoint::open(&options.model)?;
    let spec = checkpoint.spec();
    let tokenizer = text::open_tokenizer(&options.model)?;
    let window = options.window.min(spec.max_position);
    let budget = Budget {
        tokens: options.tokens,
        window,
    };
    for recipe in recipes {
        refuse_foreign_output(&options.model, &recipe.output)?;
    }
    let corpus = text::calibration(&tokenizer, &options.calibration, budget)?;
    let mut stores = Vec::new();
    let mut works = Vec::new();
    for recipe in recipes {
        let provenance = Provenance {
            source_fingerprint: checkpoint.fingerprint(),
            method: recipe.method.name().to_string(),
            settings: recipe.recorded(&corpus, window)?,
            calibration: Some(corpus.fingerprint()),
            tool: crate::PRODUCER.to_string(),
        };
        if let Ok(store) = Store::open(&recipe.output)
            && store.manifest().provenance == provenance
        {
            ui.note(&format!(
                "`{}` is complete already",
                recipe.output.display()
            ));
            stores.push(Some(store));
        } else {
            stores.push(None);
            works.push(Work {
                recipe,
                seed: serde_json::to_string(&provenance).map_err(|e| Error::unexpected(&e))?,
                writer: StoreWriter::create_or_resume(&recipe.output, provenance)?,
                quantizers: BTreeMap::new(),
            });
        }
    }
    if !works.is_empty() {
        ui.note(&format!(
            "quantizing the {} layers of `{}`, {} calibration tokens",
            spec.layers,
            options.model.display(),
            corpus.tokens(),
        ));
        let steps = (spec.layers * Linear::ALL.len() + 1) * works.len();
        let mut job = Job {
            options,
            checkpoint: &checkpoint,
            spec,
            valid: tokenizer.size(),
            works,
            magnitudes: BTreeMap::new(),
            stage: ui.stage("quantize", steps),
            ui,
            stop,
        };
        job.matrices(corpus.windows())?;
        job.dense()?;
        job.copies(&corpus)?;
        checkpoint.unchanged()?;
        let mut made = job.works.into_iter();
        for store in stores.iter_mut().filter(|s| s.is_none()) {
            let work = made.next().expect("a work for each store to be made");
            *store = Some(work.writer.finish()?);
        }
    }
    Ok(stores.into_iter().flatten().collect())
}

/// Refuses an output inside the input, and a folder that is neither empty nor ours.
fn refuse_foreign_output(model: &Path, output: &Path) -> Result<(), Error> {
    let Ok(entries) = fs::read_dir(output) else {
        return Ok(());
    };
    let inside = |a: &Path, b: &Path| match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a.starts_with(b),
        _ => false,
    };
    if inside(output, model) {
        return Err(Error::usage(format!(
            "the output `{}` lies in the checkpoint folder",
            output.display()
        )));
    }
    let ours = output.join("matrices").is_dir();
    if !ours && entries.count() > 0 {
        return Err(Error::usage(format!(
            "`{}` is not empty and no quantized store",
            output.display()
        ))
        .hint("choose another output folder, or pass `--overwrite`"));
    }
    Ok(())
}

/// A store in the making.
struct Work<'a> {
    recipe: &'a Recipe,
    /// The provenance as text: part of every key.
    seed: String,
    writer: StoreWriter,
    /// By bits.
    quantizers: BTreeMap<u8, Quantizer>,
}

impl Work<'_> {
    fn key(&self, name: &str) -> Key {
        Key::of([b"lut".as_slice(), self.seed.as_bytes(), name.as_bytes()])
    }

    /// The matrices among `names` that are not in the store yet.
    fn missing(&mut self, names: &[String]) -> Result<Vec<String>, Error> {
        let mut missing = Vec::new();
        let names = names.iter().filter(|n| self.recipe.head || *n != LM_HEAD);
        for name in names {
            let key = self.key(name);
            if !self.writer.has_lut(name, &key)? {
                missing.push(name.clone());
            }
        }
        Ok(missing)
    }

    fn quantizer(&mut self, bits: u8, jobs: usize) -> Result<&Quantizer, Error> {
        if !self.quantizers.contains_key(&bits) {
            let settings = Settings {
                bits,
                ..self.recipe.settings
            };
            self.quantizers
                .insert(bits, Quantizer::new(settings, jobs)?);
        }
        Ok(&self.quantizers[&bits])
    }

    /// Quantizes matrices that read from one site and puts them into the store.
    fn site(
        &mut self,
        stats: &SiteStats,
        names: &[String],
        context: &Context<'_>,
    ) -> Result<(), Error> {
        let Some(first) = names.first() else {
            return Ok(());
        };
        let inputs = match &stats.mixed {
            Some(mixed) if self.recipe.guided => mixed,
            _ => &stats.plain,
        };
        let calibration = Calibration {
            name: first,
            cols: inputs.cols,
            hessian: &inputs.hessian,
            sumsq: &inputs.sumsq,
            rows: inputs.rows,
        };
        let (recipe, jobs) = (self.recipe, context.jobs);
        let prepared = self
            .quantizer(recipe.settings.bits, jobs)?
            .prepare(calibration, recipe.method)?;
        for name in names {
            context.stop.check()?;
            let (shape, data) = context.checkpoint.load(name)?;
            let [rows, cols] = shape[..] else {
                return Err(Error::bad_input(format!(
                    "`{name}` is no matrix: {shape:?}"
                )));
            };
            let matrix = Matrix {
                name,
                rows,
                cols,
                data: &data,
            };
            let output = stats.outputs.iter().find(|o| o.0 == *name);
            let output = output.map(|(_, blocks)| OutputHessian { blocks });
            let (lut, report) = self
                .quantizer(recipe.bits(name), jobs)?
                .quantize(matrix, &prepared, output)?;
            if let Some(why) = &report.fallback {
                context
                    .ui
                    .note(&format!("`{name}`: {why}; used {}", report.method));
            }
            self.writer.put_lut(name, &self.key(name), &lut, report)?;
            context.stage.step(name);
        }
        Ok(())
    }
}

/// What all works share while they quantize.
struct Context<'a> {
    checkpoint: &'a Checkpoint,
    jobs: usize,
    stage: &'a Stage,
    ui: Ui,
    stop: &'a Stop,
}

struct Job<'a> {
    options: &'a QuantizeOptions,
    checkpoint: &'a Checkpoint,
    spec: &'a ModelSpec,
    /// Ids the tokenizer knows.
    valid: usize,
    works: Vec<Work<'a>>,
    /// Largest magnitude at the input of each norm, by the name of its weight.
    magnitudes: BTreeMap<String, f32>,
    stage: Stage,
    ui: Ui,
    stop: &'a Stop,
}

impl Job<'_> {
    /// All matrices of all stores.
    fn matrices(&mut self, windows: &[Vec<u32>]) -> Result<(), Error> {
        let teacher = Teacher::new(self.checkpoint);
        let mut hidden = teacher.embed(windows)?;
        let backward = self.works.iter().any(|w| w.recipe.needs_gradients());
        let scratch = match self.works.first() {
            Some(work) if backward => {
                Some(Scratch::create(scratch_dir(&work.recipe.output), &hidden)?)
            }
            _ => None,
        };
        for layer in 0..self.spec.layers {
            self.stop.check()?;
            if let Some(scratch) = &scratch {
                scratch.put(layer, &hidden)?;
            }
            let wanted = scratch.is_none() && self.lacks(&layer_names(layer))?;
            let stats = self.forward(&teacher, layer, &mut hidden, wanted)?;
            self.sites(&stats)?;
        }
        let last = hidden.0.iter().flatten();
        let last = last.fold(0.0f32, |max, x| max.max(x.abs()));
        self.magnitudes.insert(FINAL_NORM.to_string(), last);

        let head = vec![LM_HEAD.to_string()];
        let wanted = self.lacks(&head)?;
        let Some(scratch) = scratch else {
            if wanted {
                let mut builder = StatsBuilder::new(Site::HeadIn, self.spec.hidden);
                for rows in &teacher.final_norm(&hidden)?.0 {
                    builder.add(rows)?;
                }
                self.sites(&[(head, SiteStats::plain(builder.finish()?))])?;
            }
            return Ok(());
        };
        let (stats, mut gradient) =
            statistics::head(&teacher, &hidden, self.valid, LM_HEAD, wanted)?;
        drop(hidden);
        if let Some(stats) = stats {
            self.sites(&[(head, stats)])?;
        }
        for layer in (0..self.spec.layers).rev() {
            self.stop.check()?;
            let input = scratch.take(layer)?;
            let wanted = self.lacks(&layer_names(layer))?;
            let stats = statistics::layer_backward(&teacher, layer, &input, &mut gradient, wanted)?;
            for stats in stats {
                let names = stats.outputs.iter().map(|o| o.0.clone()).collect();
                self.sites(&[(names, stats)])?;
            }
        }
        Ok(())
    }

    /// Whether a store lacks one of the matrices.
    fn lacks(&mut self, names: &[String]) -> Result<bool, Error> {
        let mut lacks = false;
        for work in &mut self.works {
            lacks |= !work.missing(names)?.is_empty();
        }
        Ok(lacks)
    }

    /// Takes `hidden` through `layer`; notes the largest inputs of its norms and, if
    /// `wanted`, gathers the statistics of its linears' inputs.
    fn forward(
        &mut self,
        teacher: &Teacher<'_>,
        layer: usize,
        hidden: &mut Hidden,
        wanted: bool,
    ) -> Result<Vec<(Vec<String>, SiteStats)>, Error> {
        let mut builders: BTreeMap<Site, StatsBuilder> = BTreeMap::new();
        let mut failed = None;
        let spec = self.spec;
        let mut hook = |site: Site, rows: &[f32]| {
            let builder = builders
                .entry(site)
                .or_insert_with(|| StatsBuilder::new(site, site.width(spec)));
            if let Err(e) = builder.add(rows) {
                failed.get_or_insert(e);
            }
        };
        let largest = teacher.block(layer, hidden, wanted.then_some(&mut hook))?;
        for (norm, max) in [
            (Norm::Input, largest.input),
            (Norm::PostAttention, largest.post_attention),
        ] {
            self.magnitudes.insert(norm.tensor(layer), max);
        }
        if let Some(e) = failed {
            return Err(e.into());
        }
        let stats = builders.into_iter().map(|(site, b)| {
            let readers = Linear::ALL.into_iter().filter(|l| l.site() == site);
            let names = readers.map(|l| l.tensor(layer)).collect();
            Ok((names, SiteStats::plain(b.finish()?)))
        });
        stats.collect()
    }

    /// Quantizes the named matrices in all stores that lack them.
    fn sites(&mut self, sites: &[(Vec<String>, SiteStats)]) -> Result<(), Error> {
        let context = Context {
            checkpoint: self.checkpoint,
            jobs: self.options.jobs,
            stage: &self.stage,
            ui: self.ui,
            stop: self.stop,
        };
        for (names, stats) in sites {
            for work in &mut self.works {
                let missing = work.missing(names)?;
                work.site(stats, &missing, &context)?;
            }
        }
        Ok(())
    }

    /// Norms and the embedding table, in fp16.
    fn dense(&mut self) -> Result<(), Error> {
        let spec = self.spec;
        let mut names = vec![(FINAL_NORM.to_string(), vec![spec.hidden])];
        for layer in 0..spec.layers {
            let norms = spec.architecture.norms().iter();
            names.extend(norms.map(|n| (n.tensor(layer), vec![n.width(spec)])));
        }
        names.push((EMBEDDING.to_string(), vec![spec.vocab, spec.hidden]));
        for work in &mut self.works {
            for (name, shape) in &names {
                self.stop.check()?;
                put_f16(work, self.checkpoint, name, shape)?;
            }
        }
        Ok(())
    }

    /// The model's spec, its tokenizer, licence and notices, and what was noted of the
    /// calibration.
    fn copies(&mut self, corpus: &Corpus) -> Result<(), Error> {
        let mut files = vec![
            (SPEC_FILE.to_owned(), json(self.spec)?),
            (MAGNITUDES_FILE.to_owned(), json(&self.magnitudes)?),
            (CALIBRATION_FILE.to_owned(), json(&corpus.shingles())?),
        ];
        files.extend(notices::collect(&self.options.model)?);
        for name in text::open_tokenizer(&self.options.model)?.files() {
            let path = self.options.model.join(name);
            let bytes = fs::read(&path).map_err(|e| Error::io(&path, &e))?;
            files.push(((*name).to_owned(), bytes));
        }
        for work in &mut self.works {
            for (name, bytes) in &files {
                work.writer.put_file(name, bytes)?;
            }
        }
        Ok(())
    }
}

/// The names of a layer's matrices.
fn layer_names(layer: usize) -> [String; 7] {
    Linear::ALL.map(|linear| linear.tensor(layer))
}

fn json<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, Error> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(|e| Error::unexpected(&e))?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Puts a tensor of the checkpoint into a store in fp16.
fn put_f16(
    work: &mut Work<'_>,
    checkpoint: &Checkpoint,
    name: &str,
    shape: &[usize],
) -> Result<(), Error> {
    let key = Key::of([b"f16".as_slice(), work.seed.as_bytes(), name.as_bytes()]);
    if work.writer.has_dense(name, &key)? {
        return Ok(());
    }
    let rows = shape[0] as u32;
    let mut failed = None;
    let put = work
        .writer
        .put_dense(name, &key, DenseElem::F16, shape, |out| {
            for first in (0..rows).step_by(1024) {
                let rows: Vec<u32> = (first..rows.min(first + 1024)).collect();
                match to_f16(checkpoint, name, &rows) {
                    Ok(bytes) => out.write_all(&bytes)?,
                    Err(e) => {
                        let message = e.message.clone();
                        failed = Some(e);
                        return Err(std::io::Error::other(message));
                    }
                }
            }
            Ok(())
        });
    match failed {
        Some(e) => Err(e),
        None => Ok(put?),
    }
}

/// Rows of a tensor as little-endian fp16; what fp16 cannot hold is refused.
fn to_f16(checkpoint: &Checkpoint, name: &str, rows: &[u32]) -> Result<Vec<u8>, Error> {
    let values = checkpoint.read_rows_f32(name, rows)?;
    let mut bytes = Vec::with_capacity(values.len() * 2);
    for v in values {
        let h = f16::from_f32(v);
        if h.is_infinite() {
            return Err(Error::new(
                Exit::Numerical,
                format!("`{name}` holds {v}, which fp16 cannot"),
            ));
        }
        bytes.extend_from_slice(&h.to_le_bytes());
    }
    Ok(bytes)
}
