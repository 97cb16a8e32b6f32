//! Small programs for the tests of the rules.

use anemone_schemas::aimodel::build::{Conv2d, GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{
    Attr, AttrId, Backing, Blob, BlobData, DYNAMIC, Elem, Module, Op, TensorType, Type, ValueId,
};

pub(super) fn tensor(elem: Elem, dims: &[usize]) -> TensorType {
    TensorType::new(elem, dims)
}

pub(super) fn f16(dims: &[usize]) -> Input {
    Input::Tensor(tensor(Elem::F16, dims))
}

/// A program of one function of context 256 and width 64.
pub(super) fn program(
    inputs: &[(&str, Input)],
    body: impl FnOnce(&mut GraphBuilder<'_>) -> Vec<(&'static str, ValueId)>,
) -> Module {
    let mut m = Module::default();
    add(&mut m, "extend_256_64", inputs, body);
    m
}

/// Adds a function; its states are passed through unless `body` returns tokens under
/// empty names.
pub(super) fn add(
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
pub(super) fn unary(
    dims: &[usize],
    body: impl FnOnce(&mut GraphBuilder<'_>, ValueId) -> ValueId,
) -> Module {
    program(&[("x", f16(dims))], |g| {
        let x = g.arg(0);
        vec![("y", body(g, x))]
    })
}

/// Appends an operation the builder does not know to the first function.
pub(super) fn append(m: &mut Module, name: &str, operands: &[ValueId], result: TensorType) {
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
pub(super) fn with_op(name: &str, operands: usize) -> Module {
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

pub(super) fn constraints(m: &mut Module, alignments: &[i64], interleave: &[i64]) -> AttrId {
    m.add_attr(Attr::HwConstraints {
        alignments: alignments.to_vec(),
        interleave: interleave.to_vec(),
        backing: Backing::IoSurface,
    })
}

pub(super) fn cache_state(context: usize) -> Input {
    Input::State(tensor(Elem::F16, &[1, 1, 8, 1, context]))
}

/// A function with a constrained cache, filled by `body`.
pub(super) fn constrained(
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
pub(super) fn palettized(bits: u8, after: impl FnOnce(&mut GraphBuilder<'_>, ValueId)) -> Module {
    unary(&[1, 32, 1, 64], |g, x| {
        let w = lut(g, bits, Elem::F16);
        after(g, w);
        g.conv1x1(x, w)
    })
}

pub(super) fn lut(g: &mut GraphBuilder<'_>, bits: u8, elem: Elem) -> ValueId {
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

pub(super) fn dense_conv(g: &mut GraphBuilder<'_>, x: ValueId, options: Conv2d) -> ValueId {
    let channels = g.shape(x)[1];
    let values: Vec<f32> = (0..64 * channels).map(|i| i as f32 * 1e-3).collect();
    let w = g.f16s(&values, &[64, channels, 1, 1]);
    g.conv2d(x, w, options)
}

pub(super) fn rms(
    g: &mut GraphBuilder<'_>,
    x: ValueId,
    axis: usize,
    scale: Option<f32>,
) -> ValueId {
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
pub(super) fn write_cache(times: usize, end_of_channels: i32) -> Module {
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
pub(super) fn apple(gather: &str, states: [&str; 2], ids: Elem) -> Module {
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

pub(super) fn renamed_outputs(second: &'static str) -> Module {
    program(&[("x", f16(&[1, 8, 1, 64]))], |g| {
        let x = g.arg(0);
        vec![("y", g.sigmoid(x)), (second, g.relu(x))]
    })
}

/// Asks a table for rows inside a function that is, or is not, Apple's composite.
pub(super) fn rope_composite(constrain: bool) -> Module {
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

pub(super) fn table_input(elem: Elem, constrain: bool) -> Module {
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

pub(super) fn lookup(constant: bool, elem: Elem) -> Module {
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

pub(super) fn dynamic(state: bool) -> Module {
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

pub(super) fn compiled_by(producer: &str) -> Module {
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

pub(super) fn with_blob(len: u64) -> Module {
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

pub(super) fn named_function(name: &str) -> Module {
    let mut m = Module::default();
    let states = [
        ("key_cache", cache_state(256)),
        ("value_cache", cache_state(256)),
    ];
    add(&mut m, name, &states, |_| vec![]);
    m
}

pub(super) fn one_state(name: &str, state: TensorType) -> Module {
    program(&[(name, Input::State(state))], |_| vec![])
}

pub(super) fn constrained_use(discard: bool) -> Module {
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

pub(super) fn compare(elem: Elem) -> Module {
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

pub(super) fn log_sum_exp(shift: bool) -> Module {
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
