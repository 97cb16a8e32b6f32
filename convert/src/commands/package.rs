//! `package`: makes a model folder publishable, in place: licence and card of the base
//! model, quality report, probes, Apple's bundle metadata beside the programs, and a
//! manifest with all digests. Says the digest root and a stanza for the model catalog.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anemone_schemas::atomic;
use anemone_schemas::exit::Exit;
use anemone_schemas::hex;
use anemone_schemas::manifest::{FileInfo, MANIFEST_FILE, Manifest};
use anemone_schemas::report::{QualityReport, REPORT_FILE};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::card::{Card, bundle_metadata};
use super::files::file_info;
use super::notices;
use super::recipe::Recipe;
use super::target::{TOKENIZER_DIR, finish};
use super::text::open_tokenizer;
use super::verify;
use crate::error::Error;
use crate::ui::Ui;

/// Apple's description of a bundle.
pub(crate) const BUNDLE_FILE: &str = "metadata.json";
/// The model card.
const CARD_FILE: &str = "README.md";

/// What to package.
#[derive(Clone, Debug, Default)]
pub struct PackageOptions {
    /// Model folder made by `target`.
    pub folder: PathBuf,
    /// Quality report made by `eval`, copied into the folder.
    pub report: Option<PathBuf>,
    /// Checkpoint to take licence and notices from, if the store had none.
    pub base: Option<PathBuf>,
}

/// A packaged folder.
#[derive(Clone, Debug, Serialize)]
pub struct Package {
    /// Its manifest.
    #[serde(skip)]
    pub manifest: Manifest,
    /// SHA-256 over the lines `<sha256>  <path>` of all files, sorted by path and joined
    /// by line ends: the catalog's `artifact_sha256_root`.
    pub digest_root: String,
    /// Every file with size and digest.
    pub files: Vec<PackagedFile>,
    /// The layers of a model that is not whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partial: Option<String>,
}

/// A file of a package.
#[derive(Clone, Debug, Serialize)]
pub struct PackagedFile {
    /// Relative path.
    pub path: String,
    /// SHA-256.
    pub sha256: String,
    /// Length.
    pub size_bytes: u64,
}

/// Runs the command. The manifest is replaced last, so a folder in which this was
/// interrupted still is what its manifest says, or fails `verify`; the same command
/// completes it.
///
/// # Errors
/// A folder that does not verify, a template that does not render, a report of another
/// model, or an I/O error.
pub fn run(options: &PackageOptions, ui: Ui) -> Result<Package, Error> {
    let folder = &options.folder;
    let stage = ui.stage("package", 3);
    let manifest = verify::programs(folder)?;
    let programs = verify::program_digests(folder, &manifest);
    let tokenizer = open_tokenizer(&folder.join(TOKENIZER_DIR))?;
    verify::conversations(&tokenizer).map_err(|e| {
        let what = format!("`{}`: chat template: {}", folder.display(), e.message);
        Error::new(Exit::Verification, what)
            .hint("users would meet this on their first request; mend the template first")
    })?;
    stage.step("programs and template");
    let report = match &options.report {
        Some(path) => Some(read_report(path, &manifest)?),
        None => None,
    };
    if let Some(report) = &report {
        let path = folder.join(REPORT_FILE);
        report.write(&path).map_err(|e| Error::io(&path, &e))?;
    }
    if let Some(base) = &options.base {
        for (name, bytes) in notices::collect(base)? {
            write(folder, &name, &bytes)?;
        }
    }
    let base = notices::base(folder);
    if base.license.is_none() {
        ui.note("the base model's licence is not known; pass `--base CHECKPOINT` to copy it");
    }
    write(
        folder,
        verify::PROBES_FILE,
        verify::probe_file(&tokenizer)?.as_bytes(),
    )?;
    let card = Card {
        manifest: &manifest,
        report: report.as_ref(),
        base: &base,
        recipe: Recipe::read(folder),
    };
    write(folder, CARD_FILE, card.text().as_bytes())?;
    let mut bundle = serde_json::to_string_pretty(&bundle_metadata(&manifest))
        .map_err(|e| Error::unexpected(&e))?;
    bundle.push('\n');
    write(folder, BUNDLE_FILE, bundle.as_bytes())?;
    stage.step("descriptions");
    let manifest = finish(manifest, folder, &programs)?;
    let package = describe(folder, manifest)?;
    stage.step("manifest");
    Ok(package)
}

/// Digests of a folder whose manifest is current, the manifest's own included.
///
/// # Errors
/// An I/O error.
pub fn describe(folder: &Path, manifest: Manifest) -> Result<Package, Error> {
    let path = folder.join(MANIFEST_FILE);
    let own = file_info(&path).map_err(|e| Error::io(&path, &e))?;
    let mut files: Vec<PackagedFile> = manifest
        .files
        .iter()
        .chain([(&MANIFEST_FILE.to_string(), &own)])
        .map(|(path, FileInfo { bytes, sha256 })| PackagedFile {
            path: path.clone(),
            sha256: sha256.clone(),
            size_bytes: *bytes,
        })
        .collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(Package {
        manifest,
        digest_root: digest_root(&files),
        files,
        partial: Recipe::read(folder).and_then(|r| r.partial().map(Into::into)),
    })
}

fn digest_root(files: &[PackagedFile]) -> String {
    let lines: Vec<String> = files
        .iter()
        .map(|f| format!("{}  {}", f.sha256, f.path))
        .collect();
    hex(&Sha256::digest(lines.join("\n")))
}

impl Package {
    /// The artifact entry of the model catalog, as YAML. What only the publisher knows
    /// is left to be filled in.
    pub fn stanza(&self, repo: Option<&str>) -> String {
        let m = &self.manifest.model;
        let (owner, name) = repo
            .and_then(|repo| repo.split_once('/'))
            .unwrap_or(("OWNER", "NAME"));
        let total: u64 = self.files.iter().map(|f| f.size_bytes).sum();
        let mut out = String::new();
        let _ = write!(
            out,
            "# catalog artifact\n\
             - base_model: {base}\n  officiality: community\n  huggingface:\n    owner: {owner}\n    \
             repo: {name}\n    url: https://huggingface.co/{owner}/{name}\n    revision: # commit\n    \
             files:\n",
            base = m.name,
        );
        for f in &self.files {
            let _ = writeln!(
                out,
                "      - {{path: {:?}, sha256: {}, size_bytes: {}}}",
                f.path, f.sha256, f.size_bytes
            );
        }
        let _ = write!(
            out,
            "  artifact_sha256_root: {root}\n  size:\n    quantization: {quant:?}\n    \
             artifact_size: {total}\n  provenance:\n    converted_by:\n      tool: {tool:?}\n",
            root = self.digest_root,
            quant = m.quantization,
            tool = self.manifest.producer,
        );
        out
    }
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

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), Error> {
    let path = folder.join(name);
    atomic::write_bytes(&path, bytes).map_err(|e| Error::io(&path, &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_root_is_the_catalogs() {
        // printf 'aa  a\nbb  b' | sha256sum
        let file = |path: &str, sha256: &str| PackagedFile {
            path: path.into(),
            sha256: sha256.into(),
            size_bytes: 1,
        };
        assert_eq!(
            digest_root(&[file("a", "aa"), file("b", "bb")]),
            "891d552bfcc450c93fe0968ded00c4bf545fb2c7a701d8109020af120111f0f2"
        );
    }
}
