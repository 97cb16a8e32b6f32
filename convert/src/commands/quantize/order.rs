//! The order of the MLP's channels that a store has.

use std::fs;
use std::path::{Path, PathBuf};

use anemone_calib::{Corpus, Hidden, LinearGradient, Teacher, Weights, WindowReader};
use anemone_schemas::atomic;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::{Linear, Site};
use anemone_schemas::store::{Key, Store};

use super::statistics::passes;
use super::work::load_matrix;
use crate::error::Error;
use crate::ordered::MlpOrder;
use crate::quantize::{Matrix, Rows, Settings, fit_order};
use crate::stop::Stop;
use crate::ui::Ui;

/// File of the store with the order.
const FILE: &str = "mlp_order.json";

/// Setting of a store that has one.
pub(in crate::commands) const SETTING: &str = "mlp_order";

/// What the setting says.
pub(super) const FITTED: &str = "fitted";

/// Raised when the same inputs would give another order than before.
const VERSION: u32 = 1;

/// Calibration tokens that are looked at: sums of squares need few.
pub(crate) const TOKENS: usize = 4096;

/// What the teacher and the text are.
pub(super) struct Fit<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) corpus: &'a Corpus,
    /// Ids the tokenizer knows.
    pub(super) valid: usize,
    pub(super) ui: Ui,
    pub(super) stop: &'a Stop,
}

impl Fit<'_> {
    /// The order of stores in the making: what an earlier run left in one of their folders, or a
    /// new one. It is left in all of them.
    pub(super) fn find(&self, folders: &[&Path], scratch: PathBuf) -> Result<MlpOrder, Error> {
        let key = self.key();
        let known = folders.iter().find_map(|folder| {
            let bytes = fs::read(folder.join(FILE)).ok()?;
            let order: MlpOrder = serde_json::from_slice(&bytes).ok()?;
            let fits = order.key == key && order.check(self.checkpoint.spec()).is_ok();
            fits.then_some(order)
        });
        let order = match known {
            Some(order) => order,
            None => self.fit(key, scratch)?,
        };
        let (name, bytes) = file(&order)?;
        for folder in folders {
            let path = folder.join(&name);
            atomic::write_bytes(&path, &bytes).map_err(|e| Error::io(&path, &e))?;
        }
        Ok(order)
    }

    fn key(&self) -> String {
        let mut ids = Vec::new();
        for window in self.windows() {
            ids.extend((window.len() as u32).to_le_bytes());
            ids.extend(window.iter().flat_map(|id| id.to_le_bytes()));
        }
        let model = self.checkpoint.fingerprint();
        let version = VERSION.to_le_bytes();
        let parts = [FILE.as_bytes(), &version, model.as_bytes(), &ids];
        Key::of(parts).as_str().to_string()
    }

    /// Windows of all files, of about [`TOKENS`] tokens.
    fn windows(&self) -> impl Iterator<Item = &Vec<u32>> {
        let step = self.corpus.tokens().div_ceil(TOKENS).max(1);
        let chosen = every(step, self.corpus.origins());
        chosen.into_iter().map(|at| &self.corpus.windows()[at])
    }

    fn fit(&self, key: String, scratch: PathBuf) -> Result<MlpOrder, Error> {
        let spec = self.checkpoint.spec();
        let windows: Vec<Vec<u32>> = self.windows().cloned().collect();
        let teacher = Teacher::new(self.checkpoint);
        let stage = self.ui.stage("order", 2 * spec.layers);
        let mut layers = vec![Vec::new(); spec.layers];
        let mut ratios = 0.0;
        let mut each = |layer: usize, input: WindowReader<'_>, gradient: &mut Hidden| {
            let mut columns = vec![0.0; spec.hidden];
            let mut rows = [Linear::Gate, Linear::Up].map(|l| (l, vec![0.0; spec.intermediate]));
            let mut hook = |site: Site, inputs: &[f32], outputs: &[LinearGradient<'_>]| {
                if site != Site::MlpIn {
                    return;
                }
                add_squares(&mut columns, inputs);
                for (linear, sums) in &mut rows {
                    for output in outputs.iter().filter(|o| o.linear == *linear) {
                        add_squares(sums, output.rows);
                    }
                }
            };
            teacher.backward(layer, input, gradient, Some(&mut hook))?;
            let names = rows.each_ref().map(|(linear, _)| linear.tensor(layer));
            let mut loaded = Vec::new();
            for name in &names {
                loaded.push(load_matrix(self.checkpoint, name)?);
            }
            let matrices: Vec<Rows<'_>> = loaded
                .iter()
                .zip(&rows)
                .zip(&names)
                .map(|(((count, cols, data), (_, rows)), name)| Rows {
                    matrix: Matrix {
                        name,
                        rows: *count,
                        cols: *cols,
                        data,
                    },
                    columns: &columns,
                    rows,
                })
                .collect();
            let fitted = fit_order(&matrices, Settings::default().group_rows);
            ratios += fitted.ratio;
            layers[layer] = fitted.order;
            Ok(())
        };
        passes(
            &teacher, &windows, self.valid, scratch, &stage, self.stop, &mut each,
        )?;
        self.ui.detail(&format!(
            "tables of `gate` and `up` in an order of their own: {:.3} of the error",
            ratios / spec.layers as f64
        ));
        Ok(MlpOrder { key, layers })
    }
}

/// Every `step`-th window, given the file of each. Files take turns, so that can leave some out:
/// of those every `step`-th window is added.
fn every(step: usize, files: &[usize]) -> Vec<usize> {
    let all: Vec<usize> = (0..files.len()).collect();
    let mut chosen: Vec<usize> = all.iter().copied().step_by(step).collect();
    let mut left = all;
    left.retain(|&at| chosen.iter().all(|&c| files[c] != files[at]));
    while let Some(&first) = left.first() {
        let own = left.iter().copied().filter(|&at| files[at] == files[first]);
        chosen.extend(own.step_by(step));
        left.retain(|&at| files[at] != files[first]);
    }
    chosen.sort_unstable();
    chosen
}

/// Name and contents of the file of the store.
pub(super) fn file(order: &MlpOrder) -> Result<(String, Vec<u8>), Error> {
    let mut bytes = serde_json::to_vec(order).map_err(|e| Error::unexpected(&e))?;
    bytes.push(b'\n');
    Ok((FILE.to_owned(), bytes))
}

/// The order of a store, if it has one of its own.
///
/// # Errors
/// A file that is not one of an order for this model.
pub(in crate::commands) fn read_order(
    store: &Store,
    weights: &dyn Weights,
) -> Result<Option<MlpOrder>, Error> {
    if !store.manifest().files.iter().any(|f| f.name == FILE) {
        return Ok(None);
    }
    let path = store.dir().join(FILE);
    let bytes = fs::read(&path).map_err(|e| Error::io(&path, &e))?;
    let bad = |why: String| Error::bad_input(format!("`{}`: {why}", path.display()));
    let order: MlpOrder = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
    order.check(weights.spec()).map_err(bad)?;
    Ok(Some(order))
}

/// Adds the squares of each column of row-major values.
fn add_squares(sums: &mut [f64], values: &[f32]) {
    for row in values.chunks_exact(sums.len()) {
        for (sum, value) in sums.iter_mut().zip(row) {
            *sum += f64::from(*value) * f64::from(*value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::every;

    #[test]
    fn every_file_is_looked_at() {
        assert_eq!(every(3, &[0, 1, 0, 1, 0, 1, 0]), [0, 3, 6]);
        let turns: Vec<usize> = (0..16).map(|at| at % 2).collect();
        assert_eq!(every(4, &turns), [0, 1, 4, 8, 9, 12]);
        let turns: Vec<usize> = (0..12).map(|at| at % 4).collect();
        assert_eq!(every(2, &turns), [0, 1, 2, 3, 4, 6, 8, 9, 10, 11]);
        assert_eq!(every(9, &[0, 0, 1, 2, 0]), [0, 2, 3]);
        assert!(every(2, &[]).is_empty());
    }
}
