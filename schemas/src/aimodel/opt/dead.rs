//! Operations whose results nobody reads.

use std::collections::HashSet;

use super::regions;
use crate::aimodel::ids;
use crate::aimodel::ir::{Module, Op, OpId, ValueId};

/// Drops every operation without effects of which no result is read, and returns
/// how many that were.
///
/// Reads and writes of states, calls, and operations that are not in our tables
/// stay: their order or effect matters, or may.
pub fn drop_dead(m: &mut Module) -> usize {
    let mut dropped = 0;
    for region in regions(m) {
        let ops = m.region(region).ops.clone();
        let mut read: HashSet<ValueId> = HashSet::new();
        let mut kept: Vec<OpId> = Vec::with_capacity(ops.len());
        // Last first, so what only the dropped ones read is dropped too.
        for &id in ops.iter().rev() {
            let op = m.op(id);
            if is_pure(op) && !op.results.iter().any(|r| read.contains(r)) {
                dropped += 1;
                continue;
            }
            read.extend(&op.operands);
            kept.push(id);
        }
        kept.reverse();
        m.region_mut(region).ops = kept;
    }
    dropped
}

fn is_pure(op: &Op) -> bool {
    let effects = op.name.starts_with("dataflow.") || op.name.starts_with("serialization.");
    !effects && !op.results.is_empty() && ids::feature_version(&op.name).is_some()
}
