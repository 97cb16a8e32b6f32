//! Chat templates: Jinja2 as transformers runs it, on minijinja.
//!
//! The environment differs from minijinja's in what templates rely on: blocks are
//! trimmed (`trim_blocks`, `lstrip_blocks`), booleans and none print as in Python,
//! Python's string and list methods exist,
//! `tojson` writes what `json.dumps(ensure_ascii=False)` writes, and there are
//! `raise_exception` and `strftime_now`. A template is code from a download, so it
//! runs on a fuel budget.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value};

use super::{ChatMessage, Error, TEMPLATE, TOKENIZER_CONFIG, clock, special_token};

/// Instructions (and 64-byte pieces of output) a rendering may take.
const FUEL: u64 = 20_000_000;
/// Nesting that `tojson` follows.
const MAX_DEPTH: usize = 64;
const NAME: &str = "chat_template";
/// Marks a clock that was not fixed.
const NO_TIME: i64 = i64::MIN;

/// Token variables that templates may use.
const TOKENS: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    tokens: Vec<(&'static str, String)>,
    time: Arc<AtomicI64>,
}

impl ChatTemplate {
    /// The template of a folder: `chat_template.jinja`, or `chat_template` in
    /// `tokenizer_config.json`, which is a string or a list of named ones of which
    /// `default` is meant.
    pub(super) fn find(dir: &Path, config: &Map<String, Value>) -> Result<Option<Self>, Error> {
        let file = dir.join(TEMPLATE);
        let (path, source) = match std::fs::read_to_string(&file) {
            Ok(source) => (file, source),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let source = match config.get("chat_template") {
                    Some(Value::Array(named)) => named
                        .iter()
                        .find(|t| t.get("name").is_some_and(|name| name == "default"))
                        .and_then(|t| t.get("template")),
                    other => other,
                };
                match source.and_then(Value::as_str) {
                    Some(source) => (dir.join(TOKENIZER_CONFIG), source.to_owned()),
                    None => return Ok(None),
                }
            }
            Err(source) => return Err(Error::Io { path: file, source }),
        };
        let tokens = TOKENS
            .iter()
            .filter_map(|&key| Some((key, special_token(config, key)?.to_owned())))
            .collect();
        Self::parse(&source, tokens)
            .map(Some)
            .map_err(|source| Error::TemplateSyntax { path, source })
    }

    fn parse(source: &str, tokens: Vec<(&'static str, String)>) -> Result<Self, minijinja::Error> {
        let time = Arc::new(AtomicI64::new(NO_TIME));
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::Bool => out
                .write_str(if value.is_true() { "True" } else { "False" })
                .map_err(Into::into),
            ValueKind::None => out.write_str("None").map_err(Into::into),
            _ => minijinja::escape_formatter(out, state, value),
        });
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        let clock = Arc::clone(&time);
        environment.add_function("strftime_now", move |format: &str| {
            let now = match clock.load(Ordering::Relaxed) {
                NO_TIME => SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |since| since.as_secs() as i64),
                fixed => fixed,
            };
            clock::strftime(now, format).map_err(|directive| {
                let message = format!("strftime_now does not know `{directive}`");
                minijinja::Error::new(ErrorKind::InvalidOperation, message)
            })
        });
        environment.add_template_owned(NAME, scope_generation_blocks(source))?;
        Ok(Self {
            environment,
            tokens,
            time,
        })
    }

    pub(super) fn set_time(&mut self, unix_seconds: i64) {
        self.time.store(unix_seconds, Ordering::Relaxed);
    }

    pub(super) fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, Error> {
        use minijinja::Value as Jinja;
        // transformers passes `tools` and `documents` always, as none if not given.
        let turn = |message: &ChatMessage| {
            Jinja::from_pairs([("role", &*message.role), ("content", &*message.content)])
        };
        let ours = [
            ("messages", messages.iter().map(turn).collect()),
            ("add_generation_prompt", Jinja::from(add_generation_prompt)),
            ("tools", Jinja::from(())),
            ("documents", Jinja::from(())),
        ];
        let tokens = self
            .tokens
            .iter()
            .map(|(key, token)| (*key, Jinja::from(token.as_str())));
        let extra = extra
            .iter()
            .map(|(key, value)| (key.as_str(), to_jinja(value)));
        let context = Jinja::from_pairs(ours.into_iter().chain(tokens).chain(extra));
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|source| match refusal(&source) {
                Some(message) => Error::TemplateRefused { message },
                None => Error::Template { source },
            })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

fn to_jinja(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => ().into(),
        Value::Bool(b) => (*b).into(),
        Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => n.into(),
            (None, Some(n)) => n.into(),
            (None, None) => n.as_f64().unwrap_or(f64::NAN).into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => items.iter().map(to_jinja).collect(),
        Value::Object(map) => {
            let pairs = map
                .iter()
                .map(|(key, value)| (key.as_str(), to_jinja(value)));
            minijinja::Value::from_pairs(pairs)
        }
    }
}

/// What `raise_exception` throws.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

#[allow(
    clippy::needless_pass_by_value,
    reason = "the signature minijinja calls"
)]
fn raise_exception(message: String) -> Result<(), minijinja::Error> {
    let error = minijinja::Error::new(ErrorKind::InvalidOperation, "raised by the template");
    Err(error.with_source(Refusal(message)))
}

/// The message of `raise_exception`, if that is what stopped the template.
fn refusal(error: &minijinja::Error) -> Option<String> {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(Refusal(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        cause = error.source();
    }
    None
}

/// Replaces `{% generation %}` and its end, which mark the assistant's tokens for
/// training, by `with` blocks: the same scope and whitespace control, no effect.
fn scope_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inner = &tag[..end];
        let word = inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let replacement = match word {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&inner.replace(word, replacement));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`. minijinja's own filter
/// escapes `<` and the like for HTML, which would change the prompt.
#[allow(
    clippy::needless_pass_by_value,
    reason = "the signature minijinja calls"
)]
fn to_json(
    value: &minijinja::Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<minijinja::Value, minijinja::Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    options.assert_all_used()?;
    let mut out = String::new();
    write_json(value, indent, 0, &mut out)?;
    if ascii && !out.is_ascii() {
        out = escape_non_ascii(&out);
    }
    Ok(minijinja::Value::from_safe_string(out))
}

fn escape_non_ascii(json: &str) -> String {
    let mut out = String::new();
    for c in json.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
    out
}

fn write_json(
    value: &minijinja::Value,
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
) -> Result<(), minijinja::Error> {
    let invalid = |what: &str| minijinja::Error::new(ErrorKind::InvalidOperation, what.to_owned());
    if depth > MAX_DEPTH {
        return Err(invalid("tojson: the value is nested too deeply"));
    }
    let separate = |out: &mut String, first: bool, depth: usize| {
        if !first {
            out.push(',');
        }
        match indent {
            Some(indent) => {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent * depth));
            }
            None if !first => out.push(' '),
            None => {}
        }
    };
    match value.kind() {
        ValueKind::Map => {
            out.push('{');
            let mut first = true;
            for key in value.try_iter()? {
                separate(out, first, depth + 1);
                first = false;
                write_string(&key.to_string(), out);
                out.push_str(": ");
                write_json(&value.get_item(&key)?, indent, depth + 1, out)?;
            }
            if !first && indent.is_some() {
                separate(out, true, depth);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut first = true;
            for item in value.try_iter()? {
                separate(out, first, depth + 1);
                first = false;
                write_json(&item, indent, depth + 1, out)?;
            }
            if !first && indent.is_some() {
                separate(out, true, depth);
            }
            out.push(']');
        }
        ValueKind::String => write_string(value.as_str().unwrap_or_default(), out),
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => {
            let _ = write!(out, "{value}");
        }
        _ => return Err(invalid("tojson: the value has no JSON form")),
    }
    Ok(())
}

fn write_string(text: &str, out: &mut String) {
    // JSON strings of serde_json escape what Python escapes and nothing more.
    out.push_str(&Value::from(text).to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, extra: Value) -> Result<String, Error> {
        let template = ChatTemplate::parse(source, vec![("eos_token", "</s>".into())]);
        let mut template = template.unwrap();
        template.set_time(951_782_400);
        let Value::Object(extra) = extra else {
            panic!("extra is an object")
        };
        let message = ChatMessage {
            role: "user".into(),
            content: " <b>häh</b>\n".into(),
        };
        template.render(&[message], true, &extra)
    }

    /// Expected texts are those of Jinja2 3.1 in transformers' environment.
    #[test]
    fn templates_render_as_in_transformers() {
        let none = || serde_json::json!({});
        for (source, expected) in [
            (
                "{{ messages[0].content.strip() }}{{ eos_token }}",
                "<b>häh</b></s>",
            ),
            (
                "{{ messages[0].content | trim }}|{{ bos_token }}",
                "<b>häh</b>|",
            ),
            (
                "  {% if add_generation_prompt %}\nyes\n  {% endif %}\nend\n",
                "yes\nend",
            ),
            (
                "{% for x in [1,2,3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
                "13",
            ),
            (
                "{{ 'a,b'.split(',')[-1].upper() }}{{ 'xyx'.lstrip('x') }}",
                "Byx",
            ),
            (
                "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "1",
            ),
            (
                "{{ tools is none }}{{ tools is defined }}{{ nothing is defined }}",
                "TrueTrueFalse",
            ),
            (
                "a {%- generation -%} b {% set x = 1 %}{%- endgeneration %} c{{ x is defined }}",
                "ab  cFalse",
            ),
            ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2000"),
            (
                "{{ {'a': [1, 2.5, true, none], 'b': {}} | tojson }}",
                r#"{"a": [1, 2.5, true, null], "b": {}}"#,
            ),
            ("{{ messages[0].content | tojson }}", r#"" <b>häh</b>\n""#),
            ("{{ ['ä'] | tojson(ensure_ascii=true) }}", r#"["\u00e4"]"#),
            (
                "{{ {'a': [1, {}], 'b': []} | tojson(indent=2) }}",
                "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}",
            ),
        ] {
            assert_eq!(render(source, none()).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn extra_variables_reach_the_template() {
        let extra = serde_json::json!({"enable_thinking": false, "tools": [{"name": "f"}]});
        let source = "{{ enable_thinking }}{% for t in tools %}{{ t | tojson }}{% endfor %}";
        assert_eq!(render(source, extra).unwrap(), r#"False{"name": "f"}"#);
    }

    #[test]
    fn a_refusal_carries_the_templates_words() {
        let source = "{% if true %}{{ raise_exception('roles must alternate') }}{% endif %}";
        match render(source, serde_json::json!({})).unwrap_err() {
            Error::TemplateRefused { message } => assert_eq!(message, "roles must alternate"),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn an_endless_template_runs_out_of_fuel() {
        let source =
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
        let error = render(source, serde_json::json!({})).unwrap_err();
        assert!(
            matches!(error, Error::Template { source } if source.kind() == ErrorKind::OutOfFuel)
        );
    }
}
