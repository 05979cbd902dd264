#!/bin/sh
# A client with curl: `sh client.sh [URL]`
set -eu
url=${1:-http://127.0.0.1:8000}
session=pump-$$

# Send a JSON body to /infer, with the session of a chunk in the header that proxies read, and print the reply. Returns 1 for an error of the service, which is printed to standard error.
# The key goes to curl on its standard input, because other users of the machine can see command lines.
infer() {
    reply=$(printf '%s' "${SEQSERVE_CLIENT_KEY:+Authorization: Bearer $SEQSERVE_CLIENT_KEY}" |
        curl --silent --show-error --max-time 10 --write-out '\n%{http_code}' --header @- \
            --header 'Content-Type: application/json' ${2:+--header "x-session-id: $2"} --data "$1" "$url/infer")
    status=${reply##*
}
    body=${reply%
*}
    if [ "$status" -ge 400 ]; then
        printf '%s\n' "$body" >&2
        return 1
    fi
    printf '%s\n' "$body"
}

infer '{"model": "question-type", "inputs": ["How far is it from Denver to Aspen ?"]}'

# Each request is the next chunk of the session. The last one ends it.
infer '{"model": "sensor-forecast", "start": true, "inputs": [[[0.1, -0.4, 0.2]]]}' "$session"
infer '{"model": "sensor-forecast", "start": false, "inputs": [[[0.3, -0.4, 0.5]]]}' "$session"
infer '{"model": "sensor-forecast", "start": false, "inputs": [[[0.2, -0.3, 0.4]]], "end": true}' "$session"

infer '{"model": "nobody", "inputs": ["?"]}' || echo "the service refused the request"
