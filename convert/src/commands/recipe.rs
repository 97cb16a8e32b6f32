//! How a model folder was made: `recipe.json`, with the commands that make it again.
//!
//! Its key is a hash of everything that determines the bytes of the folder, so a folder
//! whose recipe has the key of a command is that command's finished result.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anemone_schemas::atomic;
use anemone_schemas::manifest::MANIFEST_FILE;
use anemone_schemas::store::{Key, Provenance, Store};
use serde::{Deserialize, Serialize};

use super::quantize::{METHODS, ORDER, PARTIAL, RULES};
use super::target::TargetOptions;
use crate::error::Error;
use crate::lower::{Chunks, TargetPlan};

/// Name of the file in a model folder.
pub(super) const RECIPE_FILE: &str = "recipe.json";
/// Recipes larger than this are not ours.
const MAX_BYTES: u64 = 1 << 20;

/// What `recipe.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Recipe {
    /// Key of the folder.
    pub(super) key: String,
    /// Program and version that lowered.
    pub(super) producer: String,
    /// How the store was made.
    pub(super) store: Provenance,
    /// The commands, with placeholders for folders.
    pub(super) commands: Vec<String>,
}

impl Recipe {
    pub(super) fn new(options: &TargetOptions, store: &Store, plan: &TargetPlan) -> Self {
        let manifest = store.manifest();
        // Debug prints floats with the shortest digits that read back the same.
        let plan = format!("{plan:?}");
        let tensors: Vec<&str> = manifest
            .matrices
            .iter()
            .map(|m| m.sha256.as_str())
            .chain(manifest.dense.iter().map(|d| d.sha256.as_str()))
            .chain(manifest.files.iter().map(|f| f.sha256.as_str()))
            .collect();
        let tensors = tensors.concat();
        let key = Key::of([
            crate::PRODUCER.as_bytes(),
            options.name.as_bytes(),
            plan.as_bytes(),
            tensors.as_bytes(),
        ]);
        Self {
            key: key.as_str().to_string(),
            producer: crate::PRODUCER.to_string(),
            commands: vec![quantize(&manifest.provenance), target(options)],
            store: manifest.provenance.clone(),
        }
    }

    /// The layers of a model that is not whole.
    pub(super) fn partial(&self) -> Option<&str> {
        self.store.settings.get(PARTIAL)?.as_str()
    }

    /// Whether a folder is the finished result of this recipe.
    pub(super) fn is_finished(&self, folder: &Path) -> bool {
        folder.join(MANIFEST_FILE).is_file() && Self::read(folder).as_ref() == Some(self)
    }

    /// The recipe of a folder, if it has one.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        let path = folder.join(RECIPE_FILE);
        if fs::metadata(&path).ok()?.len() > MAX_BYTES {
            return None;
        }
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    pub(super) fn write(&self, folder: &Path) -> Result<(), Error> {
        let path = folder.join(RECIPE_FILE);
        let mut text = serde_json::to_string_pretty(self).map_err(|e| Error::unexpected(&e))?;
        text.push('\n');
        atomic::write_bytes(&path, text.as_bytes()).map_err(|e| Error::io(&path, &e))
    }
}

fn quantize(provenance: &Provenance) -> String {
    let setting = |name: &str| provenance.settings.get(name);
    let method = METHODS.iter().find(|m| m.0.name() == provenance.method);
    let method = method.map_or(provenance.method.as_str(), |m| m.1);
    let mut line = format!("anemone-convert quantize CHECKPOINT -o STORE --method {method}");
    if let Some(guided) = setting("guided") {
        let _ = write!(line, " --guided {guided}");
    }
    // The default depends on the method, so it is always said.
    let order = setting(ORDER).and_then(|v| v.as_str()).unwrap_or("given");
    let _ = write!(line, " --mlp-order {order}");
    if let Some(bits) = setting("bits") {
        let _ = write!(line, " --bits {bits}");
    }
    if let Some(vector) = setting("vector") {
        let _ = write!(line, " --vector {vector}");
    }
    let rules = setting(RULES).and_then(|v| v.as_array());
    for rule in rules.into_iter().flatten().filter_map(|v| v.as_str()) {
        // As a shell takes it, whatever the pattern holds.
        let _ = write!(line, " --set '{}'", rule.replace('\'', r"'\''"));
    }
    if let Some(tokens) = setting("calibration_tokens") {
        let _ = write!(line, " --tokens {tokens}");
    }
    let partial = setting(PARTIAL).and_then(|v| v.as_str());
    if let Some(layers) = partial.and_then(|text| text.split(' ').next()) {
        let _ = write!(line, " --layers {layers}");
    }
    line
}

fn target(options: &TargetOptions) -> String {
    let mut line = format!(
        "anemone-convert target STORE -o FOLDER --name {}",
        options.name
    );
    let _ = match options.chunks {
        Chunks::Count(n) => write!(line, " --chunks {n}"),
        Chunks::MaxBytes(bytes) => write!(line, " --max-chunk-mb {}", bytes / 1_000_000),
    };
    let _ = write!(line, " --max-context {}", options.max_context);
    if !options.taps.is_empty() {
        let taps: Vec<String> = options.taps.iter().map(ToString::to_string).collect();
        let _ = write!(line, " --taps {}", taps.join(","));
    }
    if options.with_logits {
        line.push_str(" --with-logits");
    }
    line
}
