//! Passes that make a program smaller without changing what it computes.
//!
//! Each works region by region (regions see nothing of one another) and says how
//! much it took away. The operations and blobs that are no longer reached stay in
//! the module's arenas; [`super::encode`] writes only what is reached.

mod constants;
mod dead;
mod tables;
mod transposes;

use std::collections::{HashMap, HashSet};

pub use self::constants::merge_constants;
pub use self::dead::drop_dead;
pub use self::tables::sort_tables;
pub use self::transposes::cancel_transposes;

use super::ids;
use super::ir::{Attr, AttrId, Blob, BlobError, Module, Op, OpId, RegionId, ValueId};

/// What [`optimize`] took away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Savings {
    /// Look-up tables brought into ascending order.
    pub tables: usize,
    /// Blobs that were equal to another.
    pub blobs: usize,
    /// Their bytes.
    pub blob_bytes: u64,
    /// Constants that were equal to another in their region.
    pub constants: usize,
    /// Transposes that undid one another, or did nothing.
    pub transposes: usize,
    /// Operations nobody read from.
    pub dead: usize,
}

/// Runs all passes. Blobs are compared by their bytes, so those with a length of
/// which there are several are read, some of them once from end to end.
pub fn optimize(m: &mut Module) -> Result<Savings, BlobError> {
    let tables = sort_tables(m);
    let mut savings = merge_constants(m)?;
    savings.tables = tables;
    savings.transposes = cancel_transposes(m);
    savings.dead = drop_dead(m);
    Ok(savings)
}

/// Every region reached from the graphs.
fn regions(m: &Module) -> Vec<RegionId> {
    let mut found: Vec<RegionId> = vec![];
    let mut seen = HashSet::new();
    let mut open: Vec<OpId> = m.graphs.clone();
    while let Some(id) = open.pop() {
        for &region in &m.op(id).regions {
            if seen.insert(region) {
                found.push(region);
                open.extend_from_slice(&m.region(region).ops);
            }
        }
    }
    found
}

/// The `value` of a constant.
fn constant_value(op: &Op) -> Option<AttrId> {
    (op.name == ids::op::CONSTANT)
        .then(|| op.prop("value"))
        .flatten()
}

/// The `value` of every constant of a region.
fn constants(m: &Module, region: RegionId) -> HashMap<ValueId, AttrId> {
    let ops = m.region(region).ops.iter().map(|&id| m.op(id));
    ops.filter_map(|op| Some((*op.results.first()?, constant_value(op)?)))
        .collect()
}

/// The blob of a constant.
fn blob_of(m: &Module, value: AttrId) -> Option<&Blob> {
    match m.attr(value) {
        Attr::Resource(blob) => Some(m.blob(*blob)),
        _ => None,
    }
}

/// Makes every operation of a region read `to[v]` where it read `v`.
fn replace_uses(m: &mut Module, region: RegionId, to: &HashMap<ValueId, ValueId>) {
    if to.is_empty() {
        return;
    }
    for id in m.region(region).ops.clone() {
        for operand in &mut m.op_mut(id).operands {
            if let Some(&new) = to.get(operand) {
                *operand = new;
            }
        }
    }
}

#[cfg(test)]
mod tests;
