//! The configuration file: options that the command line does not give.
//!
//! ```toml
//! [all]                 # for every command that knows the option
//! max-anon = "20G"
//!
//! [quantize]
//! tokens = 65536
//! calib = ["docs.txt", "chat.jsonl"]
//! ```
//!
//! Keys are the long names of options. What stands on the command line wins; what stands
//! here wins over the environment.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command};
use toml::{Table, Value};

use crate::error::Error;

/// Environment variable that names the file.
const VARIABLE: &str = "ANEMONE_CONFIG";
/// A longer file is no configuration.
const MAX_BYTES: u64 = 1 << 20;
const ALL: &str = "all";

/// The arguments with those of the configuration file put in.
///
/// # Errors
/// A file that cannot be read, a section that is no command, a key that is no option.
pub(super) fn complete(command: &Command, mut args: Vec<OsString>) -> Result<Vec<OsString>, Error> {
    let Some(path) = named(&args).or_else(|| std::env::var_os(VARIABLE)) else {
        return Ok(args);
    };
    let path = PathBuf::from(path);
    let wrong = |what: String| Error::usage(format!("`{}`: {what}", path.display()));
    let length = fs::metadata(&path).map_err(|e| Error::io(&path, &e))?.len();
    if length > MAX_BYTES {
        return Err(wrong(format!("{length} bytes is no configuration")));
    }
    let text = fs::read_to_string(&path).map_err(|e| Error::io(&path, &e))?;
    let file: Table = text
        .parse()
        .map_err(|e: toml::de::Error| wrong(e.to_string()))?;
    let known = |name: &str| command.find_subcommand(name).is_some();
    if let Some(section) = file.keys().find(|s| *s != ALL && !known(s)) {
        return Err(wrong(format!("`[{section}]` is no command")));
    }
    let position = args
        .iter()
        .skip(1)
        .position(|a| a.to_str().is_some_and(known));
    let Some(at) = position.map(|p| p + 1) else {
        return Ok(args);
    };
    let name = args[at].to_string_lossy().into_owned();
    let sub = command.find_subcommand(&name).expect("it was found above");
    let mut more = Vec::new();
    for section in [ALL, name.as_str()] {
        let Some(Value::Table(table)) = file.get(section) else {
            continue;
        };
        for (key, value) in table {
            let find = |c: &'_ Command| {
                c.get_arguments()
                    .find(|a| a.get_long() == Some(key))
                    .cloned()
            };
            let own = find(sub).or_else(|| find(command).filter(Arg::is_global_set));
            let Some(arg) = own else {
                if section == ALL && command.get_subcommands().any(|c| find(c).is_some()) {
                    continue;
                }
                return Err(wrong(format!("`[{section}]` has no option `{key}`")));
            };
            if !given(&args, &arg) {
                let words = words(key, value, &arg)
                    .ok_or_else(|| wrong(format!("`{key}` cannot be `{value}`")))?;
                more.retain(|w: &OsString| !is_option(w, key));
                more.extend(words);
            }
        }
    }
    let rest = args.split_off(at + 1);
    args.extend(more);
    args.extend(rest);
    Ok(args)
}

/// The file named by `--config`.
fn named(args: &[OsString]) -> Option<OsString> {
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--config" {
            return args.next().cloned();
        }
        if let Some(path) = arg.to_str().and_then(|a| a.strip_prefix("--config=")) {
            return Some(path.into());
        }
    }
    None
}

/// Whether the command line gives the option itself.
fn given(args: &[OsString], arg: &Arg) -> bool {
    let long = arg.get_long().unwrap_or_default();
    let short = arg.get_short().map(|c| format!("-{c}"));
    args.iter().any(|a| {
        let short = |a: &str| {
            short
                .as_ref()
                .is_some_and(|s| a.starts_with(s) && !a.starts_with("--"))
        };
        is_option(a, long) || a.to_str().is_some_and(short)
    })
}

fn is_option(word: &OsStr, long: &str) -> bool {
    word.to_str()
        .and_then(|w| w.strip_prefix("--")?.strip_prefix(long))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

/// An option as words of the command line.
fn words(key: &str, value: &Value, arg: &Arg) -> Option<Vec<OsString>> {
    let one = |value: &Value| -> Option<OsString> {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Integer(n) => n.to_string(),
            Value::Float(x) => x.to_string(),
            _ => return None,
        };
        Some(format!("--{key}={text}").into())
    };
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(yes)) => {
            Some(yes.then(|| format!("--{key}").into()).into_iter().collect())
        }
        (ArgAction::SetTrue, _) => None,
        (_, Value::Array(list)) => list.iter().map(one).collect(),
        (ArgAction::Set, Value::Boolean(yes)) => Some(vec![format!("--{key}={yes}").into()]),
        _ => Some(vec![one(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Cli;
    use super::*;
    use clap::CommandFactory;

    fn completed(file: &str, line: &str) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("night.toml");
        fs::write(&path, file).unwrap();
        let line = format!("anemone-convert --config={} {line}", path.display());
        let args = line.split(' ').map(OsString::from).collect();
        let args = complete(&Cli::command(), args).map_err(|e| e.message)?;
        let words: Vec<_> = args.iter().skip(2).map(|a| a.to_string_lossy()).collect();
        Ok(words.join(" "))
    }

    #[test]
    fn options_of_the_file_come_before_the_users_and_yield_to_them() {
        let file = "[all]\nmax-anon = \"20G\"\ntokens = 1\n[quantize]\ntokens = 2\njobs = 3\n\
                    calib = [\"a\", \"b\"]\nfresh = true\noverwrite = false\n[target]\nchunks = 4\n";
        assert_eq!(
            completed(file, "quantize m -o s -j 1").unwrap(),
            "quantize --max-anon=20G --calib=a --calib=b --fresh --tokens=2 m -o s -j 1"
        );
        assert_eq!(
            completed(file, "target s --chunks=2 -o f").unwrap(),
            "target --max-anon=20G s --chunks=2 -o f"
        );
        assert_eq!(completed(file, "--help").unwrap(), "--help");
    }

    #[test]
    fn what_the_file_cannot_mean_is_named() {
        for (file, part) in [
            ("[quantise]\n", "`[quantise]` is no command"),
            ("[quantize]\ntoken = 1\n", "has no option `token`"),
            ("[quantize]\nfresh = 1\n", "`fresh` cannot be `1`"),
            ("[quantize]\ntokens = { a = 1 }\n", "`tokens` cannot be"),
            ("nonsense", "night.toml"),
        ] {
            let error = completed(file, "quantize m -o s").unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
