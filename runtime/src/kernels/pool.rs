//! Worker threads for the kernels.
//!
//! A call is a fixed number of tasks, decided by the shape of the problem and
//! never by the number of threads; every task writes its own part of the
//! output. Threads claim tasks from a counter, so which thread runs a task
//! changes from call to call and the result does not.
//!
//! The calling thread works too, and it never waits for a worker that has not
//! started: once the counter runs out it closes the job, and a worker waking
//! late finds nothing to do. On a machine whose cores are taken by others a
//! call therefore costs at most what one thread needs.
//!
//! A token of a small model is a thousand steps of some ten microseconds, and to be
//! woken from a condition variable takes longer than that. So whoever waits, a worker
//! for the next job or the caller for the last task, looks for a while before it
//! sleeps: first without pause, then giving the core to whoever else wants it
//! between looks.

#![expect(unsafe_code, reason = "lends a borrowed closure to the workers")]

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often one looks without pause. A `pause` takes 40 to 140 cycles, so this is
/// between 2 and 10 microseconds.
const LOOKS: u32 = 128;

/// For how long one looks after that before one sleeps.
const PATIENCE: Duration = Duration::from_micros(200);

/// Looks whether `done` for a while; whether it was.
fn look(done: impl Fn() -> bool) -> bool {
    for _ in 0..LOOKS {
        if done() {
            return true;
        }
        std::hint::spin_loop();
    }
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if done() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

type Task = dyn Fn(usize) + Sync;

/// A job lent to the workers. The pointer is valid from the moment the job is
/// published until [`Pool::run`] has seen it closed and idle.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task,
    tasks: usize,
}

// SAFETY: the closure behind `task` is `Sync`, so calling it from several
// threads is fine, and `Pool::run` keeps it alive while any worker may call it.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Workers that wait for `start`.
    asleep: usize,
    panic: Option<Box<dyn Any + Send>>,
    shutdown: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    start: Condvar,
    idle: Condvar,
    /// Counts published jobs, for workers that look before they sleep.
    epoch: AtomicU64,
    /// Workers between taking the job and having finished with it; changes under the
    /// lock only.
    active: AtomicUsize,
    /// The next unclaimed task of the current job.
    next: AtomicUsize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(&self, tasks: usize) -> Option<usize> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < tasks).then_some(task)
    }

    fn work(&self) {
        INSIDE.set(true);
        let mut seen = 0;
        loop {
            look(|| self.epoch.load(Ordering::Acquire) != seen);
            let mut state = self.lock();
            while self.epoch.load(Ordering::Acquire) == seen {
                state.asleep += 1;
                state = self
                    .start
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                state.asleep -= 1;
            }
            if state.shutdown {
                return;
            }
            seen = self.epoch.load(Ordering::Acquire);
            // None if the others have done it already.
            let Some(job) = state.job else {
                continue;
            };
            self.active.fetch_add(1, Ordering::Relaxed);
            drop(state);

            let outcome = catch_unwind(AssertUnwindSafe(|| {
                while let Some(task) = self.claim(job.tasks) {
                    // SAFETY: `active` was raised under the lock while the job
                    // was published, and `Pool::run` does not return, nor does
                    // the closure end, before `active` is back to zero.
                    unsafe { (*job.task)(task) };
                }
            }));

            let mut state = self.lock();
            if let Err(panic) = outcome {
                state.panic.get_or_insert(panic);
            }
            // What the tasks wrote is there for whoever sees the count.
            if self.active.fetch_sub(1, Ordering::Release) == 1 {
                self.idle.notify_one();
            }
        }
    }
}

thread_local! {
    /// Set on a thread that is running a task: a nested call runs in place.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A fixed set of worker threads.
///
/// One call at a time uses the workers; calls from several threads take turns,
/// and a call from inside a task runs on the thread that made it.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    turn: Mutex<()>,
}

impl Pool {
    /// Starts a pool in which `threads` threads work on a call: the caller and
    /// `threads - 1` workers. Zero means one per available core.
    ///
    /// # Panics
    ///
    /// When the system refuses to start a thread.
    pub fn new(threads: usize) -> Self {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let shared = Arc::new(Shared::default());
        let workers = (1..threads)
            .map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("kernel-{i}"))
                    .spawn(move || shared.work())
                    .expect("the system starts a worker thread")
            })
            .collect();
        Self {
            shared,
            workers,
            turn: Mutex::new(()),
        }
    }

    /// The number of threads that work on a call.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)` to `task(tasks - 1)`, each once, in any order and on any
    /// thread of the pool, and returns when all have ended.
    ///
    /// # Panics
    ///
    /// With the payload of a task that panicked, after all tasks have ended.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() || INSIDE.get() {
            (0..tasks).for_each(task);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let task: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: only the lifetime changes. The pointer is used by workers
        // counted in `active`, and by nobody once `job` is `None` and `active`
        // is zero, which is waited for below before this frame can end; the
        // caller's own share runs under `catch_unwind`.
        let lent: &'static Task =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync + '_), &'static Task>(task) };

        let mut state = self.shared.lock();
        self.shared.next.store(0, Ordering::Relaxed);
        state.job = Some(Job { task: lent, tasks });
        self.shared.epoch.fetch_add(1, Ordering::Release);
        let asleep = state.asleep > 0;
        drop(state);
        if asleep {
            self.shared.start.notify_all();
        }

        INSIDE.set(true);
        let own = catch_unwind(AssertUnwindSafe(|| {
            while let Some(i) = self.shared.claim(tasks) {
                task(i);
            }
        }));
        INSIDE.set(false);

        let mut state = self.shared.lock();
        state.job = None;
        drop(state);
        // Nobody takes the job any more, so the count only falls.
        let active = || self.shared.active.load(Ordering::Acquire);
        look(|| active() == 0);
        let mut state = self.shared.lock();
        while active() > 0 {
            state = self
                .shared
                .idle
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let theirs = state.panic.take();
        drop(state);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Cuts `out` into chunks of `size` elements (the last may be shorter) and
    /// runs `task(i, chunk)` for each, as [`Self::run`] does.
    ///
    /// # Panics
    ///
    /// When `size` is zero, and as [`Self::run`].
    pub fn run_chunks<T: Copy + Send>(
        &self,
        out: &mut [T],
        size: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let len = out.len();
        let shards = Shards::new(out);
        self.run(len.div_ceil(size), |i| {
            let from = i * size;
            // SAFETY: chunks do not overlap, and each task takes its own.
            task(i, unsafe { shards.slice(from, size.min(len - from)) });
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.shutdown = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        drop(state);
        self.shared.start.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a task, so joining succeeds.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}

/// A pointer to an output of which every task writes its own elements.
#[derive(Clone, Copy)]
pub(crate) struct Shards<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: a `Shards` only hands out elements through `slice`, whose callers
// promise that no two tasks touch the same one.
unsafe impl<T: Send> Send for Shards<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shards<T> {}

impl<T: Copy> Shards<T> {
    pub(crate) fn new(out: &mut [T]) -> Self {
        Self {
            start: out.as_mut_ptr(),
            len: out.len(),
        }
    }

    /// The `len` elements from `at`.
    ///
    /// # Safety
    ///
    /// The slice that `new` was given must still be borrowed, and no other
    /// task may touch these elements while the result is in use.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the caller's promise")]
    pub(crate) unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at <= self.len && len <= self.len - at, "part of the output");
        // SAFETY: in bounds by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_at_any_thread_count() {
        for threads in 1..=4 {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn chunks_cover_the_output_once() {
        let pool = Pool::new(3);
        for (len, size) in [(0, 4), (1, 4), (4, 4), (103, 10)] {
            let mut out = vec![0_usize; len];
            pool.run_chunks(&mut out, size, |i, chunk| {
                for (j, v) in chunk.iter_mut().enumerate() {
                    *v += i * size + j + 1;
                }
            });
            assert!(out.iter().enumerate().all(|(i, v)| *v == i + 1));
        }
    }

    #[test]
    fn calls_from_several_threads_and_from_inside_a_task_complete() {
        let pool = Pool::new(3);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(5, |_| {
                            pool.run(3, |_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 5 * 3);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_stays_usable() {
        let pool = Pool::new(2);
        for bad in [0, 63] {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(64, |i| assert!(i != bad, "task {i}"));
            }));
            assert!(outcome.is_err());
        }
        let ran = AtomicUsize::new(0);
        pool.run(8, |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.load(Ordering::Relaxed), 8);
    }
}
