//! Rules about layout and alignment within a function (B).

use anemone_schemas::aimodel::ir::{Attr, Backing, Elem, Op, TensorType, ValueId};
use serde::Serialize;

use super::Findings;
use super::function::{Function, base, is_integer};

/// Bytes a row of the engine's buffers is padded to.
const ROW: usize = 64;
/// Elements below which a last axis of 1 costs nothing worth a word.
const SMALL: usize = 64;

/// How often a function moves elements without computing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moves {
    /// Layers, by the first axis of the caches; 0 without caches.
    pub layers: usize,
    /// `transpose` operations.
    pub transposes: usize,
    /// Those that move the last axis.
    pub last_axis: usize,
    /// `reshape` operations.
    pub reshapes: usize,
}

pub(super) fn count(f: &Function<'_>) -> Moves {
    let mut moves = Moves {
        layers: f
            .input("key_cache")
            .and_then(|v| f.state(v)?.dims()?.first().copied())
            .unwrap_or(0),
        ..Moves::default()
    };
    for op in &f.ops {
        match base(op) {
            "transpose" => {
                moves.transposes += 1;
                let perm = f.ints(op.operands[1]).unwrap_or_default();
                moves.last_axis += usize::from(perm.last() != Some(&(perm.len() as i64 - 1)));
            }
            "reshape" => moves.reshapes += 1,
            _ => {}
        }
    }
    moves
}

pub(super) fn check(f: &Function<'_>, out: &mut Findings) {
    if !f.graph.private {
        for (values, what) in [(&f.graph.inputs, "input"), (&f.graph.outputs, "output")] {
            for &(name, v) in values {
                row(f, name.unwrap_or("_"), what, v, out);
            }
        }
    }
    for &(name, v) in &f.graph.inputs {
        let name = name.unwrap_or("_");
        if let Some(t) = f.state(v) {
            cache(f, name, t, out);
        }
        if name == "embedding_table" {
            table(f, v, out);
        }
    }
    for &(name, v) in &f.graph.outputs {
        if name == Some("out_logits")
            && let Some(t) = f.tensor(v)
            && (t.elem != Elem::F16 || t.encoding.is_some())
        {
            let kind = if t.encoding.is_some() {
                "constrained "
            } else {
                ""
            };
            out.about("B10", "out_logits", format!("{kind}{}", t.elem.name()));
        }
    }
    if f.composite == Some("rope_cached_cos_sin_gather") {
        rope(f, out);
    }
    for (i, &op) in f.ops.iter().enumerate() {
        match base(op) {
            "conv2d" => convolution(f, (i, op), out),
            "transpose" => undone_transpose(f, (i, op), out),
            "reshape" => undone_reshape(f, (i, op), out),
            _ => {}
        }
        singleton(f, (i, op), out);
    }
}

fn row(f: &Function<'_>, name: &str, what: &str, v: ValueId, out: &mut Findings) {
    let Some(t) = f.tensor(v) else { return };
    let (Some(dims), Some(count)) = (t.dims(), t.count()) else {
        return;
    };
    // Offsets and ids are no buffers of the engine.
    if count <= 1 || dims.len() < 2 || (is_integer(t.elem) && dims.len() == 2) {
        return;
    }
    let bytes = dims[dims.len() - 1] * t.elem.bits() / 8;
    if bytes % ROW != 0 {
        out.about(
            "B1",
            name,
            format!("{what} {dims:?} has rows of {bytes} bytes"),
        );
    }
}

fn singleton(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    if matches!(
        base(at.1),
        "constant" | "lut_to_dense" | "blockwise_shift_scale"
    ) {
        return;
    }
    for &r in &at.1.results {
        let Some(t) = f.tensor(r) else { continue };
        let large = t.count().is_some_and(|n| n > SMALL);
        if large && t.shape.len() > 1 && t.shape.last() == Some(&1) {
            out.add("B2", at, format!("result {:?}", t.shape));
        }
    }
}

fn convolution(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let Some(dims) = f.dims(at.1.operands[0]) else {
        return;
    };
    if dims.len() == 4 && dims[0] > 1 {
        out.add(
            "B3",
            at,
            format!("reads {dims:?}: {} on the batch axis", dims[0]),
        );
    }
    if dims.len() == 4 && dims[2] > 1 {
        out.add("B3", at, format!("reads {dims:?}: height {}", dims[2]));
    }
}

fn undone_transpose(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let Some(before) = f.made_by(at.1.operands[0], &["transpose"]) else {
        return;
    };
    let perms = [before, at.1].map(|op| f.ints(op.operands[1]).unwrap_or_default());
    let identity = perms[1]
        .iter()
        .enumerate()
        .all(|(i, &p)| perms[0].get(p as usize) == Some(&(i as i64)));
    if identity {
        out.add("B4", at, "undoes the transpose before".to_owned());
    }
}

fn undone_reshape(f: &Function<'_>, at: (usize, &Op), out: &mut Findings) {
    let Some(before) = f.made_by(at.1.operands[0], &["reshape"]) else {
        return;
    };
    if f.dims(before.operands[0]) == f.dims(at.1.results[0]) {
        out.add("B4", at, "undoes the reshape before".to_owned());
    }
}

fn cache(f: &Function<'_>, name: &str, t: &TensorType, out: &mut Findings) {
    if !name.contains("cache") {
        return;
    }
    let Some(dims) = t.dims() else { return };
    let pattern = dims.len() == 5 && dims[1] == 1 && dims[3] == 1;
    if !pattern || t.elem != Elem::F16 {
        out.about("B5", name, format!("state of {} {dims:?}", t.elem.name()));
        return;
    }
    if let Some(constraints) = t.encoding.map(|e| f.m.attr(e)) {
        let Attr::HwConstraints {
            alignments,
            interleave,
            backing,
        } = constraints
        else {
            return;
        };
        let rows = alignments.get(4).copied().unwrap_or(0);
        let fits = *backing == Backing::IoSurface
            && interleave[..] == [1, 1, 8, 1, 1]
            && alignments.len() == 6
            && rows % 8 == 0
            && rows >= 8 * dims[4] as i64
            && alignments
                .iter()
                .enumerate()
                .all(|(i, &a)| i == 4 || a == 1);
        if !fits || dims[2] % 8 != 0 {
            let message = format!(
                "{dims:?} with {backing:?}, alignments {alignments:?}, interleave {interleave:?}"
            );
            out.about("B6", name, message);
        }
    }
}

fn table(f: &Function<'_>, v: ValueId, out: &mut Findings) {
    let Some(t) = f.tensor(v) else { return };
    let constrained = matches!(
        t.encoding.map(|e| f.m.attr(e)),
        Some(Attr::HwConstraints { interleave, backing: Backing::IoSurface, .. })
            if interleave[..] == [8, 1, 1]
    );
    let shape = t.shape.len() == 3 && t.shape[1] == 1;
    if t.elem != Elem::Si8 || !shape || !constrained {
        let message = format!("{} {:?}", t.elem.name(), t.shape);
        out.about("B7", "embedding_table", message);
    }
}

fn rope(f: &Function<'_>, out: &mut Findings) {
    for &(_, v) in &f.graph.outputs {
        let aligned = matches!(
            f.tensor(v).and_then(|t| t.encoding).map(|e| f.m.attr(e)),
            Some(Attr::HwConstraints { alignments, backing: Backing::IoSurface, .. })
                if alignments.len() == 4 && alignments[2] == 32
        );
        if !aligned {
            let message = "gathered rotary factors without the constraint".to_owned();
            out.about("B8", "rope", message);
        }
    }
}
