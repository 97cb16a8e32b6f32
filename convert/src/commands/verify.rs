//! `verify`: is a model folder whole, and will it run?
//!
//! Every byte is read and hashed once: a program against the digest in its own asset,
//! which must be the one in the manifest, and every other file against the manifest.

mod drafter;
mod interface;
mod tokenizer;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anemone_schemas::aimodel::{asset, check};
use anemone_schemas::exit::Exit;
use anemone_schemas::hex;
use anemone_schemas::manifest::{FileInfo, MANIFEST_FILE, Manifest, TableFile};

use super::files::{file_info, list};
use super::findings::{Class, Finding};
use super::lint::first_error;
use super::package::BUNDLE_FILE;
use crate::error::Error;
use crate::ui::Ui;

pub(super) use tokenizer::{PROBES_FILE, conversations, probe_file};

/// Program of an asset and its digest.
const PROGRAM: &str = "main.mlirb";
const DIGEST: &str = "main.hash";

const DOWNLOAD_AGAIN: &str = "download or convert the folder again";

/// Checks everything that can be checked without running the model.
///
/// # Errors
/// The first thing that is fatal or silently wrong, with exit code 6.
pub fn run(folder: &Path, ui: Ui) -> Result<Manifest, Error> {
    let (manifest, findings) = check_folder(folder, ui)?;
    for finding in findings {
        if finding.class == Class::Performance {
            ui.note(&finding.what);
        } else {
            return Err(Error::new(Exit::Verification, finding.what).hint(finding.fix));
        }
    }
    Ok(manifest)
}

/// All findings on a folder that has a manifest.
///
/// # Errors
/// A manifest that cannot be read, or an I/O error that says nothing about the folder.
pub fn check_folder(folder: &Path, ui: Ui) -> Result<(Manifest, Vec<Finding>), Error> {
    let stage = ui.stage("verify", 3);
    let manifest = Manifest::read(folder)?;
    let mut findings = files(folder, &manifest)?;
    stage.step("files");
    if let Err(e) = opened(folder, &manifest) {
        findings.push(Finding::new(Class::Fatal, e.message, DOWNLOAD_AGAIN));
    }
    stage.step("programs");
    findings.extend(tokenizer::check(folder, &manifest));
    findings.extend(bundle(folder, &manifest));
    stage.step("tokenizer and bundle");
    Ok((manifest, findings))
}

/// Every file of the manifest is there with its size and digest, and none besides.
/// Programs are hashed when they are opened.
fn files(folder: &Path, manifest: &Manifest) -> Result<Vec<Finding>, Error> {
    let mut findings = Vec::new();
    let found: BTreeSet<String> = list(folder)
        .map_err(|e| Error::io(folder, &e))?
        .into_iter()
        .filter(|p| p != MANIFEST_FILE)
        .collect();
    for extra in found.iter().filter(|p| !manifest.files.contains_key(*p)) {
        let path = folder.join(extra);
        findings.push(Finding::new(
            Class::Silent,
            format!("`{}` is not in the manifest", path.display()),
            "remove it, or run `package` to take it in",
        ));
    }
    for (name, expected) in &manifest.files {
        let path = folder.join(name);
        if !found.contains(name) {
            findings.push(Finding::new(
                Class::Fatal,
                format!("`{}` is missing", path.display()),
                "the folder was copied or downloaded incompletely: do it again",
            ));
            continue;
        }
        let actual = match program_digest(manifest, folder, name) {
            Some(info) => info,
            None => file_info(&path).map_err(|e| Error::io(&path, &e))?,
        };
        if actual != *expected {
            findings.push(Finding::new(
                Class::Fatal,
                format!(
                    "`{}` has {} bytes and SHA-256 {}, expected {} bytes and {}",
                    path.display(),
                    actual.bytes,
                    actual.sha256,
                    expected.bytes,
                    expected.sha256
                ),
                DOWNLOAD_AGAIN,
            ));
        }
    }
    Ok(findings)
}

/// What an asset says about its program, which holds if it opens.
fn program_digest(manifest: &Manifest, folder: &Path, name: &str) -> Option<FileInfo> {
    let (chunk, file) = name.rsplit_once('/')?;
    if file != PROGRAM || !program_paths(manifest).any(|path| path == chunk) {
        return None;
    }
    let digest = fs::read(folder.join(chunk).join(DIGEST)).ok()?;
    Some(FileInfo {
        bytes: fs::metadata(folder.join(name)).ok()?.len(),
        sha256: hex(digest.get(..32)?),
    })
}

/// The manifest, the embedding's size and the structure of every program.
///
/// # Errors
/// What is wrong, with the program's name.
pub(crate) fn programs(folder: &Path) -> Result<Manifest, Error> {
    let manifest = Manifest::read(folder)?;
    opened(folder, &manifest)?;
    Ok(manifest)
}

/// The programs' digests, as opening them has confirmed.
pub(super) fn program_digests(folder: &Path, manifest: &Manifest) -> BTreeMap<String, FileInfo> {
    let names = program_paths(manifest).map(|path| format!("{path}/{PROGRAM}"));
    names
        .filter_map(|name| program_digest(manifest, folder, &name).map(|info| (name, info)))
        .collect()
}

/// Paths of all programs: the chunks', then the drafter's.
fn program_paths(manifest: &Manifest) -> impl Iterator<Item = &str> {
    let chunks = manifest.chunks.iter().map(|c| c.path.as_str());
    chunks.chain(manifest.drafter.iter().map(|d| d.path.as_str()))
}

fn opened(folder: &Path, manifest: &Manifest) -> Result<(), Error> {
    table(folder, &manifest.embedding)?;
    for chunk in &manifest.chunks {
        let path = folder.join(&chunk.path);
        let module = asset::open_asset(&path)?;
        check::check(&module).map_err(|e| fail(format!("`{}`: {e}", path.display())))?;
        if let Some(broken) = first_error(&module) {
            return Err(fail(format!("`{}`: {broken}", path.display())));
        }
        interface::check(manifest, chunk, &module)
            .map_err(|e| fail(format!("`{}`: {e}", path.display())))?;
    }
    if let Some(info) = &manifest.drafter {
        drafter::check(folder, manifest, info)?;
    }
    Ok(())
}

/// Apple's metadata, where the folder has been packaged.
fn bundle(folder: &Path, manifest: &Manifest) -> Option<Finding> {
    let path = folder.join(BUNDLE_FILE);
    let text = fs::read_to_string(&path).ok()?;
    let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    let assets = json["assets"].as_object().map_or(0, serde_json::Map::len);
    if json["metadata_version"] == "0.2" && assets == manifest.chunks.len() {
        return None;
    }
    Some(Finding::new(
        Class::Fatal,
        format!(
            "`{}` does not describe this folder's {} programs",
            path.display(),
            manifest.chunks.len()
        ),
        "run `package` again",
    ))
}

/// Whether a table has the bytes that its shape says.
fn table(folder: &Path, table: &TableFile) -> Result<(), Error> {
    let path = folder.join(&table.path);
    let bytes = fs::metadata(&path).map_err(|e| Error::io(&path, &e))?.len();
    let expected = table.shape.iter().product::<usize>() as u64 * 2;
    if bytes != expected {
        return Err(fail(format!(
            "`{}` has {bytes} bytes, expected {expected}",
            path.display()
        )));
    }
    Ok(())
}

fn fail(message: String) -> Error {
    Error::new(Exit::Verification, message)
}
