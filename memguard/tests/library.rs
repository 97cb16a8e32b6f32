//! The guard and the lock as a job uses them, across processes.

mod common;

use std::process::Command;

use common::{JOB, MEMGUARD, Running, finish, stderr, stdout};
use rustix::process::Signal;

/// A job that uses the lock in this folder.
fn job(dir: &tempfile::TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(JOB);
    command.args(args).env("ANEMONE_RUNTIME_DIR", dir.path());
    command
}

#[test]
fn the_soft_line_sets_the_token_and_the_job_ends_resumable() {
    let mut job = Running::start(Command::new(JOB).args(["guarded", "150", "3000"]));
    let event = job.line();
    assert!(event.contains("asking the job to stop"), "{event}");
    let reason = job.line();
    assert!(
        reason.starts_with("stopped for memory: anonymous memory reached"),
        "{reason}"
    );
    assert!(reason.contains("(limit 150 MiB)"), "{reason}");
    assert_eq!(job.code(), Some(75));
}

#[test]
fn the_hard_line_ends_the_own_group_and_nothing_else() {
    let mut bystander = Running::start(Command::new(JOB).arg("sleep"));
    // A sibling inside the group.
    let script = format!("{JOB} sleep & echo $!; exec {JOB} guarded none 150");
    let mut job = Running::start(Command::new("sh").args(["-c", &script]));
    let sibling = common::pid(job.line().parse().unwrap());
    let event = job.line();
    assert!(event.contains("ending the process group"), "{event}");
    assert_eq!(job.code(), None);
    common::eventually("the sibling has gone", || {
        rustix::process::test_kill_process(sibling).is_err()
    });
    assert_eq!(bystander.child.try_wait().unwrap(), None);
}

#[cfg(target_os = "linux")]
#[test]
fn a_resource_limit_bounds_the_budget_and_is_named() {
    let limited = |mebibytes| {
        let script = format!("ulimit -v 1048576; exec {JOB} require-memory {mebibytes}");
        finish(Command::new("sh").args(["-c", &script]))
    };
    let refused = limited(2048);
    assert_eq!(refused.status.code(), Some(4));
    let message = stdout(&refused);
    assert!(
        message.starts_with("needs 2.00 GiB of memory, but only "),
        "{message}"
    );
    assert!(message.contains(" of 1.00 GiB are available"), "{message}");
    assert!(
        message.contains("(resource limit `RLIMIT_AS`)"),
        "{message}"
    );
    let granted = limited(100);
    assert_eq!(granted.status.code(), Some(0), "{}", stdout(&granted));
}

#[test]
fn the_second_job_is_told_who_holds_the_lock() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Running::start(&mut job(&dir, &["lock", "quantize Qwen3-0.6B"]));
    assert_eq!(first.line(), "ready");
    let second = finish(&mut job(&dir, &["lock", "other"]));
    assert_eq!(second.status.code(), Some(4));
    let message = stdout(&second);
    let expected = format!(
        "another heavy job is running: process {}, `quantize Qwen3-0.6B`, since 20",
        first.child.id()
    );
    assert!(message.starts_with(&expected), "{message}");
    assert!(message.contains("heavy-job.lock"), "{message}");
}

#[test]
fn the_lock_dies_with_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Running::start(&mut job(&dir, &["lock", "first"]));
    assert_eq!(first.line(), "ready");
    let mut waiting = Running::start(&mut job(&dir, &["wait-for-lock", "second"]));
    let holder = waiting.line();
    assert!(holder.contains("`first`"), "{holder}");
    first.signal(Signal::KILL);
    assert_eq!(first.code(), None);
    assert_eq!(waiting.line(), "mine");
    assert_eq!(waiting.code(), Some(0));
}

#[test]
fn waiting_for_the_lock_can_be_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Running::start(&mut job(&dir, &["lock", "first"]));
    assert_eq!(first.line(), "ready");
    let mut waiting = Running::start(&mut job(&dir, &["wait-for-lock", "second"]));
    assert!(waiting.line().contains("`first`"));
    waiting.signal(Signal::INT);
    assert_eq!(waiting.line(), "stopped");
}

#[test]
fn a_command_under_a_locking_guard_may_take_the_lock_and_others_may_not() {
    let dir = tempfile::tempdir().unwrap();
    let guard = |args: &[&str]| {
        let mut command = Command::new(MEMGUARD);
        command
            .args(["--lock", "--", JOB])
            .args(args)
            .env("ANEMONE_RUNTIME_DIR", dir.path());
        command
    };
    let inside = finish(&mut guard(&["lock-briefly", "inner"]));
    assert_eq!(inside.status.code(), Some(0), "{}", stderr(&inside));

    let mut holder = Running::start(&mut guard(&["lock", "inner"]));
    assert_eq!(holder.line(), "ready");
    let outside = finish(&mut job(&dir, &["lock", "other"]));
    assert_eq!(outside.status.code(), Some(4));
    let refused = finish(&mut guard(&["lock-briefly", "inner"]));
    assert_eq!(refused.status.code(), Some(4));
    let message = stderr(&refused);
    assert!(
        message.contains(&format!("process {}", holder.child.id())),
        "{message}"
    );
    assert!(message.contains("hint: "), "{message}");
    let mut waiting = Running::start(
        Command::new(MEMGUARD)
            .args(["--wait", "--", "echo", "mine"])
            .env("ANEMONE_RUNTIME_DIR", dir.path())
            .stderr(std::process::Stdio::piped()),
    );
    let mut says = std::io::BufReader::new(waiting.child.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut says, &mut line).unwrap();
    let expected = format!("memguard: waiting for process {}, `", holder.child.id());
    assert!(line.starts_with(&expected), "{line}");
    holder.signal(Signal::TERM);
    assert_eq!(holder.code(), Some(128 + 15));
    assert_eq!(waiting.line(), "mine");
    assert_eq!(waiting.code(), Some(0));
}
