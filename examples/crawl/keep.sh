#!/bin/sh
# Start a command again whenever it ends, until SIGTERM.
trap 'kill "$child" 2>/dev/null; wait "$child"; exit 0' TERM INT
while :; do
  "$@" &
  child=$!
  wait "$child"
  sleep 1 &
  child=$!
  wait "$child"
done
