//! `verify`: is a model folder whole, and will it run?

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anemone_schemas::aimodel::ir::{Elem, Graph, Module, Type};
use anemone_schemas::aimodel::{asset, check};
use anemone_schemas::exit::Exit;
use anemone_schemas::manifest::{Chunk, Drafter, MANIFEST_FILE, Manifest};
use anemone_schemas::tokenizer::{ChatMessage, TokenizerFolder};

use super::files::{file_info, list};
use super::lint::first_error;
use super::package::BUNDLE_FILE;
use super::target::TOKENIZER_DIR;
use super::text::open_tokenizer;
use crate::error::Error;
use crate::ui::Ui;

/// Texts every tokenizer must bring back unchanged.
const PROBES: [&str; 4] = [
    "Hello, world!",
    "fn main() { let x = 1; }\n\tindented",
    "naïve café, 東京, Ω≈ç√",
    "  two  spaces and 12345.678",
];

/// Checks everything `verify` checks.
///
/// # Errors
/// The first thing that is wrong, with exit code 6.
pub fn run(folder: &Path, ui: Ui) -> Result<Manifest, Error> {
    let stage = ui.stage("verify", 3);
    let manifest = Manifest::read(folder)?;
    files(folder, &manifest)?;
    stage.step("files");
    programs(folder)?;
    stage.step("programs");
    tokenizer(folder, &manifest)?;
    bundle(folder, &manifest)?;
    stage.step("tokenizer and bundle");
    Ok(manifest)
}

fn fail(message: impl Into<String>) -> Error {
    Error::new(Exit::Verification, message)
}

/// Every file of the manifest is there with its digest, and none besides.
fn files(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    let found: BTreeSet<String> = list(folder)
        .map_err(|e| Error::io(folder, &e))?
        .into_iter()
        .filter(|p| p != MANIFEST_FILE)
        .collect();
    if let Some(extra) = found.iter().find(|p| !manifest.files.contains_key(*p)) {
        return Err(fail(format!(
            "`{}` is not in the manifest",
            folder.join(extra).display()
        )));
    }
    for (name, expected) in &manifest.files {
        let path = folder.join(name);
        if !found.contains(name) {
            return Err(fail(format!("`{}` is missing", path.display()))
                .hint("the folder was copied or downloaded incompletely"));
        }
        let actual = file_info(&path).map_err(|e| Error::io(&path, &e))?;
        if actual != *expected {
            return Err(fail(format!(
                "`{}` has {} bytes and SHA-256 {}, expected {} bytes and {}",
                path.display(),
                actual.bytes,
                actual.sha256,
                expected.bytes,
                expected.sha256
            ))
            .hint("download or convert the folder again"));
        }
    }
    Ok(())
}

/// The manifest, the embedding's size and the structure of every program.
///
/// # Errors
/// What is wrong, with the program's name.
pub(crate) fn programs(folder: &Path) -> Result<Manifest, Error> {
    let manifest = Manifest::read(folder)?;
    let table = folder.join(&manifest.embedding.path);
    let bytes = fs::metadata(&table)
        .map_err(|e| Error::io(&table, &e))?
        .len();
    let expected = manifest.embedding.shape.iter().product::<usize>() as u64 * 2;
    if bytes != expected {
        return Err(fail(format!(
            "`{}` has {bytes} bytes, expected {expected}",
            table.display()
        )));
    }
    for chunk in &manifest.chunks {
        let path = folder.join(&chunk.path);
        let module = asset::open_asset(&path)?;
        check::check(&module).map_err(|e| fail(format!("`{}`: {e}", path.display())))?;
        if let Some(broken) = first_error(&module) {
            return Err(fail(format!("`{}`: {broken}", path.display())));
        }
        interface(&manifest, chunk, &module)
            .map_err(|e| fail(format!("`{}`: {e}", path.display())))?;
    }
    if let Some(info) = &manifest.drafter {
        drafter(folder, &manifest, info)?;
    }
    Ok(manifest)
}

/// The structure of the drafter's program and the shapes that tie it to the model.
fn drafter(folder: &Path, manifest: &Manifest, info: &Drafter) -> Result<(), Error> {
    let table = folder.join(&info.embedding.path);
    let bytes = fs::metadata(&table)
        .map_err(|e| Error::io(&table, &e))?
        .len();
    let expected = info.embedding.shape.iter().product::<usize>() as u64 * 2;
    if bytes != expected {
        return Err(fail(format!(
            "`{}` has {bytes} bytes, expected {expected}",
            table.display()
        )));
    }
    let path = folder.join(&info.path);
    let module = asset::open_asset(&path)?;
    let wrong = |e: String| fail(format!("`{}`: {e}", path.display()));
    check::check(&module).map_err(|e| wrong(e.to_string()))?;
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
            takes(&module, &graph, &inputs).map_err(wrong)?;
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

/// Whether a function has these inputs or states.
fn takes(
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

/// Whether every function of a chunk takes and gives what the engine expects.
fn interface(manifest: &Manifest, chunk: &Chunk, module: &Module) -> Result<(), String> {
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

/// The tokenizer loads, agrees with the manifest, brings probe texts back and renders
/// conversations.
fn tokenizer(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    let dir = folder.join(TOKENIZER_DIR);
    let tokenizer = open_tokenizer(&dir)?;
    let known = tokenizer.size();
    if known != manifest.model.tokenizer_vocab {
        return Err(fail(format!(
            "`{}` knows {known} ids, the manifest says {}",
            dir.display(),
            manifest.model.tokenizer_vocab
        )));
    }
    for probe in PROBES {
        let ids = tokenizer.encode(probe, false)?;
        let back = tokenizer.decode(&ids, false)?;
        if back != probe {
            return Err(fail(format!(
                "`{}` turns {probe:?} into {back:?}",
                dir.display()
            )));
        }
    }
    if let Some(stop) = manifest.stop.iter().find(|&&id| id as usize >= known) {
        return Err(fail(format!(
            "stop id {stop} is beyond the tokenizer's {known}"
        )));
    }
    conversations(&tokenizer).map_err(|e| fail(format!("`{}`: chat template: {e}", dir.display())))
}

fn conversations(tokenizer: &TokenizerFolder) -> Result<(), Error> {
    let message = |role: &str, content: &str| ChatMessage {
        role: role.into(),
        content: content.into(),
    };
    let user = message("user", "What is a list?");
    let cases = [
        vec![user.clone()],
        vec![message("system", "Be brief."), user.clone()],
        vec![
            user.clone(),
            message("assistant", "A sequence."),
            user.clone(),
        ],
        vec![message("user", "日本語 \"quotes\" <tags>")],
    ];
    for case in cases {
        let text = tokenizer.render_chat(&case, true, &serde_json::Map::new())?;
        let content = &case.last().expect("not empty").content;
        if !text.contains(content.as_str()) {
            return Err(fail(format!("lost the message {content:?}")));
        }
    }
    Ok(())
}

/// Apple's metadata, where the folder has been packaged.
fn bundle(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    let path = folder.join(BUNDLE_FILE);
    let Ok(text) = fs::read_to_string(&path) else {
        return Ok(());
    };
    let json: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| fail(format!("`{}` is not JSON: {e}", path.display())))?;
    let assets = json["assets"].as_object().map_or(0, serde_json::Map::len);
    if json["metadata_version"] != "0.2" || assets != manifest.chunks.len() {
        return Err(fail(format!(
            "`{}` does not describe this folder's {} programs",
            path.display(),
            manifest.chunks.len()
        )));
    }
    Ok(())
}
