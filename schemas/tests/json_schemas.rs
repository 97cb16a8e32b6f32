//! The JSON Schemas in `schemas/json` are those of the types that read and write the
//! files. `BLESS=1 cargo test` writes them anew.

use std::fs;
use std::path::Path;

use anemone_schemas::aimodel::summary::Summary;
use anemone_schemas::manifest::Manifest;
use anemone_schemas::report::{QualityReport, QuantizeReport};
use anemone_schemas::spec::ModelSpec;
use anemone_schemas::store;
use schemars::{Schema, schema_for};

fn check(name: &str, schema: &Schema) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("json")
        .join(format!("{name}.schema.json"));
    let mut expected = serde_json::to_string_pretty(schema).expect("a schema is JSON");
    expected.push('\n');
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, &expected).expect("the folder is writable");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "`{}` is out of date; run `BLESS=1 cargo test --release -p anemone-schemas`",
        path.display()
    );
}

#[test]
fn checked_in_schemas_are_current() {
    check("anemone", &schema_for!(Manifest));
    check("report", &schema_for!(QualityReport));
    check("quantize_report", &schema_for!(QuantizeReport));
    check("model_spec", &schema_for!(ModelSpec));
    check("store", &schema_for!(store::Manifest));
    check("program", &schema_for!(Summary));
}
