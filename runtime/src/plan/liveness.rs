//! Dead steps, last uses, and which reads of a state may move its buffer out.

use std::collections::HashSet;

use super::kind::{Kind, Step};

/// Drops steps whose results nobody reads, marks the last use of every slot and
/// decides how states are read.
///
/// A slot is used last by the step after which no other reads it. Outputs are
/// read after all steps; constants belong to the plan and are never used last.
pub(super) fn analyse(steps: &mut Vec<Step>, outputs: &[u32], is_constant: impl Fn(u32) -> bool) {
    let mut needed: HashSet<u32> = outputs.iter().copied().collect();
    let mut kept = Vec::with_capacity(steps.len());
    while let Some(mut step) = steps.pop() {
        for r in &mut step.results {
            if r.is_some_and(|slot| !needed.contains(&slot)) {
                *r = None;
            }
        }
        let effect = matches!(step.kind, Kind::WriteHandle(_));
        if !effect && step.results.iter().all(Option::is_none) {
            continue;
        }
        // From the back, a slot seen for the first time is used last; of two
        // operands of one step, the later one is.
        for arg in step.args.iter_mut().rev() {
            arg.last = needed.insert(arg.slot) && !is_constant(arg.slot);
        }
        kept.push(step);
    }
    kept.reverse();
    *steps = kept;
    mark_reads(steps);
}

/// A read may take the buffer if the next access of the state is a write.
fn mark_reads(steps: &mut [Step]) {
    let mut next_is_write: HashSet<usize> = HashSet::new();
    for step in steps.iter_mut().rev() {
        match &mut step.kind {
            Kind::WriteHandle(state) => {
                next_is_write.insert(*state);
            }
            Kind::ReadHandle { state, take } => *take = next_is_write.remove(state),
            _ => {}
        }
    }
}
