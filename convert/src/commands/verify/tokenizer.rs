//! Does text become the ids that the model was made for?

use std::fs;
use std::path::Path;

use anemone_schemas::manifest::Manifest;
use anemone_schemas::tokenizer::{ChatMessage, TokenizerFolder};
use serde::{Deserialize, Serialize};

use super::super::findings::{Class, Finding};
use super::super::target::TOKENIZER_DIR;
use super::super::text::open_tokenizer;
use crate::error::Error;

/// Probe texts with the ids they had when the folder was packaged.
pub(in super::super) const PROBES_FILE: &str = "probes.json";

/// Texts on which tokenizers are known to come apart: digits, spaces, line ends, code,
/// scripts without spaces, composed letters, emoji.
const PROBES: [&str; 16] = [
    "Hello, world!",
    "fn main() { let x = 1; }\n\tindented",
    "naïve café, 東京, Ω≈ç√",
    "  two  spaces and 12345.678",
    "1234567890",
    "line\n\nline\r\nline",
    "    four spaces\n        eight",
    "don't we'll I'M",
    "日本語のテキスト。",
    "한국어 문장입니다.",
    "مرحبا بالعالم",
    "Привет, мир",
    "👩‍👩‍👧‍👦 🇪🇺 ❤️",
    "e\u{301} \u{e9}",
    "<tags> & \"quotes\" \\n",
    "https://example.org/a?b=c#d",
];

/// A probe and its ids.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Probe {
    text: String,
    ids: Vec<u32>,
}

/// The contents of [`PROBES_FILE`].
pub(in super::super) fn probe_file(tokenizer: &TokenizerFolder) -> Result<String, Error> {
    let probes = PROBES
        .iter()
        .map(|text| {
            Ok(Probe {
                text: (*text).to_string(),
                ids: tokenizer.encode(text, false)?,
            })
        })
        .collect::<Result<Vec<_>, Error>>()?;
    let mut json = serde_json::to_string_pretty(&probes).map_err(|e| Error::unexpected(&e))?;
    json.push('\n');
    Ok(json)
}

/// The tokenizer loads, agrees with the manifest, gives probes the ids they had, brings
/// texts back and renders conversations.
pub(super) fn check(folder: &Path, manifest: &Manifest) -> Vec<Finding> {
    let dir = folder.join(TOKENIZER_DIR);
    let shown = dir.display();
    let tokenizer = match open_tokenizer(&dir) {
        Ok(tokenizer) => tokenizer,
        Err(e) => {
            let fix = "the tokenizer files must be those of the base model, byte for byte";
            return vec![Finding::new(Class::Fatal, e.message, fix)];
        }
    };
    let mut findings = Vec::new();
    let mut found = |class, what: String, fix: &str| findings.push(Finding::new(class, what, fix));
    let known = tokenizer.size();
    if known != manifest.model.tokenizer_vocab {
        found(
            Class::Silent,
            format!(
                "`{shown}` knows {known} ids, the manifest says {}",
                manifest.model.tokenizer_vocab
            ),
            "convert again with the tokenizer of the checkpoint",
        );
    }
    if let Some(stop) = manifest.stop.iter().find(|&&id| id as usize >= known) {
        found(
            Class::Silent,
            format!("stop id {stop} is beyond the tokenizer's {known}: it never comes"),
            "convert again with the tokenizer of the checkpoint",
        );
    }
    if manifest.stop.is_empty() {
        found(
            Class::Silent,
            format!("`{shown}` and the manifest name no stop id: answers never end"),
            "give the checkpoint a `generation_config.json` with `eos_token_id`",
        );
    }
    for probe in &PROBES[..4] {
        let back = tokenizer
            .encode(probe, false)
            .and_then(|ids| tokenizer.decode(&ids, false));
        match back {
            Ok(back) if back == *probe => {}
            Ok(back) => found(
                Class::Silent,
                format!("`{shown}` turns {probe:?} into {back:?}"),
                "check the pre-tokenizer and decoder of `tokenizer.json`",
            ),
            Err(e) => found(
                Class::Fatal,
                format!("`{shown}` fails on {probe:?}: {e}"),
                "the tokenizer files must be those of the base model, byte for byte",
            ),
        }
    }
    if let Some(finding) = probes(folder, &tokenizer) {
        findings.push(finding);
    }
    if let Err(e) = conversations(&tokenizer) {
        findings.push(Finding::new(
            Class::Fatal,
            format!("`{shown}`: chat template: {}", e.message),
            "give the tokenizer a chat template that renders; without one only `--raw` works",
        ));
    }
    findings
}

/// The ids of a packaged folder's probes.
fn probes(folder: &Path, tokenizer: &TokenizerFolder) -> Option<Finding> {
    let path = folder.join(PROBES_FILE);
    let text = fs::read_to_string(&path).ok()?;
    let fix = "this version of the tokenizer library reads `tokenizer.json` otherwise: package \
               again, or use the version the folder was made with";
    let Ok(probes) = serde_json::from_str::<Vec<Probe>>(&text) else {
        let what = format!("`{}` is not a list of probes", path.display());
        return Some(Finding::new(Class::Fatal, what, "run `package` again"));
    };
    probes.iter().find_map(|probe| {
        let ids = tokenizer.encode(&probe.text, false).unwrap_or_default();
        (ids != probe.ids).then(|| {
            let what = format!(
                "`{}`: {:?} becomes {ids:?}, expected {:?}",
                path.display(),
                probe.text,
                probe.ids
            );
            Finding::new(Class::Silent, what, fix)
        })
    })
}

/// Renders four conversations: a question, one with instructions, one with a turn
/// before, one with other letters.
pub(in super::super) fn conversations(tokenizer: &TokenizerFolder) -> Result<(), Error> {
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
            return Err(Error::bad_input(format!("lost the message {content:?}")));
        }
    }
    Ok(())
}
