//! Statistics of all layers that are kept in files for more than one use.

use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use anemone_calib::{Hidden, Teacher, Weights, WindowReader};
use anemone_schemas::spec::{Linear, ModelSpec, Site};

use super::floats::{read_f32, write_f32};
use super::statistics::{self, SiteStats, passes, readers};
use crate::error::Error;
use crate::quantize::{Calibration, OUTPUT_ROWS};
use crate::stop::Stop;
use crate::ui::Ui;

/// A folder with a file per layer: of each site the mixture of plain and guided `Σ x xᵀ`, and of each
/// matrix there `Σ g gᵀ` in blocks, all in f32.
pub(in crate::commands) struct Statistics {
    dir: PathBuf,
    /// Calibration rows.
    rows: u64,
}

/// What a layer's file says of a site.
pub(in crate::commands) struct Kept {
    cols: usize,
    rows: u64,
    hessian: Vec<f32>,
    sumsq: Vec<f64>,
    /// Σ g gᵀ in blocks of [`OUTPUT_ROWS`].
    pub(in crate::commands) outputs: Vec<(Linear, Vec<f32>)>,
}

impl Kept {
    /// As the quantizer takes it.
    pub(in crate::commands) fn calibration(&self) -> Calibration<'_> {
        Calibration {
            name: "statistics",
            cols: self.cols,
            hessian: &self.hessian,
            sumsq: &self.sumsq,
            rows: self.rows,
        }
    }
}

impl Statistics {
    /// Runs the teacher over windows, forward and backward, unless `dir` is complete already.
    pub(in crate::commands) fn gather(
        weights: &dyn Weights,
        windows: &[Vec<u32>],
        valid: usize,
        dir: &Path,
        ui: Ui,
        stop: &Stop,
    ) -> Result<Self, Error> {
        let kept = Self {
            dir: dir.to_path_buf(),
            rows: windows.iter().map(|w| w.len() as u64).sum(),
        };
        let complete = dir.join("complete");
        if complete.exists() {
            return Ok(kept);
        }
        fs::create_dir_all(dir).map_err(|e| Error::io(dir, &e))?;
        let teacher = Teacher::new(weights);
        let stage = ui.stage("statistics", 2 * weights.spec().layers);
        let mut each = |layer: usize, input: WindowReader<'_>, gradient: &mut Hidden| {
            let stats = statistics::layer_backward(&teacher, layer, input, gradient, true)?;
            kept.write(layer, &stats)
        };
        let scratch = dir.join("hidden.partial");
        passes(&teacher, windows, valid, scratch, &stage, stop, &mut each)?;
        fs::write(&complete, "").map_err(|e| Error::io(&complete, &e))?;
        Ok(kept)
    }

    fn path(&self, layer: usize) -> PathBuf {
        self.dir.join(format!("{layer}.f32"))
    }

    fn write(&self, layer: usize, stats: &[SiteStats]) -> Result<(), Error> {
        let path = self.path(layer);
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(File::create(&path)?);
            for site in Site::OF_LAYER {
                for found in stats.iter().filter(|s| s.plain.site == site) {
                    let inputs = found.mixed.as_ref().unwrap_or(&found.plain);
                    let blocks = found.outputs.iter().flat_map(|o| &o.1);
                    write_f32(&mut out, inputs.hessian.iter().chain(blocks))?;
                }
            }
            out.flush()
        };
        write().map_err(|e| Error::io(&path, &e))
    }

    /// The statistics of a layer.
    pub(in crate::commands) fn layer(
        &self,
        spec: &ModelSpec,
        layer: usize,
    ) -> Result<Vec<Kept>, Error> {
        let path = self.path(layer);
        let read = || -> std::io::Result<Vec<Kept>> {
            let mut file = BufReader::new(File::open(&path)?);
            let mut take = |count| read_f32(&mut file, count);
            let mut sites = Vec::new();
            for site in Site::OF_LAYER {
                let cols = site.width(spec);
                let hessian = take(cols * cols)?;
                let sumsq = (0..cols).map(|c| hessian[c * cols + c].into()).collect();
                let mut outputs = Vec::new();
                for linear in readers(site) {
                    let blocks = linear.shape(spec)[0].div_ceil(OUTPUT_ROWS);
                    outputs.push((linear, take(blocks * OUTPUT_ROWS * OUTPUT_ROWS)?));
                }
                sites.push(Kept {
                    cols,
                    rows: self.rows,
                    hessian,
                    sumsq,
                    outputs,
                });
            }
            Ok(sites)
        };
        read().map_err(|e| Error::io(&path, &e))
    }
}
