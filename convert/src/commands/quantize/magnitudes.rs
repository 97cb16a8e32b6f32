//! What a program must hold in fp16, judged by the largest magnitudes of calibration.
//!
//! A program keeps the residual stream, what the matrices give and the logits in fp16, whose
//! largest finite value is 65504. Squares of a norm's inputs overflow far below that; they are
//! no obstacle, since the graph divides those inputs by a power of two. Anything else that
//! came out larger cannot be held, and the model is refused with the place.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use anemone_calib::Magnitudes as Block;
use anemone_schemas::exit::Exit;
use anemone_schemas::spec::{FINAL_NORM, Norm};
use anemone_schemas::store::Store;

use super::{FP16_FILE, MAGNITUDES_FILE};
use crate::error::Error;
use crate::lower::{MAGNITUDE_HEADROOM, shift_for};

/// The largest finite value of fp16.
const LARGEST: f32 = 65504.0;

/// Places of the report.
const SHOWN: usize = 10;

/// The largest magnitude that calibration saw of each thing a program computes.
#[derive(Default)]
pub(super) struct Magnitudes {
    sites: BTreeMap<String, f32>,
    /// By the name of the norm's weight: its input.
    norms: BTreeMap<String, f32>,
}

impl Magnitudes {
    /// Takes in what a block computed.
    ///
    /// # Errors
    /// A place whose values fp16 cannot hold.
    pub(super) fn block(&mut self, layer: usize, found: &Block) -> Result<(), Error> {
        for (name, magnitude) in [
            ("q_proj output", found.q),
            ("k_proj output", found.k),
            ("v_proj output", found.v),
            ("attention output", found.attn_out),
            ("gate_proj output", found.gate),
            ("up_proj output", found.up),
            ("gate * up", found.product),
            ("residual stream before attention", found.input),
            ("residual stream before the MLP", found.post_attention),
            ("residual stream after the MLP", found.output),
        ] {
            self.site(format!("layer {layer}: {name}"), magnitude)?;
        }
        for (norm, magnitude) in [
            (Norm::Input, found.input),
            (Norm::PostAttention, found.post_attention),
        ] {
            self.norms.insert(norm.tensor(layer), magnitude);
        }
        Ok(())
    }

    /// Takes in the input of the final norm: the residual stream at the end.
    pub(super) fn last(&mut self, magnitude: f32) {
        self.norms.insert(FINAL_NORM.to_string(), magnitude);
    }

    /// Takes in the logits.
    ///
    /// # Errors
    /// If fp16 cannot hold them.
    pub(super) fn logits(&mut self, magnitude: f32) -> Result<(), Error> {
        self.site("logits".to_string(), magnitude)
    }

    fn site(&mut self, name: String, magnitude: f32) -> Result<(), Error> {
        if magnitude > LARGEST {
            return Err(Error::new(
                Exit::Numerical,
                format!(
                    "{name}: {magnitude:.0} during calibration, and fp16 holds at most {LARGEST}"
                ),
            )
            .hint("a program keeps these values in fp16; this model cannot be lowered"));
        }
        self.sites.insert(name, magnitude);
        Ok(())
    }

    /// Inputs of the norms by the names of their weights, for the store.
    pub(super) fn norms(&self) -> &BTreeMap<String, f32> {
        &self.norms
    }

    /// The places and how large their values got, for the store.
    pub(super) fn sites(&self) -> &BTreeMap<String, f32> {
        &self.sites
    }

    /// What [`Self::sites`] and [`Self::norms`] put into a store.
    pub(super) fn read(store: &Store) -> Result<Self, Error> {
        let table = |name: &str| -> Result<BTreeMap<String, f32>, Error> {
            let path = store.dir().join(name);
            let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, &e))?;
            serde_json::from_str(&text)
                .map_err(|e| Error::bad_input(format!("`{}`: {e}", path.display())))
        };
        Ok(Self {
            sites: table(FP16_FILE)?,
            norms: table(MAGNITUDES_FILE)?,
        })
    }

    /// The places with the largest magnitudes, and how norms are scaled.
    pub(super) fn report(&self) -> String {
        let mut sites: Vec<_> = self.sites.iter().collect();
        sites.sort_by(|a, b| b.1.total_cmp(a.1).then(a.0.cmp(b.0)));
        let mut out = format!(
            "Largest magnitudes during calibration; fp16 holds {LARGEST}.\n\n\
             | place | largest | of fp16's range |\n|---|---:|---:|\n"
        );
        for (name, magnitude) in sites.into_iter().take(SHOWN) {
            let share = 100.0 * magnitude / LARGEST;
            let _ = writeln!(out, "| {name} | {magnitude:.4} | {share:.3}% |");
        }
        let shift = |magnitude: f32| shift_for(magnitude * MAGNITUDE_HEADROOM);
        let mut norms: Vec<_> = self.norms.iter().filter(|n| shift(*n.1) > 0).collect();
        norms.sort_by(|a, b| b.1.total_cmp(a.1).then(a.0.cmp(b.0)));
        if norms.is_empty() {
            out.push_str("\nThe squares of all norm inputs fit into fp16.\n");
            return out;
        }
        let _ = writeln!(
            out,
            "\nNorm inputs whose squares exceed fp16, divided by a power of two in the graph:\n\n\
             | norm | largest input | divided by |\n|---|---:|---:|"
        );
        for (name, &magnitude) in norms {
            let _ = writeln!(out, "| {name} | {magnitude:.2} | 2^{} |", shift(magnitude));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fp16_cannot_hold_is_refused_with_its_place() {
        let mut found = Magnitudes::default();
        let fits = Block {
            product: 65504.0,
            input: 300.0,
            ..Block::default()
        };
        found.block(3, &fits).unwrap();
        let report = found.report();
        let first = report.lines().nth(4).unwrap();
        assert_eq!(first, "| layer 3: gate * up | 65504.0000 | 100.000% |");
        // 600² is 360000, and (600 / 4)² fits.
        let norm = "| model.layers.3.input_layernorm.weight | 300.00 | 2^2 |";
        assert!(report.contains(norm), "{report}");
        let beyond = Block {
            k: 65520.0,
            ..Block::default()
        };
        let error = found.block(4, &beyond).unwrap_err();
        assert_eq!(error.exit, Exit::Numerical);
        assert!(error.message.starts_with("layer 4: k_proj output: 65520"));
        assert!(found.logits(f32::INFINITY).is_err());
    }
}
