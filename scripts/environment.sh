# Sourced by ./edgekit and the scripts beside this file, with `root` set to the checkout.
#
# use_environment KIND makes sure that .venv holds requirements/KIND.txt and that our six source folders are
# importable, so that edits are live. When the stamp is current this costs one `cksum`; everything slow is in
# environment.py. The stamp is written last, so whatever was interrupted is repaired by the next run.

use_environment() {
    [ -n "${root##*:*}" ] || fail "PYTHONPATH cannot hold a path with a colon; move this checkout: $root"
    unset PYTHONHOME
    unset PYTHONDONTWRITEBYTECODE # each process would compile what it imports: packages come without bytecode
    PYTHONPATH="$root/device_runtime:$root/host:$root/toolkit:$root/offload:$root/fleet:$root/hil"
    export PYTHONPATH
    wanted="$(cksum <"$root/requirements/$1.txt")|${EDGEKIT_PYTHON-}" || exit 1
    is_stamped "$1" && return
    # fleet and hil hold the packages of host, and dev those of all, with identical pins.
    case $1 in host) larger_kinds="dev fleet hil" ;; dev) larger_kinds= ;; *) larger_kinds=dev ;; esac
    for larger in $larger_kinds; do
        [ -r "$root/requirements/$larger.txt" ] && is_stamped "$larger" && return
    done
    find_python
    "$python" "$root/scripts/environment.py" "$1" "$wanted" || exit
}

# use_added NAME==VERSION... sets `python` to that of an environment in the cache: the packages of .venv, after these
# with what they ask for. Ends the script, and says so, where pip cannot get them.
use_added() {
    version=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    environment=${XDG_CACHE_HOME:-$HOME/.cache}/edgekit/$(echo "$1" | sed s/==/-/)-python$version
    python=$environment/bin/python
    if [ ! -e "$environment/complete" ]; then
        rm -rf "$environment"
        .venv/bin/python -m venv --without-pip "$environment"
    fi
    # The packages of .venv come after its own.
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$environment/lib/python$version/site-packages/edgekit.pth"
    if [ ! -e "$environment/complete" ]; then
        # --no-compile: halves the time; Python compiles what is really imported.
        if ! .venv/bin/python -m pip --python "$python" install --quiet --disable-pip-version-check \
            --no-compile --only-binary :all: "$@"; then
            echo "skipped: pip cannot get $* here"
            exit
        fi
        touch "$environment/complete"
    fi
}

# Whether .venv was made for the requirements file of this KIND as it is now.
is_stamped() {
    stamp="$(cksum <"$root/requirements/$1.txt")|${EDGEKIT_PYTHON-}" || exit 1
    found=
    if [ -r "$root/.venv/edgekit-$1.stamp" ]; then
        IFS= read -r found <"$root/.venv/edgekit-$1.stamp"
    fi
    # A prefix: without EDGEKIT_PYTHON, whatever Python the environment was made with will do.
    case $found in
        "$stamp"*) [ -x "$root/.venv/bin/python" ] ;;
        *) return 1 ;;
    esac
}

fail() {
    echo "edgekit: $1" >&2
    exit 1
}

# Sets `python` to the first usable interpreter.
find_python() {
    if [ -n "${EDGEKIT_PYTHON-}" ]; then
        set -- "$EDGEKIT_PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.11 python3.10
    fi
    seen=
    for python in "$@"; do
        command -v -- "$python" >/dev/null 2>&1 || continue
        version=$("$python" -c '
import sys
print(sys.version.split()[0])
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
' 2>/dev/null)
        case $? in
            0) return ;;
            3) seen="$seen
  $python is Python $version" ;;
            4) seen="$seen
  $python ($version) lacks venv or ensurepip; on Debian and Ubuntu: apt-get install python3-venv" ;;
        esac
    done
    fail "needs Python 3.10 to 3.13 with the modules venv and ensurepip. Looked for: $*${seen:-
  found none of them}
Install one, or name one: EDGEKIT_PYTHON=/path/to/python3.12 ./edgekit ..."
}
