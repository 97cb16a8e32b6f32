//! The inputs and outputs that the engine counts on.

use anemone_schemas::aimodel::ir::{Elem, Graph, Module, Type};
use anemone_schemas::manifest::{Chunk, Manifest};

/// Whether every function of a chunk takes and gives what the engine expects.
pub(super) fn check(manifest: &Manifest, chunk: &Chunk, module: &Module) -> Result<(), String> {
    let m = &manifest.model;
    let layers = chunk.layers[1] - chunk.layers[0];
    for function in &chunk.functions {
        let graph = module
            .graph(&function.name)
            .ok_or_else(|| format!("no function `{}`", function.name))?;
        let (c, w) = (function.context, function.width);
        let cache = vec![layers, 1, m.kv_channels, 1, c];
        let inputs = [
            ("transformer_input", Elem::F16, vec![1, w, 1, m.hidden]),
            ("rope_cos", Elem::F16, vec![1, 1, w, m.head_dim]),
            ("rope_sin", Elem::F16, vec![1, 1, w, m.head_dim]),
            ("in_step", Elem::Si32, vec![1]),
            ("causal_mask", Elem::F16, vec![1, c, 1, w]),
            ("key_cache", Elem::F16, cache.clone()),
            ("value_cache", Elem::F16, cache),
        ];
        let inputs = inputs.map(|(name, elem, shape)| (name.to_string(), elem, shape));
        takes(module, &graph, &inputs)?;
        let mut outputs: Vec<String> = chunk.taps.iter().map(|t| format!("tap_{t}")).collect();
        let has = |name: &str| graph.outputs.iter().any(|(n, _)| *n == Some(name));
        // The choice of ids may be left to the host.
        outputs.push(match chunk.head {
            true if has("out_logits") => "out_logits".into(),
            true => "out_ids".into(),
            false => "out_hidden".into(),
        });
        for name in outputs {
            if !has(&name) {
                return Err(format!("`{}` has no output `{name}`", function.name));
            }
        }
    }
    Ok(())
}

/// Whether a function has these inputs or states.
pub(super) fn takes(
    module: &Module,
    graph: &Graph<'_>,
    inputs: &[(String, Elem, Vec<usize>)],
) -> Result<(), String> {
    for (name, elem, shape) in inputs {
        let Some((_, value)) = graph.inputs.iter().find(|(n, _)| *n == Some(name.as_str())) else {
            return Err(format!("`{}` has no input `{name}`", graph.name));
        };
        let mut ty = module.value_type(*value);
        if let Type::Handle(inner) = module.ty(ty) {
            ty = *inner;
        }
        let found = match module.ty(ty) {
            Type::Tensor(t) => Some((t.elem, t.dims().unwrap_or_default())),
            _ => None,
        };
        if found.as_ref() != Some(&(*elem, shape.clone())) {
            return Err(format!(
                "input `{name}` of `{}` is {found:?}, expected {elem:?} {shape:?}",
                graph.name
            ));
        }
    }
    Ok(())
}
