//! Where a checkpoint comes from: a folder, or a repository of the Hub.

use std::path::{Path, PathBuf};

use anemone_memguard::Stop;

use crate::error::Error;
use crate::plan::Plan;
use crate::ui::Ui;

/// A checkpoint, or what fetching it would take.
pub enum Source {
    /// Here it is.
    Folder(PathBuf),
    /// It is not here yet, and the run is dry.
    Planned(Plan),
}

/// Finds the checkpoint `model`: a folder, or `owner/name[@revision]` on the Hub, which
/// is downloaded unless the run is `dry`. A folder of that name comes first.
///
/// # Errors
/// The Hub's refusal, no room for the files, or an interruption.
pub fn find(model: &Path, dry: bool, ui: Ui, stop: &Stop) -> Result<Source, Error> {
    if model.exists() {
        return Ok(Source::Folder(model.to_path_buf()));
    }
    hub::find(model, dry, ui, stop)
}

#[cfg(not(feature = "hub"))]
mod hub {
    use super::{Error, Path, Source, Stop, Ui};

    pub(super) fn find(model: &Path, _: bool, _: Ui, _: &Stop) -> Result<Source, Error> {
        Err(
            Error::bad_input(format!("`{}` does not exist", model.display()))
                .hint("give a folder; this program was built without the Hub"),
        )
    }
}

#[cfg(feature = "hub")]
mod hub {
    use anemone_hub::{Error as HubError, Hub, Repo, Settings};
    use anemone_memguard::require_disk;

    use super::{Error, Path, Plan, Source, Stop, Ui};

    /// The files a conversion reads, and those that must travel with the model.
    fn wanted(name: &str) -> bool {
        let weights = name == "model.safetensors"
            || (name.starts_with("model-") && name.ends_with(".safetensors"));
        weights
            || crate::commands::travels_with_model(name)
            || [
                "config.json",
                "generation_config.json",
                "model.safetensors.index.json",
                "tokenizer.json",
                "tokenizer_config.json",
                "chat_template.jinja",
                "chat_template.json",
                "special_tokens_map.json",
                "added_tokens.json",
                "README.md",
            ]
            .contains(&name)
    }

    pub(super) fn find(model: &Path, dry: bool, ui: Ui, stop: &Stop) -> Result<Source, Error> {
        let Some(repo) = model.to_str().and_then(Repo::parse) else {
            return Err(
                Error::bad_input(format!("`{}` does not exist", model.display()))
                    .hint("give a folder, or `owner/name[@revision]` of the Hub"),
            );
        };
        let settings = Settings::from_env();
        let cache = settings.cache.clone();
        let hub = Hub::new(settings).map_err(Error::from)?;
        let snapshot = hub.look_up(&repo, wanted)?;
        let bytes = snapshot.missing_bytes();
        if dry && !snapshot.missing.is_empty() {
            let files = snapshot.missing.iter().map(|f| (f.name.clone(), f.size));
            return Ok(Source::Planned(Plan::download(files, &cache, bytes)?));
        }
        if snapshot.files == 0 {
            return Err(Error::bad_input(format!(
                "`{repo}` holds no safetensors checkpoint"
            )));
        }
        require_disk(&cache, bytes)?;
        if !snapshot.missing.is_empty() {
            let stage = ui.transfer("download", bytes);
            let asked = || stop.requested().is_some();
            let fetched = hub.fetch(&snapshot, &asked, &mut |file, came| {
                stage.advance(came, file);
            });
            if let Err(HubError::Stopped) = fetched {
                stop.check()?;
            }
            fetched?;
        }
        ui.detail(&format!("`{repo}` is commit {}", snapshot.commit));
        Ok(Source::Folder(snapshot.folder))
    }
}
