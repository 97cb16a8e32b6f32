//! Transposes that undo one another.
//!
//! Result axis `i` of a transpose by `p` is axis `p[i]` of its operand, so a
//! transpose by `q` of a transpose by `p` is one by `p[q[i]]`: the operand itself
//! where that is `i`.

use std::collections::HashMap;

use super::{constants, regions, replace_uses};
use crate::aimodel::ir::{Attr, AttrId, Elem, Module, Op, ValueId};

const TRANSPOSE: &str = "primitive.transpose_v1";

/// Lets whoever reads a transpose that undoes the one before it, or that moves
/// nothing, read the original instead. Returns how many are bypassed;
/// [`super::drop_dead`] takes them out.
pub fn cancel_transposes(m: &mut Module) -> usize {
    let mut cancelled = 0;
    for region in regions(m) {
        let perms = constants(m, region);
        // What each transpose of the region makes: of what, and by which order.
        let mut made: HashMap<ValueId, (ValueId, Vec<usize>)> = HashMap::new();
        let mut to: HashMap<ValueId, ValueId> = HashMap::new();
        for &id in &m.region(region).ops {
            let op = m.op(id);
            let Some((source, perm)) = transpose(m, op, &perms) else {
                continue;
            };
            let result = op.results[0];
            let source = to.get(&source).copied().unwrap_or(source);
            let original = if moves_nothing(&perm) {
                Some(source)
            } else {
                made.get(&source).and_then(|(original, before)| {
                    let both: Option<Vec<usize>> =
                        perm.iter().map(|&i| before.get(i).copied()).collect();
                    moves_nothing(&both?).then_some(*original)
                })
            };
            match original {
                Some(original) if m.value_type(original) == m.value_type(result) => {
                    to.insert(result, original);
                    cancelled += 1;
                }
                _ => {
                    made.insert(result, (source, perm));
                }
            }
        }
        replace_uses(m, region, &to);
    }
    cancelled
}

fn moves_nothing(perm: &[usize]) -> bool {
    perm.iter().enumerate().all(|(i, &p)| i == p)
}

/// Operand and order of a transpose by a constant.
fn transpose(
    m: &Module,
    op: &Op,
    constants: &HashMap<ValueId, AttrId>,
) -> Option<(ValueId, Vec<usize>)> {
    let (TRANSPOSE, &[x, perm], &[_]) = (op.name.as_str(), &op.operands[..], &op.results[..])
    else {
        return None;
    };
    let rank = m.tensor_type(x)?.shape.len();
    let Attr::Dense { splat, bytes } = m.attr(*constants.get(&perm)?) else {
        return None;
    };
    let width = match m.tensor_type(perm)?.elem {
        Elem::Ui32 | Elem::Si32 => 4,
        Elem::Ui16 | Elem::Si16 => 2,
        _ => return None,
    };
    let axis = |b: &[u8]| b.iter().rev().fold(0usize, |n, &b| n << 8 | usize::from(b));
    let mut axes: Vec<usize> = bytes.chunks_exact(width).map(axis).collect();
    if *splat {
        axes.resize(rank, *axes.first()?);
    }
    (axes.len() == rank).then_some((x, axes))
}
