#!/bin/sh
# Folds what a target found into its corpus, keeping the smallest files that reach
# what those up to 1500 bytes reach: merge.sh reader|asset
set -eu
cd "$(dirname "$0")"
target=$1
host=$(rustc -vV | sed -n 's/^host: //p')
merged=work/merged-$target
rm -rf "$merged"
mkdir -p "$merged"
"target/$host/release/$target" -merge=1 -max_len=1500 -timeout=30 \
    "$merged" "corpus/$target" "work/$target"
find "corpus/$target" -type f ! -name 'seed_*' -delete
for file in "$merged"/*; do
    name=$(basename "$file")
    case $name in seed_*) ;; *) cp "$file" "corpus/$target/$name" ;; esac
done
du -sb "corpus/$target"
