//! Where drafts come from, and what they gave.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use anemone_runtime::engine::{
    Draft, DrafterProgram, Engine, EngineError, Lookup, Options, ProgramDrafter, Session,
    Statistics, check_drafts,
};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::ModelArgs;
use crate::failure::End;
use crate::output;

/// A source of drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Source {
    /// The folder's drafter, or prompt lookup if it has none.
    Auto,
    /// The folder's drafter.
    Model,
    /// What followed the last few tokens when they came up before.
    Lookup,
    /// No drafts: one token a call.
    Off,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct DraftArgs {
    /// Source of drafts; the text does not depend on it.
    #[arg(long, value_enum, default_value_t = Source::Auto)]
    draft: Source,
    /// Drafted tokens per cycle at most.
    #[arg(long, value_name = "N")]
    max_draft: Option<usize>,
    /// Use all rows of every call and never switch drafting off, whatever it costs.
    #[arg(long)]
    no_adapt: bool,
    /// Use the folder's drafter without trying it on a fixed prompt first.
    #[arg(long)]
    unchecked: bool,
}

/// A source of drafts, opened.
#[derive(Clone, Debug)]
pub(crate) struct Drafts {
    program: Option<Arc<DrafterProgram>>,
    /// Its name in reports.
    pub(crate) name: &'static str,
}

impl Drafts {
    /// An empty conversation with drafts from here.
    pub(crate) fn session(&self, engine: &Engine) -> Session {
        Session::new(engine, self.draft())
    }

    fn draft(&self) -> Option<Box<dyn Draft + Send>> {
        match &self.program {
            Some(program) => Some(Box::new(ProgramDrafter::new(program))),
            None if self.name == "lookup" => Some(Box::new(Lookup::new())),
            None => None,
        }
    }
}

impl DraftArgs {
    /// Opens the source the user wants; a folder's drafter is checked against its model.
    pub(crate) fn open(&self, model: &ModelArgs, engine: &Engine) -> Result<Drafts, End> {
        let without = |name| Drafts {
            program: None,
            name,
        };
        match self.draft {
            Source::Off => return Ok(without("off")),
            Source::Lookup => return Ok(without("lookup")),
            Source::Auto | Source::Model => {}
        }
        let program = DrafterProgram::open(&model.model, model.threads)?;
        if program.is_none() && self.draft == Source::Model {
            return Err(End::bad_input(
                "the folder has no drafter",
                Some("`anemone-convert drafter` adds one, `--draft lookup` needs none"),
            ));
        }
        let drafts = Drafts {
            name: if program.is_some() { "model" } else { "lookup" },
            program,
        };
        if let (Some(_), Some(draft), false) = (&drafts.program, drafts.draft(), self.unchecked) {
            match check_drafts(engine, draft) {
                Err(EngineError::Mismatch { accepted, floor }) if self.draft == Source::Auto => {
                    let mismatch = EngineError::Mismatch { accepted, floor };
                    output::note(&format!("{mismatch}; drafts come from the text instead"));
                    return Ok(without("lookup"));
                }
                checked => checked?,
            };
        }
        Ok(drafts)
    }

    pub(crate) fn options(&self, max_tokens: usize) -> Options {
        let options = Options::default();
        Options {
            max_tokens,
            max_draft: self.max_draft.unwrap_or(options.max_draft),
            adapt: !self.no_adapt,
            ..options
        }
    }
}

/// Statistics with their means.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    /// Source of drafts.
    pub(crate) draft: &'static str,
    /// Mean of accepted tokens per cycle, the target's own token not counted.
    pub(crate) accepted_per_cycle: f64,
    /// Tokens of the cycles per second.
    pub(crate) tokens_per_second: f64,
    /// Milliseconds of all cycles outside drafter and programs.
    pub(crate) host_ms: f64,
    #[serde(flatten)]
    pub(crate) counts: Statistics,
}

impl Summary {
    pub(crate) fn new(draft: &'static str, counts: Statistics) -> Self {
        Self {
            draft,
            accepted_per_cycle: counts.accepted_per_cycle(),
            tokens_per_second: counts.tokens_per_second(),
            host_ms: milliseconds(counts.host_time()),
            counts,
        }
    }

    /// Lines for people.
    pub(crate) fn render(&self) -> String {
        let c = &self.counts;
        let mut out = format!(
            "drafts: {}\ncycles: {} ({} without drafts), {} tokens, {:.2} accepted per cycle \
             (the target's own token not counted)\nrows: {} guesses, {} sides ({} hits), {} \
             replays\n",
            self.draft,
            c.cycles,
            c.plain_cycles,
            c.tokens,
            self.accepted_per_cycle,
            c.chain_rows,
            c.side_rows,
            c.side_hits,
            c.replays
        );
        let each = |d: Duration| milliseconds(d) / c.cycles.max(1) as f64;
        let _ = writeln!(
            out,
            "ms per cycle: draft {:.3}, verify {:.3}, host {:.3}",
            each(c.draft_time),
            each(c.verify_time),
            each(c.host_time())
        );
        if !c.depths.is_empty() {
            let depth = |(k, d): (usize, &anemone_runtime::engine::Depth)| {
                format!("{k}: {}/{}", d.right, d.reached)
            };
            let depths: Vec<String> = (1..).zip(&c.depths).map(depth).collect();
            let _ = writeln!(out, "right/reached by depth: {}", depths.join(", "));
        }
        for s in &c.switches {
            let state = if s.on { "on" } else { "off" };
            let _ = writeln!(out, "drafts {state} at cycle {}: {}", s.cycle, s.reason);
        }
        out
    }
}

fn milliseconds(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}
