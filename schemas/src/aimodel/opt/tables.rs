//! One order for the entries of a look-up table.
//!
//! Reordering a table and renaming the indices with it changes no weight, so the
//! same matrix has `(2^bits)!` forms per table. Here entries ascend, equal ones are
//! one, and what is then left at the end repeats the last: equal matrices become
//! equal bytes, which [`super::merge_constants`] stores once.

use std::collections::HashMap;

use half::{bf16, f16};

use super::{constants, regions};
use crate::aimodel::build::constant_value;
use crate::aimodel::ids;
use crate::aimodel::ir::{Attr, AttrId, Elem, Module, Op, RegionId, TensorType};
use crate::lut::{pack, unpack};

const LUT: &str = "primitive.lut_to_dense_v1";

/// Brings the tables of every `lut_to_dense` of constant indices and scalar
/// entries in order; returns how many of these operations changed. Weights that lie
/// in other files ([`crate::aimodel::ir::BlobData::File`]) are left as they are:
/// they are copied, not read.
pub fn sort_tables(m: &mut Module) -> usize {
    let mut changed = 0;
    // Matrices are shared by functions.
    let mut done: HashMap<[AttrId; 2], Option<Lut>> = HashMap::new();
    for region in regions(m) {
        let values = constants(m, region);
        let mut at = 0;
        while at < m.region(region).ops.len() {
            let op = m.op(m.region(region).ops[at]);
            if op.name == LUT
                && let &[indices, table, _] = &op.operands[..]
                && let (Some(&i), Some(&t)) = (values.get(&indices), values.get(&table))
                && let (Some(it), Some(tt)) = (m.tensor_type(indices), m.tensor_type(table))
            {
                let sorted = done.entry([i, t]).or_insert_with(|| {
                    let lut = Lut::read(m, [(i, it), (t, tt)])?;
                    lut.sorted()
                });
                if let Some(sorted) = sorted.clone() {
                    replace(m, region, at, &sorted);
                    changed += 1;
                    at += 2;
                }
            }
            at += 1;
        }
    }
    changed
}

/// Puts constants of `lut` before operation `at` of the region and lets it read them.
fn replace(m: &mut Module, region: RegionId, at: usize, lut: &Lut) {
    let id = m.region(region).ops[at];
    let loc = m.op(id).loc;
    for (k, bytes) in [&lut.indices, &lut.tables].into_iter().enumerate() {
        let ty = m.value_type(m.op(id).operands[k]);
        let elem = [lut.index, lut.entry][k];
        let value = constant_value(m, elem, bytes);
        let result = m.add_value(ty);
        let constant = m.add_op(Op {
            name: ids::op::CONSTANT.into(),
            operands: vec![],
            results: vec![result],
            props: vec![("value", value)],
            regions: vec![],
            loc,
        });
        m.region_mut(region).ops.insert(at + k, constant);
        m.op_mut(id).operands[k] = result;
    }
}

/// Indices and tables, as they are stored.
#[derive(Clone)]
struct Lut {
    bits: u8,
    index: Elem,
    entry: Elem,
    /// Extents of the indices.
    shape: Vec<usize>,
    /// How many tables there are along each axis.
    counts: Vec<usize>,
    indices: Vec<u8>,
    tables: Vec<u8>,
}

impl Lut {
    fn read(m: &Module, [indices, tables]: [(AttrId, &TensorType); 2]) -> Option<Self> {
        let bits = match indices.1.elem {
            Elem::Ui1 => 1,
            Elem::Ui2 => 2,
            Elem::Ui3 => 3,
            Elem::Ui4 => 4,
            Elem::Ui6 => 6,
            Elem::Ui8 => 8,
            _ => return None,
        };
        let entry = tables.1.elem;
        if !matches!(entry, Elem::F16 | Elem::Bf16 | Elem::F32) {
            return None;
        }
        let (shape, mut counts) = (indices.1.dims()?, tables.1.dims()?);
        let (vector, entries) = (counts.pop()?, counts.pop()?);
        let fits = shape.len() == counts.len()
            && (shape.iter().zip(&counts)).all(|(&a, &b)| b > 0 && a % b == 0 && a > 0);
        if vector != 1 || entries != 1 << bits || !fits {
            return None;
        }
        let bytes = |(value, ty): (AttrId, &TensorType)| {
            let bytes = match m.attr(value) {
                Attr::Resource(blob) => m.blob(*blob).bytes()?,
                // Below a byte, attributes are not packed as blobs are.
                Attr::Dense { splat, bytes } if !splat && ty.elem.bits() >= 8 => bytes,
                _ => return None,
            };
            (Some(bytes.len()) == ty.elem.packed_len(ty.count()?)).then(|| bytes.to_vec())
        };
        Some(Self {
            bits,
            index: indices.1.elem,
            entry,
            shape,
            counts,
            indices: bytes(indices)?,
            tables: bytes(tables)?,
        })
    }

    /// The same matrix with every table in order; `None` if it was, or cannot be.
    fn sorted(mut self) -> Option<Self> {
        let entries = 1usize << self.bits;
        let width = self.entry.bits() / 8;
        let count: usize = self.shape.iter().product();
        let mut codes = unpack(&self.indices, self.bits, 0, count);
        let before = self.tables.clone();
        let mut renamed: Vec<Vec<u8>> = vec![];
        for table in self.tables.chunks_exact_mut(entries * width) {
            renamed.push(sort(table, self.entry)?);
        }
        let mut place = vec![0; self.shape.len()];
        for code in &mut codes {
            let table = (0..place.len()).fold(0, |n, axis| {
                n * self.counts[axis] + place[axis] / (self.shape[axis] / self.counts[axis])
            });
            *code = renamed[table][usize::from(*code)];
            for axis in (0..place.len()).rev() {
                place[axis] += 1;
                if place[axis] < self.shape[axis] {
                    break;
                }
                place[axis] = 0;
            }
        }
        let indices = pack(&codes, self.bits);
        let was_sorted = indices == self.indices && self.tables == before;
        self.indices = indices;
        (!was_sorted).then_some(self)
    }
}

/// Sorts one table; returns the new name of every index. `None` if an entry is not
/// a number.
fn sort(table: &mut [u8], elem: Elem) -> Option<Vec<u8>> {
    let width = elem.bits() / 8;
    let value = |b: &[u8]| match elem {
        Elem::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        Elem::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
    };
    let values: Vec<f32> = table.chunks_exact(width).map(value).collect();
    if values.iter().any(|v| v.is_nan()) {
        return None;
    }
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut names = vec![0u8; values.len()];
    let mut distinct: Vec<usize> = vec![];
    for &i in &order {
        let known = distinct
            .last()
            .is_some_and(|&last| values[last].to_bits() == values[i].to_bits());
        if !known {
            distinct.push(i);
        }
        names[i] = (distinct.len() - 1) as u8;
    }
    let old = table.to_vec();
    for (k, entry) in table.chunks_exact_mut(width).enumerate() {
        let from = distinct[k.min(distinct.len() - 1)] * width;
        entry.copy_from_slice(&old[from..from + width]);
    }
    Some(names)
}
