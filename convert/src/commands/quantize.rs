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
use std::path::{Path, PathBuf};
use std::time::Instant;

use anemone_calib::{Hidden, StatsBuilder, Teacher};
use anemone_schemas::checkpoint::{self, Checkpoint};
use anemone_schemas::spec::{LM_HEAD, Linear, ModelSpec, Site};
use anemone_schemas::store::{Provenance, Store, StoreWriter};
use serde_json::Value;

use super::text::{self, Budget};
use crate::error::Error;
use crate::ordered::Ordered;
use crate::output::{self, Kind};
use crate::quantize::{Method, Quantizer, Settings};
use crate::stop::Stop;
use crate::ui::{Stage, Ui};

mod budget;
mod dense;
mod effort;
mod floats;
mod kept;
mod magnitudes;
mod order;
mod recipe;
mod rest;
mod rules;
mod statistics;
mod work;

pub use effort::Effort;
pub(super) use floats::{read_f32, write_f32};
pub(super) use kept::{Kept, Statistics};
use magnitudes::Magnitudes;
use order::Fit;
pub(super) use order::SETTING as ORDER;
pub(crate) use order::TOKENS as ORDER_TOKENS;
pub(super) use order::read_order;
pub(crate) use recipe::RULES;
pub use recipe::Recipe;
pub use rules::Rule;
pub(crate) use rules::{Bits, METHODS};
use statistics::{Scratch, SiteStats, scratch_dir};
pub(super) use work::load_matrix;
use work::{Context, Work};

/// File of the store with the largest magnitude at the input of each norm.
pub(super) const MAGNITUDES_FILE: &str = "norm_magnitudes.json";
/// File of the store with the largest magnitudes of what a program holds in fp16.
const FP16_FILE: &str = "fp16_magnitudes.json";
/// File of the store by which its calibration text is known again.
pub(crate) const CALIBRATION_FILE: &str = "calibration_text.json";
/// File of the store that holds the model's spec.
pub(super) const SPEC_FILE: &str = "model_spec.json";

/// Setting of a store that holds only some layers, and so of no use but for trials.
pub(super) const PARTIAL: &str = "layers";

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
    /// Rows that an index stands for.
    pub vector: usize,
    /// Other options for some matrices.
    pub rules: Vec<Rule>,
    /// Calibration text; empty for the built-in one.
    pub calibration: Vec<PathBuf>,
    /// At most this many calibration tokens.
    pub tokens: usize,
    /// Tokens per window.
    pub window: usize,
    /// Worker threads; the result does not depend on them.
    pub jobs: usize,
    /// Whether the MLP's channels get an order in which neighbours suit one table; see
    /// [`crate::quantize::fit_order`].
    pub fit_order: bool,
    /// Only the first so many layers, for a trial.
    pub layers: Option<usize>,
    /// Bits per weight at most, over all matrices, tables included: their bits are chosen by
    /// how much the loss minds them. In place of `bits`.
    pub target_bpw: Option<f64>,
}

impl QuantizeOptions {
    /// The checkpoint, cut off after [`Self::layers`].
    pub(crate) fn open(&self) -> Result<Checkpoint, Error> {
        let checkpoint = Checkpoint::open(&self.model)?;
        Ok(match self.layers {
            Some(layers) => checkpoint.first_layers(layers)?,
            None => checkpoint,
        })
    }

    /// What a store of these options is made by.
    pub(crate) fn recipe(&self) -> Recipe {
        Recipe {
            output: self.output.clone(),
            method: self.method,
            guided: self.guided,
            settings: Settings {
                bits: self.bits,
                vector: self.vector,
                ..Settings::default()
            },
            rules: self.rules.clone(),
            head: true,
        }
    }

    /// Refuses rules that match nothing.
    pub(crate) fn check_rules(&self, rules: &[Rule], spec: &ModelSpec) -> Result<(), Error> {
        let layers = match self.layers {
            Some(_) => checkpoint::read_spec(&self.model)?.layers,
            None => spec.layers,
        };
        rules::check(rules, spec, layers)
    }

    /// Which layers a trial has, such as `0..2 of 36`.
    fn partial(&self) -> Result<Option<Value>, Error> {
        let Some(layers) = self.layers else {
            return Ok(None);
        };
        let all = checkpoint::read_spec(&self.model)?.layers;
        Ok(Some(format!("0..{layers} of {all}").into()))
    }
}

/// Runs the command.
///
/// # Errors
/// Bad input, no calibration text, or an interruption (exit code 130): the store then
/// holds every finished matrix and the same command goes on.
pub fn run(options: &QuantizeOptions, ui: Ui, stop: &Stop) -> Result<Store, Error> {
    Ok(run_timed(options, ui, stop)?.0)
}

/// [`run`], and what it took.
///
/// # Errors
/// As [`run`].
pub fn run_timed(options: &QuantizeOptions, ui: Ui, stop: &Stop) -> Result<(Store, Effort), Error> {
    let mut recipe = options.recipe();
    if let Some(target) = options.target_bpw {
        output::check(&options.output, Kind::Store, &[&options.model])?;
        let mut rules = budget::allocate(options, target, ui, stop)?;
        rules.append(&mut recipe.rules);
        recipe.rules = rules;
    }
    let (mut stores, effort) = run_all(options, &[recipe], ui, stop)?;
    Ok((stores.remove(0), effort))
}

/// The largest values that a program of a store would hold in fp16, as calibration saw them.
///
/// # Errors
/// A store without them.
pub fn fp16_report(store: &Store) -> Result<String, Error> {
    Ok(Magnitudes::read(store)?.report())
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
) -> Result<(Vec<Store>, Effort), Error> {
    let checkpoint = options.open()?;
    let spec = checkpoint.spec();
    let tokenizer = text::open_tokenizer(&options.model)?;
    tokenizer.check_fits(spec.vocab)?;
    let window = options.window.min(spec.max_position);
    let budget = Budget {
        tokens: options.tokens,
        window,
    };
    for recipe in recipes {
        output::check(&recipe.output, Kind::Store, &[&options.model])?;
        options.check_rules(&recipe.rules, spec)?;
        recipe.check(spec)?;
    }
    let corpus = text::calibration(&tokenizer, &options.calibration, budget)?;
    let mut stores = Vec::new();
    let mut works = Vec::new();
    let mut effort = Effort::default();
    for recipe in recipes {
        let mut settings = recipe.recorded(&corpus, window)?;
        if let Some(partial) = options.partial()? {
            settings.insert(PARTIAL.into(), partial);
        }
        if options.fit_order {
            settings.insert(order::SETTING.into(), order::FITTED.into());
        }
        let provenance = Provenance {
            source_fingerprint: checkpoint.fingerprint(),
            method: recipe.method.name().to_string(),
            settings,
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
        let order = if options.fit_order {
            let fit = Fit {
                checkpoint: &checkpoint,
                corpus: &corpus,
                valid: tokenizer.size(),
                ui,
                stop,
            };
            let folders: Vec<&Path> = works.iter().map(|w| w.recipe.output.as_path()).collect();
            let start = Instant::now();
            let order = fit.find(&folders, scratch_dir(folders[0]))?;
            effort.step("order", start);
            Some(order)
        } else {
            None
        };
        let weights = Ordered::new(&checkpoint, order);
        let steps = (spec.layers * Linear::ALL.len() + 1) * works.len();
        let mut job = Job {
            options,
            weights: &weights,
            spec,
            valid: tokenizer.size(),
            works,
            magnitudes: Magnitudes::default(),
            effort,
            stage: ui.stage("quantize", steps),
            ui,
            stop,
        };
        job.matrices(corpus.windows())?;
        job.dense()?;
        job.copies(&corpus)?;
        checkpoint.unchanged()?;
        effort = job.effort;
        for work in &job.works {
            let parts = work.quantizers.values().flat_map(Quantizer::seconds);
            parts.for_each(|(name, seconds)| effort.add(name, seconds));
        }
        let mut made = job.works.into_iter();
        for store in stores.iter_mut().filter(|s| s.is_none()) {
            let work = made.next().expect("a work for each store to be made");
            *store = Some(work.writer.finish()?);
        }
    }
    Ok((stores.into_iter().flatten().collect(), effort))
}

struct Job<'a> {
    options: &'a QuantizeOptions,
    weights: &'a Ordered<'a>,
    spec: &'a ModelSpec,
    /// Ids the tokenizer knows.
    valid: usize,
    works: Vec<Work<'a>>,
    magnitudes: Magnitudes,
    effort: Effort,
    stage: Stage,
    ui: Ui,
    stop: &'a Stop,
}

impl Job<'_> {
    /// All matrices of all stores.
    fn matrices(&mut self, windows: &[Vec<u32>]) -> Result<(), Error> {
        let teacher = Teacher::new(self.weights);
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
            let start = Instant::now();
            let stats = self.forward(&teacher, layer, &mut hidden, wanted)?;
            self.effort.step("forward", start);
            self.sites(&stats)?;
        }
        let last = hidden.0.iter().flatten();
        let last = last.fold(0.0f32, |max, x| max.max(x.abs()));
        self.magnitudes.last(last);

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
        let start = Instant::now();
        let (stats, mut gradient, logits) =
            statistics::head(&teacher, hidden, self.valid, LM_HEAD, wanted)?;
        self.effort.step("head", start);
        self.magnitudes.logits(logits)?;
        if let Some(stats) = stats {
            self.sites(&[(head, stats)])?;
        }
        for layer in (0..self.spec.layers).rev() {
            self.stop.check()?;
            let wanted = self.lacks(&layer_names(layer))?;
            let start = Instant::now();
            let stats = scratch.take(layer, |input| {
                statistics::layer_backward(&teacher, layer, input, &mut gradient, wanted)
            })?;
            self.effort.step("backward", start);
            // As large as all that follows.
            let mixed_alone = self.works.iter().all(|w| w.recipe.guided);
            for mut stats in stats {
                if mixed_alone && stats.mixed.is_some() {
                    stats.plain.hessian = Vec::new();
                }
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
        self.magnitudes.block(layer, &largest)?;
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
            weights: self.weights,
            jobs: self.options.jobs,
            stage: &self.stage,
            ui: self.ui,
            stop: self.stop,
        };
        for (names, stats) in sites {
            for work in &mut self.works {
                let missing = work.missing(names)?;
                work.site(stats, &missing, &context, &mut self.effort)?;
            }
        }
        Ok(())
    }
}

/// The names of a layer's matrices.
fn layer_names(layer: usize) -> [String; 7] {
    Linear::ALL.map(|linear| linear.tensor(layer))
}
