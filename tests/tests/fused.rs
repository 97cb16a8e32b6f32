//! Fused plans against plans of one step per operation: the same bits in every output
//! and in the caches, for both forms of attention, any number of threads, a scaled
//! norm, and masks with holes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anemone_convert::lower::{AttentionForm, Forms, Prescale};
use anemone_convert::quantize::Method;
use anemone_runtime::kernels::Pool;
use anemone_runtime::{Plan, Program, RunOptions, Tensor};
use anemone_schemas::aimodel::ir::Elem;
use anemone_tests::line::{lowered_as, quantized, scratch};
use anemone_tests::reference::data;
use half::f16;

const HIDDEN: f32 = -40_000.0;
/// Slots before the call.
const FILLED: usize = 32;

/// Uniform in (-1, 1) from a counter.
fn uniform(i: u64) -> f32 {
    let mut z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// How the mask of row `r` sees slot `c`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum View {
    /// What was before, and the rows up to itself.
    Chain,
    /// As a chain, but every third of the rows before is hidden.
    Tree,
    /// Everything, with a mild bias: nothing may be skipped.
    All,
    /// Row 1 sees nothing.
    Nothing,
}

fn mask(view: View, context: usize, width: usize) -> Vec<f16> {
    let value = |c: usize, r: usize| {
        let seen = c < FILLED || c - FILLED <= r;
        match view {
            View::All => -((c % 7) as f32),
            View::Nothing if r == 1 => HIDDEN,
            View::Tree if c > FILLED && c < FILLED + r && c.is_multiple_of(3) => HIDDEN,
            _ if seen => 0.0,
            _ => HIDDEN,
        }
    };
    let cells = (0..context).flat_map(|c| (0..width).map(move |r| (c, r)));
    cells.map(|(c, r)| f16::from_f32(value(c, r))).collect()
}

/// Bits of every output and state.
type Bits = BTreeMap<String, Vec<u32>>;

fn bits(tensor: &Tensor) -> Vec<u32> {
    match (tensor.as_f16(), tensor.as_u32()) {
        (Some(v), _) => v.iter().map(|x| u32::from(x.to_bits())).collect(),
        (_, Some(v)) => v.to_vec(),
        _ => panic!("an output of {:?}", tensor.elem()),
    }
}

fn run(plan: &Plan, view: View, live: Option<usize>) -> Bits {
    let info = plan.info();
    let port = |name: &str| {
        info.inputs
            .iter()
            .find(|p| p.name == name)
            .expect("an input")
    };
    let width = port("transformer_input").shape[1];
    let context = port("causal_mask").shape[1];
    let tensor = |name: &str, f: &dyn Fn(usize) -> f32| {
        let shape = &port(name).shape;
        let n = shape.iter().product();
        let values: Vec<f16> = (0..n).map(|i| f16::from_f32(f(i))).collect();
        Tensor::new(shape, values).expect("as many as the shape has")
    };
    let x = tensor("transformer_input", &|i| uniform(i as u64));
    let cos = tensor("rope_cos", &|i| uniform(i as u64 + 1_000_000));
    let sin = tensor("rope_sin", &|i| uniform(i as u64 + 2_000_000));
    let mask = Tensor::new(&[1, context, 1, width], mask(view, context, width)).expect("fits");
    let step = Tensor::new(&[1], vec![FILLED as i32]).expect("one");
    let mut states: Vec<Tensor> = (0..2u64)
        .map(|k| {
            let shape = &info.states[k as usize].shape;
            let n: usize = shape.iter().product();
            // Stale keys beyond what is visible, as after a rejected draft.
            let at = |i: usize| f16::from_f32(uniform(i as u64 + (3 + k) * 1_000_000));
            Tensor::new(shape, (0..n).map(at).collect::<Vec<f16>>()).expect("fits")
        })
        .collect();
    let [keys, values] = &mut states[..] else {
        unreachable!("two states")
    };
    let options = RunOptions {
        live: live.map(|n| (width, n)),
        keep_argmax_inputs: false,
    };
    let outcome = plan
        .run_with(
            &[
                ("transformer_input", &x),
                ("rope_cos", &cos),
                ("rope_sin", &sin),
                ("in_step", &step),
                ("causal_mask", &mask),
            ],
            &mut [("key_cache", keys), ("value_cache", values)],
            &options,
        )
        .expect("a program of the lowering");
    let mut all: Bits = outcome
        .outputs
        .iter()
        .map(|(n, t)| (n.clone(), bits(t)))
        .collect();
    all.insert("key_cache".into(), bits(keys));
    all.insert("value_cache".into(), bits(values));
    all
}

/// Programs of a folder, by number of threads.
fn programs(folder: &Path, threads: usize) -> Vec<Program> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|e| e.expect("an entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "aimodel"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "programs in {}", folder.display());
    let pool = Arc::new(Pool::new(threads));
    let open = |p: &std::path::PathBuf| Program::open_with(p, Arc::clone(&pool));
    paths.iter().map(|p| open(p).expect("a program")).collect()
}

#[test]
fn fused_plans_give_the_bits_of_their_operations() {
    let dir = scratch("fused");
    let store = quantized(&data("tiny-qwen3"), &dir, Method::KMeansUnweighted, 512);
    for (attention, prescale) in [
        (AttentionForm::Channel, Prescale::Uniform(4)),
        (AttentionForm::Row, Prescale::None),
    ] {
        let dir = scratch(&format!("fused-{attention:?}"));
        let forms = Forms {
            attention,
            prescale,
            ..Forms::default()
        };
        let folder = lowered_as(&store, &dir, 256, forms);
        let (one, two) = (programs(&folder, 1), programs(&folder, 2));
        for (one, two) in one.iter().zip(&two) {
            for f in one.functions() {
                let plain = one.plan_unfused(&f.name).expect("a plan");
                let fused = [one.plan(&f.name), two.plan(&f.name)].map(|p| p.expect("a plan"));
                let what = format!("{attention:?} {}", f.name);
                one.set_profiling(true);
                for view in [View::Chain, View::Tree, View::All, View::Nothing] {
                    let expected = run(&plain, view, None);
                    for plan in &fused {
                        let found = run(plan, view, None);
                        for (name, bits) in &expected {
                            assert!(found[name] == *bits, "{what}: {name} behind {view:?}");
                        }
                    }
                }
                one.set_profiling(false);
                check_fused(&fused[0], &plain, &what);
                live_rows_are_the_same(&fused[0], &what);
            }
        }
    }
}

/// A fused plan has the fused steps, and none of those they replace.
fn check_fused(fused: &Plan, plain: &Plan, what: &str) {
    let names =
        |plan: &Plan| -> Vec<String> { plan.profile(None).into_iter().map(|e| e.name).collect() };
    let (fused, plain) = (names(fused), names(plain));
    for name in ["attention", "norm", "rotation", "gate"] {
        assert!(fused.iter().any(|n| n == name), "{what}: no {name}");
        assert!(plain.iter().all(|n| n != name), "{what}: {name} unfused");
    }
    for name in ["softmax", "product"] {
        assert!(fused.iter().all(|n| n != name), "{what}: a {name} is left");
        assert!(plain.iter().any(|n| n == name), "{what}: no {name}");
    }
}

/// With five live rows, those rows of every output are what they are among all.
fn live_rows_are_the_same(plan: &Plan, what: &str) {
    const LIVE: usize = 5;
    let (all, some) = (
        run(plan, View::Chain, None),
        run(plan, View::Chain, Some(LIVE)),
    );
    for port in &plan.info().outputs {
        let (a, b) = (&all[&port.name], &some[&port.name]);
        if port.shape[1] > 1 && port.shape[2] == 1 && port.name != "out_logits" {
            let row = port.shape[3];
            assert!(a[..LIVE * row] == b[..LIVE * row], "{what}: {}", port.name);
            assert!(b[LIVE * row..].iter().all(|&v| v == 0), "{what}: dead rows");
        } else {
            let width = port.shape[3];
            for (a, b) in a.chunks(width).zip(b.chunks(width)) {
                assert!(a[..LIVE] == b[..LIVE], "{what}: {}", port.name);
            }
        }
    }
    assert_eq!(plan.info().states[0].elem, Elem::F16);
}
