//! Where the commands that go on from a store begin: it, its model, and the text.

use std::path::{Path, PathBuf};

use anemone_calib::Corpus;
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::spec::{LM_HEAD, ModelSpec};
use anemone_schemas::store::{Provenance, Store, StoreWriter};
use serde_json::Value;

use super::target::store_spec;
use super::text::{self, Budget};
use crate::error::Error;
use crate::ui::Ui;

/// What `tune` and `refine` start from.
pub(super) struct Origin {
    pub(super) checkpoint: Checkpoint,
    pub(super) store: Store,
    pub(super) spec: ModelSpec,
    /// Where the output layer comes from, if not from the store.
    pub(super) head: Option<Store>,
    /// Ids the tokenizer knows.
    pub(super) valid: usize,
    pub(super) corpus: Corpus,
}

impl Origin {
    /// Opens it all; the window of `budget` is cut to what the model takes.
    ///
    /// # Errors
    /// A store of another checkpoint, or anything that cannot be read.
    pub(super) fn open(
        model: &Path,
        store: &Path,
        head: Option<&Path>,
        calibration: &[PathBuf],
        budget: Budget,
    ) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(model)?;
        let found = Store::open(store)?;
        if found.manifest().provenance.source_fingerprint != checkpoint.fingerprint() {
            return Err(Error::bad_input(format!(
                "`{}` was not made from `{}`",
                store.display(),
                model.display()
            )));
        }
        let spec = store_spec(&found)?;
        let head = head.map(Store::open).transpose()?;
        let tokenizer = text::open_tokenizer(model)?;
        let budget = Budget {
            window: budget.window.min(spec.max_position),
            ..budget
        };
        let corpus = text::calibration(&tokenizer, calibration, budget)?;
        Ok(Self {
            checkpoint,
            store: found,
            spec,
            head,
            valid: tokenizer.size(),
            corpus,
        })
    }

    /// What the new store is made by: the settings of `command` on top of what made the old one.
    pub(super) fn provenance(&self, command: &str, settings: &[(&str, Value)]) -> Provenance {
        let mut provenance = self.store.manifest().provenance.clone();
        let mut put = |key: &str, value: Value| {
            let key = format!("{command}_{key}");
            provenance.settings.insert(key, value);
        };
        for (key, value) in settings {
            put(key, value.clone());
        }
        put("tokens", self.corpus.tokens().into());
        put("text", self.corpus.fingerprint().into());
        if let Some(head) = &self.head {
            let record = head.manifest().matrices.iter().find(|m| m.name == LM_HEAD);
            put("head", record.map(|m| m.sha256.clone()).into());
        }
        provenance.tool = crate::PRODUCER.to_string();
        provenance
    }
}

/// The store to be made, or nothing if it is complete already.
///
/// # Errors
/// Another store in its place: refused now, not after the work.
pub(super) fn begin(
    output: &Path,
    provenance: &Provenance,
    ui: Ui,
) -> Result<Option<StoreWriter>, Error> {
    if let Ok(done) = Store::open(output)
        && done.manifest().provenance == *provenance
    {
        ui.note(&format!("`{}` is complete already", output.display()));
        return Ok(None);
    }
    let writer = StoreWriter::create_or_resume(output, provenance.clone())?;
    Ok(Some(writer))
}
