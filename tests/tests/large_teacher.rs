//! As `teacher.rs`, on models outside the repository: an untied model in several
//! shards, and the tokenizer of the published Qwen3.

use anemone_schemas::checkpoint::{Checkpoint, Head};
use anemone_tests::reference::{check_teacher, check_tokenizer, shared};

#[test]
fn logits_of_a_sharded_untied_model_are_those_of_transformers() {
    let dir = shared("small-qwen3");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert_eq!(checkpoint.head(), Head::Own);
    check_teacher(&checkpoint, &dir, "small-qwen3");
}

#[test]
fn ids_and_prompts_are_those_of_transformers() {
    check_tokenizer(&shared("small-qwen3"), "small-qwen3");
    check_tokenizer(&shared("qwen3-tokenizer"), "qwen3-tokenizer");
}
