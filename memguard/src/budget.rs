//! How much memory and disk a job may still take, and refusing it early.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::platform::Memory;

/// What limits a [`Budget`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// The memory of the machine.
    Machine,
    /// The limit of a cgroup; its folder.
    Cgroup(PathBuf),
    /// A resource limit (`ulimit`) of this process; its name.
    ResourceLimit(&'static str),
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("memory of this machine"),
            Self::Cgroup(dir) => write!(f, "limit of the cgroup `{}`", dir.display()),
            Self::ResourceLimit(name) => write!(f, "resource limit `{name}`"),
        }
    }
}

/// The memory this process may use, all in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Budget {
    /// All it could ever get.
    pub total: u64,
    /// What it could get now without anyone being swapped out.
    pub available: u64,
    /// What sets `available`.
    pub bound: Bound,
    /// Size of swap.
    pub swap_total: u64,
    /// Swap in use by anyone.
    pub swap_used: u64,
}

impl Budget {
    /// Reads the figures of this moment: the machine's, then every cgroup above
    /// this process, then its resource limits; the tightest wins.
    ///
    /// # Errors
    /// [`Error::Read`] or [`Error::Field`] if the kernel's figures are missing.
    pub fn now() -> Result<Self, Error> {
        let mut memory = Memory::open()?;
        let reading = memory.read()?;
        let mut budget = Self {
            total: reading.total,
            available: reading.available,
            bound: memory.bound(&reading),
            swap_total: reading.swap_total,
            swap_used: reading.swap_used,
        };
        for (name, limit, used) in crate::platform::resource_limits()? {
            budget.total = budget.total.min(limit);
            let left = limit.saturating_sub(used);
            if left < budget.available {
                budget.available = left;
                budget.bound = Bound::ResourceLimit(name);
            }
        }
        Ok(budget)
    }

    /// Checks that `bytes` more can be had.
    ///
    /// # Errors
    /// [`Error::Memory`] with the numbers.
    pub fn require(&self, bytes: u64) -> Result<(), Error> {
        if bytes <= self.available {
            return Ok(());
        }
        Err(Error::Memory {
            needed: bytes,
            available: self.available,
            total: self.total,
            bound: self.bound.clone(),
        })
    }
}

/// Checks that `bytes` more memory can be had now.
///
/// # Errors
/// [`Error::Memory`] with the numbers, or an error of [`Budget::now`].
pub fn require_memory(bytes: u64) -> Result<(), Error> {
    Budget::now()?.require(bytes)
}

/// Checks that `bytes` and 5 % spare can be written at `path`, which need not
/// exist yet.
///
/// # Errors
/// [`Error::Disk`] with the numbers, or [`Error::Read`] if the file system does
/// not answer.
pub fn require_disk(path: &Path, bytes: u64) -> Result<(), Error> {
    let read_error = |source| Error::Read {
        path: path.to_path_buf(),
        source,
    };
    let absolute = std::path::absolute(path).map_err(read_error)?;
    let existing = absolute
        .ancestors()
        .find(|ancestor| ancestor.exists())
        .unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(existing).map_err(|e| read_error(e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let with_spare = bytes.saturating_add(bytes / 20);
    if with_spare <= free {
        return Ok(());
    }
    Err(Error::Disk {
        path: path.to_path_buf(),
        needed: bytes,
        with_spare,
        free,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_of_this_machine_is_plausible() {
        let budget = Budget::now().unwrap();
        assert!(budget.available <= budget.total, "{budget:?}");
        assert!(budget.total > 64 << 20, "{budget:?}");
        assert!(budget.swap_used <= budget.swap_total, "{budget:?}");
        budget.require(budget.available).unwrap();
    }

    #[test]
    fn memory_that_is_not_there_is_refused_with_numbers() {
        let budget = Budget {
            total: 16 << 30,
            available: 3 << 30,
            bound: Bound::Cgroup("/sys/fs/cgroup/job".into()),
            swap_total: 0,
            swap_used: 0,
        };
        assert_eq!(
            budget.require(12 << 30).unwrap_err().to_string(),
            "needs 12.0 GiB of memory, but only 3.00 GiB of 16.0 GiB are available \
             (limit of the cgroup `/sys/fs/cgroup/job`)"
        );
    }

    #[test]
    fn disk_that_is_not_there_is_refused_with_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("not/yet/there");
        require_disk(&out, 1).unwrap();
        let message = require_disk(&out, 1 << 60).unwrap_err().to_string();
        assert!(message.contains("not/yet/there"), "{message}");
        assert!(message.contains("1048576 TiB and 5 % spare"), "{message}");
    }
}
