//! Every format Anemone reads or writes: checkpoints, the quantized store, Core AI
//! programs, model folders and reports. Bytes and shapes only; no policy.

pub mod aimodel;
pub mod atomic;
pub mod checkpoint;
pub mod drafter;
pub mod exit;
pub mod lut;
pub mod manifest;
pub mod mapped;
pub mod report;
pub mod spec;
pub mod store;
pub mod tokenizer;

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}
