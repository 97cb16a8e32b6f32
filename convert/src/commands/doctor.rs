//! `doctor`: everything `verify` checks, a self-test, the machine, and what to do about
//! each finding.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anemone_memguard::{Budget, Error as GuardError, Lock, human_bytes, require_disk};
use anemone_runtime::engine::Engine;
use anemone_schemas::manifest::Manifest;
use anemone_schemas::tokenizer::ChatMessage;

use super::findings::{Class, Finding};
use super::lint;
use super::verify;
use crate::error::Error;
use crate::lint::{LintOptions, Severity};
use crate::ui::Ui;

/// Tokens of the self-test.
const TOKENS: usize = 8;
/// Room that the device's compiler takes for its own form of the weights, as others
/// measured: times the programs' bytes.
const COMPILED: f64 = 2.4;

/// What to look at.
#[derive(Clone, Debug)]
pub struct DoctorOptions {
    /// Model folder; without one only the machine is looked at.
    pub folder: Option<PathBuf>,
    /// Whether to run the model.
    pub run: bool,
    /// Threads of the self-test.
    pub threads: usize,
}

/// All findings, the worst first.
///
/// # Errors
/// A folder without a readable manifest.
pub fn run(options: &DoctorOptions, ui: Ui) -> Result<Vec<Finding>, Error> {
    let mut findings = machine();
    if let Some(folder) = &options.folder {
        let (manifest, found) = verify::check_folder(folder, ui)?;
        let sound = found.iter().all(|f| f.class != Class::Fatal);
        findings.extend(found);
        findings.extend(disk_for_compiling(folder, &manifest));
        if sound {
            findings.extend(placement(folder)?);
            if options.run {
                findings.extend(self_test(folder, options.threads, ui));
            }
        }
    }
    findings.sort_by_key(|f| f.class);
    Ok(findings)
}

/// What on this machine stands in the way of a conversion.
fn machine() -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Ok(budget) = Budget::now() {
        if budget.available < budget.total / 10 {
            findings.push(Finding::new(
                Class::Performance,
                format!(
                    "only {} of {} memory are available ({})",
                    human_bytes(budget.available),
                    human_bytes(budget.total),
                    budget.bound
                ),
                "close other programs before a long job",
            ));
        }
        if budget.swap_used > budget.swap_total / 2 && budget.swap_total > 0 {
            findings.push(Finding::new(
                Class::Performance,
                format!(
                    "{} of {} swap are in use",
                    human_bytes(budget.swap_used),
                    human_bytes(budget.swap_total)
                ),
                "close other programs before a long job",
            ));
        }
    }
    match Lock::acquire("anemone-convert doctor") {
        Err(e @ GuardError::Busy { .. }) => findings.push(Finding::new(
            Class::Performance,
            e.to_string(),
            "figures measured now are those of a busy machine",
        )),
        Err(e) => findings.push(Finding::new(
            Class::Fatal,
            e.to_string(),
            "name a folder of yours in the variable `ANEMONE_RUNTIME_DIR`",
        )),
        Ok(_) => {}
    }
    findings
}

/// The first run on a device compiles every program and keeps the result.
fn disk_for_compiling(folder: &Path, manifest: &Manifest) -> Option<Finding> {
    let programs: u64 = manifest
        .files
        .iter()
        .filter(|(path, _)| manifest.chunks.iter().any(|c| path.starts_with(&c.path)))
        .map(|(_, file)| file.bytes)
        .sum();
    let needed = (programs as f64 * COMPILED) as u64;
    let short = require_disk(folder, needed).err()?;
    let class = if cfg!(target_os = "macos") {
        Class::Fatal
    } else {
        Class::Performance
    };
    Some(Finding::new(
        class,
        format!("compiling on a device: {short}"),
        "the device's compiler keeps its own form of the weights; leave that much free there",
    ))
}

/// What the rules of the engine say about the programs, a finding for each rule.
fn placement(folder: &Path) -> Result<Vec<Finding>, Error> {
    let report = lint::run(folder, &LintOptions::default())?;
    let mut findings = Vec::new();
    for program in &report.programs {
        for ((severity, rule), found) in program.by_rule() {
            let class = match severity.0 {
                Severity::Error => Class::Fatal,
                Severity::Warning => Class::Performance,
                Severity::Note => continue,
            };
            let what = format!(
                "`{}`: {rule} in {} places, first in `{}`: {}",
                program.path.display(),
                found.len(),
                found[0].function,
                found[0].message
            );
            findings.push(Finding::new(
                class,
                what,
                "see docs/lint.md for the rule; `lint` shows all",
            ));
        }
    }
    Ok(findings)
}

/// A short greedy answer on the CPU.
fn self_test(folder: &Path, threads: usize, ui: Ui) -> Vec<Finding> {
    let fatal = |what: String| {
        vec![Finding::new(
            Class::Fatal,
            format!("self-test of `{}`: {what}", folder.display()),
            "convert again; if it stays, report it with this message",
        )]
    };
    let engine = match Engine::open(folder, threads) {
        Ok(engine) => engine,
        Err(e) => return fatal(e.to_string()),
    };
    let message = ChatMessage {
        role: "user".into(),
        content: "Say hello.".into(),
    };
    let answer = |engine: &Engine| -> Result<Vec<u32>, Error> {
        let prompt = if engine.tokenizer().has_chat_template() {
            engine.chat_prompt(std::slice::from_ref(&message))?
        } else {
            engine.tokenizer().encode(&message.content, true)?
        };
        Ok(engine
            .generate(&prompt, TOKENS, |_| ControlFlow::Continue(()))?
            .ids)
    };
    let ids = match (answer(&engine), answer(&engine)) {
        (Ok(ids), Ok(again)) if ids == again => ids,
        (Ok(ids), Ok(again)) => return fatal(format!("answers {ids:?}, then {again:?}")),
        (Err(e), _) | (_, Err(e)) => return fatal(e.message),
    };
    let text = engine.tokenizer().decode(&ids, false).unwrap_or_default();
    ui.note(&format!("self-test: {} tokens, {text:?}", ids.len()));
    let known = engine.manifest().model.tokenizer_vocab;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= known) {
        return fatal(format!("chose id {id}, which the tokenizer does not know"));
    }
    if ids.len() == TOKENS && ids.iter().all(|id| *id == ids[0]) {
        return vec![Finding::new(
            Class::Silent,
            format!("self-test of `{}`: says {text:?}", folder.display()),
            "measure it with `eval --folder` against the checkpoint",
        )];
    }
    Vec::new()
}
