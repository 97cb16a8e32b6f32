//! One store in the making.

use std::collections::BTreeMap;
use std::time::Instant;

use anemone_calib::Weights;
use anemone_schemas::store::{Key, StoreWriter};

use super::effort::Effort;
use super::recipe::Recipe;
use super::rules::{Bits, MatrixOptions};
use super::statistics::{SiteStats, calibration};
use crate::error::Error;
use crate::quantize::{Matrix, Method, OUTPUT_ROWS, OutputHessian, Prepared, Quantizer, Settings};
use crate::stop::Stop;
use crate::ui::{Stage, Ui};

/// A store in the making.
pub(super) struct Work<'a> {
    pub(super) recipe: &'a Recipe,
    /// The provenance as text: part of every key.
    pub(super) seed: String,
    pub(super) writer: StoreWriter,
    /// By bits, vector and the bits of the damping.
    pub(super) quantizers: BTreeMap<(u8, usize, u64), Quantizer>,
}

impl Work<'_> {
    fn key(&self, name: &str) -> Key {
        Key::of([b"lut".as_slice(), self.seed.as_bytes(), name.as_bytes()])
    }

    /// The matrices among `names` that are not in the store yet.
    pub(super) fn missing(&mut self, names: &[String]) -> Result<Vec<String>, Error> {
        let mut missing = Vec::new();
        let names = names.iter().filter(|n| self.recipe.has_table(n));
        for name in names {
            let key = self.key(name);
            if !self.writer.has_lut(name, &key)? {
                missing.push(name.clone());
            }
        }
        Ok(missing)
    }

    fn quantizer(&mut self, options: MatrixOptions, jobs: usize) -> Result<&Quantizer, Error> {
        let bits = match options.bits {
            Bits::Table(bits) => bits,
            // Such matrices are not quantized here.
            Bits::Int8 | Bits::Fp16 => self.recipe.settings.bits,
        };
        let key = (bits, options.vector, options.damping.to_bits());
        if !self.quantizers.contains_key(&key) {
            let settings = Settings {
                bits,
                vector: options.vector,
                damping: options.damping,
                ..self.recipe.settings
            };
            self.quantizers.insert(key, Quantizer::new(settings, jobs)?);
        }
        Ok(&self.quantizers[&key])
    }

    /// Quantizes matrices that read from one site and puts them into the store.
    pub(super) fn site(
        &mut self,
        stats: &SiteStats,
        names: &[String],
        context: &Context<'_>,
        effort: &mut Effort,
    ) -> Result<(), Error> {
        let Some(first) = names.first() else {
            return Ok(());
        };
        let inputs = match &stats.mixed {
            Some(mixed) if self.recipe.guided => mixed,
            _ => &stats.plain,
        };
        let calibration = calibration(first, inputs);
        let (recipe, jobs) = (self.recipe, context.jobs);
        // Prepared statistics are large: one at a time, shared by neighbours of a kind.
        let mut last: Option<(Method, f64, Prepared<'_>)> = None;
        for name in names {
            context.stop.check()?;
            let options = recipe.matrix(name);
            let quantizer = self.quantizer(options, jobs)?;
            let kept = last.take();
            let kept = kept.filter(|l| (l.0, l.1) == (options.method, options.damping));
            let prepared = match kept {
                Some((.., prepared)) => prepared,
                None => quantizer.prepare(calibration, options.method)?,
            };
            let start = Instant::now();
            let (rows, cols, data) = load_matrix(context.weights, name)?;
            let matrix = Matrix {
                name,
                rows,
                cols,
                data: &data,
            };
            let output = stats.outputs.iter().find(|o| o.0 == *name);
            let output = output.map(|(_, blocks)| OutputHessian {
                blocks,
                rows: OUTPUT_ROWS,
            });
            let (lut, report) = quantizer.quantize(matrix, &prepared, output)?;
            last = Some((options.method, options.damping, prepared));
            if let Some(why) = &report.fallback {
                context
                    .ui
                    .note(&format!("`{name}`: {why}; used {}", report.method));
            }
            self.writer.put_lut(name, &self.key(name), &lut, report)?;
            effort.matrix(name, start);
            context.stage.step(name);
        }
        Ok(())
    }
}

/// What all works share while they quantize.
pub(super) struct Context<'a> {
    pub(super) weights: &'a dyn Weights,
    pub(super) jobs: usize,
    pub(super) stage: &'a Stage,
    pub(super) ui: Ui,
    pub(super) stop: &'a Stop,
}

/// A matrix: rows, columns and values.
pub(in crate::commands) fn load_matrix(
    weights: &dyn Weights,
    name: &str,
) -> Result<(usize, usize, Vec<f32>), Error> {
    let (shape, data) = weights.load(name)?;
    let [rows, cols] = shape[..] else {
        return Err(Error::bad_input(format!(
            "`{name}` is no matrix: {shape:?}"
        )));
    };
    Ok((rows, cols, data))
}
