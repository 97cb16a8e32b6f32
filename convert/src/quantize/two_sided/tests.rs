//! Every step lowers the objective.

use super::*;
use crate::quantize::testing::{Problem, Random, correlated_hessian};
use crate::quantize::{Method, OutputHessian, Spent, gptq, kmeans_tables};
use anemone_schemas::lut::LutShape;

#[test]
fn no_step_raises_the_objective() {
    let problem = Problem::new(81, 96, 300);
    let settings = Settings::default();
    let blocks = correlated_hessian(&mut Random::new(5), 96, 200);
    let output = Some(OutputHessian {
        blocks: &blocks,
        rows: 96,
    });
    let metric = OutputMetric::new(output, "w", 96, &settings).unwrap();
    let prepared = Prepared::new(problem.calibration(), Method::TwoSided, &settings).unwrap();
    let by = prepared.rounding.as_ref().unwrap();
    let shape = LutShape::new(96, 300, 4, 32).unwrap();
    let book = kmeans_tables(
        problem.matrix(),
        shape,
        &prepared.weights,
        &Spent::default(),
    )
    .unwrap();
    let tile = &Tile::cut(problem.matrix(), 32, Some(96))[0];
    let start = gptq::round(tile, &book, &prepared, by);
    let mut state = Refinement::new(tile, &book, &start.codes, &prepared, by.damping, &metric);
    let mut before = state.objective();
    let mut expect_lower = |state: &Refinement<'_>, step: &str| {
        let now = state.objective();
        assert!(now < before, "{step}: {now} after {before}");
        before = now;
    };
    for _ in 0..3 {
        state.refit_tables(REFIT_STEPS);
        state.sort_tables();
        state.recompute();
        expect_lower(&state, "tables");
        for _ in 0..2 {
            state.codes_pass();
            expect_lower(&state, "codes");
        }
        // What was kept up to date is what a fresh product gives.
        let kept = state.objective();
        state.recompute();
        assert!((state.objective() / kept - 1.0).abs() < 1e-4);
    }
}
