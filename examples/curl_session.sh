#!/bin/sh
# The service with curl alone: what there is, one inference in JSON, and what was counted.
# Usage: curl_session.sh SOCKET MODEL     (a model with one float32 input)
set -eu
socket=$1
model=$2

ask() { # PATH [CURL OPTIONS...]
    path=$1
    shift
    curl --silent --show-error --fail-with-body --unix-socket "$socket" "$@" "http://localhost$path" || return
    echo
}

ask /v2/health/ready
ask /v2/repository/index --request POST
ask "/v2/models/$model"

# The input's name and size, from the metadata; free dimensions (-1) become 1.
request=$(ask "/v2/models/$model" | python3 -c '
import json, math, sys
(given,) = json.load(sys.stdin)["inputs"]
shape = [max(size, 1) for size in given["shape"]]
print(json.dumps({"inputs": [{**given, "shape": shape, "data": [0] * math.prod(shape)}]}))')
ask "/v2/models/$model/infer" --data "$request"

ask "/v2/models/$model/stats"
ask /metrics | grep '^edgekit_requests_total'

# A model that is not there: the protocol's error, and curl's exit code 22.
ask /v2/models/nothing || echo "curl ended with $?"
