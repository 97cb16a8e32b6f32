//! Where a command may write: never over or into its own input, never into a folder
//! that holds anything it does not know, and over a finished result only when told.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use anemone_schemas::atomic::partial_path;
use anemone_schemas::manifest::{MANIFEST_FILE, Manifest};
use anemone_schemas::store;

use crate::commands::ablate;
use crate::commands::package::BUNDLE_FILE;
use crate::commands::target::TOKENIZER_DIR;
use crate::commands::travels_with_model;
use crate::commands::{refine, tune};
use crate::error::Error;

/// What a command makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A quantized store.
    Store,
    /// A model folder.
    Folder,
    /// A bundle for Apple's runner.
    Bundle,
    /// A checkpoint.
    Checkpoint,
    /// The folder of `demo`.
    Demo,
    /// The folder of `ablate`: stores, which are to be checked for themselves, and reports.
    Ablation,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Store => "quantized store",
            Self::Folder => "model folder",
            Self::Bundle => "bundle",
            Self::Checkpoint => "checkpoint",
            Self::Demo => "demo",
            Self::Ablation => "comparison",
        }
    }

    /// Whether a folder holds a finished result, which only `--overwrite` replaces.
    fn finished(self, dir: &Path) -> bool {
        let last = match self {
            Self::Store => store::MANIFEST,
            Self::Folder => MANIFEST_FILE,
            Self::Bundle => BUNDLE_FILE,
            Self::Checkpoint => "config.json",
            Self::Demo => "report.json",
            Self::Ablation => ablate::REPORT_FILE,
        };
        dir.join(last).exists()
    }

    /// The names that may lie in such a folder, or `None` if it is not one of ours.
    fn known(self, dir: &Path) -> Option<BTreeSet<String>> {
        let mut names: BTreeSet<String> = BTreeSet::new();
        let mut add = |all: &[&str]| names.extend(all.iter().map(ToString::to_string));
        match self {
            Self::Store => {
                if !dir.join("matrices").is_dir() {
                    return None;
                }
                add(&[store::MANIFEST, "matrices", "dense"]);
                add(&STORE_FILES);
                add(&TOKENIZER_FILES);
                let found = entries(dir).ok()?.into_iter();
                names.extend(found.filter(|name| travels_with_model(name)));
            }
            Self::Folder => {
                let manifest = Manifest::read(dir).ok()?;
                add(&[MANIFEST_FILE]);
                for path in manifest.files.keys() {
                    add(&[path.split('/').next().unwrap_or(path)]);
                }
            }
            Self::Bundle => {
                if !dir.join(BUNDLE_FILE).is_file() || dir.join(MANIFEST_FILE).exists() {
                    return None;
                }
                add(&[BUNDLE_FILE, TOKENIZER_DIR]);
                let program =
                    |name: &String| Path::new(name).extension().is_some_and(|e| e == "aimodel");
                names.extend(entries(dir).ok()?.into_iter().filter(program));
            }
            Self::Checkpoint => {
                if !dir.join("config.json").is_file() {
                    return None;
                }
                add(&["config.json", "generation_config.json", "model.safetensors"]);
                add(&["model.safetensors.index.json"]);
                add(&TOKENIZER_FILES);
                let shard = |name: &String| {
                    name.starts_with("model-")
                        && Path::new(name)
                            .extension()
                            .is_some_and(|e| e == "safetensors")
                };
                names.extend(entries(dir).ok()?.into_iter().filter(shard));
            }
            Self::Ablation => {
                if !ablate::store_names().any(|store| dir.join(store).is_dir()) {
                    return None;
                }
                add(&[ablate::REPORT_FILE, ablate::PAGE_FILE]);
                names.extend(ablate::store_names().map(str::to_string));
            }
            Self::Demo => {
                if !dir.join("model").is_dir() {
                    return None;
                }
                add(&["model", "report.json"]);
                let made = |name: &String| {
                    name == "folder"
                        || [".store", ".folder", ".folder.partial", ".drafter"]
                            .iter()
                            .any(|end| name.ends_with(end))
                };
                names.extend(entries(dir).ok()?.into_iter().filter(made));
            }
        }
        Some(names)
    }
}

/// What `quantize` puts beside matrices and tensors.
const STORE_FILES: [&str; 10] = [
    // Scratch of the backward pass, of `refine` and of `tune`.
    "hidden.partial",
    refine::SCRATCH,
    tune::STATE,
    "model_spec.json",
    "norm_magnitudes.json",
    "fp16_magnitudes.json",
    "calibration_text.json",
    "mlp_order.json",
    "config.json",
    "generation_config.json",
];

const TOKENIZER_FILES: [&str; 8] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
];

/// Refuses an output that touches an input, and a folder with anything in it that is
/// not of this kind.
///
/// # Errors
/// What is in the way, as wrong usage.
pub fn check(output: &Path, kind: Kind, inputs: &[&PathBuf]) -> Result<(), Error> {
    let out = resolved(output)?;
    for input in inputs {
        let from = resolved(input)?;
        if from.starts_with(&out) || out.starts_with(&from) {
            return Err(Error::usage(format!(
                "the output `{}` and the input `{}` lie in each other",
                output.display(),
                input.display()
            ))
            .hint("choose another output folder; inputs are never written to"));
        }
    }
    match fs::metadata(output) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::io(output, &e)),
        Ok(meta) if !meta.is_dir() => {
            return Err(
                Error::usage(format!("`{}` is a file, not a folder", output.display()))
                    .hint("choose another output folder"),
            );
        }
        Ok(_) => {}
    }
    let found = entries(output).map_err(|e| Error::io(output, &e))?;
    let known = kind.known(output).unwrap_or_default();
    let stranger = found.iter().find(|name| {
        let whole = name.strip_suffix(".partial").unwrap_or(name);
        !known.contains(*name) && !known.contains(whole)
    });
    match stranger {
        Some(name) => Err(Error::usage(format!(
            "`{}` is not empty, and `{name}` in it is no part of a {} made by anemone-convert",
            output.display(),
            kind.name()
        ))
        .hint("choose another output folder, or remove it yourself")),
        None => Ok(()),
    }
}

/// Removes what `--fresh` (an unfinished result) or `--overwrite` (a finished one) give
/// up. To be called after [`check`] has found nothing foreign.
///
/// # Errors
/// If it cannot be removed.
pub fn discard(output: &Path, kind: Kind, fresh: bool, overwrite: bool) -> Result<(), Error> {
    if fresh || overwrite {
        remove(&partial_path(output))?;
    }
    let discard = if kind.finished(output) {
        overwrite
    } else {
        fresh || overwrite
    };
    if discard && output.exists() {
        // In one step it is no longer there, so that a kill leaves nothing half-removed
        // under its name.
        let doomed = partial_path(output);
        remove(&doomed)?;
        fs::rename(output, &doomed).map_err(|e| Error::io(output, &e))?;
        remove(&doomed)?;
    }
    Ok(())
}

fn remove(dir: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io(dir, &e)),
        _ => Ok(()),
    }
}

fn entries(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = fs::read_dir(dir)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// The path without links, as far as it exists.
fn resolved(path: &Path) -> Result<PathBuf, Error> {
    let absolute = std::path::absolute(path).map_err(|e| Error::io(path, &e))?;
    let mut missing = Vec::new();
    let mut known = absolute.as_path();
    let real = loop {
        match known.canonicalize() {
            Ok(real) => break real,
            Err(_) => match (known.parent(), known.components().next_back()) {
                (Some(parent), Some(Component::Normal(name))) => {
                    missing.push(name);
                    known = parent;
                }
                _ => break known.to_path_buf(),
            },
        }
    };
    Ok(missing
        .iter()
        .rev()
        .fold(real, |path, name| path.join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_that_touches_its_input_is_refused_through_links_too() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        fs::create_dir(&model).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&model, &link).unwrap();
        for out in [
            &model,
            &link,
            &link.join("deeper/still"),
            &dir.path().into(),
        ] {
            let refused = check(out, Kind::Store, &[&model]).unwrap_err();
            assert!(refused.message.contains("in each other"), "{refused}");
        }
        check(&dir.path().join("model.store"), Kind::Store, &[&model]).unwrap();
    }

    #[test]
    fn what_is_not_ours_stays_whatever_the_flags() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        fs::create_dir_all(out.join("matrices")).unwrap();
        for own in ["LICENSE", "base_model.json", "tokenizer.json.partial"] {
            fs::write(out.join(own), "ours").unwrap();
        }
        check(&out, Kind::Store, &[]).unwrap();
        fs::write(out.join("diary.txt"), "mine").unwrap();
        let refused = check(&out, Kind::Store, &[]).unwrap_err();
        assert!(refused.message.contains("diary.txt"), "{refused}");
    }

    #[test]
    fn finished_results_need_overwrite_and_unfinished_ones_fresh() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let make = |finished: bool| {
            fs::create_dir_all(out.join("matrices")).unwrap();
            if finished {
                fs::write(out.join("store.json"), "{}").unwrap();
            }
        };
        for (finished, fresh, overwrite, stays) in [
            (false, false, false, true),
            (false, true, false, false),
            (false, false, true, false),
            (true, false, false, true),
            (true, true, false, true),
            (true, false, true, false),
        ] {
            make(finished);
            discard(&out, Kind::Store, fresh, overwrite).unwrap();
            assert_eq!(out.exists(), stays, "{finished} {fresh} {overwrite}");
            let _ = fs::remove_dir_all(&out);
        }
    }
}
