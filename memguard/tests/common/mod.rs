//! What the tests of the command share.
#![allow(dead_code, reason = "not every test file uses every helper")]

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

pub(crate) const MEMGUARD: &str = env!("CARGO_BIN_EXE_memguard");
pub(crate) const JOB: &str = env!("CARGO_BIN_EXE_memguard-test-job");

/// Far longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

/// `memguard` with these options running the test job with these arguments, lines
/// for other machine-wide limits left at their defaults.
pub(crate) fn guarded(options: &[&str], job: &[&str]) -> Command {
    let mut command = Command::new(MEMGUARD);
    command.args(options).arg("--").arg(JOB).args(job);
    command
}

/// Output of a command that is expected to end.
pub(crate) fn finish(command: &mut Command) -> Output {
    heed_interrupts();
    command.stdin(Stdio::null()).output().expect("start")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A process under test, killed with its group when the test ends.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    /// Starts the command in a group of its own, so that what it kills is not us.
    pub(crate) fn start(command: &mut Command) -> Self {
        heed_interrupts();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("start");
        let lines = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, lines }
    }

    /// The next line of its standard output, empty at the end.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("readable");
        line.trim_end().to_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.id()), signal).expect("signalled");
    }

    /// Its exit code; `None` if a signal ended it.
    pub(crate) fn code(&mut self) -> Option<i32> {
        self.child.wait().expect("waited").code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = rustix::process::kill_process_group(pid(self.child.id()), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

pub(crate) fn pid(id: u32) -> Pid {
    Pid::from_raw(id.try_into().expect("small")).expect("positive")
}

/// A shell starts background jobs with SIGINT ignored, other starters ignore SIGTSTP,
/// and children inherit that. A handler is reset by `exec`, so with one in place
/// children heed both again; this one does what the default does.
fn heed_interrupts() {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTSTP] {
        let always = Arc::new(AtomicBool::new(true));
        signal_hook::flag::register_conditional_default(signal, always).expect("handler");
    }
}

/// Waits until `done`, or panics after a time that no machine needs.
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "still not so: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
