//! What a command prints, and whether it goes ahead.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anemone_schemas::atomic;
use anemone_schemas::report::QualityReport;
use serde::Serialize;

use super::args::RunArgs;
use crate::error::Error;
use crate::output::{self, Kind};
use crate::plan::Plan;

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
