//! `package`: makes a model folder publishable, in place: quality report, model card
//! and Apple's bundle metadata beside the programs, and a manifest with all digests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anemone_schemas::atomic;
use anemone_schemas::manifest::Manifest;
use anemone_schemas::report::{QualityReport, REPORT_FILE};

use super::card::{bundle_metadata, model_card};
use super::target::finish;
use super::verify;
use crate::error::Error;
use crate::ui::Ui;

/// Apple's description of a bundle.
pub(crate) const BUNDLE_FILE: &str = "metadata.json";
/// The model card.
const CARD_FILE: &str = "README.md";

/// What to package.
#[derive(Clone, Debug)]
pub struct PackageOptions {
    /// Model folder made by `target`.
    pub folder: PathBuf,
    /// Quality report made by `eval`, copied into the folder.
    pub report: Option<PathBuf>,
    /// Whether a drafter may be passed on with the folder.
    pub with_drafter: bool,
}

/// Runs the command. The manifest is replaced last, so a folder in which this was
/// interrupted still is what its manifest says, or fails `verify`.
///
/// # Errors
/// A folder that does not verify, a report of another model, or an I/O error.
pub fn run(options: &PackageOptions, ui: Ui) -> Result<Manifest, Error> {
    let folder = &options.folder;
    let stage = ui.stage("package", 3);
    let manifest = verify::programs(folder)?;
    if manifest.drafter.is_some() && !options.with_drafter {
        return Err(Error::usage(format!(
            "`{}` has a drafter, and published drafters come without a licence of their own",
            folder.display()
        ))
        .hint(
            "keep the drafter out: `anemone-convert drafter -o` leaves the model folder as it \
             is; or pass `--with-drafter` if you may pass it on",
        ));
    }
    stage.step("programs");
    let report = match &options.report {
        Some(path) => Some(read_report(path, &manifest)?),
        None => None,
    };
    if let Some(report) = &report {
        let path = folder.join(REPORT_FILE);
        report.write(&path).map_err(|e| Error::io(&path, &e))?;
    }
    write(folder, CARD_FILE, &model_card(&manifest, report.as_ref()))?;
    let mut bundle = serde_json::to_string_pretty(&bundle_metadata(&manifest))
        .map_err(|e| Error::unexpected(&e))?;
    bundle.push('\n');
    write(folder, BUNDLE_FILE, &bundle)?;
    stage.step("descriptions");
    let manifest = finish(manifest, folder, &BTreeMap::new())?;
    stage.step("manifest");
    Ok(manifest)
}

fn read_report(path: &Path, manifest: &Manifest) -> Result<QualityReport, Error> {
    let report = QualityReport::read(path)
        .map_err(|e| Error::bad_input(format!("`{}`: {e}", path.display())))?;
    if report.teacher != manifest.model.source_fingerprint {
        return Err(Error::bad_input(format!(
            "`{}` compares with checkpoint {}, the folder was made from {}",
            path.display(),
            report.teacher,
            manifest.model.source_fingerprint
        )));
    }
    Ok(report)
}

fn write(folder: &Path, name: &str, text: &str) -> Result<(), Error> {
    let path = folder.join(name);
    atomic::write_bytes(&path, text.as_bytes()).map_err(|e| Error::io(&path, &e))
}
