#!/bin/sh
# Prints the alerting rules with the runbooks at another address: sh set-runbook-url.sh https://dashboard.example.org/runbooks
# As they are, they lead to a dashboard server on this machine, which serves the runbooks under /runbooks.
set -eu

base=${1:-}
base=${base%/}
case $base in
  http://* | https://*) ;;
  *)
    echo "set-runbook-url: '$base' is no address: give it as http://HOST/PATH or https://HOST/PATH" >&2
    exit 2
    ;;
esac
quoted=$(printf '%s' "$base" | sed 's/[\\&#]/\\&/g')
sed "s#runbook_url: .*/runbooks/#runbook_url: $quoted/#" "${2:-$(dirname "$0")/rankscope.rules.yml}"
