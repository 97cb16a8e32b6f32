//! Keeps a long job from taking the machine down with it.
//!
//! - [`Budget`]: how much memory this process may still use, with cgroup and
//!   resource limits counted in; [`require_memory`] and [`require_disk`] refuse
//!   a job before it starts.
//! - [`Watch`] and [`Guard`]: sample the anonymous memory of a process group,
//!   the memory the machine still has, and the growth of swap. The soft lines
//!   ask the job to stop, the hard lines end the process group.
//! - [`Stop`]: the token a job polls between two steps; set by the guard, by
//!   SIGINT and by SIGTERM.
//! - [`Lock`]: one heavy job at a time for each user.
//!
//! # What counts as memory
//!
//! Anonymous memory, not resident memory: pages of a mapped checkpoint are
//! resident too, but the kernel drops them for free. "Available" is the kernel's
//! own estimate (`MemAvailable`), or what the tightest cgroup above us leaves.
//!
//! # Nothing outside the group
//!
//! The guard signals one process group and nothing else. A process that moved
//! to another group is named in the report and left alone.
//!
//! ```no_run
//! use anemone_memguard::{Guard, Limits, Lock, Stop, require_memory};
//!
//! # fn main() -> Result<(), anemone_memguard::Error> {
//! let stop = Stop::on_signals()?;
//! let _lock = Lock::acquire("quantize Qwen3-0.6B")?;
//! require_memory(3 << 30)?;
//! let _guard = Guard::start(&Limits::default(), &stop, |event| eprintln!("{event}"))?;
//! for matrix in 0..196 {
//!     if let Some(reason) = stop.requested() {
//!         eprintln!("{reason}: {matrix} of 196 done, the same command goes on");
//!         std::process::exit(reason.exit_code().into());
//!     }
//!     // quantize one matrix and write it to its final name
//! }
//! # Ok(())
//! # }
//! ```

mod amount;
mod budget;
#[cfg(target_os = "linux")]
mod cgroup;
mod error;
mod group;
mod guard;
mod limit_args;
mod lock;
mod platform;
mod stop;
mod watch;

pub use amount::{Amount, ParseAmountError, human_bytes};
pub use budget::{Bound, Budget, require_disk, require_memory};
pub use error::Error;
pub use group::{GUARDS_VARIABLE, Group, Process};
pub use guard::{Event, Guard};
pub use limit_args::LimitArgs;
pub use lock::{HOLDER_VARIABLE, Holder, Lock, RUNTIME_DIR_VARIABLE};
pub use stop::{Reason, Stop, heeded_signals};
pub use watch::{Breach, Limits, Measure, Statistics, Verdict, Watch};
