//! Bits of each matrix within a budget of bytes.
//!
//! A matrix that changes by E changes the model's distribution by a divergence of about
//! `½ E_t (g_tᵀ E x_t)²`, for inputs x and gradients g of the loss at the outputs. With outputs
//! taken as independent and alike that is
//!
//! ```text
//! ½ · γ · Σ e H eᵀ / tokens        γ = mean square of an output's gradient, inputs weighing alike
//! ```
//!
//! The error is that of GPTQ at each of the bits. Divergences of matrices add up well enough
//! to be planned with, so the plan is greedy: from the least bits for all, the step with the
//! most divergence saved per byte comes next, until none fits.

use anemone_calib::{Corpus, Teacher};
use anemone_schemas::checkpoint::Checkpoint;
use anemone_schemas::lut::{DEFAULT_GROUP_ROWS, LutShape};
use anemone_schemas::spec::{LM_HEAD, Linear};

use super::rules::{Bits, MatrixOptions, Rule, resolve};
use super::statistics::{self, Scratch, SiteStats, scratch_dir};
use super::work::load_matrix;
use super::{QuantizeOptions, text};
use crate::error::Error;
use crate::quantize::{Matrix, Method, OUTPUT_ROWS, Quantizer, Settings};
use crate::stop::Stop;
use crate::ui::{Stage, Ui};

/// What a matrix may have.
const CHOICES: [u8; 5] = [2, 3, 4, 6, 8];

/// A matrix at some bits.
#[derive(Clone, Copy, Debug)]
struct Choice {
    bits: Bits,
    bytes: u64,
    /// Estimated divergence, in nats per token.
    cost: f64,
}

/// A matrix and what it may become, by rising bytes.
#[derive(Debug)]
struct Candidate {
    name: String,
    weights: u64,
    choices: Vec<Choice>,
}

/// Measures all matrices and chooses their bits: a rule for each.
///
/// # Errors
/// A budget that even the least bits exceed, or an error of the passes.
pub(super) fn allocate(
    options: &QuantizeOptions,
    target: f64,
    ui: Ui,
    stop: &Stop,
) -> Result<Vec<Rule>, Error> {
    let checkpoint = options.open()?;
    let tokenizer = text::open_tokenizer(&options.model)?;
    let budget = text::Budget {
        tokens: options.tokens,
        window: options.window.min(checkpoint.spec().max_position),
    };
    let corpus = text::calibration(&tokenizer, &options.calibration, budget)?;
    let layers = checkpoint.spec().layers;
    let mut survey = Survey {
        options,
        checkpoint: &checkpoint,
        quantizers: CHOICES
            .iter()
            .map(|&bits| {
                let settings = Settings {
                    bits,
                    ..Settings::default()
                };
                Quantizer::new(settings, options.jobs)
            })
            .collect::<Result<_, _>>()?,
        found: Vec::new(),
        stage: ui.stage("measure", layers * Linear::ALL.len() + 1),
        stop,
    };
    survey.run(&corpus, tokenizer.size())?;
    let mut candidates = survey.found;
    candidates.sort_by(|a, b| a.name.cmp(&b.name));
    let chosen = choose(&candidates, target)?;
    let bytes: u64 = chosen.iter().map(|c| c.bytes).sum();
    let weights: u64 = candidates.iter().map(|c| c.weights).sum();
    let cost: f64 = chosen.iter().map(|c| c.cost).sum();
    ui.note(&format!(
        "{:.3} bits per weight of at most {target}, estimated divergence {cost:.4}",
        8.0 * bytes as f64 / weights as f64
    ));
    let rules = candidates.iter().zip(&chosen).map(|(candidate, choice)| {
        let name = candidate.name.replace('.', r"\.");
        let rule = format!("^{name}$=bits={}", choice.bits).parse();
        rule.map_err(|e: String| Error::bad_input(e))
    });
    rules.collect()
}

/// The choice for each candidate.
fn choose(candidates: &[Candidate], target: f64) -> Result<Vec<Choice>, Error> {
    let weights: u64 = candidates.iter().map(|c| c.weights).sum();
    let most = (target * weights as f64 / 8.0).floor() as u64;
    let mut at = vec![0usize; candidates.len()];
    let mut bytes: u64 = candidates.iter().map(|c| c.choices[0].bytes).sum();
    if bytes > most {
        return Err(Error::usage(format!(
            "`--target-bpw {target}` is less than the {:.3} bits per weight that the fewest bits take, tables included",
            8.0 * bytes as f64 / weights as f64
        )));
    }
    loop {
        // A step may pass over choices that are not worth their bytes.
        let mut best: Option<(f64, usize, usize)> = None;
        for (index, candidate) in candidates.iter().enumerate() {
            let now = candidate.choices[at[index]];
            for (to, choice) in candidate.choices.iter().enumerate().skip(at[index] + 1) {
                let more = choice.bytes - now.bytes;
                let gain = (now.cost - choice.cost) / more.max(1) as f64;
                let better = best.is_none_or(|(most, ..)| gain > most);
                if bytes + more <= most && gain > 0.0 && better {
                    best = Some((gain, index, to));
                }
            }
        }
        let Some((_, index, to)) = best else {
            break;
        };
        let choices = &candidates[index].choices;
        bytes += choices[to].bytes - choices[at[index]].bytes;
        at[index] = to;
    }
    let chosen = candidates.iter().zip(at).map(|(c, at)| c.choices[at]);
    Ok(chosen.collect())
}

struct Survey<'a> {
    options: &'a QuantizeOptions,
    checkpoint: &'a Checkpoint,
    /// One for each of [`CHOICES`].
    quantizers: Vec<Quantizer>,
    found: Vec<Candidate>,
    stage: Stage,
    stop: &'a Stop,
}

impl Survey<'_> {
    fn run(&mut self, corpus: &Corpus, valid: usize) -> Result<(), Error> {
        let teacher = Teacher::new(self.checkpoint);
        let layers = self.checkpoint.spec().layers;
        let mut hidden = teacher.embed(corpus.windows())?;
        let output = &self.options.output;
        std::fs::create_dir_all(output).map_err(|e| Error::io(output, &e))?;
        let scratch = Scratch::create(scratch_dir(output), &hidden)?;
        for layer in 0..layers {
            self.stop.check()?;
            scratch.put(layer, &hidden)?;
            teacher.block(layer, &mut hidden, None)?;
        }
        let (stats, mut gradient, _) = statistics::head(&teacher, hidden, valid, LM_HEAD, true)?;
        if let Some(stats) = stats {
            self.site(&stats)?;
        }
        for layer in (0..layers).rev() {
            self.stop.check()?;
            let all = scratch.take(layer, |input| {
                statistics::layer_backward(&teacher, layer, input, &mut gradient, true)
            })?;
            for stats in &all {
                self.site(stats)?;
            }
        }
        Ok(())
    }

    /// Measures the matrices that read from a site.
    fn site(&mut self, stats: &SiteStats) -> Result<(), Error> {
        let inputs = &stats.plain;
        let names = || stats.outputs.iter().map(|o| &o.0);
        let Some(first) = names().next() else {
            return Ok(());
        };
        let calibration = statistics::calibration(first, inputs);
        let prepared = self.quantizers[0].prepare(calibration, Method::Gptq)?;
        // The blocks of outputs are weighted by the mean square of the inputs.
        let weight = inputs.sumsq.iter().sum::<f64>() / inputs.cols as f64;
        for (name, blocks) in &stats.outputs {
            self.stop.check()?;
            let (rows, cols, data) = load_matrix(self.checkpoint, name)?;
            let matrix = Matrix {
                name,
                rows,
                cols,
                data: &data,
            };
            let diagonal = (0..rows).map(|r| f64::from(blocks[r * OUTPUT_ROWS + r % OUTPUT_ROWS]));
            let gamma = diagonal.sum::<f64>() / rows as f64 / weight.max(f64::MIN_POSITIVE);
            let unset = MatrixOptions {
                method: Method::Gptq,
                bits: Bits::Table(0),
                vector: 1,
                damping: Settings::default().damping,
            };
            // A rule of the user's own fixes the bits.
            let fixed = resolve(&self.options.rules, unset, name).bits;
            let mut choices = Vec::new();
            for (&bits, quantizer) in CHOICES.iter().zip(&self.quantizers) {
                if fixed != unset.bits && fixed != Bits::Table(bits) {
                    continue;
                }
                let (_, report) = quantizer.quantize(matrix, &prepared, None)?;
                choices.push(Choice {
                    bits: Bits::Table(bits),
                    bytes: bytes(rows, cols, bits)?,
                    cost: 0.5 * gamma * report.weighted_error,
                });
            }
            if choices.is_empty() {
                choices.push(Choice {
                    bits: fixed,
                    bytes: fixed.bytes([rows, cols], |bits| bytes(rows, cols, bits))?,
                    cost: 0.0,
                });
            }
            self.found.push(Candidate {
                name: name.clone(),
                weights: (rows * cols) as u64,
                choices,
            });
            self.stage.step(name);
        }
        Ok(())
    }
}

/// Bytes of codes and tables.
fn bytes(rows: usize, cols: usize, bits: u8) -> Result<u64, Error> {
    let shape = LutShape::new(rows, cols, bits, DEFAULT_GROUP_ROWS)
        .map_err(|e| Error::bad_input(e.to_string()))?;
    let codes = (rows * cols * usize::from(bits)).div_ceil(8);
    Ok((codes + shape.groups() * shape.entries() * 2) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Costs that fall fourfold with each bit, as those of uniform noise do.
    fn candidate(name: &str, weights: u64, cost: f64) -> Candidate {
        let choice = |&bits: &u8| Choice {
            bits: Bits::Table(bits),
            bytes: weights * u64::from(bits) / 8,
            cost: cost * 0.25f64.powi(bits.into()),
        };
        Candidate {
            name: name.to_string(),
            weights,
            choices: CHOICES.iter().map(choice).collect(),
        }
    }

    #[test]
    fn the_budget_holds_and_bits_go_where_they_save_most() {
        let candidates = [
            candidate("a", 8000, 1.0),
            candidate("b", 8000, 1000.0),
            candidate("c", 80_000, 1.0),
        ];
        let total = 96_000.0;
        let mut before = f64::INFINITY;
        for target in [2.0, 2.5, 3.0, 4.0, 4.5, 6.0, 8.0] {
            let chosen = choose(&candidates, target).unwrap();
            let bytes: u64 = chosen.iter().map(|c| c.bytes).sum();
            assert!(8.0 * bytes as f64 / total <= target);
            let cost: f64 = chosen.iter().map(|c| c.cost).sum();
            assert!(cost < before, "{target}: {cost}");
            before = cost;
            assert!(chosen[1].bits >= chosen[0].bits && chosen[0].bits >= chosen[2].bits);
        }
        assert!(
            choose(&candidates, 8.0)
                .unwrap()
                .iter()
                .all(|c| c.bits == Bits::Table(8))
        );
        let error = choose(&candidates, 1.9).unwrap_err();
        assert!(
            error.message.contains("2.000 bits per weight"),
            "{}",
            error.message
        );
    }
}
