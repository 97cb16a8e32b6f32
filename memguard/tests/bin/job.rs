//! Jobs that the tests put under guard. The first argument names one; each says on
//! standard output when it is ready.

use std::io::Write;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use anemone_memguard::{Guard, Limits, Lock, Stop, require_memory};

/// Nothing here outlives a test by much, whatever goes wrong.
const LONG: Duration = Duration::from_mins(2);
const BLOCK: usize = 8 << 20;
/// Stops a leak that nobody else stops.
const MOST_BLOCKS: usize = (4 << 30) / BLOCK;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["leak"] => leak(),
        // A tree: every process leaks and so do its children.
        ["leak-tree", depth] => {
            let depth: u32 = depth.parse().expect("depth");
            if depth > 0 {
                for _ in 0..2 {
                    start(&["leak-tree", &(depth - 1).to_string()], false);
                }
            }
            leak()
        }
        // Starts a process that leaves the group, tells its id, then leaks.
        ["leak-beside-stray"] => {
            say(&start(&["sleep"], true).to_string());
            leak()
        }
        ["sleep"] => {
            thread::sleep(LONG);
            ExitCode::SUCCESS
        }
        // Holds this much until asked to stop, then writes a checkpoint and exits.
        ["checkpoint", mebibytes, file] => {
            let stop = Stop::on_signals().expect("handlers");
            let held = hold(mebibytes);
            say("ready");
            while stop.requested().is_none() {
                thread::sleep(Duration::from_millis(5));
            }
            let reason = stop.requested().expect("requested");
            std::fs::write(file, reason.to_string()).expect("checkpoint");
            drop(held);
            reason.exit_code().into()
        }
        // Tells its id and runs until asked to stop. It starts no process: a child
        // that is suspended between `vfork` and `exec` holds its parent in a wait
        // that nothing suspends, and shells use `vfork`.
        ["until-asked"] => {
            let stop = Stop::on_signals().expect("handlers");
            say(&std::process::id().to_string());
            while stop.requested().is_none() {
                thread::sleep(Duration::from_millis(5));
            }
            say("bye");
            ExitCode::from(7)
        }
        // Deaf to the first signal.
        ["deaf", mebibytes] => {
            let _stop = Stop::on_signals().expect("handlers");
            let _held = hold(mebibytes);
            say("ready");
            thread::sleep(LONG);
            ExitCode::SUCCESS
        }
        // Guards itself and leaks; polls the token as a converter does.
        ["guarded", soft, hard] => {
            let limits = Limits {
                soft_anon: soft.parse::<u64>().ok().map(|m| m << 20),
                max_anon: hard.parse::<u64>().ok().map(|m| m << 20),
                ..Limits::default()
            };
            let stop = Stop::new();
            let _guard =
                Guard::start(&limits, &stop, |event| say(&event.to_string())).expect("guard");
            let mut held = Vec::new();
            for _ in 0..MOST_BLOCKS {
                if let Some(reason) = stop.requested() {
                    say(&reason.to_string());
                    return reason.exit_code().into();
                }
                held.push(std::hint::black_box(vec![1u8; BLOCK]));
                thread::sleep(Duration::from_millis(2));
            }
            ExitCode::SUCCESS
        }
        ["require-memory", mebibytes] => {
            let bytes = mebibytes.parse::<u64>().expect("size") << 20;
            match require_memory(bytes) {
                Ok(()) => ExitCode::SUCCESS,
                Err(e) => {
                    say(&e.to_string());
                    ExitCode::from(4)
                }
            }
        }
        ["lock", name] => match Lock::acquire(name) {
            Ok(_lock) => {
                say("ready");
                thread::sleep(LONG);
                ExitCode::SUCCESS
            }
            Err(e) => {
                say(&e.to_string());
                ExitCode::from(4)
            }
        },
        // Takes the lock for a moment.
        ["lock-briefly", name] => {
            let _lock = Lock::acquire(name).expect("lock");
            ExitCode::SUCCESS
        }
        ["wait-for-lock", name] => {
            let stop = Stop::on_signals().expect("handlers");
            let lock = Lock::wait(name, &stop, |holder| say(&holder.to_string())).expect("lock");
            say(if lock.is_some() { "mine" } else { "stopped" });
            ExitCode::SUCCESS
        }
        _ => {
            say("unknown job");
            ExitCode::from(99)
        }
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

fn hold(mebibytes: &str) -> Vec<u8> {
    let mebibytes: usize = mebibytes.parse().expect("size");
    std::hint::black_box(vec![1u8; mebibytes << 20])
}

fn leak() -> ExitCode {
    let mut held = Vec::new();
    for _ in 0..MOST_BLOCKS {
        held.push(std::hint::black_box(vec![1u8; BLOCK]));
        thread::sleep(Duration::from_millis(2));
    }
    ExitCode::SUCCESS
}

fn start(args: &[&str], own_group: bool) -> u32 {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command.args(args);
    if own_group {
        command
            .process_group(0)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
    }
    command.spawn().expect("start").id()
}
