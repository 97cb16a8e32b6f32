#!/bin/sh
# Fuzzes one target: fuzz.sh reader|asset SECONDS [libFuzzer options]
#
# The instrumentation is LLVM's own pass, so a stable compiler does; a C++ compiler
# builds libFuzzer. `--target` keeps the flags away from build scripts.
set -eu
cd "$(dirname "$0")"
target=$1 seconds=$2
shift 2
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1 \
-Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares"
cargo build --release --target "$host" --bin "$target"
mkdir -p "work/$target"
exec "target/$host/release/$target" "work/$target" "corpus/$target" \
    -max_total_time="$seconds" -timeout=30 -rss_limit_mb=1024 -max_len=32768 \
    -artifact_prefix="work/" "$@"
