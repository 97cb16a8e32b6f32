//! The model in training: a store whose table values and norm weights may move.

use std::collections::BTreeMap;

use anemone_calib::{Error as CalibError, Weights};
use anemone_schemas::lut::LutMatrix;
use anemone_schemas::spec::{FINAL_NORM, LM_HEAD, ModelSpec};
use anemone_schemas::store::{LutRecord, MatrixReport, Store};
use half::f16;
use rayon::prelude::*;

use super::matrices;
use crate::commands::rewrite::Replace;
use crate::error::Error;
use crate::lower::StoreWeights;

/// Adam's decay of the mean gradient and of its square, and what keeps a division finite.
const DECAY: [f64; 2] = [0.9, 0.95];
const EPSILON: f64 = 1e-8;

/// Values in training: all tables of a matrix, or a norm's weight.
struct Parameter {
    values: Vec<f32>,
    /// By how much a value moves at a rate of one.
    units: Vec<f32>,
    /// Adam's running means of the gradient and its square.
    means: Vec<[f64; 2]>,
}

impl Parameter {
    fn new(values: Vec<f32>, units: Vec<f32>) -> Self {
        let means = vec![[0.0; 2]; values.len()];
        Self {
            values,
            units,
            means,
        }
    }
}

pub(super) struct Student<'a> {
    stored: StoreWeights<'a>,
    /// Where the output layer is, if not there.
    head: Option<StoreWeights<'a>>,
    parameters: BTreeMap<String, Parameter>,
    steps: i32,
}

impl<'a> Student<'a> {
    pub(super) fn new(
        store: &'a Store,
        head: Option<&'a Store>,
        spec: &'a ModelSpec,
    ) -> Result<Self, Error> {
        let mut parameters = BTreeMap::new();
        for name in matrices(spec.layers) {
            if store.dense(&name).is_ok() {
                // It has no table to train.
                continue;
            }
            let lut = store.load_lut(&name)?;
            if lut.vector > 1 {
                // Its entries are no single values.
                continue;
            }
            let (mut values, mut units) = (Vec::new(), Vec::new());
            for group in 0..lut.shape().groups() {
                let table = lut.table(group);
                let n = table.len() as f32;
                let mean = table.iter().sum::<f32>() / n;
                let variance = table.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n;
                units.extend(vec![variance.sqrt(); table.len()]);
                values.extend(table);
            }
            parameters.insert(name, Parameter::new(values, units));
        }
        let layers = 0..spec.layers;
        let norms = layers.flat_map(|l| spec.architecture.norms().iter().map(move |n| n.tensor(l)));
        for name in norms.chain([FINAL_NORM.to_string()]) {
            let (_, values) = store.dense_f32(&name)?;
            let units = values.iter().map(|v| 0.5 * v.abs()).collect();
            parameters.insert(name, Parameter::new(values, units));
        }
        Ok(Self {
            stored: StoreWeights { store, spec },
            head: head.map(|store| StoreWeights { store, spec }),
            parameters,
            steps: 0,
        })
    }

    /// Steps taken.
    pub(super) fn steps(&self) -> usize {
        self.steps as usize
    }

    /// All numbers in training, with their means.
    pub(super) fn numbers(&self) -> impl Iterator<Item = (f32, [f64; 2])> {
        let parameters = self.parameters.values();
        parameters.flat_map(|p| p.values.iter().copied().zip(p.means.iter().copied()))
    }

    /// Takes over where a training of the same parameters was.
    pub(super) fn go_on(&mut self, steps: usize, numbers: impl Iterator<Item = (f32, [f64; 2])>) {
        self.steps = i32::try_from(steps).unwrap_or(i32::MAX);
        let parameters = self.parameters.values_mut();
        let own = parameters.flat_map(|p| p.values.iter_mut().zip(&mut p.means));
        for ((value, means), (new, new_means)) in own.zip(numbers) {
            (*value, *means) = (new, new_means);
        }
    }

    fn lut(&self, name: &str) -> Result<LutMatrix, CalibError> {
        let lut = self.stored.store.load_lut(name);
        lut.map_err(|e| CalibError::Weight {
            tensor: name.to_string(),
            source: Box::new(e),
        })
    }

    /// Adds the gradient of a matrix to those of its table values: each is the sum over the
    /// weights with its code.
    pub(super) fn add_gradient(
        &self,
        name: &str,
        dw: &[f32],
        gradients: &mut BTreeMap<String, Vec<f32>>,
    ) {
        if !self.parameters.contains_key(name) {
            return;
        }
        let Ok(lut) = self.lut(name) else {
            // The forward pass has read it a moment ago.
            return;
        };
        let shape = lut.shape();
        let rows = shape.group_rows * shape.cols;
        let codes = lut.codes();
        let sums = gradients
            .entry(name.to_string())
            .or_insert_with(|| vec![0.0; shape.groups() * shape.entries()]);
        sums.par_chunks_mut(shape.entries())
            .zip(dw.par_chunks(rows))
            .zip(codes.par_chunks(rows))
            .for_each(|((sums, dw), codes)| {
                let mut exact = vec![0.0f64; sums.len()];
                for (d, &code) in dw.iter().zip(codes) {
                    exact[code as usize] += f64::from(*d);
                }
                for (sum, exact) in sums.iter_mut().zip(exact) {
                    *sum += exact as f32;
                }
            });
    }

    /// A step of Adam.
    pub(super) fn update(&mut self, gradients: &BTreeMap<String, Vec<f32>>, rate: f64) {
        self.steps += 1;
        let correction = DECAY.map(|d| 1.0 - d.powi(self.steps));
        for (name, parameter) in &mut self.parameters {
            let Some(gradient) = gradients.get(name) else {
                continue;
            };
            let moving = parameter.values.iter_mut().zip(&parameter.units);
            for (((value, &unit), means), &g) in moving.zip(&mut parameter.means).zip(gradient) {
                let g = f64::from(g) * f64::from(unit);
                means[0] = DECAY[0] * means[0] + (1.0 - DECAY[0]) * g;
                means[1] = DECAY[1] * means[1] + (1.0 - DECAY[1]) * g * g;
                let mean = means[0] / correction[0];
                let root = (means[1] / correction[1]).sqrt();
                if root > 0.0 {
                    let step = rate * mean / (root + EPSILON * root.max(1.0));
                    *value -= (step * f64::from(unit)) as f32;
                }
            }
        }
    }

    /// Rounds all values to fp16, as they will be stored.
    pub(super) fn round(&mut self) {
        for parameter in self.parameters.values_mut() {
            for value in &mut parameter.values {
                *value = f16::from_f32(*value).to_f32();
            }
        }
    }
}

impl Replace for Student<'_> {
    fn matrix(&self, old: &LutRecord) -> Result<Option<(LutMatrix, MatrixReport)>, Error> {
        let name = &old.name;
        let Some(parameter) = self.parameters.get(name) else {
            return Ok(None);
        };
        let lut = sorted(&self.stored.store.load_lut(name)?, &parameter.values)
            .map_err(|e| Error::bad_input(format!("`{name}`: {e}")))?;
        let mut report = old.report.clone();
        report.method = format!("{}, tuned", report.method);
        Ok(Some((lut, report)))
    }

    fn dense(&self, name: &str) -> Option<&[f32]> {
        self.parameters.get(name).map(|p| p.values.as_slice())
    }
}

/// A matrix with new table values, put in order, and its codes renamed accordingly.
fn sorted(old: &LutMatrix, values: &[f32]) -> Result<LutMatrix, anemone_schemas::lut::LutError> {
    let shape = old.shape();
    let mut codes = old.codes();
    let mut tables = Vec::with_capacity(values.len());
    for (table, codes) in values
        .chunks(shape.entries())
        .zip(codes.chunks_mut(shape.group_rows * shape.cols))
    {
        let mut order: Vec<usize> = (0..table.len()).collect();
        order.sort_by(|&a, &b| table[a].total_cmp(&table[b]));
        let mut place = vec![0u8; table.len()];
        for (to, &from) in order.iter().enumerate() {
            place[from] = to as u8;
        }
        tables.extend(
            order
                .iter()
                .map(|&from| f16::from_f32(table[from]).to_bits()),
        );
        for code in codes {
            *code = place[*code as usize];
        }
    }
    LutMatrix::from_codes(shape, tables, &codes)
}

impl Weights for Student<'_> {
    fn spec(&self) -> &ModelSpec {
        self.stored.spec
    }

    fn load(&self, name: &str) -> Result<(Vec<usize>, Vec<f32>), CalibError> {
        let Some(parameter) = self.parameters.get(name) else {
            let head = self.head.as_ref().filter(|_| name == LM_HEAD);
            return head.unwrap_or(&self.stored).load(name);
        };
        if self.stored.store.lut(name).is_err() {
            return Ok((vec![parameter.values.len()], parameter.values.clone()));
        }
        let lut = self.lut(name)?;
        let shape = lut.shape();
        let mut weights = vec![0.0; shape.rows * shape.cols];
        let rows = shape.group_rows * shape.cols;
        let codes = lut.codes();
        weights
            .par_chunks_mut(rows)
            .zip(codes.par_chunks(rows))
            .zip(parameter.values.par_chunks(shape.entries()))
            .for_each(|((weights, codes), table)| {
                for (weight, &code) in weights.iter_mut().zip(codes) {
                    *weight = table[code as usize];
                }
            });
        Ok((vec![shape.rows, shape.cols], weights))
    }
}
