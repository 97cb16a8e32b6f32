//! What must travel with a model: its licence, notices, and what its card says of them.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// File that carries the base model's card data from store to folder.
pub(super) const BASE_FILE: &str = "base_model.json";
/// Beginnings of the names of files that are copied as they are.
const NAMES: [&str; 6] = [
    "LICENSE",
    "LICENCE",
    "NOTICE",
    "COPYING",
    "COPYRIGHT",
    "USE_POLICY",
];
/// A longer file is no licence.
const MAX_BYTES: u64 = 1 << 20;

/// What the base model's card says in its front matter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Base {
    /// SPDX-like id as the Hub uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) license: Option<String>,
    /// Name of a licence that has no id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) license_name: Option<String>,
    /// Where it can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) license_link: Option<String>,
    /// Languages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) language: Vec<String>,
}

impl Base {
    /// What the licence is called.
    pub(super) fn name(&self) -> Option<&String> {
        self.license_name.as_ref().or(self.license.as_ref())
    }
}

/// Whether a file of this name is copied along with a model.
pub(crate) fn travels(name: &str) -> bool {
    let upper = name.to_ascii_uppercase();
    name == BASE_FILE
        || (name.bytes().all(|b| b.is_ascii_graphic())
            && NAMES.iter().any(|start| upper.starts_with(start)))
}

/// The files of a checkpoint that travel, by name, with the card's data as a file.
///
/// # Errors
/// A file that cannot be read.
pub(super) fn collect(dir: &Path) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| Error::io(dir, &e))? {
        let entry = entry.map_err(|e| Error::io(dir, &e))?;
        let (path, name) = (entry.path(), entry.file_name());
        let Some(name) = name.to_str().filter(|name| travels(name)) else {
            continue;
        };
        let meta = fs::metadata(&path).map_err(|e| Error::io(&path, &e))?;
        if meta.is_file() && meta.len() <= MAX_BYTES && name != BASE_FILE {
            let bytes = fs::read(&path).map_err(|e| Error::io(&path, &e))?;
            files.push((name.to_string(), bytes));
        }
    }
    let card = dir.join("README.md");
    let short = fs::metadata(&card).is_ok_and(|meta| meta.len() <= MAX_BYTES);
    let base = match fs::read_to_string(&card) {
        Ok(text) if short => front_matter(&text),
        _ => Base::default(),
    };
    if base != Base::default() {
        let mut json = serde_json::to_vec_pretty(&base).map_err(|e| Error::unexpected(&e))?;
        json.push(b'\n');
        files.push((BASE_FILE.to_string(), json));
    }
    files.sort();
    Ok(files)
}

/// The card data that came with a store or folder.
pub(super) fn base(dir: &Path) -> Base {
    fs::read(dir.join(BASE_FILE))
        .ok()
        .and_then(|json| serde_json::from_slice(&json).ok())
        .unwrap_or_default()
}

/// The few keys we need of a card's YAML: `key: value` at the left margin, and lists of
/// plain values.
fn front_matter(card: &str) -> Base {
    let mut base = Base::default();
    let Some(rest) = card.strip_prefix("---") else {
        return base;
    };
    let Some((yaml, _)) = rest.split_once("\n---") else {
        return base;
    };
    let plain = |value: &str| {
        let value = value.trim().trim_matches(['"', '\'']);
        let sound = !value.is_empty() && value.len() < 300 && !value.contains(['\n', '"']);
        sound.then(|| value.to_string())
    };
    let mut list = false;
    for line in yaml.lines() {
        if let Some(item) = line.trim_start().strip_prefix("- ") {
            if list {
                base.language.extend(plain(item));
            }
            continue;
        }
        list = false;
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        match key {
            "license" => base.license = plain(value),
            "license_name" => base.license_name = plain(value),
            "license_link" => base.license_link = plain(value),
            "language" => {
                let inner = value.trim().trim_matches(['[', ']']);
                base.language = inner.split(',').filter_map(plain).collect();
                list = true;
            }
            _ => {}
        }
    }
    base
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_matter_of_real_cards_is_read() {
        let base = front_matter(
            "---\nlibrary_name: transformers\nlicense: apache-2.0\n\
             license_link: https://huggingface.co/Qwen/Qwen3-8B/blob/main/LICENSE\n\
             pipeline_tag: text-generation\nbase_model:\n- Qwen/Qwen3-8B-Base\n---\n\n# Qwen3\nlicense: no\n",
        );
        assert_eq!(base.license.as_deref(), Some("apache-2.0"));
        assert!(base.license_link.unwrap().ends_with("blob/main/LICENSE"));
        assert!(base.language.is_empty());
        let base = front_matter(
            "---\nlanguage:\n- en\n- \"de\"\nlicense: other\nlicense_name: gemma\n---\n",
        );
        assert_eq!(base.language, ["en", "de"]);
        assert_eq!(base.license_name.as_deref(), Some("gemma"));
        assert_eq!(
            front_matter("# no front matter\nlicense: mit\n"),
            Base::default()
        );
    }

    #[test]
    fn licences_travel_and_other_files_do_not() {
        for (name, yes) in [
            ("LICENSE", true),
            ("LICENSE.txt", true),
            ("license.md", true),
            ("NOTICE", true),
            ("README.md", false),
            ("model.safetensors", false),
            ("LICENSE \u{1}", false),
        ] {
            assert_eq!(travels(name), yes, "{name}");
        }
    }
}
