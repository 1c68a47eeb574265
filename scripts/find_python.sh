#!/bin/sh
# Prints the interpreter to use: the newest of the tested lines (3.13, 3.12, 3.11), then any newer one.
# Usage: find_python.sh [LINE ...]   with LINE like 3.11 to look for these lines only.
set -u
usable() { # path -> prints its line, e.g. 3.13; fails if it does not run or is older than 3.11
    "$1" -c 'import sys, venv; v = sys.version_info; print(f"{v[0]}.{v[1]}"); sys.exit(v < (3, 11))' 2>/dev/null
}
pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
for line in ${*:-3.13 3.12 3.11 any}; do
    if [ "$line" = any ]; then names="python3 python"; else names="python$line"; fi
    for name in $names; do
        path=$(command -v "$name" 2>/dev/null) && usable "$path" >/dev/null && { echo "$path"; exit 0; }
    done
    for name in python3 python "$pyenv_root/versions/$line".*/bin/python; do
        path=$(command -v "$name" 2>/dev/null) || continue
        [ "$(usable "$path")" = "$line" ] && { echo "$path"; exit 0; }
    done
done
exit 1
