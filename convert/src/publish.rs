//! Publishing a packaged folder on the Hub.

use std::path::PathBuf;

use crate::commands::package::Package;
use crate::error::Error;
use crate::ui::Ui;

/// Where and how.
#[derive(Clone, Debug)]
pub struct PublishOptions {
    /// Packaged folder.
    pub folder: PathBuf,
    /// `owner/name[@revision]`.
    pub repo: String,
    /// Commit directly instead of proposing a pull request.
    pub direct: bool,
    /// Make a repository that does not exist yet private.
    pub private: bool,
    /// Whether a drafter's weights may be published.
    pub with_drafter: bool,
}

/// Refuses what must not be published.
///
/// # Errors
/// Wrong usage: no repository's name, a partial model, or a drafter that nobody asked to
/// publish.
pub fn check(options: &PublishOptions, package: &Package) -> Result<(), Error> {
    let drafter = package.files.iter().find(|f| f.path.starts_with("drafter"));
    if let Some(file) = drafter.filter(|_| !options.with_drafter) {
        return Err(Error::usage(format!(
            "`{}` belongs to a drafter, whose licence need not be the model's",
            options.folder.join(&file.path).display()
        ))
        .hint("publish a folder without it, or pass `--with-drafter` if its licence allows that"));
    }
    if let Some(layers) = &package.partial {
        return Err(Error::usage(format!(
            "`{}` holds only layers {layers}: it is for trials",
            options.folder.display()
        )));
    }
    hub::check(options)
}

/// Publishes all files of the package as one commit; gives the address of the commit or
/// pull request.
///
/// # Errors
/// As [`check`], or the Hub's refusal.
pub fn run(options: &PublishOptions, package: &Package, ui: Ui) -> Result<String, Error> {
    check(options, package)?;
    hub::run(options, package, ui)
}

#[cfg(not(feature = "hub"))]
mod hub {
    use super::{Error, Package, PublishOptions, Ui};

    pub(super) fn check(_: &PublishOptions) -> Result<(), Error> {
        Err(Error::usage("this program was built without the Hub"))
    }

    pub(super) fn run(options: &PublishOptions, _: &Package, _: Ui) -> Result<String, Error> {
        check(options).map(|()| String::new())
    }
}

#[cfg(feature = "hub")]
mod hub {
    use anemone_hub::{Hub, LocalFile, Repo, Settings, Upload};

    use super::{Error, Package, PublishOptions, Ui};

    fn repo(options: &PublishOptions) -> Result<Repo, Error> {
        Repo::parse(&options.repo).ok_or_else(|| {
            Error::usage(format!("`{}` is not `owner/name[@revision]`", options.repo))
        })
    }

    pub(super) fn check(options: &PublishOptions) -> Result<(), Error> {
        repo(options).map(|_| ())
    }

    pub(super) fn run(
        options: &PublishOptions,
        package: &Package,
        ui: Ui,
    ) -> Result<String, Error> {
        let repo = repo(options)?;
        let model = &package.manifest.model;
        let bytes: u64 = package.files.iter().map(|f| f.size_bytes).sum();
        ui.note(&format!(
            "publishing {} files, {bytes} bytes, to `{repo}`",
            package.files.len()
        ));
        let hub = Hub::new(Settings::from_env())?;
        let published = hub.publish(
            &repo,
            &Upload {
                folder: options.folder.clone(),
                files: package
                    .files
                    .iter()
                    .map(|f| LocalFile {
                        path: f.path.clone(),
                        size: f.size_bytes,
                        sha256: f.sha256.clone(),
                    })
                    .collect(),
                message: format!("{} in {} for Core AI", model.name, model.quantization),
                as_pull_request: !options.direct,
                private: options.private,
            },
        )?;
        let address = published.pull_request.or(published.commit);
        Ok(address.unwrap_or_else(|| repo.to_string()))
    }
}
