#!/bin/sh
# Makes or refreshes a virtual environment. Usage: venv.sh DIR EXTRAS [PYTHON]
# Does nothing when DIR already holds these extras, for this interpreter, from the current
# pyproject.toml and constraints.txt.
set -eu
dir=$1 extras=$2 python=${3:-}
key="$extras $(cksum < pyproject.toml) $(cksum < constraints.txt)"
stamp=$dir/.installed
installed=$(sed -n 1p "$stamp" 2>/dev/null || true)
# The extra `dev` contains `test`.
if [ "$installed" = "$key" ] || [ "$extras:$installed" = "test:dev ${key#* }" ]; then
    if [ -z "$python" ] || [ "$(sed -n 2p "$stamp")" = "$python" ]; then exit 0; fi
fi
chosen=$python
if [ -z "$chosen" ] && [ -x "$dir/bin/python" ]; then
    chosen=$(sed -n 2p "$stamp" 2>/dev/null || true)
fi
if [ -z "$chosen" ]; then
    chosen=$(sh scripts/find_python.sh) || {
        echo "error: no Python >= 3.11 found; install one, or name it: make ... PYTHON=/path/to/python" >&2
        exit 1
    }
fi
version=$("$chosen" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || {
    echo "error: PYTHON=$chosen does not run; give the path of a Python >= 3.11" >&2
    exit 1
}
case $version in
2.* | 3.[0-9] | 3.10) echo "error: $chosen is Python $version; eqx-loss needs 3.11 or newer" >&2; exit 1 ;;
esac
if [ "$("$dir/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)" != "$version" ]; then
    echo "Creating $dir with Python $version"
    rm -rf "$dir"
    # Debian ships venv without ensurepip: then the interpreter's own pip fills the environment.
    "$chosen" -m venv "$dir" >/dev/null 2>&1 || "$chosen" -m venv --without-pip "$dir"
fi
rm -f "$stamp"
echo "Installing eqx-loss[$extras] (about a minute)"
if "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
    pip="$dir/bin/python -m pip"
else
    pip="$chosen -m pip --python $dir/bin/python"
fi
$pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
printf '%s\n%s\n' "$key" "${python:-$chosen}" > "$stamp"
