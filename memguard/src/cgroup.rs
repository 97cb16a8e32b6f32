//! The memory limits of the cgroups above this process, version 1 and 2.
//!
//! `/proc/self/cgroup` gives our path inside the hierarchy and
//! `/proc/self/mountinfo` where that hierarchy is mounted, which in a container
//! is often only a part of it. Every level up to the mount point can carry a limit
//! and the tightest one binds.
//!
//! What a level can still give is `limit - (usage - file)`, where `file` is the
//! page cache charged to it: as with `MemAvailable`, clean pages of a mapped
//! checkpoint are not memory in use. Sources: the kernel's
//! `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::platform::Reread;

/// The file names of one version.
struct Names {
    limits: &'static [&'static str],
    usage: &'static str,
    file: [&'static str; 2],
}

/// `memory.high` does not kill, but a job above it is throttled to a standstill.
const V2: Names = Names {
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    file: ["active_file", "inactive_file"],
};
const V1: Names = Names {
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    file: ["total_active_file", "total_inactive_file"],
};

/// One level of the hierarchy.
#[derive(Debug)]
pub(crate) struct Cgroup {
    dir: PathBuf,
    limits: Vec<Reread>,
    usage: Reread,
    stat: Reread,
    file: [&'static str; 2],
}

impl Cgroup {
    fn open(dir: &Path, names: &Names) -> Result<Option<Self>, Error> {
        // The root of version 2 has no limit, nor has a level without the controller.
        if !dir.join(names.limits[0]).exists() || !dir.join(names.usage).exists() {
            return Ok(None);
        }
        let limits = names
            .limits
            .iter()
            .map(|name| dir.join(name))
            .filter(|path| path.exists())
            .map(|path| Reread::open(&path))
            .collect::<Result<_, _>>()?;
        Ok(Some(Self {
            dir: dir.to_path_buf(),
            limits,
            usage: Reread::open(&dir.join(names.usage))?,
            stat: Reread::open(&dir.join("memory.stat"))?,
            file: names.file,
        }))
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The limit and what is left of it, `None` without a limit. `machine` is what
    /// the machine has left: `memory.stat` is costly, so it is not read when the
    /// cgroup cannot be what binds.
    pub(crate) fn room(&mut self, machine: u64) -> Result<Option<(u64, u64)>, Error> {
        let mut limit = u64::MAX;
        for file in &mut self.limits {
            // "max" stands for no limit.
            limit = limit.min(file.text()?.trim().parse().unwrap_or(u64::MAX));
        }
        // Version 1 writes "no limit" as the largest page-aligned i64.
        if limit >= i64::MAX as u64 - 0xffff {
            return Ok(None);
        }
        let usage: u64 = self
            .usage
            .text()?
            .trim()
            .parse()
            .map_err(|_| Error::Field {
                path: self.usage.path().to_path_buf(),
                field: "number of bytes",
            })?;
        let unused = limit.saturating_sub(usage);
        if unused >= machine {
            return Ok(Some((limit, unused)));
        }
        let stat = self.stat.text()?;
        let cache: u64 = stat
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(name, _)| self.file.contains(name))
            .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
            .sum();
        let used = usage.saturating_sub(cache);
        Ok(Some((limit, limit.saturating_sub(used))))
    }
}

/// All cgroups with a memory controller from our own up. `root` is `/`, or a folder
/// with a copy of the files in a test.
pub(crate) fn above(root: &Path) -> Result<Vec<Cgroup>, Error> {
    let read =
        |path: PathBuf| fs::read_to_string(&path).map_err(|source| Error::Read { path, source });
    // A kernel without cgroups has no such file.
    let memberships = root.join("proc/self/cgroup");
    if !memberships.exists() {
        return Ok(Vec::new());
    }
    let memberships = read(memberships)?;
    let mounts = read(root.join("proc/self/mountinfo"))?;
    let Some((names, path)) = own_path(&memberships) else {
        return Ok(Vec::new());
    };
    let Some((mounted, mount_point)) = mount_of(&mounts, path, names.limits[0] == V1.limits[0])
    else {
        return Ok(Vec::new());
    };
    let top = root.join(mount_point.trim_start_matches('/'));
    let below = path.strip_prefix(mounted).unwrap_or("");
    // Outside of a cgroup namespace the path climbs (`/../other`): only the mount
    // point is ours to see.
    let below = if below.split('/').any(|part| part == "..") {
        ""
    } else {
        below.trim_matches('/')
    };
    let own = top.join(below);
    let mut levels = Vec::new();
    for dir in own.ancestors() {
        levels.extend(Cgroup::open(dir, names)?);
        if dir == top {
            break;
        }
    }
    Ok(levels)
}

/// The line of the memory controller: version 1 if it is bound there.
fn own_path(memberships: &str) -> Option<(&'static Names, &str)> {
    let mut unified = None;
    for line in memberships.lines() {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        if controllers.split(',').any(|name| name == "memory") {
            return Some((&V1, path));
        }
        if controllers.is_empty() {
            unified = Some((&V2, path));
        }
    }
    unified
}

/// Root inside the hierarchy and mount point of the mount that shows `path`.
/// Fields of a line: `proc_pid_mountinfo(5)`.
fn mount_of<'a>(mounts: &'a str, path: &str, v1: bool) -> Option<(&'a str, &'a str)> {
    let candidates = mounts.lines().filter_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut system = system.split(' ');
        let kind = system.next()?;
        let options = system.nth(1).unwrap_or("");
        let ours = if v1 {
            kind == "cgroup" && options.split(',').any(|option| option == "memory")
        } else {
            kind == "cgroup2"
        };
        ours.then_some((root.trim_end_matches('/'), point))
    });
    // A mount whose root is above our path, else whichever there is.
    let all: Vec<_> = candidates.collect();
    all.iter()
        .find(|(root, _)| {
            path.strip_prefix(root)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
        .or(all.first())
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root folder with the given files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn rooms(root: &Path, machine: u64) -> Vec<Option<(u64, u64)>> {
        above(root)
            .unwrap()
            .iter_mut()
            .map(|level| level.room(machine).unwrap())
            .collect()
    }

    const V2_MOUNT: &str =
        "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn every_level_of_version_2_counts_and_page_cache_is_free() {
        let root = system(&[
            ("proc/self/cgroup", "0::/user.slice/job.scope\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "8000\n"),
            ("sys/fs/cgroup/user.slice/memory.high", "max\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "7000\n"),
            (
                "sys/fs/cgroup/user.slice/memory.stat",
                "anon 900\nfile 6100\ninactive_file 5000\nactive_file 1000\nshmem 100\n",
            ),
            ("sys/fs/cgroup/user.slice/job.scope/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/job.scope/memory.high", "4000\n"),
            (
                "sys/fs/cgroup/user.slice/job.scope/memory.current",
                "1000\n",
            ),
            (
                "sys/fs/cgroup/user.slice/job.scope/memory.stat",
                "inactive_file 0\n",
            ),
        ]);
        assert_eq!(
            rooms(root.path(), 1 << 30),
            [Some((4000, 3000)), Some((8000, 7000))]
        );
    }

    #[test]
    fn a_container_of_version_1_sees_its_own_limit_at_the_mount_point() {
        let root = system(&[
            ("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "4000\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "active_file 1\ntotal_active_file 500\ntotal_inactive_file 1500\n",
            ),
        ]);
        assert_eq!(rooms(root.path(), 1 << 30), [Some((5000, 3000))]);
    }

    #[test]
    fn no_limit_is_no_limit() {
        let root = system(&[
            ("proc/self/cgroup", "4:cpu,memory:/a\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /cg rw - cgroup cgroup rw,cpu,memory\n",
            ),
            ("cg/a/memory.limit_in_bytes", "9223372036854771712\n"),
            ("cg/a/memory.usage_in_bytes", "4000\n"),
            ("cg/a/memory.stat", ""),
        ]);
        assert_eq!(rooms(root.path(), 1 << 30), [None]);
        assert!(above(system(&[]).path()).unwrap().is_empty());
    }

    #[test]
    fn a_path_outside_of_the_namespace_falls_back_to_the_mount_point() {
        let root = system(&[
            ("proc/self/cgroup", "0::/../other\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/memory.max", "600\n"),
            ("sys/fs/cgroup/memory.current", "100\n"),
            ("sys/fs/cgroup/memory.stat", "anon 100\n"),
        ]);
        assert_eq!(rooms(root.path(), 1 << 30), [Some((600, 500))]);
    }
}
