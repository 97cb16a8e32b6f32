//! The command `memguard`, from outside.

mod common;

use std::process::{Command, Stdio};

use common::{JOB, MEMGUARD, Running, eventually, finish, guarded, pid, stderr, stdout};
use rustix::process::{Signal, test_kill_process};
use serde_json::Value;

fn shell(options: &[&str], script: &str) -> Command {
    let mut command = Command::new(MEMGUARD);
    command.args(options).args(["--", "sh", "-c", script]);
    command
}

fn json(path: &std::path::Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("statistics")).expect("json")
}

#[test]
fn a_tree_that_allocates_without_end_is_killed_and_bystanders_live() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report.json");
    let mut bystander = Running::start(Command::new(JOB).arg("sleep"));
    let output = finish(&mut guarded(
        &[
            "--max-anon",
            "300M",
            &format!("--json={}", report.display()),
        ],
        &["leak-tree", "2"],
    ));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("anonymous memory reached"), "{said}");
    assert!(said.contains("(limit 300 MiB)"), "{said}");
    assert!(said.contains("killed process group"), "{said}");
    assert_eq!(bystander.child.try_wait().unwrap(), None);

    let report = json(&report);
    assert_eq!(report["outcome"], "killed");
    assert_eq!(report["exit_code"], 4);
    assert_eq!(report["command_signal"], 9);
    assert_eq!(report["breach"]["measure"], "anonymous");
    assert_eq!(report["breach"]["limit"], 300 << 20);
    assert!(report["peak_anonymous"].as_u64().unwrap() >= 300 << 20);
    assert_eq!(report["left_alone"], Value::Array(vec![]));
}

#[test]
fn nothing_of_a_killed_tree_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let pids = dir.path().join("pids");
    // The shell ends early: its children must not escape because their leader has gone.
    let script = format!(
        "{JOB} leak & echo $! >> {0}; {JOB} leak & echo $! >> {0}; wait",
        pids.display()
    );
    let output = finish(&mut shell(&["--max-anon", "200M"], &script));
    assert_eq!(output.status.code(), Some(4), "{}", stderr(&output));
    let pids = std::fs::read_to_string(pids).unwrap();
    assert_eq!(pids.lines().count(), 2);
    for id in pids.lines() {
        let id = id.parse().unwrap();
        eventually("the child has gone", || test_kill_process(pid(id)).is_err());
    }
}

#[test]
fn a_process_that_left_the_group_is_named_and_not_signalled() {
    let output = finish(&mut guarded(
        &["--max-anon", "200M"],
        &["leak-beside-stray"],
    ));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    let stray = stdout(&output).trim().parse().expect("its id");
    let named = format!("left alone, outside of the group: {stray} `{JOB} sleep`");
    assert!(said.contains(&named), "{said}");
    rustix::process::kill_process(pid(stray), Signal::KILL).expect("it lives");
}

#[test]
fn a_cooperative_job_is_asked_first_and_leaves_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = dir.path().join("checkpoint");
    let report = dir.path().join("report.json");
    let output = finish(&mut guarded(
        &[
            "--soft=100M",
            "--max-anon=2G",
            &format!("--json={}", report.display()),
        ],
        &["checkpoint", "150", checkpoint.to_str().unwrap()],
    ));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("(limit 100 MiB)"), "{said}");
    assert!(!said.contains("killed"), "{said}");
    assert_eq!(
        std::fs::read_to_string(checkpoint).unwrap(),
        "asked to terminate"
    );
    let report = json(&report);
    assert_eq!(report["outcome"], "stopped");
    assert_eq!(report["command_code"], 75);
}

#[test]
fn a_job_that_does_not_stop_when_asked_is_killed_after_the_grace_period() {
    let output = finish(&mut guarded(
        &["--soft=100M", "--grace=1"],
        &["deaf", "150"],
    ));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("1 s to do so"), "{said}");
    assert!(said.contains("not stopped in time"), "{said}");
    assert!(said.contains("killed process group"), "{said}");
}

#[test]
fn exit_codes_pass_through() {
    for code in [0, 1, 3, 75, 255] {
        let output = finish(&mut shell(&[], &format!("exit {code}")));
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(stderr(&output), "");
    }
    let output = finish(&mut shell(&[], "kill -USR1 $$"));
    assert_eq!(output.status.code(), Some(128 + 10));
}

#[test]
fn standard_streams_are_the_commands() {
    let output = finish(&mut shell(&[], "echo data; echo note >&2"));
    assert_eq!(stdout(&output), "data\n");
    assert_eq!(stderr(&output), "note\n");
}

/// Whether a hangup is ignored here, as under `nohup`. Then it is ignored by all that this
/// process starts; a shell cannot even trap it.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (Signal::HUP.as_raw() - 1) & 1 == 1)
}

#[test]
fn signals_pass_through() {
    let mut signals = vec![Signal::INT, Signal::TERM, Signal::USR2];
    if !ignores_hangups() {
        signals.push(Signal::HUP);
    }
    for signal in signals {
        let script = format!(
            "trap 'echo got; exit 42' {}; echo ready; while :; do sleep 0.05; done",
            signal.as_raw()
        );
        // The shell would remark on the `sleep` that the signal ends.
        let mut job = Running::start(shell(&[], &script).stderr(Stdio::null()));
        assert_eq!(job.line(), "ready");
        job.signal(signal);
        assert_eq!(job.line(), "got", "{signal:?}");
        assert_eq!(job.code(), Some(42));
    }
}

#[test]
fn a_signal_that_memguard_was_started_to_ignore_stays_ignored() {
    let script =
        format!("trap '' HUP; exec {MEMGUARD} -- sh -c 'echo ready; read line; echo lived'");
    let mut command = Command::new("sh");
    let mut job = {
        // `Running` closes standard input; this job needs one to wait on.
        command.args(["-c", &script]).stdin(Stdio::piped());
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let mut out = std::io::BufReader::new(job.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    rustix::process::kill_process(pid(job.id()), Signal::HUP).unwrap();
    std::io::Write::write_all(&mut job.stdin.take().unwrap(), b"\n").unwrap();
    line.clear();
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert_eq!(line, "lived\n");
    assert_eq!(job.wait().unwrap().code(), Some(0));
}

/// The letter `ps` shows: `T` stands for stopped.
#[cfg(target_os = "linux")]
fn state(id: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

#[cfg(target_os = "linux")]
#[test]
fn the_command_is_suspended_and_resumed_together_with_memguard() {
    let mut job = Running::start(&mut guarded(&[], &["until-asked"]));
    let command: u32 = job.line().parse().unwrap();
    job.signal(Signal::TSTP);
    eventually("both are stopped", || {
        state(job.child.id()) == Some('T') && state(command) == Some('T')
    });
    job.signal(Signal::CONT);
    eventually("both run", || {
        state(job.child.id()) != Some('T') && state(command) != Some('T')
    });
    job.signal(Signal::TERM);
    assert_eq!(job.line(), "bye");
    assert_eq!(job.code(), Some(7));
}

#[test]
fn the_second_interrupt_ends_a_job_at_once() {
    let mut job = Running::start(&mut guarded(&[], &["deaf", "1"]));
    assert_eq!(job.line(), "ready");
    job.signal(Signal::INT);
    // Two signals that are pending at once count as one, so it may take a third.
    eventually("it has ended", || {
        job.child.try_wait().unwrap().is_some() || {
            job.signal(Signal::INT);
            false
        }
    });
    assert_eq!(job.code(), Some(130));
}

#[test]
fn a_command_that_cannot_run_has_the_shells_codes() {
    let output = finish(Command::new(MEMGUARD).args(["--", "/nowhere/at-all"]));
    assert_eq!(output.status.code(), Some(127));
    assert!(stderr(&output).contains("cannot run `/nowhere/at-all`"));
    let output = finish(Command::new(MEMGUARD).args(["--", "/"]));
    assert_eq!(output.status.code(), Some(126));
}

#[test]
fn a_machine_short_of_memory_is_not_given_the_job() {
    let output = finish(&mut shell(&["--min-free=100%"], "echo started"));
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(stdout(&output), "");
    assert!(stderr(&output).contains("before the job has started"));
    assert!(stderr(&output).contains("hint: "));
}

#[test]
fn wrong_usage_is_refused_and_names_the_argument() {
    for (options, part) in [
        (&["--max-anon", "6X", "--", "true"][..], "unknown unit `X`"),
        (&["--max-anon", "6%", "--", "true"], "give a size"),
        (&["--min-free", "120%", "--", "true"], "too large"),
        (&["--swap-growth", "lots", "--", "true"], "not an amount"),
        (&["--interval", "0", "--", "true"], "10..=60000"),
        (
            &["--soft", "2G", "--max-anon", "1G", "--", "true"],
            "`--soft` (2.00 GiB) must be below `--max-anon` (1.00 GiB)",
        ),
        (
            &["--no-such-option", "--", "true"],
            "unknown option `--no-such-option`",
        ),
        (&["--", "--", "true"], "unknown option `--`"),
        (&["--quiet"], "COMMAND"),
    ] {
        let output = finish(Command::new(MEMGUARD).args(options));
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}

#[test]
fn quiet_says_nothing_and_json_goes_to_standard_error() {
    let output = finish(&mut guarded(
        &["--quiet", "--max-anon=100M", "--json"],
        &["leak"],
    ));
    let said = stderr(&output);
    assert_eq!(said.lines().count(), 1, "{said}");
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["exit_code"], 4);
    assert_eq!(report["command"][1], "leak");
}

#[test]
fn help_documents_every_exit_code() {
    let output = finish(Command::new(MEMGUARD).arg("--help"));
    assert_eq!(output.status.code(), Some(0));
    let help = stdout(&output);
    for code in ["128 + N", "  2  ", "  4  ", "  125  ", "  126, 127  "] {
        assert!(help.contains(code), "{code}");
    }
}
