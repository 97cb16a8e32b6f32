//! Does a drafter belong to this model?
//!
//! Nothing fails if it does not: a drafter trained for another model, fed with the
//! hidden states of the wrong layers, or read one row off still gives guesses, and the
//! text stays right. Only hardly any guess is. So the model continues a fixed prompt,
//! and a drafter that is seldom right there is refused.

use std::ops::ControlFlow;

use crate::engine::{Draft, Engine, EngineError, Options, Session};

/// Something that code models and chat models alike have much to say after.
const PROMPT: &str = "import json\nimport os\nimport sys\n\n\ndef read_config(path):\n    \
                      \"\"\"Read the configuration file at `path` and return it.\"\"\"\n    \
                      with open(path) as file:\n        return json.load(file)\n\n\ndef \
                      write_config(path, config):\n";
/// Accepted tokens per cycle, the target's own not counted, that a drafter must reach.
/// The built-in model's reaches 1.3 here; with the hidden states of other layers 0.4,
/// read one row off 0.05.
const FLOOR: f64 = 0.5;
/// Tokens to generate, and again as many while the floor is not reached.
const STEP: usize = 24;
const STEPS: usize = 3;

/// Accepted tokens per cycle on a fixed prompt, the target's own not counted.
///
/// # Errors
/// [`EngineError::Mismatch`] if they are so few that the drafter is not this model's;
/// failures of the programs.
pub fn check_drafts(engine: &Engine, draft: Box<dyn Draft + Send>) -> Result<f64, EngineError> {
    let mut text = engine.tokenizer().encode(PROMPT, true)?;
    let mut session = Session::new(engine, Some(draft));
    let options = Options {
        max_tokens: STEP,
        sides: false,
        adapt: false,
        stop: false,
        ..Options::default()
    };
    let (mut accepted, mut cycles) = (0, 0);
    for _ in 0..STEPS {
        let answer = session.answer(engine, &text, &options, |_| ControlFlow::Continue(()))?;
        accepted += answer.statistics.accepted;
        cycles += answer.statistics.cycles;
        text.extend(answer.ids);
        if accepted as f64 >= FLOOR * cycles as f64 {
            return Ok(accepted as f64 / cycles.max(1) as f64);
        }
    }
    Err(EngineError::Mismatch {
        accepted: accepted as f64 / f64::from(cycles as u32),
        floor: FLOOR,
    })
}
