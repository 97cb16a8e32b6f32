//! What a store holds beside its matrices of tables.

use std::fs;

use anemone_calib::Corpus;
use anemone_schemas::spec::{EMBEDDING, FINAL_NORM, LM_HEAD, Linear};

use super::dense::{put_f16, put_int8};
use super::{Bits, CALIBRATION_FILE, FP16_FILE, Job, MAGNITUDES_FILE, SPEC_FILE, order};
use crate::commands::{notices, text};
use crate::error::Error;

impl Job<'_> {
    /// Norms, the embedding table and what else stays in fp16.
    pub(super) fn dense(&mut self) -> Result<(), Error> {
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
                put_f16(work, self.weights, name, shape)?;
            }
            let matrices = (0..spec.layers).flat_map(|layer| {
                Linear::ALL.map(|linear| (linear.tensor(layer), linear.shape(spec)))
            });
            let head = (LM_HEAD.to_string(), [spec.vocab, spec.hidden]);
            for (name, shape) in matrices.chain([head]) {
                let put = match work.recipe.matrix(&name).bits {
                    Bits::Table(_) => continue,
                    Bits::Int8 => put_int8,
                    Bits::Fp16 => put_f16,
                };
                self.stop.check()?;
                put(work, self.weights, &name, &shape)?;
                self.stage.step(&name);
            }
        }
        Ok(())
    }

    /// The model's spec, its tokenizer, licence and notices, and what was noted of the
    /// calibration.
    pub(super) fn copies(&mut self, corpus: &Corpus) -> Result<(), Error> {
        let mut files = vec![
            (SPEC_FILE.to_owned(), json(self.spec)?),
            (MAGNITUDES_FILE.to_owned(), json(self.magnitudes.norms())?),
            (FP16_FILE.to_owned(), json(self.magnitudes.sites())?),
            (CALIBRATION_FILE.to_owned(), json(&corpus.shingles())?),
        ];
        if let Some(order) = self.weights.order() {
            files.push(order::file(order)?);
        }
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

fn json<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, Error> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(|e| Error::unexpected(&e))?;
    bytes.push(b'\n');
    Ok(bytes)
}
