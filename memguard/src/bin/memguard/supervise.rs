//! One command under watch, from its start to its end.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anemone_memguard::{
    Breach, Error, GUARDS_VARIABLE, Group, HOLDER_VARIABLE, Lock, Process, Verdict, Watch,
    heeded_signals,
};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2,
};
use signal_hook::iterator::Signals;

use crate::args::Args;
use crate::report::{Outcome, Report};
use crate::{code, say};

const PASSED_ON: [i32; 8] = [
    SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT,
];
/// How long killed processes may take to go: one that is deep in a device driver
/// cannot be waited for.
const LAST_WAIT: Duration = Duration::from_secs(10);
const LAST_POLL: Duration = Duration::from_millis(20);

/// Runs the command and gives memguard's exit code.
pub(crate) fn run(args: &Args, watch: Watch, lock: Option<&Lock>) -> Result<u8, Error> {
    // Before the start, so that no signal falls between.
    let signals = listen().map_err(Error::Signals)?;
    let began = Instant::now();
    let (child, group) = match start(args, lock) {
        Ok(started) => started,
        Err(e) => {
            say(&format!("error: cannot run `{}`: {e}", args.command_line()));
            return Ok(if e.kind() == io::ErrorKind::NotFound {
                code::NOT_FOUND
            } else {
                code::CANNOT_RUN
            });
        }
    };
    let mut job = Job {
        args,
        child,
        group,
        watch,
        asked: None,
        killed: false,
        breach: None,
        left_alone: Vec::new(),
    };
    job.watch.follow(group);
    job.guard(&signals);
    let status = match job.child.wait() {
        Ok(status) => status,
        Err(e) => {
            say(&format!("error: cannot learn how the command ended: {e}"));
            return Ok(code::INTERNAL);
        }
    };
    let report = job.report(status, began.elapsed());
    if let Some(path) = &args.json
        && let Err(e) = report.write(path)
    {
        say(&format!("error: cannot write `{}`: {e}", path.display()));
    }
    Ok(report.exit_code)
}

/// Signals as messages, so that one call can wait for them and for the next sample.
fn listen() -> io::Result<Receiver<i32>> {
    let mut wanted = heeded_signals(&PASSED_ON);
    wanted.push(SIGCHLD);
    let mut signals = Signals::new(wanted)?;
    let (send, receive) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        for signal in signals.forever() {
            if send.send(signal).is_err() {
                break;
            }
        }
    })?;
    Ok(receive)
}

fn start(args: &Args, lock: Option<&Lock>) -> io::Result<(Child, Group)> {
    let (program, arguments) = args.command.split_first().ok_or(io::ErrorKind::NotFound)?;
    let mut guards = std::env::var(GUARDS_VARIABLE).unwrap_or_default();
    if !guards.is_empty() {
        guards.push(':');
    }
    guards.push_str(&std::process::id().to_string());
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env(GUARDS_VARIABLE, guards)
        .process_group(0);
    if let Some(lock) = lock {
        command.env(HOLDER_VARIABLE, lock.holder_for_children());
    }
    let child = command.spawn()?;
    let group = Group::led_by(child.id()).ok_or(io::ErrorKind::InvalidData)?;
    Ok((child, group))
}

struct Job<'a> {
    args: &'a Args,
    /// Leader of the group. It is waited for last: until then its number, which is
    /// the group's, cannot be given to anyone else, so that every signal meets the
    /// right group.
    child: Child,
    group: Group,
    watch: Watch,
    /// When the command was asked to stop for memory.
    asked: Option<Instant>,
    killed: bool,
    breach: Option<Breach>,
    left_alone: Vec<Process>,
}

impl Job<'_> {
    /// Returns when the leader has ended, and after a stop for memory when the
    /// whole group has.
    fn guard(&mut self, signals: &Receiver<i32>) {
        let mut next_sample = Instant::now();
        loop {
            if self.leader_has_ended() && (self.breach.is_none() || self.group_is_gone()) {
                return;
            }
            let now = Instant::now();
            if self.killed {
                self.await_the_killed(now + LAST_WAIT);
                return;
            }
            if let Some(asked) = self.asked
                && now >= asked + self.args.grace()
            {
                self.tell("it has not stopped in time");
                self.kill();
                continue;
            }
            if now >= next_sample {
                match self.watch.sample() {
                    Verdict::Hard(breach) => {
                        self.breach = Some(breach);
                        self.tell(&breach.to_string());
                        self.kill();
                        continue;
                    }
                    Verdict::Soft(breach) if self.asked.is_none() => self.ask(breach),
                    Verdict::Soft(_) | Verdict::Fine => {}
                }
                next_sample = now + self.watch.pause();
            }
            let mut until = next_sample;
            if let Some(asked) = self.asked {
                // The end of a group whose leader has gone sends no signal.
                until = until
                    .min(asked + self.args.grace())
                    .min(now + 5 * LAST_POLL);
            }
            match signals.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(signal) => self.pass_on(signal),
                Err(RecvTimeoutError::Timeout) => {}
                // Only if the listener panicked; the watch goes on without it.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(self.watch.pause()),
            }
        }
    }

    fn pass_on(&self, signal: i32) {
        if signal == SIGCHLD {
            return;
        }
        // May fail for members that changed their user; there is nobody to tell.
        let _ = self.group.signal(signal);
        if signal == SIGTSTP {
            // Nothing to watch while the command sleeps; SIGCONT wakes both.
            let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
        }
    }

    fn ask(&mut self, breach: Breach) {
        self.asked = Some(Instant::now());
        self.breach = Some(breach);
        let seconds = self.args.grace().as_secs();
        self.tell(&format!("{breach}"));
        self.tell(&format!(
            "asked process group {} to stop, {seconds} s to do so",
            self.group.id()
        ));
        let _ = self.group.signal(SIGTERM);
        // A stopped process only sees it when it continues.
        let _ = self.group.signal(SIGCONT);
    }

    fn kill(&mut self) {
        // First of all: what follows allocates and reads all of /proc.
        let _ = self.group.signal(SIGKILL);
        self.killed = true;
        self.tell(&format!("killed process group {}", self.group.id()));
        self.left_alone = self.group.strays(std::process::id());
        for stray in &self.left_alone {
            self.tell(&format!("left alone, outside of the group: {stray}"));
        }
    }

    fn await_the_killed(&self, until: Instant) {
        while !(self.leader_has_ended() && self.group_is_gone()) {
            if Instant::now() >= until {
                for member in self.group.members() {
                    self.tell(&format!("killed but still there: {member}"));
                }
                return;
            }
            // A fork that was under way when the signal came may have slipped by.
            let _ = self.group.signal(SIGKILL);
            thread::sleep(LAST_POLL);
        }
    }

    /// Whether the leader has ended, without taking its status: see [`Job::child`].
    fn leader_has_ended(&self) -> bool {
        let Some(pid) = Pid::from_raw(self.group.id()) else {
            return true;
        };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(
            waitid(WaitId::Pid(pid), options),
            Ok(None) | Err(rustix::io::Errno::INTR)
        )
    }

    fn group_is_gone(&self) -> bool {
        self.group.members().is_empty()
    }

    fn tell(&self, message: &str) {
        if !self.args.quiet {
            say(&format!("memguard: {message}"));
        }
    }

    fn report(&mut self, status: ExitStatus, elapsed: Duration) -> Report {
        let own_code = match (status.code(), status.signal()) {
            (Some(code), _) => code as u8,
            (None, signal) => 128u8.saturating_add(signal.unwrap_or(0) as u8),
        };
        let (outcome, exit_code) = match self.breach {
            None => (Outcome::Ended, own_code),
            Some(_) if self.killed => (Outcome::Killed, code::NO_RESOURCES),
            Some(_) => (Outcome::Stopped, code::NO_RESOURCES),
        };
        Report {
            command: self
                .args
                .command
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            outcome,
            exit_code,
            command_code: status.code(),
            command_signal: status.signal(),
            breach: self.breach,
            left_alone: std::mem::take(&mut self.left_alone),
            seconds: elapsed.as_secs_f64(),
            statistics: self.watch.statistics(),
        }
    }
}
