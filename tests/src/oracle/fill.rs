//! A program that fills states with hardware constraints.
//!
//! Memory for such a state comes from the function's descriptor and holds anything; the
//! wheel lets Python read it but not write to it. So what is to be in it is written by
//! Apple's runtime itself: a program with one function for each kind of state, which
//! takes a tensor without constraints and writes it over the whole state.

use std::path::Path;

use anemone_schemas::aimodel::asset::{Metadata, open_asset, write_asset};
use anemone_schemas::aimodel::build::{GraphBuilder, Input};
use anemone_schemas::aimodel::ir::{Attr, Module, TensorType, Type};
use serde_json::{Map, Value};

use super::Result;

/// Writes the program for the states of an asset's functions. Returns which function
/// fills which state, as `function/state`; empty if no state has constraints.
pub(super) fn write(asset: &Path, to: &Path) -> Result<Map<String, Value>> {
    // What cannot be read here is for Apple's loader to judge.
    let Ok(source) = open_asset(asset) else {
        return Ok(Map::new());
    };
    let mut kinds: Vec<(TensorType, Attr)> = Vec::new();
    let mut fillers = Map::new();
    for graph in source.graphs() {
        for (name, value) in &graph.inputs {
            let Some(name) = name else { continue };
            let Type::Handle(inner) = source.ty(source.value_type(*value)) else {
                continue;
            };
            let Type::Tensor(state) = source.ty(*inner) else {
                continue;
            };
            let Some(encoding) = state.encoding else {
                continue;
            };
            let plain = TensorType {
                encoding: None,
                ..state.clone()
            };
            let kind = (plain, source.attr(encoding).clone());
            let at = kinds.iter().position(|k| *k == kind).unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            });
            fillers.insert(
                format!("{}/{name}", graph.name),
                format!("fill_{at}").into(),
            );
        }
    }
    if !kinds.is_empty() {
        let mut module = Module::default();
        for (at, (plain, constraints)) in kinds.into_iter().enumerate() {
            fill(&mut module, &format!("fill_{at}"), plain, constraints);
        }
        write_asset(to, &module, &Metadata::default()).map_err(|e| e.to_string())?;
    }
    Ok(fillers)
}

fn fill(module: &mut Module, name: &str, plain: TensorType, constraints: Attr) {
    let constraints = module.add_attr(constraints);
    let state = TensorType {
        encoding: Some(constraints),
        ..plain.clone()
    };
    let inputs = [
        ("value", Input::Tensor(plain)),
        ("state", Input::State(state)),
    ];
    let mut g = GraphBuilder::new(module, name, &inputs);
    let token = g.token();
    let value = g.copy_with_constraints(g.arg(0), constraints);
    let token = g.write_handle(g.arg(1), value, token);
    // A function without outputs has no states for Apple's loader.
    let output = g.arg(0);
    g.finish(&[("written", output)], &[token]);
}
