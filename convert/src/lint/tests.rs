//! Every rule on the smallest program that breaks it and on its good twin.

#![allow(
    clippy::redundant_closure_for_method_calls,
    reason = "rows of closures read as a table"
)]

use std::collections::BTreeSet;

use anemone_schemas::aimodel::build::{Conv2d, GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{
    Attr, AttrId, Backing, Blob, BlobData, DYNAMIC, Elem, Module, Op, TensorType, Type, ValueId,
};

use super::{Checked, Finding, LintOptions, RULES, Severity, lint};

fn tensor(elem: Elem, dims: &[usize]) -> TensorType {
    TensorType::new(elem, dims)
}

fn f16(dims: &[usize]) -> Input {
    Input::Tensor(tensor(Elem::F16, dims))
}

/// A program of one function of context 256 and width 64.
fn program(
    inputs: &[(&str, Input)],
    body: impl FnOnce(&mut GraphBuilder<'_>) -> Vec<(&'static str, ValueId)>,
) -> Module {
    let mut m = Module::default();
    add(&mut m, "extend_256_64", inputs, body);
    m
}

/// Adds a function; its states are passed through unless `body` returns tokens under
/// empty names.
fn add(
    m: &mut Module,
    name: &str,
    inputs: &[(&str, Input)],
    body: impl FnOnce(&mut GraphBuilder<'_>) -> Vec<(&'static str, ValueId)>,
) {
    let mut g = GraphBuilder::new(m, name, inputs);
    let (tokens, outputs): (Vec<_>, Vec<_>) = body(&mut g)
        .into_iter()
        .partition(|(name, _)| name.is_empty());
    let mut tokens: Vec<ValueId> = tokens.into_iter().map(|t| t.1).collect();
    let states = inputs
        .iter()
        .filter(|i| matches!(i.1, Input::State(_)))
        .count();
    while tokens.len() < states {
        tokens.push(g.token());
    }
    g.finish(&outputs, &tokens);
}

/// One f16 input `x` and one output `y`.
fn unary(dims: &[usize], body: impl FnOnce(&mut GraphBuilder<'_>, ValueId) -> ValueId) -> Module {
    program(&[("x", f16(dims))], |g| {
        let x = g.arg(0);
        vec![("y", body(g, x))]
    })
}

/// Appends an operation the builder does not know to the first function.
fn append(m: &mut Module, name: &str, operands: &[ValueId], result: TensorType) {
    let loc = m.unknown_loc();
    let ty = m.add_type(Type::Tensor(result));
    let result = m.add_value(ty);
    let op = m.add_op(Op {
        name: name.into(),
        operands: operands.to_vec(),
        results: vec![result],
        props: vec![],
        regions: vec![],
        loc,
    });
    let region = m.graphs()[0].region;
    let ops = &mut m.region_mut(region).ops;
    ops.insert(ops.len() - 1, op);
}

/// A unary program with an unknown operation on its input.
fn with_op(name: &str, operands: usize) -> Module {
    let mut m = unary(&[1, 8, 1, 64], |g, x| g.sigmoid(x));
    let x = m.graphs()[0].inputs[0].1;
    append(
        &mut m,
        name,
        &vec![x; operands],
        tensor(Elem::F16, &[1, 8, 1, 64]),
    );
    m
}

fn constraints(m: &mut Module, alignments: &[i64], interleave: &[i64]) -> AttrId {
    m.add_attr(Attr::HwConstraints {
        alignments: alignments.to_vec(),
        interleave: interleave.to_vec(),
        backing: Backing::IoSurface,
    })
}

fn cache_state(context: usize) -> Input {
    Input::State(tensor(Elem::F16, &[1, 1, 8, 1, context]))
}

/// A function with a constrained cache, filled by `body`.
fn constrained(
    m: &mut Module,
    name: &str,
    interleave: &[i64],
    body: impl FnOnce(&mut GraphBuilder<'_>) -> Vec<(&'static str, ValueId)>,
) {
    let encoding = constraints(m, &[1, 1, 1, 1, 2048, 1], interleave);
    let cache = TensorType {
        encoding: Some(encoding),
        ..tensor(Elem::F16, &[1, 1, 8, 1, 256])
    };
    add(m, name, &[("key_cache", Input::State(cache))], body);
}

/// `x` `[1, 32, 1, 64]` through a palettized convolution of 64 rows.
fn palettized(bits: u8, after: impl FnOnce(&mut GraphBuilder<'_>, ValueId)) -> Module {
    unary(&[1, 32, 1, 64], |g, x| {
        let w = lut(g, bits, Elem::F16);
        after(g, w);
        g.conv1x1(x, w)
    })
}

fn lut(g: &mut GraphBuilder<'_>, bits: u8, elem: Elem) -> ValueId {
    let (index, count) = match bits {
        3 => (Elem::Ui3, 8),
        _ => (Elem::Ui4, 16),
    };
    let indices = g.constant(
        tensor(index, &[64, 32, 1, 1]),
        &vec![0x11; 64 * 32 * bits as usize / 8],
    );
    let bytes = vec![0x3c; 2 * count * elem.bits() / 8];
    let table = g.constant(tensor(elem, &[2, 1, 1, 1, count, 1]), &bytes);
    g.lut_to_dense(indices, table, 0)
}

fn dense_conv(g: &mut GraphBuilder<'_>, x: ValueId, options: Conv2d) -> ValueId {
    let channels = g.shape(x)[1];
    let values: Vec<f32> = (0..64 * channels).map(|i| i as f32 * 1e-3).collect();
    let w = g.f16s(&values, &[64, channels, 1, 1]);
    g.conv2d(x, w, options)
}

fn rms(g: &mut GraphBuilder<'_>, x: ValueId, axis: usize, scale: Option<f32>) -> ValueId {
    let x = match scale {
        Some(s) => {
            let s = g.f16_scalar(s);
            g.broadcasting("mul", x, s)
        }
        None => x,
    };
    let square = g.binary("mul", x, x);
    g.reduce_mean(square, &[axis])
}

/// Writes a cache row `end - start` long at offsets of the graph's input `in_step`.
fn write_cache(times: usize, end_of_channels: i32) -> Module {
    let inputs = [
        ("key_cache", cache_state(256)),
        ("value_cache", cache_state(256)),
        ("in_step", Input::Tensor(tensor(Elem::Si32, &[1]))),
        ("rows", f16(&[1, 1, 8, 1, 64])),
    ];
    program(&inputs, |g| {
        let (key, value, step, rows) = (g.arg(0), g.arg(1), g.arg(2), g.arg(3));
        let width = g.i32s(&[64]);
        let step_end = g.binary("add", step, width);
        let (front, back) = (g.i32s(&[0, 0, 0, 0]), g.i32s(&[1, 1, end_of_channels, 1]));
        let start = g.concat(0, &[front, step]);
        let end = g.concat(0, &[back, step_end]);
        let fresh = g.token();
        let (mut current, mut token) = g.read_handle(key, fresh);
        for _ in 0..times {
            current = g.slice_update(current, start, end, rows);
            token = g.write_handle(key, current, token);
        }
        let other = g.token();
        let (_, other) = g.read_handle(value, other);
        vec![("", token), ("", other)]
    })
}

/// Programs for Apple's runner, with one thing changed.
fn apple(gather: &str, states: [&str; 2], ids: Elem) -> Module {
    let mut m = Module::default();
    add(&mut m, "load_embeddings", &[], |g| {
        let table = g.full(Elem::F16, &[1, 64], 0.0);
        vec![("embedding_table", table)]
    });
    add(&mut m, gather, &[("x", f16(&[1, 64]))], |g| {
        vec![("y", g.arg(0))]
    });
    let inputs = [
        ("transformer_input", f16(&[1, 64, 1, 64])),
        ("position_ids", Input::Tensor(tensor(ids, &[1, 64]))),
        ("in_step", Input::Tensor(tensor(Elem::Si32, &[1]))),
        ("causal_mask", f16(&[1, 256, 1, 64])),
        (states[0], cache_state(256)),
        (states[1], cache_state(256)),
    ];
    add(&mut m, "extend_256_64", &inputs, |g| {
        vec![("out_logits", g.arg(0))]
    });
    m
}

fn renamed_outputs(second: &'static str) -> Module {
    program(&[("x", f16(&[1, 8, 1, 64]))], |g| {
        let x = g.arg(0);
        vec![("y", g.sigmoid(x)), (second, g.relu(x))]
    })
}

/// Asks a table for rows inside a function that is, or is not, Apple's composite.
fn rope_composite(constrain: bool) -> Module {
    let mut m = Module::default();
    let inputs = [
        ("pos_ids", Input::Tensor(tensor(Elem::Si32, &[1, 64, 1]))),
        ("cos_cache", f16(&[256, 64])),
    ];
    let encoding = constraints(&mut m, &[1, 1, 32, 1], &[1, 1, 1]);
    add(&mut m, "rope_gather", &inputs, |g| {
        let (ids, cos) = (g.arg(0), g.arg(1));
        let rows = g.gather_nd(cos, ids);
        let out = if constrain {
            g.copy_with_constraints(rows, encoding)
        } else {
            rows
        };
        vec![("cos", out)]
    });
    let declaration = m.add_attr(Attr::Opaque {
        name: "rope_cached_cos_sin_gather".into(),
        items: vec![],
    });
    let graph = m.graphs[0];
    m.op_mut(graph)
        .props
        .insert(1, ("compositeDecl", declaration));
    add(&mut m, "extend_256_64", &inputs, |g| {
        let args = [g.arg(0), g.arg(1)];
        vec![("y", g.invoke("rope_gather", &args)[0])]
    });
    m
}

fn table_input(elem: Elem, constrain: bool) -> Module {
    let mut m = Module::default();
    let encoding = constraints(&mut m, &[1, 1, 1, 1], &[8, 1, 1]);
    let table = TensorType {
        encoding: constrain.then_some(encoding),
        ..tensor(elem, &[64, 1, 64])
    };
    add(
        &mut m,
        "extend_256_64",
        &[("embedding_table", Input::Tensor(table))],
        |_| vec![],
    );
    m
}

fn lookup(constant: bool, elem: Elem) -> Module {
    let inputs = [
        ("positions", Input::Tensor(tensor(Elem::Si32, &[64, 1]))),
        ("table", Input::Tensor(tensor(elem, &[256, 512]))),
    ];
    program(&inputs, |g| {
        let positions = g.arg(0);
        let values: Vec<f32> = (0..256 * 64).map(|i| (i % 7) as f32).collect();
        let table = if constant {
            g.f16s(&values, &[256, 64])
        } else {
            g.arg(1)
        };
        vec![("y", g.gather_nd(table, positions))]
    })
}

fn dynamic(state: bool) -> Module {
    let ty = |dims: &[i64]| TensorType {
        elem: Elem::F16,
        shape: dims.to_vec(),
        encoding: None,
    };
    if state {
        let cache = Input::State(ty(&[1, 1, 8, 1, DYNAMIC]));
        program(&[("key_cache", cache)], |_| vec![])
    } else {
        program(&[("x", Input::Tensor(ty(&[1, DYNAMIC])))], |g| {
            let x = g.arg(0);
            vec![("y", g.unary("exp", x))]
        })
    }
}

fn compiled_by(producer: &str) -> Module {
    let mut m = with_op("sigmoid_v1", 1);
    let file = m.add_attr(Attr::File {
        name: "a.py".into(),
        directory: String::new(),
        sha256: String::new(),
    });
    m.add_attr(Attr::CompileUnit {
        language: "python".into(),
        file,
        producer: producer.into(),
        optimized: 0,
        flags: String::new(),
        files: 0,
    });
    m
}

fn with_blob(len: u64) -> Module {
    let mut m = unary(&[1, 8, 1, 64], |g, x| g.sigmoid(x));
    m.add_blob(Blob {
        key: "w".into(),
        data: BlobData::File {
            path: "w".into(),
            offset: 0,
            len,
        },
    });
    m
}

fn named_function(name: &str) -> Module {
    let mut m = Module::default();
    let states = [
        ("key_cache", cache_state(256)),
        ("value_cache", cache_state(256)),
    ];
    add(&mut m, name, &states, |_| vec![]);
    m
}

fn one_state(name: &str, state: TensorType) -> Module {
    program(&[(name, Input::State(state))], |_| vec![])
}

fn constrained_use(discard: bool) -> Module {
    let mut m = Module::default();
    let mut read = None;
    constrained(&mut m, "extend_256_64", &[1, 1, 8, 1, 1], |g| {
        let state = g.arg(0);
        let token = g.token();
        let (current, token) = g.read_handle(state, token);
        read = Some(current);
        let plain = g.copy_discarding_constraints(current);
        vec![("y", plain), ("", token)]
    });
    if !discard {
        let result = tensor(Elem::F16, &[1, 1, 8, 1, 256]);
        append(&mut m, "primitive.exp_v1", &[read.unwrap()], result);
    }
    m
}

fn compare(elem: Elem) -> Module {
    let inputs = [
        ("a", Input::Tensor(tensor(elem, &[1, 64]))),
        ("b", Input::Tensor(tensor(elem, &[1, 64]))),
    ];
    program(&inputs, |g| {
        let (a, b) = (g.arg(0), g.arg(1));
        let greater = g.binary("greater", a, b);
        vec![("y", g.cast(greater, Elem::F16))]
    })
}

fn log_sum_exp(shift: bool) -> Module {
    unary(&[1, 8, 1, 64], |g, x| {
        let top = g.reduce_max(x, &[1]);
        let x = if shift {
            g.broadcasting("sub", x, top)
        } else {
            x
        };
        let e = g.unary("exp", x);
        let sum = g.reduce_sum(e, &[1]);
        g.unary("log", sum)
    })
}

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
