//! Rules about element types, ranks and constants (A, C4 of constants).

use std::collections::HashMap;

use anemone_schemas::aimodel::ir::{AttrId, DYNAMIC, Elem, Op, TensorType, ValueId};

use super::function::{Function, base, first_non_finite, is_float, is_integer};
use super::{Findings, Severity};

const MAX_RANK: usize = 5;
/// Most elements of a 32-bit integer tensor that is a shape, offsets or ids.
const MAX_INDICES: usize = 4096;
/// Smallest normal f16.
const MIN_NORMAL: f64 = 6.103_515_625e-5;

/// Constants already looked at: functions share them.
#[derive(Default)]
pub(super) struct Finite(HashMap<(AttrId, Elem), Option<usize>>);

pub(super) fn check(f: &Function<'_>, finite: &mut Finite, out: &mut Findings) {
    for &(name, v) in &f.graph.inputs {
        if let Some(t) = f.tensor(v).or_else(|| f.state(v)) {
            input(f, name.unwrap_or("_"), t, out);
        }
    }
    for (i, &op) in f.ops.iter().enumerate() {
        for &r in &op.results {
            if let Some(t) = f.tensor(r) {
                result(f, (i, op), r, t, out);
            }
        }
        match base(op) {
            "constant" => constant(f, (i, op), finite, out),
            "cast" => cast(f, (i, op), out),
            "get_shape" | "broadcast_shapes" => {
                let message = format!("`{}` computes a shape at run time", base(op));
                out.add("A5", (i, op), message);
            }
            "if" | "while" | "for" | "while_loop" | "switch" | "cond" | "scan" | "non_zero"
            | "unique" | "nms" => {
                let message = format!("`{}` depends on data", base(op));
                out.add("A8", (i, op), message);
            }
            "add" => subnormal(f, (i, op), out),
            _ => {}
        }
    }
}

/// A composite's body that nothing calls: only its dynamic shapes are worth a word.
pub(super) fn unreached(f: &Function<'_>, out: &mut Findings) {
    let dynamic = f
        .graph
        .inputs
        .iter()
        .filter_map(|i| f.tensor(i.1))
        .any(|t| t.shape.contains(&DYNAMIC));
    if dynamic {
        let message = "has dynamic shapes, but no function calls it".to_owned();
        out.push("A5", Severity::Note, None, "graph", message);
    }
}

fn input(f: &Function<'_>, name: &str, t: &TensorType, out: &mut Findings) {
    if t.shape.len() > MAX_RANK {
        out.about("A1", name, format!("input of {} axes", t.shape.len()));
    }
    if t.shape.contains(&DYNAMIC) {
        out.about("A5", name, "input of dynamic shape".to_owned());
        if f.input(name).is_some_and(|v| f.state(v).is_some()) {
            out.about("K5", name, "state of dynamic shape".to_owned());
        }
    }
    if is_float(t.elem) && t.elem != Elem::F16 {
        out.about("A2", name, format!("input of {}", t.elem.name()));
    }
}

fn result(f: &Function<'_>, at: (usize, &Op), v: ValueId, t: &TensorType, out: &mut Findings) {
    let only_read_by = |name: &str| f.users(v).all(|u| base(u) == name);
    let constant = base(at.1) == "constant";
    if t.shape.len() > MAX_RANK && !(constant && only_read_by("lut_to_dense")) {
        out.add("A1", at, format!("result of {} axes", t.shape.len()));
    }
    if t.shape.contains(&DYNAMIC) {
        out.add(
            "A5",
            at,
            format!("result of dynamic shape {:?}", spelled(t)),
        );
    }
    if is_float(t.elem) && t.elem != Elem::F16 {
        let message = format!("{} {:?}", t.elem.name(), spelled(t));
        if constant {
            out.add("A3", at, message);
        } else if decides(f, v, 0) {
            let message = format!("{message}, widened for an argmax");
            out.except("A2", Severity::Warning, at, message);
        } else {
            out.add("A2", at, message);
        }
    } else if is_integer(t.elem) && t.elem.bits() >= 32 && t.count().is_none_or(|n| n > MAX_INDICES)
    {
        let message = format!(
            "{} {:?} is no shape, offset or id",
            t.elem.name(),
            spelled(t)
        );
        out.add("A2", at, message);
    } else if is_integer(t.elem) && t.elem.bits() < 8 && !only_read_by("lut_to_dense") {
        let by_scale = only_read_by("blockwise_shift_scale");
        if !by_scale {
            let message = format!("{} outside a weight's decompression", t.elem.name());
            out.add("A2", at, message);
        }
    }
}

/// Whether a value does nothing but decide an argmax: every way from it ends in
/// indices.
fn decides(f: &Function<'_>, v: ValueId, depth: usize) -> bool {
    const PART: [&str; 8] = [
        "argmax",
        "reduce_max",
        "maximum",
        "greater",
        "where",
        "concat",
        "slice",
        "split",
    ];
    let mut users = f.users(v).peekable();
    users.peek().is_some()
        && depth < 64
        && users.all(|u| {
            PART.contains(&base(u))
                && u.results.iter().all(|&r| {
                    f.tensor(r).is_some_and(|t| !is_float(t.elem)) || decides(f, r, depth + 1)
                })
        })
}

fn constant(f: &Function<'_>, at: (usize, &Op), finite: &mut Finite, out: &mut Findings) {
    let (Some(value), Some(t)) = (at.1.prop("value"), f.tensor(at.1.results[0])) else {
        return;
    };
    if !is_float(t.elem) || t.elem.bits() < 16 {
        return;
    }
    let bad = *finite
        .0
        .entry((value, t.elem))
        .or_insert_with(|| first_non_finite(f.m, t.elem, f.m.attr(value)));
    if let Some(index) = bad {
        out.add(
            "C4",
            at,
            format!("element {index} of the constant is not finite"),
        );
    }
}

fn cast(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let (from, to) = (at.1.operands[0], at.1.results[0]);
    let (Some(a), Some(b)) = (f.tensor(from), f.tensor(to)) else {
        return;
    };
    if is_float(a.elem) && is_float(b.elem) {
        let message = format!("{} to {}", a.elem.name(), b.elem.name());
        if decides(f, to, 0) {
            out.except("A4", Severity::Warning, at, message);
        } else {
            out.add("A4", at, message);
        }
    }
    if is_integer(a.elem)
        && is_float(b.elem)
        && let Some(before) = f.made_by(from, &["cast"])
        && f.tensor(before.operands[0])
            .is_some_and(|t| is_float(t.elem))
    {
        out.add(
            "K8",
            at,
            "back to float right after a cast to integer".to_owned(),
        );
    }
    if a.elem == Elem::Bool
        && is_float(b.elem)
        && let Some(compared) = f.made_by(f.source(from), &["equal", "not_equal", "greater"])
        && f.tensor(compared.operands[0])
            .is_some_and(|t| is_integer(t.elem))
    {
        out.add(
            "K9",
            at,
            "a comparison of integers cast to float".to_owned(),
        );
    }
    if is_float(b.elem) && f.made_by(f.source(from), &["argmax"]).is_some() {
        let message = format!("an argmax cast to {} aborts", b.elem.name());
        out.except("K1", Severity::Error, at, message);
    }
}

fn subnormal(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    for &v in &at.1.operands {
        let Some(values) = f.floats(v) else { continue };
        let tiny = values.iter().find(|x| **x != 0.0 && x.abs() < MIN_NORMAL);
        if let Some(x) = tiny
            && f.tensor(v).is_some_and(|t| t.elem == Elem::F16)
        {
            out.add("A6", at, format!("adds {x:.3e}"));
        }
    }
}

/// A shape as people write it.
fn spelled(t: &TensorType) -> Vec<String> {
    t.shape
        .iter()
        .map(|&d| {
            if d == DYNAMIC {
                "?".into()
            } else {
                d.to_string()
            }
        })
        .collect()
}
