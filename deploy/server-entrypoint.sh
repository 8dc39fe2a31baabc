#!/bin/sh
# Starts `rankscope` in a container. The server refuses an address that is not loopback without a password file, so one
# is made at the first start: user `admin`, whose password then lies in `admin-password` beside it, readable by the
# server's user only. It is not printed: logs travel further than they should.
#
# Set RANKSCOPE_SERVER_PASSWORD_FILE to bring a password file of your own.
set -eu

if [ "${1:-}" = serve ] && [ -z "${RANKSCOPE_SERVER_PASSWORD_FILE:-}" ]; then
  umask 077
  RANKSCOPE_SERVER_PASSWORD_FILE="$RANKSCOPE_SERVER_DATA_DIR/passwords"
  export RANKSCOPE_SERVER_PASSWORD_FILE
  if [ ! -s "$RANKSCOPE_SERVER_PASSWORD_FILE" ]; then
    python3 -c 'import secrets; print(secrets.token_urlsafe(18))' >"$RANKSCOPE_SERVER_DATA_DIR/admin-password"
    rankscope password admin <"$RANKSCOPE_SERVER_DATA_DIR/admin-password" >"$RANKSCOPE_SERVER_PASSWORD_FILE.new"
    mv "$RANKSCOPE_SERVER_PASSWORD_FILE.new" "$RANKSCOPE_SERVER_PASSWORD_FILE"
    echo "rankscope: made a password for user admin; it is in $RANKSCOPE_SERVER_DATA_DIR/admin-password" >&2
  fi
fi
exec rankscope "$@"
