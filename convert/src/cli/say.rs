//! What a command prints, and whether it goes ahead.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anemone_schemas::atomic;
use anemone_schemas::exit::Exit;
use anemone_schemas::manifest::Manifest;
use anemone_schemas::report::QualityReport;
use anemone_schemas::store::Store;
use serde::Serialize;

use super::args::{PackageArgs, RunArgs};
use crate::commands::package;
use crate::error::Error;
use crate::output::{self, Kind};
use crate::plan::Plan;
use crate::publish;

/// Writes the HTML form of a report.
pub(super) fn write_page(path: &Path, report: &QualityReport) -> Result<(), Error> {
    atomic::write_bytes(path, report.html().as_bytes()).map_err(|e| Error::io(path, &e))
}

/// Whether to go ahead: not after a dry run, which only shows the plan; and only where
/// disk and memory suffice and the output may be written.
pub(super) fn agreed(
    plan: Plan,
    args: &RunArgs,
    output: &Path,
    kind: Kind,
    inputs: &[&PathBuf],
) -> Result<bool, Error> {
    output::check(output, kind, inputs)?;
    if args.dry_run {
        show(plan, args.json)?;
        return Ok(false);
    }
    plan.require()?;
    output::discard(output, kind, args.fresh, args.overwrite)?;
    Ok(true)
}

/// Prints a plan, then refuses what cannot be carried out.
pub(super) fn show(mut plan: Plan, as_json: bool) -> Result<(), Error> {
    plan.estimate()?;
    print(&if as_json { json(&plan)? } else { plan.text() })?;
    // A plan that cannot be carried out is shown whole, then refused.
    plan.require()
}

pub(super) fn json(value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string_pretty(value).map_err(|e| Error::unexpected(&e))
}

/// Prints to standard output; a reader that went away is no failure.
pub(super) fn print(text: &str) -> Result<(), Error> {
    match writeln!(io::stdout(), "{}", text.trim_end()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::unexpected(&e)),
    }
}

/// Refuses a store in which a matrix was made by a simpler method than asked for.
pub(super) fn require_no_fallback(store: &Store) -> Result<(), Error> {
    let mut matrices = store.manifest().matrices.iter();
    let fallen = matrices.find_map(|m| Some((&m.name, m.report.fallback.as_ref()?)));
    match fallen {
        Some((name, why)) => Err(Error::new(
            Exit::Numerical,
            format!("`{}`: `{name}`: {why}", store.dir().display()),
        )
        .hint("more calibration text, or `--set` with another method or damping")),
        None => Ok(()),
    }
}

/// Refuses a report with a mean KL above a limit.
pub(super) fn require_quality(report: &QualityReport, limit: f64) -> Result<(), Error> {
    let measured = report.students.iter();
    let mut measured =
        measured.flat_map(|student| student.sets.iter().map(move |set| (student, set)));
    // What is no number is not below the limit either.
    match measured.find(|(_, set)| set.kl_mean.is_nan() || set.kl_mean > limit) {
        Some((student, set)) => Err(Error::new(
            Exit::Verification,
            format!(
                "`{}` on `{}` has a mean KL of {:.4}, more than the {limit} allowed",
                student.name, set.set, set.kl_mean
            ),
        )),
        None => Ok(()),
    }
}

/// What `package` and its upload would do.
pub(super) fn dry_package(a: &PackageArgs, mut plan: Plan) -> Result<(), Error> {
    if let Some(options) = a.publish() {
        let manifest = Manifest::read(&options.folder)?;
        let package = package::describe(&options.folder, manifest)?;
        publish::check(&options, &package)?;
        let bytes: u64 = package.files.iter().map(|f| f.size_bytes).sum();
        plan.notes.push(format!(
            "then {} files, {bytes} bytes, go to `{}` as a {}",
            package.files.len(),
            options.repo,
            if options.direct {
                "commit"
            } else {
                "pull request"
            },
        ));
    }
    show(plan, a.json)
}
