//! Rules about operations (C) and about defects of single ones (K).

use std::collections::HashMap;

use anemone_schemas::aimodel::ir::{Elem, Op, ValueId};

use super::function::{Function, base, is_float};
use super::{Findings, Severity};

/// Keys above which the softmax runs over the last axis on purpose.
const LONG_CONTEXT: usize = 4096;
/// Extent from which an axis is wider than a head.
const WIDE: usize = 256;
/// Composites in which the engine knows a gather.
const KNOWN_GATHERS: [&str; 2] = [
    "rope_cached_cos_sin_gather",
    "fused_interleaved_embedding_gather_dequant_reshape",
];

pub(super) fn check(f: &Function<'_>, out: &mut Findings) {
    if let Some(name) = f.composite
        && name.contains("scaled_dot_product_attention")
    {
        fused(f.graph.inputs.len(), name, None, out);
    }
    mask(f, out);
    let mut writes: HashMap<ValueId, usize> = HashMap::new();
    let mut runtime_write = false;
    for (i, &op) in f.ops.iter().enumerate() {
        let at = (i, op);
        match base(op) {
            "batch_matmul" => product(f, at, out),
            name if name.contains("scaled_dot_product_attention") => {
                fused(op.operands.len(), name, Some(at), out);
            }
            "softmax" => softmax(f, at, out),
            "reduce_mean" => norm(f, at, out),
            "tanh" | "erf" | "gelu" => out.add("C9", at, format!("`{}`", base(op))),
            "silu" => out.add("K10", at, "SiLU as one operation".to_owned()),
            "mul" => sigmoid_product(f, at, out),
            "log" => log_sum(f, at, out),
            "gather_nd" | "gather_along_axis" | "scatter_nd" | "scatter_along_axis" => {
                gather(f, at, out);
            }
            "conv2d" => stride(f, at, out),
            "argmax" => argmax(f, at, out),
            "round" | "floor" | "ceil" | "trunc" => {
                out.add("K7", at, format!("`{}`", base(op)));
            }
            "slice_update" => {
                update(f, at, out);
                if !runtime_write && f.ints(op.operands[1]).is_none() {
                    runtime_write = true;
                    let message = "writes at an offset known at run time".to_owned();
                    out.add("K3", at, message);
                }
            }
            "read_handle" => read(f, at, out),
            "write_handle" => {
                write(f, at, out);
                *writes.entry(op.operands[0]).or_default() += 1;
            }
            _ => {}
        }
    }
    for &(name, v) in &f.graph.inputs {
        if let Some(&n) = writes.get(&v).filter(|&&n| n > 1) {
            out.about("K4", name.unwrap_or("_"), format!("written {n} times"));
        }
    }
}

fn product(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let Some(&weight) = at.1.operands.iter().find(|&&v| f.is_weight(v)) else {
        return;
    };
    let shape = f.dims(weight).unwrap_or_default();
    let message = format!("matrix product with a weight {shape:?}");
    let logits = f.output("out_logits").map(|v| f.source(v));
    if logits == Some(at.1.results[0]) {
        out.except("C1", Severity::Warning, at, message);
    } else {
        out.add("C1", at, message);
    }
}

/// A fused attention of `operands` operands; the fourth is a mask.
fn fused(operands: usize, name: &str, at: Option<(usize, &Op)>, out: &mut Findings) {
    let rules = if operands > 3 {
        &["C2", "K12"][..]
    } else {
        &["C2"]
    };
    for &id in rules {
        let message = format!("`{name}` of {operands} operands");
        match at {
            Some(at) => out.add(id, at, message),
            None => out.about(id, "graph", message),
        }
    }
}

fn axis(f: &Function<'_>, v: ValueId, rank: usize) -> Option<usize> {
    let &axis = f.ints(v)?.first()?;
    usize::try_from(if axis < 0 { axis + rank as i64 } else { axis }).ok()
}

fn softmax(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let Some(dims) = f.dims(at.1.operands[0]) else {
        return;
    };
    let Some(axis) = axis(f, at.1.operands[1], dims.len()) else {
        return;
    };
    if dims.len() < 3 || axis == 1 {
        return;
    }
    let message = format!("over axis {axis} of {dims:?}");
    if axis + 1 == dims.len() && dims[axis] > LONG_CONTEXT {
        out.except("C3", Severity::Note, at, message);
    } else {
        out.add("C3", at, message);
    }
}

/// RMSNorm, told by the mean of a square.
fn norm(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let Some(square) = f.made_by(at.1.operands[0], &["mul", "pow"]) else {
        return;
    };
    let x = square.operands[0];
    if base(square) == "mul" && square.operands[1] != x {
        return;
    }
    let Some(dims) = f.dims(x) else { return };
    if let Some(axis) = axis(f, at.1.operands[1], dims.len())
        && axis != 1
        && dims.get(axis).is_some_and(|&d| d >= WIDE)
    {
        out.add("C7", at, format!("reduces axis {axis} of {dims:?}"));
    }
    let scaled = f.made_by(x, &["mul"]).is_some_and(|op| {
        op.operands.iter().any(|&v| {
            f.floats(v)
                .is_some_and(|c| c.len() == 1 && c[0].abs() < 1.0)
        })
    });
    if f.tensor(x).is_some_and(|t| t.elem == Elem::F16) && !scaled {
        out.add(
            "C18",
            at,
            format!("mean of the square of {dims:?}, not scaled"),
        );
    }
}

fn mask(f: &Function<'_>, out: &mut Findings) {
    let Some(t) = f.input("causal_mask").and_then(|v| f.tensor(v)) else {
        return;
    };
    let context = f
        .input("key_cache")
        .and_then(|v| f.state(v)?.dims()?.last().copied());
    let fits = t.dims().is_some_and(|d| {
        d.len() == 4 && d[0] == 1 && d[2] == 1 && context.is_none_or(|c| c == d[1])
    });
    if t.elem != Elem::F16 || !fits {
        let message = format!("{} {:?} over {context:?} keys", t.elem.name(), t.shape);
        out.about("C4", "causal_mask", message);
    }
}

fn sigmoid_product(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let [a, b] = at.1.operands[..] else { return };
    for (x, s) in [(a, b), (b, a)] {
        if f.made_by(s, &["sigmoid"])
            .is_some_and(|op| op.operands[0] == x)
        {
            out.add("C8", at, "x * sigmoid(x), which is SiLU".to_owned());
            out.add("K10", at, "x * sigmoid(x) is fused to SiLU".to_owned());
        }
    }
}

fn log_sum(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let inner = f.source(at.1.operands[0]);
    let of_exp = |v: &ValueId| f.made_by(f.source(*v), &["exp"]);
    let sum = f.made_by(inner, &["add", "reduce_sum"]);
    let Some(exp) = sum.and_then(|op| op.operands.iter().find_map(of_exp)) else {
        return;
    };
    let shifted = f.made_by(exp.operands[0], &["sub"]).is_some_and(|op| {
        f.made_by(f.source(op.operands[1]), &["reduce_max"])
            .is_some()
    });
    if !shifted {
        out.add("K11", at, "log of a sum of exponentials".to_owned());
    }
}

fn gather(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    if f.composite.is_some_and(|c| KNOWN_GATHERS.contains(&c)) {
        return;
    }
    let table = f.dims(at.1.operands[0]).unwrap_or_default();
    let rope = base(at.1) == "gather_nd"
        && table.len() == 2
        && table[1] <= WIDE
        && f.is_weight(at.1.operands[0]);
    if rope {
        out.add("C10", at, format!("looks up a table {table:?} by position"));
    } else {
        out.add("C11", at, format!("`{}` of {table:?}", base(at.1)));
    }
}

fn stride(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let strides = f.ints(at.1.operands[2]).unwrap_or_default();
    let palettized = f
        .made_by(f.source(at.1.operands[1]), &["lut_to_dense"])
        .is_some();
    let most = if palettized { 2 } else { 3 };
    if strides.iter().any(|&s| s > most) {
        out.add(
            "C15",
            at,
            format!("strides {strides:?}, at most {most} here"),
        );
    }
}

fn argmax(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    if let Some(t) = f.tensor(at.1.operands[0])
        && is_float(t.elem)
        && t.elem.bits() < 32
    {
        out.add(
            "K1",
            at,
            format!("argmax of {} {:?}", t.elem.name(), t.shape),
        );
    }
}

fn update(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let Some(dims) = f.dims(at.1.operands[0]) else {
        return;
    };
    for (axis, (end, d)) in f.offsets(at.1.operands[2]).iter().zip(dims).enumerate() {
        if let Some(end) = *end
            && end > d as i64
        {
            out.add(
                "C14",
                at,
                format!("ends at {end} on axis {axis} of extent {d}"),
            );
        }
    }
}

fn read(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let v = at.1.results[0];
    let constrained = f.tensor(v).is_some_and(|t| t.encoding.is_some());
    let other = f.users(v).find(|u| {
        !matches!(
            base(u),
            "copy_discarding_constraints" | "write_handle" | "output"
        )
    });
    if let Some(user) = other.filter(|_| constrained) {
        out.add("C13", at, format!("read by `{}` as it is", base(user)));
    }
}

fn write(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let v = at.1.operands[1];
    let constrained = f.tensor(v).is_some_and(|t| t.encoding.is_some());
    let made = f.made_by(v, &["copy_with_constraints", "read_handle"]);
    if constrained && made.is_none() {
        out.add(
            "C13",
            at,
            "writes what no `copy_with_constraints` made".to_owned(),
        );
    }
}
