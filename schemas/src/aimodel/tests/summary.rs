//! A summary counts what is there.

use super::{bytes_of, sampler, tensor};
use crate::aimodel::build::GraphBuilder;
use crate::aimodel::decode::decode_bytes;
use crate::aimodel::ir::{Elem, Module};
use crate::aimodel::summary::{Summary, summarize};

#[test]
fn functions_operations_and_bytes_are_those_of_the_program() {
    let bytes = bytes_of(&sampler());
    let m = decode_bytes(&bytes).unwrap();
    let s = summarize(&m, bytes.len() as u64);
    let [helper, step] = &s.functions[..] else {
        panic!("two functions");
    };
    assert!(helper.private && !step.private);
    // mul, its constant, output.
    assert_eq!(helper.operations, 3);
    let names = |values: &[_]| -> Vec<String> {
        values
            .iter()
            .map(|v: &crate::aimodel::summary::ValueSummary| {
                format!("{} {}{:?}", v.name.as_deref().unwrap(), v.elem, v.shape)
            })
            .collect()
    };
    assert_eq!(
        names(&step.inputs),
        [
            "k_new f16[Some(1), Some(2), Some(1), Some(16)]",
            "pos si32[Some(1)]",
            "x f16[Some(4), Some(64)]"
        ]
    );
    let state = "k_cache f16[Some(1), Some(2), Some(32), Some(16)]";
    assert_eq!(names(&step.states), [state]);
    let best = "best ui32[Some(4), Some(1), Some(1), Some(1)]";
    assert!(names(&step.outputs).iter().any(|o| o == best), "{step:?}");
    assert_eq!(step.outputs.len(), 2, "the token is none");
    assert_eq!(s.operations["primitive.lut_to_dense_v1"], 1);
    assert_eq!(s.operations["dataflow.output_v1"], 2);
    let in_functions: u64 = s.functions.iter().map(|f| f.operations).sum();
    assert_eq!(s.operations.values().sum::<u64>(), in_functions);

    // 32 x 64 nibbles; 4 tables of 16 halves; 4 x 64 halves.
    let b = &s.bytes;
    assert_eq!((b.indices, b.tables, b.constants), (1024, 128, 512));
    assert_eq!((b.norms, b.quantized, b.scales, b.unused), (0, 0, 0, 0));
    assert_eq!(b.total, bytes.len() as u64);
    assert_eq!(b.program, b.total - 1024 - 128 - 512);
}

#[test]
fn the_weight_of_a_norm_is_told_from_other_constants() {
    let mut m = Module::default();
    let mut g = GraphBuilder::new(&mut m, "f", &[("x", tensor(Elem::F16, &[1, 64]))]);
    let x = g.arg(0);
    let square = g.binary("mul", x, x);
    let mean = g.reduce_mean(square, &[1]);
    let inverse = g.unary("rsqrt", mean);
    let normed = g.broadcasting("mul", x, inverse);
    let ramp = |from: f32| (0..64).map(|i| from + i as f32 / 64.0).collect::<Vec<_>>();
    let weight = g.f16s(&ramp(1.0), &[1, 64]);
    let y = g.binary("mul", weight, normed);
    let bias = g.f16s(&ramp(2.0), &[1, 64]);
    let y = g.binary("mul", y, bias);
    g.finish(&[("y", y)], &[]);
    let b = summarize(&m, 1000).bytes;
    assert_eq!((b.norms, b.constants, b.program), (128, 128, 744));
}

#[test]
fn text_and_json_come_from_the_same_numbers() {
    let m = sampler();
    let s = summarize(&m, 10_000);
    let json = serde_json::to_string_pretty(&s).unwrap();
    assert_eq!(serde_json::from_str::<Summary>(&json).unwrap(), s);
    let again = summarize(&decode_bytes(&bytes_of(&m)).unwrap(), 10_000);
    assert_eq!(serde_json::to_string_pretty(&again).unwrap(), json);
    let text = s.to_string();
    assert!(text.contains("private helper: 3 operations"), "{text}");
    assert!(text.contains("  state k_cache: handle<"), "{text}");
    assert!(text.contains("        1024 indices"), "{text}");
}
