//! The Python environment with Apple's wheel.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::Result;

const OVERRIDE: &str = "ANEMONE_ORACLE_PYTHON";
/// The wheel exists for this Python only.
const INTERPRETER: &str = "python3.11";
const PACKAGES: [&str; 2] = ["coreai-core==1.0.0b3", "numpy==2.4.6"];

/// The interpreter to use, made ready if need be.
pub(super) fn python() -> Result<PathBuf> {
    static READY: OnceLock<Result<PathBuf>> = OnceLock::new();
    READY
        .get_or_init(|| match env::var_os(OVERRIDE) {
            Some(python) => Ok(python.into()),
            None => install(),
        })
        .clone()
}

/// Makes the environment once for all test processes: the first one holds a file
/// lock while it installs, and a stamp says that it got to the end.
fn install() -> Result<PathBuf> {
    let target = target_dir()?;
    let venv = target.join("oracle-venv");
    let python = venv.join("bin").join("python");
    let stamp = venv.join("anemone-packages");
    let wanted = PACKAGES.join("\n");
    let lock_path = target.join("oracle-venv.lock");
    let lock = File::create(&lock_path)
        .and_then(|f| f.lock().map(|()| f))
        .map_err(|e| format!("cannot lock `{}`: {e}", lock_path.display()))?;
    if fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        return Ok(python);
    }
    let _ = fs::remove_dir_all(&venv);
    let venv_arg = venv.display().to_string();
    step(Path::new(INTERPRETER), &["-m", "venv", &venv_arg])?;
    let mut pip = vec!["-m", "pip", "install", "--quiet"];
    pip.extend(PACKAGES);
    step(&python, &pip)?;
    step(&python, &["-c", "import coreai.runtime, numpy"])?;
    fs::write(&stamp, wanted).map_err(|e| format!("cannot write `{}`: {e}", stamp.display()))?;
    drop(lock);
    Ok(python)
}

fn step(program: &Path, args: &[&str]) -> Result<()> {
    let command = format!("{} {}", program.display(), args.join(" "));
    let hint = format!(
        "these tests need Apple's runtime: install {INTERPRETER} and allow access to PyPI, \
         or set {OVERRIDE} to a Python that has {}",
        PACKAGES.join(" and ")
    );
    let output = Command::new(program)
        .args(args)
        .output()
        .map_err(|e| format!("cannot run `{command}`: {e}; {hint}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`{command}` failed: {}; {hint}", said.trim()))
}

/// The directory cargo builds into: a test runs from `<target>/<profile>/deps`.
fn target_dir() -> Result<PathBuf> {
    let exe = env::current_exe().map_err(|e| format!("no path of the test: {e}"))?;
    let target = exe.ancestors().nth(3);
    target
        .map(Path::to_path_buf)
        .ok_or_else(|| format!("`{}` is not in a target directory", exe.display()))
}
