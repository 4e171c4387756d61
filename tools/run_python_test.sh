#!/usr/bin/env bash
# Runs a Python test with the machine's python3: Bazel's own Python rules would need the network.
exec python3 "$@"
