//! `lint`: will the Neural Engine run these programs?

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anemone_schemas::aimodel::asset;
use anemone_schemas::aimodel::ir::Module;
use anemone_schemas::manifest::Manifest;
use serde::Serialize;

use crate::error::Error;
use crate::lint::{self, Finding, LintOptions, Moves, Severity};

/// File that makes a folder an asset.
const PROGRAM: &str = "main.mlirb";

/// What was found in one program.
#[derive(Clone, Debug, Serialize)]
pub struct ProgramReport {
    /// The asset.
    pub path: PathBuf,
    /// All findings.
    pub findings: Vec<Finding>,
    /// Transposes and reshapes by function.
    pub moves: BTreeMap<String, Moves>,
}

/// What was found in a path.
#[derive(Clone, Debug, Serialize)]
pub struct LintReport {
    /// By program.
    pub programs: Vec<ProgramReport>,
}

/// Lints an `.aimodel`, or all of them in a folder but the drafter of a model folder.
///
/// # Errors
/// If there is none, or one is damaged.
pub fn run(path: &Path, options: &LintOptions) -> Result<LintReport, Error> {
    let programs = assets(path)?
        .into_iter()
        .map(|path| {
            let module = asset::open_asset(&path)?;
            let mut findings = lint::lint(&module, options);
            if path.is_symlink() || path.join(PROGRAM).is_symlink() {
                findings.push(lint::symlinked(&path));
            }
            Ok(ProgramReport {
                findings,
                moves: lint::moves(&module),
                path,
            })
        })
        .collect::<Result<_, Error>>()?;
    Ok(LintReport { programs })
}

/// The first error in a program that is about to be written or shipped.
pub(super) fn first_error(module: &Module) -> Option<String> {
    lint::lint(module, &LintOptions::default())
        .into_iter()
        .find(|f| f.severity == Severity::Error)
        .map(|f| {
            format!(
                "placement rule {} ({}): {} in `{}`: {}",
                f.rule, f.source, f.name, f.function, f.message
            )
        })
}

fn assets(path: &Path) -> Result<Vec<PathBuf>, Error> {
    if path.join(PROGRAM).exists() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(path).map_err(|e| Error::io(path, &e))? {
        let entry = entry.map_err(|e| Error::io(path, &e))?.path();
        if entry.join(PROGRAM).exists() {
            found.push(entry);
        }
    }
    // A drafter is made for the GPU, which has other rules.
    if let Ok(Some(drafter)) = Manifest::read(path).map(|m| m.drafter) {
        found.retain(|asset| *asset != path.join(&drafter.path));
    }
    found.sort();
    if found.is_empty() {
        return Err(Error::bad_input(format!(
            "`{}` is no `.aimodel` and holds none",
            path.display()
        ))
        .hint(format!("expected `{PROGRAM}` in it or in a folder of it")));
    }
    Ok(found)
}

impl LintReport {
    /// Number of errors.
    pub fn errors(&self) -> usize {
        self.programs.iter().map(|p| p.count(Severity::Error)).sum()
    }

    /// A summary by rule, worst first, with one place for each.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for program in &self.programs {
            program.print(&mut out);
        }
        out
    }
}

impl ProgramReport {
    fn count(&self, severity: Severity) -> usize {
        self.findings
            .iter()
            .filter(|f| f.severity == severity)
            .count()
    }

    /// Findings of one rule together, the most severe rules first.
    pub(super) fn by_rule(&self) -> BTreeMap<(Reverse<Severity>, &str), Vec<&Finding>> {
        let mut by_rule: BTreeMap<_, Vec<&Finding>> = BTreeMap::new();
        for f in &self.findings {
            by_rule
                .entry((Reverse(f.severity), f.rule))
                .or_default()
                .push(f);
        }
        by_rule
    }

    fn print(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "{}: {} errors, {} warnings, {} notes",
            self.path.display(),
            self.count(Severity::Error),
            self.count(Severity::Warning),
            self.count(Severity::Note)
        );
        for ((severity, rule), findings) in self.by_rule() {
            let first = findings[0];
            let place = match first.op {
                Some(op) => format!("`{}` op {op} `{}`", first.function, first.name),
                None if first.function.is_empty() => first.name.clone(),
                None => format!("`{}` {}", first.function, first.name),
            };
            let _ = writeln!(
                out,
                "  {} {rule} x{}: {place}: {}\n      {} [{}]",
                severity.0.name(),
                findings.len(),
                first.message,
                first.reason,
                first.source
            );
        }
        // Functions of one program differ in sizes only, mostly: one line for equals.
        let mut by_moves: Vec<(Moves, Vec<&str>)> = Vec::new();
        for (name, &moves) in &self.moves {
            match by_moves.iter_mut().find(|m| m.0 == moves) {
                Some((_, names)) => names.push(name),
                None => by_moves.push((moves, vec![name])),
            }
        }
        for (moves, names) in by_moves {
            let layers = moves.layers.max(1) as f64;
            let _ = writeln!(
                out,
                "  {:.1} transposes ({:.1} of the last axis) and {:.1} reshapes per layer: {}",
                moves.transposes as f64 / layers,
                moves.last_axis as f64 / layers,
                moves.reshapes as f64 / layers,
                names.join(" ")
            );
        }
    }
}
