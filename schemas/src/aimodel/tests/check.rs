//! Wrong programs are refused, right ones are typed.

use super::{sampler, tensor};
use crate::aimodel::build::{Bound, Conv2d, GraphBuilder, Input, Padding, Scatter};
use crate::aimodel::check::check;
use crate::aimodel::ir::{Attr, Elem, Module, OpId, TensorType, Type, ValueId};

/// What the checker says of a program that `build` makes with one change.
fn refusal(change: impl FnOnce(&mut Module)) -> String {
    let mut m = sampler();
    change(&mut m);
    check(&m).unwrap_err().to_string()
}

/// The `n`-th operation called `name` of function `step`.
fn find(m: &Module, name: &str) -> OpId {
    let body = m.graph("step").unwrap().region;
    let ops = &m.region(body).ops;
    *ops.iter().find(|&&op| m.op(op).name == name).unwrap()
}

#[test]
fn a_wrong_program_is_refused_with_function_operation_and_reason() {
    let said = refusal(|m| {
        let op = find(m, "primitive.conv2d_v1");
        let result = m.op(op).results[0];
        let ty = m.add_type(Type::Tensor(TensorType::new(Elem::F16, &[4, 31, 1, 1])));
        let other = m.add_value(ty);
        let body = m.graph("step").unwrap().region;
        m.op_mut(op).results[0] = other;
        for op in m.region(body).ops.clone() {
            for v in &mut m.op_mut(op).operands {
                if *v == result {
                    *v = other;
                }
            }
        }
    });
    assert!(said.contains("function `step`, operation"), "{said}");
    assert!(said.contains("(`primitive.conv2d_v1`)"), "{said}");
    assert!(
        said.contains("result 0 is tensor<4x31x1x1xf16>, expected tensor<4x32x1x1xf16>"),
        "{said}"
    );

    let said = refusal(|m| {
        let op = find(m, "silu_v1");
        m.op_mut(op).regions.clear();
    });
    assert!(said.contains("has 0 regions, expected one"), "{said}");

    let said = refusal(|m| {
        let body = m.graph("step").unwrap().region;
        m.region_mut(body).ops.pop();
    });
    assert!(said.contains("not describe a graph"), "{said}");

    let said = refusal(|m| {
        let silu = find(m, "silu_v1");
        let body = m.graph("step").unwrap().region;
        let ops = &mut m.region_mut(body).ops;
        let at = ops.iter().position(|&op| op == silu).unwrap();
        ops.swap(at - 1, at);
    });
    assert!(said.contains("not defined before"), "{said}");

    let said = refusal(|m| {
        let op = find(m, "dataflow.invoke_v1");
        let symbol = m.add_attr(Attr::SymbolRef(vec!["nobody".into()]));
        let ty = m.add_type(Type::ParamSymbol);
        let callee = m.add_attr(Attr::ParamConstant { value: symbol, ty });
        m.op_mut(op).props[1].1 = callee;
    });
    assert!(said.contains("no function `nobody`"), "{said}");

    let said = refusal(|m| {
        let op = find(m, "primitive.constant_v1");
        let short = m.add_attr(Attr::Dense {
            splat: false,
            bytes: vec![0; 3],
        });
        m.op_mut(op).props[0].1 = short;
    });
    assert!(said.contains("holds 4 bytes, 3 are given"), "{said}");
}

fn state_graph(outputs: impl FnOnce(&mut GraphBuilder) -> Vec<ValueId>) -> Result<(), String> {
    let mut m = Module::default();
    let state = Input::State(TensorType::new(Elem::F16, &[4]));
    let mut g = GraphBuilder::new(&mut m, "f", &[("a", state.clone()), ("b", state)]);
    let tokens = outputs(&mut g);
    g.finish(&[], &tokens);
    check(&m).map_err(|e| e.to_string())
}

#[test]
fn states_need_their_own_chains_of_tokens_in_order() {
    fn touch(g: &mut GraphBuilder, i: usize) -> ValueId {
        let token = g.token();
        let (x, token) = g.read_handle(g.arg(i), token);
        g.write_handle(g.arg(i), x, token)
    }
    state_graph(|g| vec![touch(g, 0), touch(g, 1)]).unwrap();
    let said = state_graph(|g| vec![touch(g, 0)]).unwrap_err();
    assert!(
        said.contains("takes 2 states and returns 1 tokens"),
        "{said}"
    );
    let said = state_graph(|g| vec![touch(g, 1), touch(g, 0)]).unwrap_err();
    assert!(said.contains("belongs to another state"), "{said}");
    let said = state_graph(|g| {
        let token = g.token();
        let (x, first) = g.read_handle(g.arg(0), token);
        let a = g.write_handle(g.arg(0), x, first);
        g.write_handle(g.arg(0), x, first);
        vec![a, touch(g, 1)]
    })
    .unwrap_err();
    assert!(said.contains("follow the same token"), "{said}");
}

#[test]
fn functions_that_call_in_a_circle_are_refused() {
    let mut m = Module::default();
    for (name, callee) in [("a", None), ("b", Some("a"))] {
        let mut g = GraphBuilder::new(&mut m, name, &[("x", tensor(Elem::F32, &[2]))]);
        let y = match callee {
            Some(callee) => g.invoke(callee, &[g.arg(0)])[0],
            None => g.arg(0),
        };
        g.finish(&[("y", y)], &[]);
    }
    check(&m).unwrap();
    // Let `b`, once called `a` too, call itself.
    let b = m.graphs[1];
    let call = m.region(m.op(b).regions[0]).ops[0];
    let symbol = m.add_attr(Attr::SymbolRef(vec!["b".into()]));
    let ty = m.add_type(Type::ParamSymbol);
    let callee = m.add_attr(Attr::ParamConstant { value: symbol, ty });
    m.op_mut(call).props[1].1 = callee;
    let said = check(&m).unwrap_err().to_string();
    assert!(said.contains("reaches itself"), "{said}");
}

#[test]
#[should_panic(expected = "`primitive.add_v1` shapes [2, 4] and [4, 2] differ")]
fn building_a_wrong_operation_panics_with_its_name() {
    let mut m = Module::default();
    let inputs = [
        ("x", tensor(Elem::F16, &[2, 4])),
        ("y", tensor(Elem::F16, &[4, 2])),
    ];
    let mut g = GraphBuilder::new(&mut m, "f", &inputs);
    g.binary("add", g.arg(0), g.arg(1));
}

/// Shapes as numpy or the specification gives them.
#[test]
fn result_shapes_are_inferred() {
    let mut m = Module::default();
    let inputs = [
        ("x", tensor(Elem::F16, &[2, 3, 4])),
        ("y", tensor(Elem::F16, &[4, 5])),
        ("i", tensor(Elem::Si32, &[7, 1])),
        ("image", tensor(Elem::F16, &[1, 8, 5, 7])),
        ("w", tensor(Elem::F16, &[6, 4, 2, 3])),
        ("n", tensor(Elem::Si32, &[3])),
    ];
    let mut g = GraphBuilder::new(&mut m, "f", &inputs);
    let [x, y, i, image, w, n] = [0, 1, 2, 3, 4, 5].map(|k| g.arg(k));
    let expect = |g: &GraphBuilder, v: ValueId, shape: &[usize]| {
        assert_eq!(g.shape(v), shape);
    };
    let v = g.transpose(x, &[2, 0, 1]);
    expect(&g, v, &[4, 2, 3]);
    let v = g.slice(x, &[0, -2, 1], &[2, -1, i32::MAX]);
    expect(&g, v, &[2, 1, 3]);
    let v = g.slice_strided(x, &[0, 0, 0], &[2, 3, 4], &[1, 2, 3]);
    expect(&g, v, &[2, 2, 2]);
    let v = g.slice_runtime(x, n, Bound::Static(&[2, 3, 4]), &[1, 1, 4]);
    expect(&g, v, &[1, 1, 4]);
    let v = g.broadcasting_batch_matmul(x, y);
    expect(&g, v, &[2, 3, 5]);
    let v = g.gather_nd(x, i);
    expect(&g, v, &[7, 3, 4]);
    let v = g.expand_dims(y, &[0, 2]);
    expect(&g, v, &[1, 4, 1, 5]);
    let v = g.shrink_dims(v, &[2]);
    expect(&g, v, &[1, 4, 5]);
    let v = g.pad(y, &[(1, 0), (0, 2)], Padding::Constant, 0.0);
    expect(&g, v, &[5, 7]);
    let v = g.tile(y, &[2, 3]);
    expect(&g, v, &[8, 15]);
    let v = g.reduce_sum(x, &[0, 2]);
    expect(&g, v, &[1, 3, 1]);
    let v = g.argmax(x, 1);
    expect(&g, v, &[2, 1, 4]);
    assert_eq!(g.elem(v), Elem::Ui32);
    let parts = g.split(x, 2, &[1, 3]);
    expect(&g, parts[1], &[2, 3, 3]);
    let v = g.concat(2, &parts);
    expect(&g, v, &[2, 3, 4]);
    let padded = g.pad(
        image,
        &[(0, 0), (0, 0), (1, 0), (2, 1)],
        Padding::Constant,
        0.0,
    );
    let options = Conv2d {
        stride: [2, 1],
        dilation: [1, 2],
        groups: 2,
    };
    let v = g.conv2d(padded, w, options);
    expect(&g, v, &[1, 6, 3, 6]);
    let j = g.i32s(&[0, 1, 2, 3]);
    let j = g.reshape(j, &[1, 4]);
    let row = g.slice(y, &[0, 0], &[1, 4]);
    let v = g.scatter_along_axis(y, j, row, 1, Scatter::Add);
    expect(&g, v, &[4, 5]);
}

/// A function that scales `si8[4, 6]` in blocks of two by three.
fn scaled(
    scale: &[f32],
    change: impl FnOnce(&mut GraphBuilder, &mut [ValueId; 3]),
) -> Result<(), String> {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::Si8, &[4, 6]))]);
    let x = g.arg(0);
    let mut parameters = [
        g.f16s(scale, &[2, 2]),
        g.full(Elem::Si8, &[2, 2], 3.0),
        g.full(Elem::F16, &[2, 2], 0.5),
    ];
    let [s, z, b] = parameters;
    let y = g.blockwise_shift_scale(x, s, z, b);
    change(&mut g, &mut parameters);
    let graph = g.finish(&[("y", y)], &[]);
    let body = m.op(graph).regions[0];
    let ops = m.region(body).ops.clone();
    let named = |m: &Module, name| *ops.iter().find(|&&op| m.op(op).name == name).unwrap();
    let op = named(&m, "primitive.blockwise_shift_scale_v2");
    m.op_mut(op).operands[1..].copy_from_slice(&parameters);
    // What `change` appended comes before its user.
    let at = ops.iter().position(|&o| o == op).unwrap();
    let mut ops = ops;
    ops.remove(at);
    ops.insert(ops.len() - 1, op);
    m.region_mut(body).ops = ops;
    check(&m).map_err(|e| e.to_string())
}

#[test]
fn parameters_of_a_scale_have_one_shape_and_it_is_positive() {
    let good = [0.5, 1.0, 2.0, 6e-8];
    scaled(&good, |_, _| {}).unwrap();
    let said = scaled(&good, |g, p| p[1] = g.full(Elem::Si8, &[1, 1], 0.0)).unwrap_err();
    assert!(
        said.contains("the first offset has shape [1, 1], the scale [2, 2]"),
        "{said}"
    );
    let said = scaled(&good, |g, p| p[2] = g.full(Elem::F16, &[], 0.0)).unwrap_err();
    assert!(
        said.contains("the second offset has shape [], the scale [2, 2]"),
        "{said}"
    );
    for wrong in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY] {
        let said = scaled(&[0.5, 1.0, wrong, 2.0], |_, _| {}).unwrap_err();
        assert!(said.contains("function `f`, operation"), "{said}");
        assert!(said.contains("entry 2 of its scale is"), "{said}");
    }
}

#[test]
fn sorting_and_reversing_keep_shapes() {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F16, &[2, 3, 4]))]);
    let x = g.arg(0);
    let (sorted, order) = (g.sort(x, 1, true), g.argsort(x, 2, false, true));
    assert_eq!(
        (g.shape(sorted), g.elem(sorted)),
        (vec![2, 3, 4], Elem::F16)
    );
    assert_eq!((g.shape(order), g.elem(order)), (vec![2, 3, 4], Elem::Si32));
    let turned = g.reverse(x, &[0, 2]);
    let low = g.binary("bitwise_and", order, order);
    g.finish(&[("a", sorted), ("b", turned), ("c", low)], &[]);
    check(&m).unwrap();
}
