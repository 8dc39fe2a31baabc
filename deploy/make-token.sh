#!/bin/sh
# Makes one control token, unless it is there already, with a copy for each reader: make-token.sh NAME:UID ...
#
# A copy lies in $RANKSCOPE_TOKEN_DIR/NAME, mode 0600, owned by UID: exporter and server run as different users, and
# neither takes a token that others can read. An existing copy is never read here: without capabilities not even root
# may, so if one copy is missing, all are made anew.
set -eu

directory="${RANKSCOPE_TOKEN_DIR:-/run/rankscope/token}"
missing=""
for reader in "$@"; do
  [ -s "$directory/${reader%%:*}" ] || missing=yes
done
[ -n "$missing" ] || exit 0

umask 077
token="$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')"
for reader in "$@"; do
  file="$directory/${reader%%:*}"
  rm -f "$file.new"
  printf '%s\n' "$token" >"$file.new"
  chown "${reader##*:}" "$file.new"
  mv "$file.new" "$file"
done
chmod 755 "$directory"
