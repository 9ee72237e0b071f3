#!/usr/bin/env bash
# Sets bert_ds up in .venv and runs it.
#
#   ./run.sh                     set up, then the main job: from raw text to a Hugging Face model, in a few minutes
#   ./run.sh setup               set up only; seconds when nothing has changed
#   ./run.sh test [ARGS...]      set up, then the fast tests; ARGS go to pytest
#
# PYTHON=/path/to/python3 chooses the interpreter (3.10 or newer). A torch >= 2.6 that it already has is used as it is.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
venv="$root/.venv"
log="$venv/set-up.log"
stamp="$venv/.set-up"
unfinished="$venv/.set-up-unfinished"
torch_minimum="2.6"
torch_release="2.13.0"

say() { printf '[set-up] %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

find_python() {
    # An activated .venv of this checkout must not build itself anew.
    PATH="$(printf '%s' ":$PATH:" | sed "s|:$venv/bin:|:|g; s|^:||; s|:\$||")"
    python="$(command -v "${PYTHON:-python3}")" ||
        fail "${PYTHON:-python3} was not found. Fix: install Python 3.10 or newer, or name it: PYTHON=/path/to/python3 ./run.sh"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is $("$python" --version 2>&1), and 3.10 or newer is needed. Fix: PYTHON=/path/to/python3 ./run.sh"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python cannot make virtual environments. Fix: install its venv module (on Debian and Ubuntu: apt install python3-venv)"
}

# What the set-up depends on: the requirements, this script, the interpreter and the place (a .venv cannot be moved).
fingerprint() {
    "$python" - "$root" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256()
for name in ("setup.py", "run.sh"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest(), sys.version.split()[0], sys.base_prefix, root)
PY
}

has_torch() {
    "$1" - "$torch_minimum" 2>/dev/null <<'PY'
import re, sys
from importlib.metadata import version
found = tuple(map(int, re.match(r"(\d+)\.(\d+)", version("torch")).groups()))
sys.exit(found < tuple(map(int, sys.argv[1].split("."))))
PY
}

# Lines of pip that tell where the time goes.
shown='^ *(Downloading .*\(([0-9.]+ GB|[0-9]{2,}[0-9.]* MB)\)|Building wheel for [^ ]+|Installing collected packages)'

# Runs a long command with its output in the log; shows what takes its time, and the end of the log on failure.
logged() {
    printf '\n$ %s\n' "$*" >>"$log"
    if ! "$@" 2>&1 | tee -a "$log" | { grep --line-buffered -oE "$shown" || true; }; then
        printf '\n--- end of %s ---\n' "$log" >&2
        tail -n 20 "$log" >&2
        fail "set-up failed at: $*. Fix: see above, then run it again; it starts over where that is needed"
    fi
}

# One set-up at a time; one that was interrupted may have left half a package behind, so it starts over.
make_room() {
    local owner
    while owner="$(cat "$unfinished" 2>/dev/null)" && grep -qsa run.sh "/proc/${owner:-none}/cmdline"; do
        say "waiting for another set-up (process $owner)"
        sleep 2
    done
    if [[ -e "$unfinished" ]]; then
        say "the last set-up was interrupted: starting over"
        rm -rf "$venv"
    elif [[ -d "$venv" ]] && ! "$venv/bin/python" -c '' 2>/dev/null; then
        say ".venv does not run any more: starting over"
        rm -rf "$venv"
    elif [[ -e "$stamp" ]] && [[ "$(cut -d ' ' -f 2- "$stamp")" != "$(cut -d ' ' -f 2- <<<"$wanted")" ]]; then
        say "the interpreter or the folder has changed: starting over"
        rm -rf "$venv"
    fi
}

set_up() {
    local wanted started=$SECONDS
    find_python
    wanted="$(fingerprint)"
    [[ -e "$stamp" && "$(cat "$stamp")" == "$wanted" ]] && "$venv/bin/python" -c '' 2>/dev/null && return
    make_room
    [[ -e "$stamp" && "$(cat "$stamp")" == "$wanted" ]] && return

    mkdir -p "$venv"
    echo $$ >"$unfinished"
    rm -f "$stamp"
    : >"$log"
    say "$("$python" --version) at $python; packages go to .venv, the log to ${log#"$root/"}"
    if has_torch "$python"; then
        say "using the torch that is installed already"
        logged "$python" -m venv --system-site-packages "$venv"
    else
        logged "$python" -m venv "$venv"
    fi
    if ! has_torch "$venv/bin/python"; then
        say "installing torch $torch_release"
        logged "$venv/bin/python" -m pip install "torch==$torch_release"
    fi
    say "installing bert_ds and what it needs"
    logged "$venv/bin/python" -m pip install --use-pep517 -e "$root[hf,dev]"
    DS_ACCELERATOR=cpu logged "$venv/bin/python" -c 'import torch, deepspeed, bert_ds'
    printf '%s\n' "$wanted" >"$stamp"
    rm -f "$unfinished"
    say "done in $((SECONDS - started)) s"
}

usage() {
    sed -n '4,6s/^# *//p' "${BASH_SOURCE[0]}"
}

main() {
    local job="${1:-run}"
    case "$job" in
    run | setup | test) shift $(($# > 0)) ;;
    -h | --help) usage && exit ;;
    --*) job=run ;;
    *) usage >&2 && fail "unknown job '$job'" ;;
    esac
    cd "$root"
    set_up
    case "$job" in
    run) exec "$venv/bin/python" -m bert_ds.demo "$@" ;;
    test) exec "$venv/bin/python" -m pytest "$@" ;;
    esac
}

main "$@"
