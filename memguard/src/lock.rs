//! One heavy job at a time for each user.
//!
//! The lock is `flock(2)` on a file that is never removed: the kernel releases it
//! when the holder dies, however it dies, so there is no stale lock to clean up.
//! The holder writes its name into the file only for the message that others print;
//! the text decides nothing.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

use crate::{Error, Stop};

/// Environment variable that replaces the runtime folder of the lock.
pub const RUNTIME_DIR_VARIABLE: &str = "ANEMONE_RUNTIME_DIR";

/// Environment variable by which `memguard --lock` tells its command who holds the
/// lock, so that a command that takes the lock itself does not wait for its guard.
pub const HOLDER_VARIABLE: &str = "MEMGUARD_LOCK";

const FILE_NAME: &str = "heavy-job.lock";
const LONGEST_RECORD: usize = 4096;
const POLL: Duration = Duration::from_millis(200);

/// Who holds the lock, as far as the lock file tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holder {
    /// Process id.
    pub pid: Option<u32>,
    /// What it said it does.
    pub command: String,
    /// Since when, seconds since 1970.
    pub since: Option<u64>,
}

impl Holder {
    fn record(&self) -> String {
        let line: String = self
            .command
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .take(500)
            .collect();
        format!(
            "pid {}\nsince {}\ncommand {line}\n",
            self.pid.unwrap_or(0),
            self.since.unwrap_or(0),
        )
    }

    fn parse(record: &str) -> Self {
        let field = |name| {
            record
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        };
        Self {
            pid: field("pid").and_then(|text| text.parse().ok()),
            command: field("command").unwrap_or_default().to_owned(),
            since: field("since").and_then(|text| text.parse().ok()),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(pid), Some(since)) = (self.pid, self.since) else {
            return f.write_str("a process that has not given its name");
        };
        let command = &self.command;
        write!(f, "process {pid}, `{command}`, since {}", utc(since))
    }
}

/// `2026-11-30 05:43:00 UTC`; civil date from a day number as in H. Hinnant,
/// "chrono-compatible low-level date algorithms".
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months are counted from March, so that the leap day is the last of the year.
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// The heavy-job lock, held until dropped or until the process ends.
#[derive(Debug)]
pub struct Lock {
    /// `None` where the guard above holds the lock for us.
    file: Option<File>,
}

impl Lock {
    /// Takes the lock at once. `command` names this job to others.
    ///
    /// # Errors
    /// [`Error::Busy`] naming the holder, or [`Error::Lock`] and
    /// [`Error::RuntimeDir`] if the lock file cannot be used.
    pub fn acquire(command: &str) -> Result<Self, Error> {
        let path = runtime_dir()?.join(FILE_NAME);
        match Self::acquire_at(&path, command) {
            Err(Error::Busy { holder, .. }) if is_our_guard(&holder) => Ok(Self { file: None }),
            other => other,
        }
    }

    /// Waits for the lock; `None` if `stop` was requested meanwhile. `on_wait` is
    /// told the holder, and again whenever another one comes first.
    ///
    /// # Errors
    /// As [`Lock::acquire`], [`Error::Busy`] aside.
    pub fn wait(
        command: &str,
        stop: &Stop,
        mut on_wait: impl FnMut(&Holder),
    ) -> Result<Option<Self>, Error> {
        let mut told: Option<Holder> = None;
        while stop.requested().is_none() {
            match Self::acquire(command) {
                Err(Error::Busy { holder, .. }) => {
                    if told.as_ref() != Some(&holder) {
                        on_wait(&holder);
                        told = Some(holder);
                    }
                }
                other => return other.map(Some),
            }
            thread::sleep(POLL);
        }
        Ok(None)
    }

    fn acquire_at(path: &Path, command: &str) -> Result<Self, Error> {
        let lock_error = |source| Error::Lock {
            path: path.to_path_buf(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(lock_error)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Error::Busy {
                    holder: read_holder(&file),
                    path: path.to_path_buf(),
                });
            }
            Err(e) => return Err(lock_error(e.into())),
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).ok();
        let holder = Holder {
            pid: Some(std::process::id()),
            command: command.to_owned(),
            since: since.map(|since| since.as_secs()),
        };
        file.set_len(0)
            .and_then(|()| file.write_all(holder.record().as_bytes()))
            .map_err(lock_error)?;
        Ok(Self { file: Some(file) })
    }

    /// The process that commands below this one should take for the holder: the
    /// value of [`HOLDER_VARIABLE`].
    pub fn holder_for_children(&self) -> String {
        match &self.file {
            Some(_) => std::process::id().to_string(),
            None => std::env::var(HOLDER_VARIABLE).unwrap_or_default(),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // Only so that nobody reads a name that no longer holds.
            let _ = file.set_len(0);
        }
    }
}

fn is_our_guard(holder: &Holder) -> bool {
    let guard = std::env::var(HOLDER_VARIABLE).ok();
    guard.and_then(|pid| pid.parse().ok()) == holder.pid && holder.pid.is_some()
}

/// The record in the file. Whoever has just taken the lock may not have written it
/// yet, so an empty one is read again for a moment.
fn read_holder(file: &File) -> Holder {
    for _ in 0..20 {
        let mut record = vec![0; LONGEST_RECORD];
        let read = file.read_at(&mut record, 0).unwrap_or(0);
        let holder = Holder::parse(&String::from_utf8_lossy(&record[..read]));
        if holder.pid.is_some() {
            return holder;
        }
        thread::sleep(Duration::from_millis(5));
    }
    Holder::default()
}

/// A folder that is ours alone and gone after a restart where the system has one:
/// `$XDG_RUNTIME_DIR`, else `/run/user/<uid>` (a job started by cron has no such
/// variable but must meet the same lock), else a folder of ours in the temporary
/// folder.
fn runtime_dir() -> Result<PathBuf, Error> {
    if let Some(dir) = std::env::var_os(RUNTIME_DIR_VARIABLE).filter(|dir| !dir.is_empty()) {
        return private_dir(PathBuf::from(dir));
    }
    let uid = geteuid().as_raw();
    let session = std::env::var_os("XDG_RUNTIME_DIR")
        .filter(|dir| !dir.is_empty())
        .map_or_else(|| format!("/run/user/{uid}").into(), PathBuf::from);
    if owned_dir(&session) {
        return private_dir(session.join("anemone"));
    }
    private_dir(std::env::temp_dir().join(format!("anemone-{uid}")))
}

/// Not through a symbolic link: in a shared temporary folder it may be a trap.
fn owned_dir(dir: &Path) -> bool {
    fs::symlink_metadata(dir).is_ok_and(|meta| meta.is_dir() && meta.uid() == geteuid().as_raw())
}

fn private_dir(dir: PathBuf) -> Result<PathBuf, Error> {
    match DirBuilder::new().mode(0o700).create(&dir) {
        Ok(()) => Ok(dir),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            if owned_dir(&dir) {
                Ok(dir)
            } else {
                Err(Error::RuntimeDir { path: dir })
            }
        }
        Err(source) => Err(Error::Lock { path: dir, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_excludes_names_its_holder_and_can_be_taken_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let first = Lock::acquire_at(&path, "quantize\nQwen3").unwrap();
        let busy = Lock::acquire_at(&path, "other").unwrap_err();
        let Error::Busy { holder, .. } = &busy else {
            panic!("{busy}");
        };
        assert_eq!(holder.pid, Some(std::process::id()));
        assert_eq!(holder.command, "quantize Qwen3");
        let message = busy.to_string();
        assert!(message.contains("`quantize Qwen3`, since 20"), "{message}");
        drop(first);
        Lock::acquire_at(&path, "other").unwrap();
    }

    #[test]
    fn the_time_of_day_is_the_calendars() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (951_868_799, "2000-02-29 23:59:59 UTC"),
            (1_767_225_600, "2026-01-01 00:00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn a_folder_of_someone_else_or_a_link_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(matches!(private_dir(link), Err(Error::RuntimeDir { .. })));
        let made = private_dir(dir.path().join("own")).unwrap();
        assert_eq!(fs::metadata(&made).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_record_of_garbage_is_a_holder_without_a_name() {
        let holder = Holder::parse("pid x\n\u{0}\u{1}");
        assert_eq!(holder.to_string(), "a process that has not given its name");
    }
}
