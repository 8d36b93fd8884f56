#!/bin/sh
# Packages a digit classifier under limits, checks the package, runs it, and makes the same bytes again:
# package_under_budget.sh [FOLDER [options of edgekit package]]
set -eu
here=$(CDPATH='' cd -- "${0%/*}/.." && pwd -P)
out=${1:-packages}
[ $# = 0 ] || shift
tiny="$here/models/tiny"

"$here/edgekit" package "$tiny/digits_cnn.onnx" --target rpi5 --budget size=100kB,drop=1% \
    --calibration "$tiny/digits_cnn.calib.npz" --eval "$tiny/digits_cnn.eval.npz" -o "$out/first" "$@"
"$here/edgekit" verify "$out/first/digits_cnn-1.0.0-rpi5.edgepkg"
"$here/edgekit" run "$out/first/digits_cnn-1.0.0-rpi5.edgepkg"

"$here/edgekit" package "$tiny/digits_cnn.onnx" --recipe "$out/first/digits_cnn-1.0.0-rpi5.recipe.json" -o "$out/second"
cmp "$out/first/digits_cnn-1.0.0-rpi5.edgepkg" "$out/second/digits_cnn-1.0.0-rpi5.edgepkg"
echo "same bytes"
