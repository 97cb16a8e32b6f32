//! Rules about the functions of a program together (B6 across functions, C17, D8,
//! E, K14 to K19).

use std::collections::{BTreeMap, BTreeSet};

use anemone_schemas::aimodel::ir::{Attr, Elem, Module};

use super::function::Function;
use super::{Findings, Severity};

const PHONE_BYTES: u64 = 2_000_000_000;
const MAX_CONTEXT: usize = 16384;
const PREFILL_WIDTH: usize = 64;

pub(super) fn check(m: &Module, entries: &[&Function<'_>], out: &mut Findings) {
    shared_caches(entries, out);
    widths(entries, out);
    names(entries, out);
    contexts(entries, out);
    let bytes: u64 = m
        .blobs()
        .iter()
        .map(anemone_schemas::aimodel::ir::Blob::len)
        .sum();
    if bytes > PHONE_BYTES {
        out.about(
            "D8",
            "program",
            format!("{:.2} GB of constants", bytes as f64 / 1e9),
        );
    }
    let refused = m.attrs().iter().any(
        |a| matches!(a, Attr::CompileUnit { producer, .. } if producer.contains("coreai-torch 0.4.0")),
    );
    if refused {
        out.about(
            "K15",
            "program",
            "debug locations of coreai-torch 0.4.0".to_owned(),
        );
    }
    if entries.iter().any(|f| f.graph.name == "load_embeddings") {
        apple(entries, out);
    }
}

/// Context and width in a name like `extend_256_16`.
fn parts(name: &str) -> Option<(&str, usize, usize)> {
    let mut parts = name.rsplitn(3, '_');
    let width = parts.next()?.parse().ok()?;
    let context = parts.next()?.parse().ok()?;
    Some((parts.next()?, context, width))
}

fn shared_caches(entries: &[&Function<'_>], out: &mut Findings) {
    let mut layouts: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for f in entries {
        for &(name, v) in &f.graph.inputs {
            if let (Some(name), Some(t)) = (name, f.state(v)) {
                let layout = match t.encoding.map(|e| f.m.attr(e)) {
                    Some(Attr::HwConstraints {
                        alignments,
                        interleave,
                        ..
                    }) => {
                        format!("alignments {alignments:?}, interleave {interleave:?}")
                    }
                    _ => "plain".to_owned(),
                };
                layouts.entry(name).or_default().insert(layout);
            }
        }
    }
    for (name, layouts) in layouts {
        if layouts.len() > 1 {
            out.about("B6", name, format!("the functions disagree: {layouts:?}"));
        }
    }
}

fn widths(entries: &[&Function<'_>], out: &mut Findings) {
    let widest = entries
        .iter()
        .filter(|f| f.input("key_cache").is_some())
        .filter_map(|f| Some(parts(f.graph.name)?.2))
        .max();
    if let Some(w) = widest.filter(|&w| w < PREFILL_WIDTH) {
        out.about(
            "C17",
            "program",
            format!("the widest function takes {w} tokens"),
        );
    }
}

fn names(entries: &[&Function<'_>], out: &mut Findings) {
    for f in entries {
        out.function = f.graph.name.to_owned();
        // A state's token has the state's name among the results; names must be
        // distinct within inputs and within outputs.
        for values in [&f.graph.inputs, &f.graph.outputs] {
            let mut seen = BTreeSet::new();
            for name in values.iter().filter_map(|v| v.0) {
                if !seen.insert(name) {
                    out.about("K16", name, "a name given twice".to_owned());
                }
            }
        }
        let states = f
            .graph
            .inputs
            .iter()
            .filter(|i| f.state(i.1).is_some())
            .count();
        if states != 0 && states != 2 {
            let message = format!("{states} states");
            out.push("K16", Severity::Warning, None, "states", message);
        }
    }
    out.function = String::new();
}

fn contexts(entries: &[&Function<'_>], out: &mut Findings) {
    for f in entries {
        let context = f
            .input("key_cache")
            .and_then(|v| f.state(v)?.dims()?.last().copied());
        if let Some(c) = context.filter(|&c| c > MAX_CONTEXT) {
            out.function = f.graph.name.to_owned();
            out.about("K19", "key_cache", format!("context {c}"));
        }
    }
    out.function = String::new();
}

/// What Apple's static-shape runner looks for.
fn apple(entries: &[&Function<'_>], out: &mut Findings) {
    let gathers: BTreeSet<usize> = entries
        .iter()
        .filter_map(|f| {
            f.graph
                .name
                .strip_prefix("gather_embeddings_")?
                .parse()
                .ok()
        })
        .collect();
    for f in entries {
        let name = f.graph.name;
        if !name.starts_with("extend") && !name.starts_with("prompt") {
            continue;
        }
        out.function = name.to_owned();
        match parts(name) {
            None => out.about("E1", "name", "no context and width at its end".to_owned()),
            Some((_, _, w)) if !gathers.contains(&w) => {
                out.about("E1", "name", format!("there is no `gather_embeddings_{w}`"));
            }
            Some(_) => {}
        }
        let states: Vec<&str> = f
            .graph
            .inputs
            .iter()
            .filter(|i| f.state(i.1).is_some())
            .filter_map(|i| i.0)
            .collect();
        if !states.is_empty() && states != ["key_cache", "value_cache"] {
            out.about("E2", "states", format!("states {states:?}"));
        }
        let expected = [
            ("transformer_input", Elem::F16),
            ("pos", Elem::Ui16),
            ("step", Elem::Si32),
            ("causal_mask", Elem::F16),
        ];
        for (part, elem) in expected {
            let found = f.graph.inputs.iter().find(|i| {
                i.0.is_some_and(|n| n.contains(part) && (part != "step" || !n.contains("pos")))
            });
            match found.and_then(|i| f.tensor(i.1)) {
                Some(t) if t.elem == elem => {}
                Some(t) => out.about("E3", part, format!("input of {}", t.elem.name())),
                None => out.about("E3", part, "no such input".to_owned()),
            }
        }
        match f.output("out_logits").and_then(|v| f.tensor(v)) {
            Some(t) if t.elem == Elem::F16 => {}
            Some(t) => out.about("E3", "out_logits", format!("output of {}", t.elem.name())),
            None => out.about("E3", "out_logits", "no such output".to_owned()),
        }
    }
    out.function = String::new();
}
