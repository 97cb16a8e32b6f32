//! What scripts rely on: exit codes, and which stream carries what.

use std::process::{Command, Output};

fn anemone(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_anemone"))
        .args(args)
        .env_remove("ANEMONE_MODEL")
        .output()
        .expect("the binary starts")
}

#[test]
fn help_goes_to_standard_output_and_lists_the_exit_codes() {
    let out = anemone(&["--help"]);
    assert_eq!(out.status.code(), Some(0));
    let text = String::from_utf8(out.stdout).unwrap();
    for code in ["0 ", "1 ", "2 ", "3 ", "4 ", "5 ", "6 ", "75 ", "130 "] {
        assert!(text.contains(&format!("\n  {code}")), "{code} in {text}");
    }
    assert!(out.stderr.is_empty());
}

#[test]
fn wrong_arguments_exit_with_2() {
    for args in [
        &["run"][..],
        &["walk"],
        &["run", "--model", "x", "p", "--raw", "--system", "s"],
    ] {
        assert_eq!(anemone(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn a_folder_that_is_no_model_exits_with_3_and_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    for command in [&["run", "hello"][..], &["chat"], &["bench"]] {
        let mut args = command.to_vec();
        args.extend(["--model", dir.path().to_str().unwrap()]);
        let out = anemone(&args);
        assert_eq!(out.status.code(), Some(3), "{args:?}");
        assert!(out.stdout.is_empty());
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(
            text.starts_with("error: ") && text.contains("anemone.json"),
            "{text}"
        );
        assert!(text.contains("\nhint: "), "{text}");
    }
}
