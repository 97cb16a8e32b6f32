//! Is the id a program chooses the one its logits say?
//!
//! An argmax over f16 in the graph is reported to give wrong ids on some accelerators,
//! without an error. So a folder is called once when it is opened, with a few tokens, and
//! the ids are compared with the first largest logits. If they differ the host chooses from then on, and [`super::Engine`] says so.

use super::{Engine, EngineError, Row, Scores, best};

/// Rows of the call.
const ROWS: usize = 4;

/// What is wrong with the ids of the last program, if anything.
pub(super) fn wrong_choice(engine: &Engine) -> Result<Option<String>, EngineError> {
    let known = engine.manifest().model.tokenizer_vocab;
    let rows = ROWS.min(engine.manifest().widths[0]);
    let ids: Vec<u32> = (0..rows)
        .map(|i| ((i * 7919 + 11) % known.max(1)) as u32)
        .collect();
    let step = engine.step(&mut engine.cache(), 0, &Row::chain(&ids, 0))?;
    Ok(differing(&step.scores, &step.ids, known))
}

/// The first row whose id is not that of its first largest logit.
fn differing(scores: &Scores, chosen: &[u32], known: usize) -> Option<String> {
    let rows = chosen.iter().enumerate();
    rows.map(|(row, &id)| (row, id, best(scores, row, known)))
        .find(|&(_, id, expected)| id != expected)
        .map(|(row, id, expected)| {
            format!(
                "the last program chooses id {id} in row {row} where its logits say {expected}; \
                 ids are chosen from the logits instead"
            )
        })
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::tensor::Tensor;

    #[test]
    fn an_id_that_is_not_the_first_best_is_reported() {
        // Three ids and a padding row, for two rows.
        let logits = [1.0, 5.0, 4.0, 5.0, 4.0, 0.0, 9.0, 9.0];
        let logits: Vec<f16> = logits.iter().map(|&v| f16::from_f32(v)).collect();
        let scores = Scores::Output(Tensor::new(&[1, 4, 1, 2], logits).unwrap());
        assert_eq!(differing(&scores, &[1, 0], 3), None);
        let said = differing(&scores, &[1, 1], 3).unwrap();
        assert!(
            said.contains("id 1 in row 1 where its logits say 0"),
            "{said}"
        );
        let said = differing(&scores, &[2, 0], 3).unwrap();
        assert!(said.contains("id 2 in row 0"), "{said}");
    }
}
