//! The parts of `anemone-schemas` that are fuzzed, under the same name.
//!
//! Built from its sources without the rest: instrumenting the tokenizer and the chat
//! templates would take most of the time and none of the coverage is theirs.

#[path = "../../src/aimodel/mod.rs"]
pub mod aimodel;
#[path = "../../src/atomic.rs"]
pub mod atomic;
#[path = "../../src/lut.rs"]
pub mod lut;
#[path = "../../src/mapped.rs"]
pub mod mapped;

/// As in the crate's root.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
