#!/bin/sh
# No model of this kind fits into 2 kB: the command says so, and what would do:
# refused.sh [FOLDER [options of edgekit package]]
here=$(CDPATH='' cd -- "${0%/*}/.." && pwd -P)
out=${1:-packages}
[ $# = 0 ] || shift
tiny="$here/models/tiny"
"$here/edgekit" package "$tiny/digits_cnn.onnx" --target rpi5 --budget size=2kB \
    --calibration "$tiny/digits_cnn.calib.npz" --eval "$tiny/digits_cnn.eval.npz" -o "$out/refused" "$@"
code=$?
echo "exit code $code"
[ "$code" = 5 ]
