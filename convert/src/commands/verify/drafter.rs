//! The drafter's program and the shapes that tie it to the model.

use std::path::Path;

use anemone_schemas::aimodel::ir::Elem;
use anemone_schemas::aimodel::{self, asset};
use anemone_schemas::manifest::{Drafter, Manifest};

use super::{fail, interface, table};
use crate::error::Error;

/// The structure of the drafter's program and the shapes that tie it to the model.
pub(super) fn check(folder: &Path, manifest: &Manifest, info: &Drafter) -> Result<(), Error> {
    table(folder, &info.embedding)?;
    let path = folder.join(&info.path);
    let module = asset::open_asset(&path)?;
    let wrong = |e: String| fail(format!("`{}`: {e}", path.display()));
    aimodel::check::check(&module).map_err(|e| wrong(e.to_string()))?;
    for &context in &info.contexts {
        for (kind, rows) in [("draft", info.rows), ("extend", info.prefill_rows)] {
            let name = format!("{kind}_{context}");
            let slots = context + info.spare_slots;
            let cache = vec![info.layers, 1, info.kv_heads, slots, info.head_dim];
            let mut inputs = vec![
                (
                    "context_cos".to_string(),
                    Elem::F32,
                    vec![rows, info.head_dim],
                ),
                (
                    "context_sin".to_string(),
                    Elem::F32,
                    vec![rows, info.head_dim],
                ),
                ("in_step".to_string(), Elem::Si32, vec![1]),
                ("key_cache".to_string(), Elem::F16, cache.clone()),
                ("value_cache".to_string(), Elem::F16, cache),
            ];
            let hidden = manifest.model.hidden;
            let taps = info.taps.iter();
            inputs.extend(taps.map(|t| (format!("tap_{t}"), Elem::F16, vec![1, rows, 1, hidden])));
            let graph = module
                .graph(&name)
                .ok_or_else(|| wrong(format!("no function `{name}`")))?;
            interface::takes(&module, &graph, &inputs).map_err(wrong)?;
            let outputs: &[&str] = match (kind, info.confidences) {
                ("extend", _) => &["out_done"],
                (_, true) => &["out_ids", "out_probabilities", "out_confidences"],
                (_, false) => &["out_ids", "out_probabilities"],
            };
            for &output in outputs {
                if !graph.outputs.iter().any(|(n, _)| *n == Some(output)) {
                    return Err(wrong(format!("`{name}` has no output `{output}`")));
                }
            }
        }
    }
    Ok(())
}
