//! `anemone run`: one prompt, one answer.

use std::io::Read;
use std::ops::ControlFlow;

use anemone_runtime::engine::{Answer, Engine, Finish, Options, Session};
use anemone_schemas::exit::Exit;
use anemone_schemas::tokenizer::ChatMessage;
use clap::Args;
use serde::Serialize;

use crate::ModelArgs;
use crate::drafts::{DraftArgs, Summary};
use crate::failure::End;
use crate::output::{self, Interrupt};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt; `-` reads it from standard input.
    prompt: String,
    /// System message.
    #[arg(long, conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt itself, without the chat template.
    #[arg(long)]
    raw: bool,
    /// Tokens at most.
    #[arg(short = 'n', long, default_value_t = 256)]
    max_tokens: usize,
    #[command(flatten)]
    drafts: DraftArgs,
    /// Print the answer when it is complete.
    #[arg(long)]
    no_stream: bool,
    /// Say what drafting gave and cost.
    #[arg(long)]
    stats: bool,
    /// Print one JSON document with the answer, counts and times.
    #[arg(long)]
    json: bool,
}

/// The answer with its counts and times.
#[derive(Debug, Serialize)]
struct Report {
    text: String,
    /// `stop`, `length`, `context` or `cancelled`.
    finish: &'static str,
    tokens: usize,
    prompt_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    statistics: Summary,
}

impl Report {
    fn new(text: String, answer: &Answer, draft: &'static str) -> Self {
        let counts = answer.statistics.clone();
        Self {
            text,
            finish: match answer.finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
                Finish::Context => "context",
                Finish::Cancelled => "cancelled",
            },
            tokens: answer.ids.len(),
            prompt_tokens_per_second: rate(counts.prompt_tokens, counts.prompt_time.as_secs_f64()),
            decode_tokens_per_second: counts.tokens_per_second(),
            statistics: Summary::new(draft, counts),
        }
    }

    fn line(&self) -> String {
        format!(
            "{} prompt tokens at {:.1}/s, {} tokens at {:.1}/s, {}",
            self.statistics.counts.prompt_tokens,
            self.prompt_tokens_per_second,
            self.tokens,
            self.decode_tokens_per_second,
            self.finish
        )
    }
}

/// Tokens per second, 0 where no time passed.
fn rate(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}

pub(crate) fn run(args: &RunArgs) -> Result<Exit, End> {
    let prompt = if args.prompt == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        text
    } else {
        args.prompt.clone()
    };
    let engine = Engine::open(&args.model.model, args.model.threads)?;
    output::warn(engine.warning());
    let ids = if args.raw {
        engine.tokenizer().encode(&prompt, true)?
    } else {
        let message = |role: &str, content: &str| ChatMessage {
            role: role.into(),
            content: content.into(),
        };
        let system = args.system.as_deref().map(|s| message("system", s));
        let messages: Vec<_> = system
            .into_iter()
            .chain([message("user", &prompt)])
            .collect();
        engine.chat_prompt(&messages)?
    };
    let interrupt = Interrupt::install()?;
    let drafts = args.drafts.open(&args.model, &engine)?;
    let mut session = drafts.session(&engine);
    let options = args.drafts.options(args.max_tokens);
    let live = !args.json && !args.no_stream;
    let answer = stream(&engine, &mut session, &ids, &options, &interrupt, live)?;
    let whole = engine.tokenizer().decode(&answer.ids, true)?;
    let report = Report::new(whole, &answer, drafts.name);
    if args.json {
        output::print_json(&report)?;
    } else {
        if args.no_stream {
            output::print(&report.text)?;
        }
        output::print("\n")?;
        output::note(&report.line());
        if args.stats {
            output::note(report.statistics.render().trim_end());
        }
    }
    Ok(if answer.finish == Finish::Cancelled {
        Exit::Interrupted
    } else {
        Exit::Ok
    })
}

/// Answers `ids`; if `live`, whole characters are printed as soon as they are known.
pub(crate) fn stream(
    engine: &Engine,
    session: &mut Session,
    ids: &[u32],
    options: &Options,
    interrupt: &Interrupt,
    live: bool,
) -> Result<Answer, End> {
    let mut pieces = engine.tokenizer().stream();
    let mut show = |id| {
        let piece = pieces.push(id)?;
        if live { output::print(&piece) } else { Ok(()) }
    };
    let mut shown = Ok(());
    let answer = session.answer(engine, ids, options, |id| {
        shown = show(id);
        if shown.is_err() || interrupt.raised() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    shown?;
    let tail = pieces.finish()?;
    if live {
        output::print(&tail)?;
    }
    Ok(answer)
}
