//! `anemone chat`: a conversation, turn by turn.

use std::io::{BufRead, Write};

use anemone_runtime::engine::{Engine, Finish, Options, Session, Statistics};
use anemone_schemas::exit::Exit;
use anemone_schemas::tokenizer::ChatMessage;
use clap::Args;

use crate::ModelArgs;
use crate::drafts::{DraftArgs, Summary};
use crate::failure::End;
use crate::output::{self, Interrupt};
use crate::run;

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// System message.
    #[arg(long)]
    system: Option<String>,
    /// Tokens of one answer at most.
    #[arg(short = 'n', long, default_value_t = 1024)]
    max_tokens: usize,
    #[command(flatten)]
    drafts: DraftArgs,
    /// Say after each answer what drafting gave and cost.
    #[arg(long)]
    stats: bool,
}

const HELP: &str = "/reset forgets the conversation, /system TEXT sets the system message and \
                    forgets, /quit or Ctrl-D ends; Ctrl-C stops an answer";

/// Messages so far; the first may be the system's.
struct Conversation(Vec<ChatMessage>);

impl Conversation {
    fn new(system: Option<&str>) -> Self {
        Self(system.into_iter().map(|s| message("system", s)).collect())
    }

    fn system(&self) -> Option<String> {
        let first = self.0.first().filter(|m| m.role == "system");
        first.map(|m| m.content.clone())
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    ChatMessage {
        role: role.into(),
        content: content.into(),
    }
}

pub(crate) fn chat(args: &ChatArgs) -> Result<Exit, End> {
    let engine = Engine::open(&args.model.model, args.model.threads)?;
    output::warn(engine.warning());
    let interrupt = Interrupt::install()?;
    let drafts = args.drafts.open(&args.model, &engine)?;
    let mut session = drafts.session(&engine);
    let options = args.drafts.options(args.max_tokens);
    let mut talk = Conversation::new(args.system.as_deref());
    output::note(HELP);
    let mut lines = std::io::stdin().lock().lines();
    loop {
        prompt();
        let Some(line) = lines.next() else {
            return Ok(Exit::Ok);
        };
        let line = line?;
        match line.trim() {
            "" => {}
            "/quit" | "/exit" => return Ok(Exit::Ok),
            "/help" => output::note(HELP),
            "/reset" => talk = Conversation::new(talk.system().as_deref()),
            command if command.starts_with("/system") => {
                let system = command["/system".len()..].trim();
                talk = Conversation::new(Some(system).filter(|s| !s.is_empty()));
            }
            command if command.starts_with('/') => {
                output::note(&format!("unknown command `{command}`; {HELP}"));
            }
            said => {
                talk.0.push(message("user", said));
                interrupt.lower();
                let statistics = turn(&engine, &mut session, &mut talk, &options, &interrupt)?;
                if let Some(statistics) = statistics.filter(|_| args.stats) {
                    output::note(Summary::new(drafts.name, statistics).render().trim_end());
                }
            }
        }
    }
}

/// Answers the last message; it is taken back if the conversation has become too
/// long.
fn turn(
    engine: &Engine,
    session: &mut Session,
    talk: &mut Conversation,
    options: &Options,
    interrupt: &Interrupt,
) -> Result<Option<Statistics>, End> {
    let ids = engine.chat_prompt(&talk.0)?;
    if ids.len() > engine.max_context() {
        talk.0.pop();
        output::note(&format!(
            "the conversation of {} tokens is longer than the context of {}; /reset forgets it",
            ids.len(),
            engine.max_context()
        ));
        return Ok(None);
    }
    let answer = run::stream(engine, session, &ids, options, interrupt, true)?;
    output::print("\n")?;
    let said = engine.tokenizer().decode(&answer.ids, true)?;
    talk.0.push(message("assistant", &said));
    match answer.finish {
        Finish::Context => output::note("(the context is full; /reset forgets the conversation)"),
        Finish::Length => output::note("(the answer was cut)"),
        Finish::Stop | Finish::Cancelled => {}
    }
    Ok(Some(answer.statistics))
}

fn prompt() {
    // On standard error, so that a transcript holds answers only.
    let mut err = std::io::stderr().lock();
    let _ = err.write_all(b"> ").and_then(|()| err.flush());
}
