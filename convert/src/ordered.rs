//! A checkpoint whose MLP channels stand in another order.
//!
//! `down(silu(gate x) * up x)` does not mind the order of its channels, so a store may have one of
//! its own ([`crate::quantize::fit_order`]). What compares a store with its checkpoint, matrix by
//! matrix, reads the checkpoint through [`Ordered`].

use std::collections::BTreeMap;

use anemone_calib::{Error as CalibError, Weights};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::{Linear, ModelSpec};
use serde::{Deserialize, Serialize};

/// For each layer, which channel of the checkpoint comes at each place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MlpOrder {
    /// What determined it.
    pub(crate) key: String,
    /// A permutation of the intermediate channels for each layer.
    pub(crate) layers: Vec<Vec<u32>>,
}

impl MlpOrder {
    /// What is wrong with it for a model, if anything.
    pub(crate) fn check(&self, spec: &ModelSpec) -> Result<(), String> {
        if self.layers.len() != spec.layers {
            let found = self.layers.len();
            return Err(format!("expected {} layers, found {found}", spec.layers));
        }
        for (layer, order) in self.layers.iter().enumerate() {
            let mut seen = vec![false; spec.intermediate];
            for &channel in order {
                match seen.get_mut(channel as usize) {
                    Some(seen) if !*seen => *seen = true,
                    _ => {
                        return Err(format!(
                            "layer {layer}: channel {channel} occurs twice or is beyond the {} there are",
                            spec.intermediate
                        ));
                    }
                }
            }
            if order.len() != spec.intermediate {
                return Err(format!(
                    "layer {layer}: expected {} channels, found {}",
                    spec.intermediate,
                    order.len()
                ));
            }
        }
        Ok(())
    }
}

/// Along which dimension a matrix has the channels.
#[derive(Clone, Copy)]
enum Axis {
    Rows,
    Columns,
}

/// See the [module documentation](self).
pub(crate) struct Ordered<'a> {
    checkpoint: &'a Checkpoint,
    order: Option<MlpOrder>,
    /// The matrices that have the channels.
    matrices: BTreeMap<String, (Axis, usize)>,
}

impl<'a> Ordered<'a> {
    /// The checkpoint in this order, or as it is. The order was checked.
    pub(crate) fn new(checkpoint: &'a Checkpoint, order: Option<MlpOrder>) -> Self {
        let kinds = [
            (Linear::Gate, Axis::Rows),
            (Linear::Up, Axis::Rows),
            (Linear::Down, Axis::Columns),
        ];
        let layers = order.as_ref().map_or(0, |order| order.layers.len());
        let of_layer = |layer| kinds.map(|(linear, axis)| (linear.tensor(layer), (axis, layer)));
        Self {
            checkpoint,
            matrices: (0..layers).flat_map(of_layer).collect(),
            order,
        }
    }

    /// The order, if it is not that of the checkpoint.
    pub(crate) fn order(&self) -> Option<&MlpOrder> {
        self.order.as_ref()
    }

    /// Along which dimension a matrix is in another order, and in which.
    fn axis(&self, name: &str) -> Option<(Axis, &[u32])> {
        let (axis, layer) = *self.matrices.get(name)?;
        Some((axis, &self.order.as_ref()?.layers[layer]))
    }
}

impl Weights for Ordered<'_> {
    fn spec(&self) -> &ModelSpec {
        self.checkpoint.spec()
    }

    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), CalibError> {
        match self.axis(name) {
            None => Ok(self.checkpoint.read_f32(name)?),
            Some((Axis::Rows, order)) => {
                let shape = self.checkpoint.tensor(name)?.shape.to_vec();
                Ok((shape, self.checkpoint.read_rows_f32(name, order)?))
            }
            Some((Axis::Columns, order)) => {
                let (shape, mut data) = self.checkpoint.read_f32(name)?;
                reorder_columns(&mut data, order);
                Ok((shape, data))
            }
        }
    }

    fn rows(&self, name: &str, ids: &[u32]) -> Result<Vec<f32>, CalibError> {
        match self.axis(name) {
            None => Ok(self.checkpoint.read_rows_f32(name, ids)?),
            Some((Axis::Rows, order)) => {
                let ids: Vec<u32> = ids.iter().map(|&id| order[id as usize]).collect();
                Ok(self.checkpoint.read_rows_f32(name, &ids)?)
            }
            Some((Axis::Columns, order)) => {
                let mut data = self.checkpoint.read_rows_f32(name, ids)?;
                reorder_columns(&mut data, order);
                Ok(data)
            }
        }
    }
}

fn reorder_columns(data: &mut [f32], order: &[u32]) {
    let mut before = vec![0.0; order.len()];
    for row in data.chunks_exact_mut(order.len().max(1)) {
        before.copy_from_slice(row);
        for (value, &channel) in row.iter_mut().zip(order) {
            *value = before[channel as usize];
        }
    }
}

#[cfg(test)]
mod tests {
    use anemone_calib::Teacher;

    use super::*;

    fn checkpoint() -> Checkpoint {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/tiny-qwen3");
        Checkpoint::open(dir.as_ref()).unwrap()
    }

    /// Another order in each layer: steps of a size that has no factor in common with the width.
    fn order(spec: &ModelSpec) -> MlpOrder {
        let width = spec.intermediate;
        let of_layer = |layer| {
            let mut steps = layer + width / 3..width;
            let step = steps.find(|s| gcd(*s, width) == 1).unwrap();
            (0..width).map(|at| (at * step % width) as u32).collect()
        };
        MlpOrder {
            key: String::new(),
            layers: (0..spec.layers).map(of_layer).collect(),
        }
    }

    fn gcd(a: usize, b: usize) -> usize {
        if b == 0 { a } else { gcd(b, a % b) }
    }

    fn logits(weights: &dyn Weights) -> Vec<f32> {
        let teacher = Teacher::new(weights);
        let mut hidden = teacher.embed(&[(1..40).collect()]).unwrap();
        for layer in 0..weights.spec().layers {
            teacher.block(layer, &mut hidden, None).unwrap();
        }
        let normed = teacher.final_norm(&hidden).unwrap();
        teacher
            .logits(&normed.0[0], &teacher.head().unwrap())
            .unwrap()
    }

    #[test]
    fn a_model_computes_the_same_in_any_order() {
        let checkpoint = checkpoint();
        let order = order(checkpoint.spec());
        assert_eq!(order.check(checkpoint.spec()), Ok(()));
        let ordered = Ordered::new(&checkpoint, Some(order.clone()));
        let (given, found) = (logits(&checkpoint), logits(&ordered));
        for (a, b) in given.iter().zip(&found) {
            assert!((a - b).abs() < 1e-3, "{a} {b}");
        }

        // Each of the three alone in this order is another model.
        let name = Linear::Down.tensor(0);
        let (shape, down) = checkpoint.load(&name).unwrap();
        let moved = ordered.load(&name).unwrap().1;
        for (row, moved) in down.chunks(shape[1]).zip(moved.chunks(shape[1])) {
            for (at, value) in moved.iter().enumerate() {
                let from = row[order.layers[0][at] as usize];
                assert_eq!(value.to_bits(), from.to_bits());
            }
        }
        for linear in [Linear::Gate, Linear::Up, Linear::Down, Linear::O] {
            let name = linear.tensor(1);
            let (shape, all) = ordered.load(&name).unwrap();
            let rows = ordered.rows(&name, &[3, 0]).unwrap();
            assert_eq!(rows[..shape[1]], all[3 * shape[1]..4 * shape[1]]);
            assert_eq!(rows[shape[1]..], all[..shape[1]]);
        }
    }

    #[test]
    fn what_is_no_order_of_all_channels_is_refused() {
        let checkpoint = checkpoint();
        let spec = checkpoint.spec();
        let good = order(spec);
        let refused = |spoil: &dyn Fn(&mut Vec<Vec<u32>>), why: &str| {
            let mut bad = good.clone();
            spoil(&mut bad.layers);
            let said = bad.check(spec).unwrap_err();
            assert!(said.contains(why), "{said}");
        };
        refused(&|l| drop(l.pop()), "layers");
        refused(&|l| l[1].truncate(5), "layer 1: expected");
        refused(&|l| l[0][2] = l[0][1], "layer 0: channel");
        refused(&|l| l[0][2] = u32::MAX, "layer 0: channel 4294967295");
        refused(&|l| l[0].push(0), "layer 0: channel 0");
    }
}
