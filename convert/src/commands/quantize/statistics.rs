//! The passes of the teacher that statistics come from.
//!
//! Forward, layer by layer over all windows at once, so only one layer's weights are in memory.
//! If something needs gradients, the input of each layer goes to a scratch file, and
//! after the end of the model a second pass takes the layers from the last to the first, with
//! the statistics of each. Without, statistics come from the first pass.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use anemone_calib::{
    Error as CalibError, Guided, GuidedBuilder, Hidden, LinearGradient, Stats, Teacher,
    WindowReader, sampled_loss,
};
use anemone_schemas::spec::{LM_HEAD, Linear, ModelSpec, Site};

use super::floats::{read_f32, write_f32};
use crate::error::Error;
use crate::quantize::{Calibration, OUTPUT_ROWS};
use crate::stop::Stop;
use crate::ui::Stage;

/// Seed of the ids that are drawn for the gradients.
pub(super) const LABEL_SEED: u64 = 1;

/// What is known about the inputs of a site, and the outputs of the matrices there.
pub(super) struct SiteStats {
    /// Σ x xᵀ.
    pub(super) plain: Stats,
    /// The mixture of that with its weighted sibling, if there were gradients.
    pub(super) mixed: Option<Stats>,
    /// By name of the tensor: Σ g gᵀ in blocks.
    pub(super) outputs: Vec<(String, Vec<f32>)>,
}

impl SiteStats {
    pub(super) fn plain(plain: Stats) -> Self {
        Self {
            plain,
            mixed: None,
            outputs: Vec::new(),
        }
    }

    fn guided(found: Guided, names: Vec<String>) -> Self {
        Self {
            plain: found.plain,
            mixed: Some(found.mixed),
            outputs: names.into_iter().zip(found.outputs).collect(),
        }
    }
}

/// Statistics of inputs as the quantizer takes them; `name` is for messages.
pub(super) fn calibration<'a>(name: &'a str, inputs: &'a Stats) -> Calibration<'a> {
    Calibration {
        name,
        cols: inputs.cols,
        hessian: &inputs.hessian,
        sumsq: &inputs.sumsq,
        rows: inputs.rows,
    }
}

/// Hidden states of all layers in files, removed when dropped.
pub(super) struct Scratch {
    dir: PathBuf,
    lengths: Vec<usize>,
}

impl Scratch {
    /// For windows of these many values, in `dir`, which is emptied.
    pub(super) fn create(dir: PathBuf, hidden: &Hidden) -> Result<Self, Error> {
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).map_err(|e| Error::io(&dir, &e))?;
        let lengths = hidden.0.iter().map(Vec::len).collect();
        Ok(Self { dir, lengths })
    }

    fn path(&self, layer: usize) -> PathBuf {
        self.dir.join(format!("{layer}.f32"))
    }

    /// Writes the input of a layer.
    pub(super) fn put(&self, layer: usize, hidden: &Hidden) -> Result<(), Error> {
        let path = self.path(layer);
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(File::create(&path)?);
            write_f32(&mut out, hidden.0.iter().flatten())?;
            out.flush()
        };
        write().map_err(|e| Error::io(&path, &e))
    }

    /// Lets `with` read the input of a layer, window by window, and removes its file.
    pub(super) fn take<T>(
        &self,
        layer: usize,
        with: impl FnOnce(WindowReader<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let path = self.path(layer);
        let file = File::open(&path).map_err(|e| Error::io(&path, &e))?;
        let mut file = BufReader::new(file);
        let done = with(&mut |window| {
            read_f32(&mut file, self.lengths[window]).map_err(|source| CalibError::Io {
                path: path.clone(),
                source,
            })
        })?;
        drop(file);
        fs::remove_file(&path).map_err(|e| Error::io(&path, &e))?;
        Ok(done)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Where the scratch files of a store lie.
pub(super) fn scratch_dir(output: &Path) -> PathBuf {
    output.join("hidden.partial")
}

/// Runs the teacher over windows, forward and backward. `each` sees the layers from the last to the
/// first, with their inputs and the gradient at their outputs, which it takes to that at the inputs.
pub(super) fn passes(
    teacher: &Teacher<'_>,
    windows: &[Vec<u32>],
    valid: usize,
    scratch: PathBuf,
    stage: &Stage,
    stop: &Stop,
    each: &mut dyn FnMut(usize, WindowReader<'_>, &mut Hidden) -> Result<(), Error>,
) -> Result<(), Error> {
    let layers = teacher.spec().layers;
    let mut hidden = teacher.embed(windows)?;
    let scratch = Scratch::create(scratch, &hidden)?;
    for layer in 0..layers {
        stop.check()?;
        scratch.put(layer, &hidden)?;
        teacher.block(layer, &mut hidden, None)?;
        stage.step(&format!("layer {layer}, forward"));
    }
    let (_, mut gradient, _) = head(teacher, hidden, valid, LM_HEAD, false)?;
    for layer in (0..layers).rev() {
        stop.check()?;
        scratch.take(layer, |input| each(layer, input, &mut gradient))?;
        stage.step(&format!("layer {layer}, backward"));
    }
    Ok(())
}

/// Statistics of the output layer, whose gradients need no draw, and the gradient of the loss at
/// the output of the last block. The last is the largest magnitude of a logit.
pub(super) fn head(
    teacher: &Teacher<'_>,
    hidden: Hidden,
    valid: usize,
    name: &str,
    wanted: bool,
) -> Result<(Option<SiteStats>, Hidden, f32), Error> {
    let spec = teacher.spec();
    let vocab = spec.vocab;
    let mut builder =
        wanted.then(|| GuidedBuilder::new(Site::HeadIn, spec.hidden, &[vocab], OUTPUT_ROWS));
    let starts: Vec<usize> = hidden
        .0
        .iter()
        .scan(0, |sum, window| {
            let start = *sum;
            *sum += window.len() / spec.hidden;
            Some(start)
        })
        .collect();
    let mut largest = 0.0f32;
    let mut loss = |window: usize, first: usize, normed: &[f32], logits: &mut [f32]| {
        largest = logits.iter().fold(largest, |max, x| max.max(x.abs()));
        if let Some(builder) = &mut builder {
            let mut probabilities = logits.to_vec();
            anemone_calib::softmax_rows(&mut probabilities, vocab, valid);
            builder.add_distribution(normed, &probabilities)?;
        }
        sampled_loss(logits, vocab, valid, LABEL_SEED, starts[window] + first);
        Ok(())
    };
    let (gradient, _) = teacher.head_backward(hidden, teacher.head()?, &mut loss)?;
    let stats = match builder {
        Some(builder) => Some(SiteStats::guided(builder.finish()?, vec![name.to_string()])),
        None => None,
    };
    Ok((stats, gradient, largest))
}

/// Takes `gradient` back through a layer, and gives the statistics of its sites if `wanted`.
pub(super) fn layer_backward(
    teacher: &Teacher<'_>,
    layer: usize,
    input: WindowReader<'_>,
    gradient: &mut Hidden,
    wanted: bool,
) -> Result<Vec<SiteStats>, Error> {
    let spec = teacher.spec();
    let mut builders: Vec<(Site, GuidedBuilder)> = Vec::new();
    let mut failed: Option<CalibError> = None;
    let mut hook = |site: Site, inputs: &[f32], outputs: &[LinearGradient<'_>]| {
        if !builders.iter().any(|b| b.0 == site) {
            builders.push((site, builder(spec, site)));
        }
        let rows: Vec<&[f32]> = outputs.iter().map(|o| o.rows).collect();
        for (_, builder) in builders.iter_mut().filter(|b| b.0 == site) {
            if let Err(e) = builder.add(inputs, &rows) {
                failed.get_or_insert(e);
            }
        }
    };
    teacher.backward(layer, input, gradient, wanted.then_some(&mut hook))?;
    if let Some(e) = failed {
        return Err(e.into());
    }
    let named = |site: Site| readers(site).map(|l| l.tensor(layer)).collect();
    let stats = builders
        .into_iter()
        .map(|(site, b)| Ok(SiteStats::guided(b.finish()?, named(site))));
    stats.collect()
}

/// The matrices that read a site, in the order of the teacher's hook.
pub(super) fn readers(site: Site) -> impl Iterator<Item = Linear> {
    Linear::ALL.into_iter().filter(move |l| l.site() == site)
}

fn builder(spec: &ModelSpec, site: Site) -> GuidedBuilder {
    let outputs: Vec<usize> = readers(site).map(|l| l.shape(spec)[0]).collect();
    GuidedBuilder::new(site, site.width(spec), &outputs, OUTPUT_ROWS)
}
