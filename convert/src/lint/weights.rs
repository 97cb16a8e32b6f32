//! Rules about compressed weights (D).

use anemone_schemas::aimodel::ir::{Elem, Op};

use super::Findings;
use super::function::{Function, base, is_integer};

pub(super) fn check(f: &Function<'_>, out: &mut Findings) {
    let compressed = f.ops.iter().any(|op| {
        base(op) == "lut_to_dense" || (base(op) == "blockwise_shift_scale" && !f.graph.private)
    });
    for (i, &op) in f.ops.iter().enumerate() {
        match base(op) {
            "lut_to_dense" => table(f, (i, op), out),
            "blockwise_shift_scale" => scales(f, (i, op), out),
            "conv2d" | "batch_matmul" if compressed => plain(f, (i, op), out),
            _ => {}
        }
    }
}

fn table(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let [indices, table, axis] = at.1.operands[..] else {
        return;
    };
    let (Some(i), Some(t)) = (f.tensor(indices), f.tensor(table)) else {
        return;
    };
    let (Some(idims), Some(tdims)) = (i.dims(), t.dims()) else {
        return;
    };
    let bits = i.elem.bits();
    let rank = idims.len();
    let wrong = if t.elem != Elem::F16 {
        Some(format!("table of {}", t.elem.name()))
    } else if tdims.len() != rank + 2 || tdims[rank] != 1 << bits {
        Some(format!("table {tdims:?} for {bits}-bit indices {idims:?}"))
    } else if f.ints(axis).is_some_and(|a| a != [0]) {
        Some("axis other than 0".to_owned())
    } else {
        None
    };
    if let Some(message) = wrong {
        out.add("D4", at, message);
        return;
    }
    if !matches!(bits, 2 | 4 | 6 | 8) {
        out.add("D1", at, format!("{bits}-bit palette"));
    }
    if tdims[1..rank].iter().any(|&d| d != 1) || tdims[rank + 1] != 1 {
        out.add(
            "D1",
            at,
            format!("table {tdims:?} has blocks along the input or vectors"),
        );
    }
    for user in f.users(at.1.results[0]) {
        let weight = matches!(
            base(user),
            "conv2d" | "batch_matmul" | "transpose" | "reshape"
        );
        if !weight {
            out.add("D3", at, format!("palettized operand of `{}`", base(user)));
        }
    }
}

fn scales(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let (Some(data), Some(scale)) = (f.tensor(at.1.operands[0]), f.dims(at.1.operands[1])) else {
        return;
    };
    if !is_integer(data.elem) || data.elem.bits() > 8 {
        return;
    }
    if scale.iter().skip(1).any(|&d| d != 1) {
        out.add(
            "D1",
            at,
            format!("{} with scales {scale:?}", data.elem.name()),
        );
    }
}

/// A dense weight beside compressed ones.
fn plain(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    for &v in at.1.operands.iter().take(2) {
        let source = f.source(v);
        if let Some(t) = f.tensor(source)
            && f.made_by(source, &["constant"]).is_some()
            && t.elem == Elem::F16
        {
            out.add("D2", at, format!("weight {:?} is not compressed", t.shape));
        }
    }
}
