//! Every rule on the smallest program that breaks it and on its good twin.

use std::collections::BTreeSet;

use anemone_schemas::aimodel::build::{Conv2d, GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Elem, Module};

use self::programs::*;
use super::{Checked, Finding, LintOptions, RULES, Severity, lint};

mod programs;

/// Identifier, a program that breaks the rule, one that keeps it.
fn cases() -> Vec<(&'static str, Module, Module)> {
    let wide = [1, 8, 1, 64];
    let plain = || unary(&wide, |g, x| g.sigmoid(x));
    let cast_twice = |g: &mut GraphBuilder<'_>, x| {
        let w = g.cast(x, Elem::F32);
        let w = g.unary("exp", w);
        g.cast(w, Elem::F16)
    };
    let swap = [0, 2, 1, 3];
    let last = [0, 1, 3, 2];
    vec![
        (
            "A1",
            unary(&wide, |g, x| g.reshape(x, &[1, 1, 8, 1, 1, 64])),
            palettized(4, |_, _| ()),
        ),
        ("A2", unary(&wide, cast_twice), plain()),
        (
            "A3",
            unary(&wide, |g, x| {
                g.f32s(&[0.5], &[1]);
                x
            }),
            unary(&wide, |g, x| {
                g.f16s(&[0.5], &[1]);
                x
            }),
        ),
        ("A4", unary(&wide, cast_twice), plain()),
        ("A5", dynamic(false), plain()),
        (
            "A6",
            unary(&wide, |g, x| {
                let eps = g.f16_scalar(1e-6);
                g.broadcasting("add", x, eps)
            }),
            unary(&wide, |g, x| {
                let eps = g.f16_scalar(1e-3);
                g.broadcasting("add", x, eps)
            }),
        ),
        ("A8", with_op("dataflow.while_v1", 1), plain()),
        (
            "B1",
            unary(&[1, 8, 1, 16], |g, x| g.relu(x)),
            unary(&[1, 8, 1, 32], |g, x| g.relu(x)),
        ),
        (
            "B2",
            unary(&wide, |g, x| g.reshape(x, &[1, 8, 64, 1])),
            unary(&wide, |g, x| g.reshape(x, &[1, 1, 8, 64])),
        ),
        (
            "B3",
            unary(&[64, 8, 1, 1], |g, x| dense_conv(g, x, Conv2d::default())),
            unary(&wide, |g, x| dense_conv(g, x, Conv2d::default())),
        ),
        (
            "B4",
            unary(&wide, |g, x| {
                let t = g.transpose(x, &last);
                g.transpose(t, &last)
            }),
            unary(&wide, |g, x| {
                let t = g.transpose(x, &last);
                g.transpose(t, &swap)
            }),
        ),
        (
            "B5",
            one_state("key_cache", tensor(Elem::F16, &[1, 256, 8])),
            one_state("key_cache", tensor(Elem::F16, &[1, 1, 8, 1, 256])),
        ),
        (
            "B6",
            {
                let mut m = Module::default();
                constrained(&mut m, "extend_256_64", &[1, 1, 1, 1, 8], |_| vec![]);
                m
            },
            constrained_use(true),
        ),
        (
            "B7",
            table_input(Elem::F16, false),
            table_input(Elem::Si8, true),
        ),
        ("B8", rope_composite(false), rope_composite(true)),
        (
            "B10",
            program(&[("x", Input::Tensor(tensor(Elem::F32, &wide)))], |g| {
                vec![("out_logits", g.arg(0))]
            }),
            program(&[("x", f16(&wide))], |g| vec![("out_logits", g.arg(0))]),
        ),
        (
            "C1",
            unary(&[1, 1, 64, 8], |g, x| {
                let w = g.f16s(&[0.5; 64], &[1, 1, 8, 8]);
                let p = g.batch_matmul(x, w);
                g.relu(p)
            }),
            unary(&[1, 1, 64, 64], |g, x| g.batch_matmul(x, x)),
        ),
        ("C2", with_op("scaled_dot_product_attention_v1", 3), plain()),
        (
            "C3",
            unary(&[1, 8, 64, 64], |g, x| g.softmax(x, 3)),
            unary(&[1, 8, 64, 64], |g, x| g.softmax(x, 1)),
        ),
        (
            "C4",
            unary(&wide, |g, x| {
                let m = g.f16_scalar(f32::NEG_INFINITY);
                g.broadcasting("add", x, m)
            }),
            unary(&wide, |g, x| {
                let m = g.f16_scalar(-40000.0);
                g.broadcasting("add", x, m)
            }),
        ),
        (
            "C7",
            unary(&[1, 64, 1, 512], |g, x| rms(g, x, 3, None)),
            unary(&[1, 512, 1, 64], |g, x| rms(g, x, 1, None)),
        ),
        (
            "C8",
            unary(&wide, |g, x| {
                let s = g.sigmoid(x);
                g.binary("mul", x, s)
            }),
            unary(&wide, |g, x| g.silu(x)),
        ),
        ("C9", unary(&wide, |g, x| g.unary("tanh", x)), plain()),
        ("C10", lookup(true, Elem::F16), rope_composite(true)),
        ("C11", lookup(false, Elem::F16), rope_composite(true)),
        ("C13", constrained_use(false), constrained_use(true)),
        ("C14", write_cache(1, 16), write_cache(1, 8)),
        (
            "C15",
            unary(&[1, 8, 8, 64], |g, x| {
                let stride = [4, 4];
                dense_conv(
                    g,
                    x,
                    Conv2d {
                        stride,
                        ..Conv2d::default()
                    },
                )
            }),
            unary(&[1, 8, 8, 64], |g, x| {
                let stride = [3, 3];
                dense_conv(
                    g,
                    x,
                    Conv2d {
                        stride,
                        ..Conv2d::default()
                    },
                )
            }),
        ),
        (
            "C17",
            named_function("extend_256_16"),
            named_function("extend_256_64"),
        ),
        (
            "C18",
            unary(&wide, |g, x| rms(g, x, 1, None)),
            unary(&wide, |g, x| rms(g, x, 1, Some(0.0625))),
        ),
        ("D1", palettized(3, |_, _| ()), palettized(4, |_, _| ())),
        (
            "D2",
            unary(&[1, 32, 1, 64], |g, x| {
                let w = lut(g, 4, Elem::F16);
                let a = g.conv1x1(x, w);
                dense_conv(g, a, Conv2d::default())
            }),
            palettized(4, |_, _| ()),
        ),
        (
            "D3",
            palettized(4, |g, w| {
                g.unary("exp", w);
            }),
            palettized(4, |_, _| ()),
        ),
        (
            "D4",
            unary(&wide, |g, x| {
                lut(g, 4, Elem::F32);
                x
            }),
            palettized(4, |_, _| ()),
        ),
        ("D8", with_blob(3_000_000_000), with_blob(1_000_000_000)),
        (
            "E1",
            apple(
                "gather_embeddings_8",
                ["key_cache", "value_cache"],
                Elem::Ui16,
            ),
            apple(
                "gather_embeddings_64",
                ["key_cache", "value_cache"],
                Elem::Ui16,
            ),
        ),
        (
            "E2",
            apple("gather_embeddings_64", ["k_cache", "v_cache"], Elem::Ui16),
            apple(
                "gather_embeddings_64",
                ["key_cache", "value_cache"],
                Elem::Ui16,
            ),
        ),
        (
            "E3",
            apple(
                "gather_embeddings_64",
                ["key_cache", "value_cache"],
                Elem::Si32,
            ),
            apple(
                "gather_embeddings_64",
                ["key_cache", "value_cache"],
                Elem::Ui16,
            ),
        ),
        (
            "K1",
            unary(&wide, |g, x| g.argmax(x, 1)),
            unary(&wide, |g, x| {
                let x = g.cast(x, Elem::F32);
                g.argmax(x, 1)
            }),
        ),
        (
            "K3",
            write_cache(1, 8),
            unary(&wide, |g, x| {
                let part = g.slice(x, &[0, 0, 0, 0], &[1, 1, 1, 64]);
                g.slice_update(x, &[0, 1, 0, 0], &[1, 2, 1, 64], part)
            }),
        ),
        ("K4", write_cache(2, 8), write_cache(1, 8)),
        ("K5", dynamic(true), named_function("extend_256_64")),
        ("K7", unary(&wide, |g, x| g.unary("round", x)), plain()),
        (
            "K8",
            unary(&wide, |g, x| {
                let i = g.cast(x, Elem::Si16);
                g.cast(i, Elem::F16)
            }),
            unary(&wide, |g, x| g.cast(x, Elem::Si16)),
        ),
        ("K9", compare(Elem::Si32), compare(Elem::F16)),
        ("K10", unary(&wide, |g, x| g.silu(x)), plain()),
        ("K11", log_sum_exp(false), log_sum_exp(true)),
        (
            "K12",
            with_op("scaled_dot_product_attention_v1", 4),
            with_op("scaled_dot_product_attention_v1", 3),
        ),
        (
            "K15",
            compiled_by("coreai-torch 0.4.0"),
            compiled_by("coreai-torch 0.4.3"),
        ),
        ("K16", renamed_outputs("y"), renamed_outputs("z")),
        (
            "K19",
            one_state("key_cache", tensor(Elem::F16, &[1, 1, 8, 1, 32768])),
            one_state("key_cache", tensor(Elem::F16, &[1, 1, 8, 1, 16384])),
        ),
    ]
}

fn of<'a>(findings: &'a [Finding], id: &str) -> Vec<&'a Finding> {
    findings.iter().filter(|f| f.rule == id).collect()
}

#[test]
fn every_rule_fires_on_what_breaks_it_and_not_on_its_twin() {
    for (id, bad, good) in cases() {
        let severity = RULES.iter().find(|r| r.id == id).unwrap().severity;
        let found = lint(&bad, &LintOptions::default());
        let hits = of(&found, id);
        assert!(!hits.is_empty(), "{id} does not fire: {found:#?}");
        assert!(
            hits.iter().any(|f| f.severity == severity),
            "{id} fires as {:?}",
            hits[0].severity
        );
        let found = lint(&good, &LintOptions::default());
        assert!(
            of(&found, id).is_empty(),
            "{id} fires on its good twin: {found:#?}"
        );
    }
}

#[test]
fn every_static_rule_has_a_case_and_identifiers_are_unique() {
    let covered: BTreeSet<&str> = cases().iter().map(|c| c.0).collect();
    let known: BTreeSet<&str> = RULES.iter().map(|r| r.id).collect();
    assert_eq!(known.len(), RULES.len());
    for rule in RULES.iter().filter(|r| r.checked == Checked::Statically) {
        // The command sees symlinks, a program does not.
        assert!(
            covered.contains(rule.id) || rule.id == "K14",
            "{} has no case",
            rule.id
        );
    }
}

#[test]
fn scores_widened_for_an_argmax_only_warn() {
    let m = unary(&[1, 8, 1, 64], |g, x| {
        let x = g.cast(x, Elem::F32);
        g.argmax(x, 1)
    });
    let found = lint(&m, &LintOptions::default());
    for id in ["A2", "A4"] {
        let hits = of(&found, id);
        assert!(!hits.is_empty() && hits.iter().all(|f| f.severity == Severity::Warning));
    }
}

#[test]
fn a_row_softmax_over_a_long_context_is_noted() {
    let m = unary(&[1, 1, 16, 8192], |g, x| g.softmax(x, 3));
    let found = lint(&m, &LintOptions::default());
    assert_eq!(of(&found, "C3")[0].severity, Severity::Note);
}

#[test]
fn an_output_layer_written_as_apple_does_warns() {
    let m = program(&[("x", f16(&[1, 1, 64, 8]))], |g| {
        let x = g.arg(0);
        let w = g.f16s(&[0.5; 512], &[1, 1, 8, 64]);
        let scores = g.batch_matmul(x, w);
        vec![("out_logits", g.reshape(scores, &[1, 64, 64]))]
    });
    let found = lint(&m, &LintOptions::default());
    assert_eq!(of(&found, "C1")[0].severity, Severity::Warning);
}

#[test]
fn functions_that_share_a_cache_must_agree_on_its_layout() {
    let mut m = named_function("extend_256_64");
    let before = lint(&m, &LintOptions::default());
    assert!(of(&before, "B6").is_empty());
    constrained(&mut m, "extend_256_16", &[1, 1, 8, 1, 1], |_| vec![]);
    let found = lint(&m, &LintOptions::default());
    assert!(of(&found, "B6")[0].message.contains("disagree"));
}

#[test]
fn allowed_rules_are_left_out() {
    let m = unary(&[1, 8, 1, 16], |g, x| g.relu(x));
    let allow = vec!["B1".to_owned()];
    assert!(!of(&lint(&m, &LintOptions::default()), "B1").is_empty());
    assert!(of(&lint(&m, &LintOptions { allow }), "B1").is_empty());
}

#[test]
fn the_mask_covers_the_keys_of_the_cache() {
    let with = |keys: usize| {
        let inputs = [
            ("causal_mask", f16(&[1, keys, 1, 64])),
            ("key_cache", cache_state(256)),
        ];
        program(&inputs, |_| vec![])
    };
    assert!(of(&lint(&with(256), &LintOptions::default()), "C4").is_empty());
    assert_eq!(
        of(&lint(&with(512), &LintOptions::default()), "C4").len(),
        1
    );
}
