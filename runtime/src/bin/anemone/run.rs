//! `anemone run`: one prompt, one answer.

use std::io::Read;

use anemone_runtime::engine::{Engine, Finish};
use anemone_schemas::exit::Exit;
use anemone_schemas::tokenizer::ChatMessage;
use clap::Args;
use serde::Serialize;

use crate::ModelArgs;
use crate::failure::End;
use crate::output::{self, Interrupt};
use crate::text::{Answer, Text, finish_name};

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
    /// Print the answer when it is complete.
    #[arg(long)]
    no_stream: bool,
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
    prompt_tokens: usize,
    tokens: usize,
    /// Time to the first token.
    prompt_seconds: f64,
    /// Time from the first token to the last.
    decode_seconds: f64,
    prompt_tokens_per_second: f64,
    decode_tokens_per_second: f64,
}

impl Report {
    fn new(text: String, answer: &Answer) -> Self {
        let (prompt, decode) = (answer.first.as_secs_f64(), answer.rest.as_secs_f64());
        let later = answer.ids.len().saturating_sub(1);
        Self {
            text,
            finish: finish_name(answer.finish),
            prompt_tokens: answer.processed,
            tokens: answer.ids.len(),
            prompt_seconds: prompt,
            decode_seconds: decode,
            prompt_tokens_per_second: rate(answer.processed, prompt),
            decode_tokens_per_second: rate(later, decode),
        }
    }

    fn line(&self) -> String {
        format!(
            "{} prompt tokens at {:.1}/s, {} tokens at {:.1}/s, {}",
            self.prompt_tokens,
            self.prompt_tokens_per_second,
            self.tokens,
            self.decode_tokens_per_second,
            self.finish
        )
    }
}

/// Tokens per second, 0 where no time passed.
pub(crate) fn rate(tokens: usize, seconds: f64) -> f64 {
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
    crate::output::warn(engine.warning());
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
    let mut text = Text::new(&engine);
    let live = !args.json && !args.no_stream;
    let answer = stream(&engine, &mut text, &ids, args.max_tokens, &interrupt, live)?;
    let whole = engine.tokenizer().decode(&answer.ids, true)?;
    let report = Report::new(whole, &answer);
    if args.json {
        output::print_json(&report)?;
    } else {
        if args.no_stream {
            output::print(&report.text)?;
        }
        output::print("\n")?;
        output::note(&report.line());
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
    text: &mut Text,
    ids: &[u32],
    max_tokens: usize,
    interrupt: &Interrupt,
    live: bool,
) -> Result<Answer, End> {
    let mut pieces = engine.tokenizer().stream();
    let answer = text.answer(engine, ids, max_tokens, interrupt, |id| {
        let piece = pieces.push(id)?;
        if live { output::print(&piece) } else { Ok(()) }
    })?;
    let tail = pieces.finish()?;
    if live {
        output::print(&tail)?;
    }
    Ok(answer)
}
