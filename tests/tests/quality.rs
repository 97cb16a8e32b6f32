//! What each step of the quantizer is worth, measured on the programs that ship.

#![allow(clippy::print_stdout, reason = "figures for those who run it by hand")]

use std::path::Path;

use anemone_convert::commands::eval::{self, EvalOptions};
use anemone_convert::commands::quantize::{self, QuantizeOptions};
use anemone_convert::quantize::Method;
use anemone_convert::stop::Stop;
use anemone_convert::ui::Ui;
use anemone_schemas::report::{Measured, QualityReport, Student};
use anemone_tests::line::{lowered, quantized, scratch};
use anemone_tests::reference::data;

/// How far the simulator may be from the programs, in nats.
const SIMULATOR_TOLERANCE: f64 = 0.004;

fn report(model: &Path, store: &Path, folder: &Path) -> QualityReport {
    let options = EvalOptions {
        model: model.to_path_buf(),
        store: Some(store.to_path_buf()),
        folder: Some(folder.to_path_buf()),
        text: Vec::new(),
        window: 256,
        tokens: 2048,
        threads: 2,
    };
    eval::run(&options, Ui::Quiet, &Stop::default()).expect("store and folder are whole")
}

fn student(report: &QualityReport, measured: Measured) -> &Student {
    let mut students = report.students.iter();
    students.find(|s| s.measured == measured).expect("measured")
}

#[test]
fn each_step_lowers_the_divergence_of_shipped_programs() {
    let model = data("tiny-qwen3");
    let mut divergences = Vec::new();
    for method in [
        Method::KMeansUnweighted,
        Method::KMeans,
        Method::Gptq,
        Method::TwoSided,
    ] {
        let dir = scratch(method.name());
        let store = quantized(&model, &dir, method, 16_384);
        let folder = lowered(&store, &dir, 256);
        let report = report(&model, &store, &folder);
        let shipped = student(&report, Measured::ShippedPrograms);
        let simulated = student(&report, Measured::Simulator);
        for (a, b) in shipped.sets.iter().zip(&simulated.sets) {
            let gap = (a.kl_mean - b.kl_mean).abs();
            assert!(
                gap <= SIMULATOR_TOLERANCE,
                "{}, {}: {} on programs, {} simulated",
                shipped.name,
                a.set,
                a.kl_mean,
                b.kl_mean
            );
            assert!(a.tokens >= 1000, "{} has {} tokens", a.set, a.tokens);
        }
        println!("{}: {:.5}", shipped.name, shipped.mean_kl());
        divergences.push(shipped.mean_kl());
    }
    let [unweighted, weighted, gptq, two_sided] = divergences[..] else {
        panic!("four methods");
    };
    // The default.
    assert!(two_sided < gptq, "two-sided {two_sided}, GPTQ {gptq}");
    assert!(gptq < 0.9 * weighted, "GPTQ {gptq}, k-means {weighted}");
    assert!(
        weighted < unweighted,
        "weighted {weighted}, unweighted {unweighted}"
    );
}

#[test]
fn an_output_layer_of_six_bits_is_lowered_and_closer_to_the_original() {
    let model = data("tiny-qwen3");
    let divergence = |bits: u8| {
        let dir = scratch(&format!("head-{bits}"));
        let options = QuantizeOptions {
            model: model.clone(),
            output: dir.join("store"),
            method: Method::Gptq,
            guided: false,
            bits: 4,
            vector: 1,
            rules: vec![format!("lm_head=bits={bits}").parse().unwrap()],
            calibration: Vec::new(),
            tokens: 4096,
            window: 256,
            jobs: 2,
            fit_order: false,
            layers: None,
            target_bpw: None,
        };
        let store = quantize::run(&options, Ui::Quiet, &Stop::default()).unwrap();
        let mut matrices = store.manifest().matrices.iter();
        assert!(matrices.all(|m| m.bits == if m.name == "lm_head.weight" { bits } else { 4 }));
        let folder = lowered(&options.output, &dir, 256);
        let report = report(&model, &options.output, &folder);
        let shipped = student(&report, Measured::ShippedPrograms).mean_kl();
        let simulated = student(&report, Measured::Simulator).mean_kl();
        assert!((shipped - simulated).abs() <= SIMULATOR_TOLERANCE);
        shipped
    };
    let (four, six) = (divergence(4), divergence(6));
    assert!(six < 0.95 * four, "{six} in six bits, {four} in four");
}
