//! Apple's Core AI runtime as the judge of programs.
//!
//! The `coreai-core` wheel runs `.aimodel` assets on the CPU of Linux and Mac. It
//! is driven by a Python script in its own process, since its loader ends the
//! process on a bad file. The environment is made on first use under the target
//! directory; `ANEMONE_ORACLE_PYTHON` names another interpreter that has the wheel.

mod environment;
mod fill;
mod tensor;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

pub use self::tensor::Tensor;

/// What went wrong, as text: the only reader is whoever runs the tests.
pub type Result<T> = std::result::Result<T, String>;

/// One call of a function.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Function name.
    pub function: String,
    /// Inputs by name.
    pub inputs: Vec<(String, Tensor)>,
    /// States to set before the call. Others keep what earlier calls left in
    /// them, or start as zeros.
    pub states: Vec<(String, Tensor)>,
    /// Inputs that are outputs of earlier calls: name, call, output. They are
    /// passed on as they are, whatever their layout, and not returned.
    pub carried: Vec<(String, usize, String)>,
}

impl Call {
    /// A call without inputs yet.
    pub fn new(function: &str) -> Self {
        Self {
            function: function.to_owned(),
            ..Self::default()
        }
    }

    /// Adds an input.
    #[must_use]
    pub fn input(mut self, name: &str, value: Tensor) -> Self {
        self.inputs.push((name.to_owned(), value));
        self
    }

    /// Sets a state before the call.
    #[must_use]
    pub fn state(mut self, name: &str, value: Tensor) -> Self {
        self.states.push((name.to_owned(), value));
        self
    }

    /// Feeds an input with an output of an earlier call.
    #[must_use]
    pub fn carry(mut self, name: &str, call: usize, output: &str) -> Self {
        self.carried
            .push((name.to_owned(), call, output.to_owned()));
        self
    }
}

/// What a call gave.
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    /// Outputs, in the order of their names.
    pub outputs: Vec<(String, Tensor)>,
    /// States of the function after the call, in the order of their names.
    pub states: Vec<(String, Tensor)>,
}

impl Outputs {
    /// An output by name.
    ///
    /// # Panics
    /// If there is none.
    pub fn get(&self, name: &str) -> &Tensor {
        find(&self.outputs, name)
    }

    /// A state by name.
    ///
    /// # Panics
    /// If there is none.
    pub fn state(&self, name: &str) -> &Tensor {
        find(&self.states, name)
    }
}

fn find<'a>(values: &'a [(String, Tensor)], name: &str) -> &'a Tensor {
    let found = values.iter().find(|v| v.0 == name);
    &found
        .unwrap_or_else(|| panic!("no `{name}` among the results"))
        .1
}

/// A verified program and what its calls gave.
#[derive(Clone, Debug)]
pub struct Report {
    /// Public functions.
    pub functions: Vec<String>,
    /// The OS release the feature version maps to, as "27.0".
    pub compatibility: Option<String>,
    /// One entry per call.
    pub calls: Vec<Outputs>,
}

/// Loads and verifies an asset and makes the calls in order.
///
/// # Errors
/// If the environment cannot be made, or what Apple's loader or runtime said.
pub fn run(asset: &Path, calls: &[Call]) -> Result<Vec<Outputs>> {
    Ok(report(asset, calls)?.calls)
}

/// [`run`], with what the loader says about the program.
///
/// # Errors
/// Those of [`run`].
pub fn report(asset: &Path, calls: &[Call]) -> Result<Report> {
    let python = environment::python()?;
    let scratch = tempfile::tempdir().map_err(|e| format!("no scratch folder: {e}"))?;
    let request = scratch.path().join("request");
    let response = scratch.path().join("response");
    let filling = scratch.path().join("fill.aimodel");
    let fillers = fill::write(asset, &filling)?;
    let (calls, tensors) = encode_calls(calls);
    let constrained = !fillers.is_empty();
    let job = json!({ "calls": calls, "filling": filling, "fillers": fillers });
    tensor::write_file(&request, &job, &tensors)?;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/oracle/run_program.py");
    let mut command = Command::new(&python);
    command.arg(script).args([asset, &request, &response]);
    if constrained {
        // When the wheel (1.0.0b3, Linux) copies a state with eight channels interleaved,
        // the last seven elements keep what the memory held: channels of the last slot
        // of the last layer. Masked slots may hold anything but NaN, so glibc is told to
        // hand out zeros (the complement of this byte).
        command.env("MALLOC_PERTURB_", "255");
    }
    let output = command
        .output()
        .map_err(|e| format!("cannot start `{}`: {e}", python.display()))?;
    // The wheel sometimes aborts while it shuts down, after the response is there.
    if !response.exists() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = said
            .lines()
            .filter(|l| !l.trim().is_empty() && !l.contains("ODIE ["))
            .collect();
        let tail = said[said.len().saturating_sub(12)..].join("\n");
        return Err(format!(
            "Core AI refused `{}` ({}):\n{tail}",
            asset.display(),
            output.status
        ));
    }
    let (job, tensors) = tensor::read_file(&response)?;
    decode_report(&job, &tensors).ok_or_else(|| "the response is malformed".to_owned())
}

fn encode_calls(calls: &[Call]) -> (Value, Vec<(String, &Tensor)>) {
    let mut tensors = vec![];
    let mut job = vec![];
    for (i, call) in calls.iter().enumerate() {
        let keys = |kind: &str, values: &[(String, Tensor)]| -> Value {
            let keys = values.iter().map(|(name, _)| {
                let key = format!("{i}/{kind}/{name}");
                (name.clone(), Value::String(key))
            });
            Value::Object(keys.collect())
        };
        let (inputs, states) = (keys("inputs", &call.inputs), keys("states", &call.states));
        for (kind, values) in [("inputs", &call.inputs), ("states", &call.states)] {
            for (name, value) in values {
                tensors.push((format!("{i}/{kind}/{name}"), value));
            }
        }
        let carried: serde_json::Map<String, Value> = call
            .carried
            .iter()
            .map(|(name, call, output)| (name.clone(), json!([call, output])))
            .collect();
        job.push(json!({
            "function": call.function, "inputs": inputs, "states": states, "carried": carried,
        }));
    }
    (Value::Array(job), tensors)
}

fn decode_report(job: &Value, tensors: &BTreeMap<String, Tensor>) -> Option<Report> {
    let named = |list: &Value| -> Option<Vec<(String, Tensor)>> {
        let pairs = list.as_array()?.iter().map(|pair| {
            let key = pair.get(1)?.as_str()?;
            Some((pair.get(0)?.as_str()?.to_owned(), tensors.get(key)?.clone()))
        });
        pairs.collect()
    };
    let calls = job.get("calls")?.as_array()?.iter().map(|call| {
        Some(Outputs {
            outputs: named(call.get("outputs")?)?,
            states: named(call.get("states")?)?,
        })
    });
    let functions = job.get("functions")?.as_array()?.iter();
    Some(Report {
        functions: functions
            .map(|f| Some(f.as_str()?.to_owned()))
            .collect::<Option<_>>()?,
        compatibility: job.get("compatibility")?.as_str().map(str::to_owned),
        calls: calls.collect::<Option<_>>()?,
    })
}
