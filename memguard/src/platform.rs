//! The few figures that every system gives in its own way.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::{
    Members, Memory, Reread, command_of, ignored_signals, is_alive, pids, resource_limits,
    started_by, thread_cpu,
};

#[cfg(not(target_os = "linux"))]
mod other;
#[cfg(not(target_os = "linux"))]
pub(crate) use other::{
    Members, Memory, command_of, ignored_signals, is_alive, pids, resource_limits, started_by,
    thread_cpu,
};

/// The machine's memory at one moment, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    pub(crate) total: u64,
    pub(crate) available: u64,
    pub(crate) swap_total: u64,
    pub(crate) swap_used: u64,
    /// Index of the cgroup that sets `available`, if one does.
    #[cfg(target_os = "linux")]
    pub(crate) cgroup: Option<usize>,
}
