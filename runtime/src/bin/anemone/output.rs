//! Standard output, and the flag that Ctrl-C raises.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anemone_schemas::exit::Exit;
use serde::Serialize;

use crate::failure::End;

/// Writes text at once: a token that is known is a token that is seen.
pub(crate) fn print(text: &str) -> Result<(), End> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes a value as one JSON document.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), End> {
    let text = serde_json::to_string_pretty(value).map_err(|e| End::unexpected(&e))?;
    print(&text)?;
    print("\n")
}

/// Writes a line for the person at the terminal.
#[allow(
    clippy::print_stderr,
    reason = "what is not data goes to standard error"
)]
pub(crate) fn note(line: &str) {
    eprintln!("{line}");
}

/// Prints a warning, if there is one.
pub(crate) fn warn(warning: Option<&str>) {
    if let Some(warning) = warning {
        note(&format!("warning: {warning}"));
    }
}

/// Raised by the first Ctrl-C; the second ends the process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    pub(crate) fn install() -> Result<Self, End> {
        let flag = Self::default();
        let signal = signal_hook::consts::SIGINT;
        // Order matters: a second signal finds the flag raised.
        let code = i32::from(Exit::Interrupted as u8);
        signal_hook::flag::register_conditional_shutdown(signal, code, Arc::clone(&flag.0))?;
        signal_hook::flag::register(signal, Arc::clone(&flag.0))?;
        Ok(flag)
    }

    pub(crate) fn raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn lower(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
