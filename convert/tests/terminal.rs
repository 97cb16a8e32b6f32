//! Progress on a real terminal, made with `script` of util-linux.
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{PROGRAM, alone, text, tiny};

/// Quantizes with standard error on a terminal of 80 columns and standard output in a
/// file; gives what the terminal and the file got.
fn on_a_terminal(dir: &Path, name: &str, more: &str, variables: &[(&str, &str)]) -> [String; 2] {
    let (log, data) = (
        dir.join(format!("{name}.tty")),
        dir.join(format!("{name}.out")),
    );
    let line = format!(
        "stty cols 80 rows 24; '{}' quantize '{}' -o '{}' --tokens 512 --method kmeans --guided false \
         --jobs 1 {more} > '{}'",
        PROGRAM,
        tiny().display(),
        dir.join(name).display(),
        data.display(),
    );
    let mut script = alone(Command::new("script"));
    script
        .args([
            "--quiet",
            "--return",
            "--flush",
            "--command",
            &line,
            text(&log),
        ])
        .env("SHELL", "/bin/sh")
        .env("TERM", "xterm-256color")
        .env_remove("NO_COLOR")
        .stdin(Stdio::null());
    script.envs(variables.iter().copied());
    let out: Output = script
        .output()
        .expect("`script` of util-linux is installed");
    let seen = String::from_utf8_lossy(&fs::read(&log).unwrap()).into_owned();
    assert!(out.status.success(), "{seen}");
    [seen, fs::read_to_string(data).unwrap()]
}

/// Whether it has a colour or another rendition, not just movements of the cursor.
fn has_colour(seen: &str) -> bool {
    let sequences = seen.split("\u{1b}[").skip(1);
    sequences
        .filter_map(|s| {
            s.find(|c: char| c.is_ascii_alphabetic())
                .map(|at| &s[..=at])
        })
        .any(|s| s.ends_with('m'))
}

#[test]
fn a_terminal_gets_a_bar_with_the_time_left_and_standard_output_nothing_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let [seen, data] = on_a_terminal(dir.path(), "bar", "", &[]);
    assert_eq!(data, "", "progress on standard output");
    let bar = seen
        .split(['\r', '\n'])
        .filter(|l| l.contains("quantize ["));
    let bar: Vec<&str> = bar.collect();
    assert!(bar.len() > 2, "{seen:?}");
    for part in ["/57, ", "/s, ", " left"] {
        assert!(
            bar.iter().all(|l| l.contains(part)),
            "no `{part}` in {bar:?}"
        );
    }
    assert!(
        bar.iter().any(|l| l.contains("model.layers.")),
        "no matrix in {bar:?}"
    );
    // The bar moves in place: no line per matrix.
    assert!(!seen.contains("quantize: 1/57"), "{seen:?}");
    // And goes away: the last thing drawn over is an empty line.
    assert!(seen.contains("\u{1b}[2K"), "{seen:?}");

    let [seen, data] = on_a_terminal(dir.path(), "plain", "", &[("NO_COLOR", "1")]);
    assert_eq!(data, "");
    assert!(
        seen.contains("quantize ["),
        "NO_COLOR is about colours, not bars: {seen:?}"
    );
    assert!(!has_colour(&seen), "{seen:?}");
    let [seen, _] = on_a_terminal(dir.path(), "lines", "--progress lines", &[]);
    assert!(
        seen.contains("quantize: 57/57 ") && !seen.contains('\u{1b}'),
        "{seen:?}"
    );
    let [seen, _] = on_a_terminal(dir.path(), "quiet", "--quiet", &[]);
    let said = seen.lines().filter(|l| !l.starts_with("Script "));
    assert_eq!(said.collect::<String>().trim(), "", "{seen:?}");
    // A dry run's plan is data, also for who looks at a terminal.
    let [seen, data] = on_a_terminal(dir.path(), "plan", "--dry-run --json", &[]);
    let plan: serde_json::Value = serde_json::from_str(&data).expect("the plan and nothing else");
    assert_eq!(plan["command"], "quantize");
    assert!(!seen.contains("output_bytes"), "{seen:?}");
}
