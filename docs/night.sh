#!/bin/sh
# Converts models one after another, unattended, and publishes each:
#
#     memguard --lock -- sh night.sh WORK OWNER/NAME[@REVISION]...
#
# A step that was stopped, killed or short of disk or memory is tried again: it goes on
# where it was. Any other failure skips the model, not the night.
#
# UPLOAD_TO   owner to publish to; nothing is published without it
# QUANTIZE    options for `quantize`
# TARGET      options for `target`
# PAUSE       seconds before a step is tried again (60)
# TRIES       tries of each step (5)

work=$1
shift
convert=${ANEMONE_CONVERT:-anemone-convert}
mkdir -p "$work" || exit 1
failed=0

step() {
    tries=0
    while :; do
        "$convert" --quiet --log "$work/night.log" "$@" >> "$work/output.log" && return 0
        code=$?
        tries=$((tries + 1))
        echo "night: \`$1\` for $model ended with $code, try $tries" >&2
        # 4: resources, 75: stopped, 137: killed. Others do not get better by waiting.
        case $code in
        4 | 75 | 137) [ "$tries" -lt "${TRIES:-5}" ] || return "$code" ;;
        *) return "$code" ;;
        esac
        sleep "${PAUSE:-60}"
    done
}

for model; do
    name=$(printf '%s' "$model" | sed 's|[/@]|-|g')
    # shellcheck disable=SC2086 # options are words
    step quantize "$model" -o "$work/$name.store" $QUANTIZE &&
        step target "$work/$name.store" -o "$work/$name" --name "${model%@*}" $TARGET &&
        step package "$work/$name" ${UPLOAD_TO:+--upload "$UPLOAD_TO/$name"} &&
        step verify "$work/$name" &&
        echo "night: $model is done" >&2 || failed=$((failed + 1))
done
[ "$failed" -eq 0 ] || echo "night: $failed models failed, see $work/night.log" >&2
exit $((failed > 0))
