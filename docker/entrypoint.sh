#!/bin/sh
# A worker tells the others the name they reach it by. Each replica has its own: the container's.
: "${PAGEWIRE_ADVERTISE_HOST:=$(hostname)}"
export PAGEWIRE_ADVERTISE_HOST
exec "$@"
