# Runs on the device: this text and one call of its functions are the standard input of `sh`. It needs no more
# than a POSIX shell, tar, and flock and runuser of util-linux. It prints `NAME=VALUE` for what it found and
# `changed=WHAT` for each thing it changed; a failure is one line on standard error.
#
#   /opt/edgekit/releases/ID    an environment; ID/complete is written last
#   /opt/edgekit/current        link to the one that runs
#   /opt/edgekit/previous       link to the one before
#   /opt/edgekit/started        ID of the release with which the services were started as everything is now
set -eu
umask 022
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # not what a user has set up for the login
prefix=/opt/edgekit config=/etc/edgekit state=/var/lib/edgekit units=/etc/systemd/system
as_edgekit="runuser -u edgekit -- env EDGEKIT_HOME=$config EDGEKIT_STATE=$state"

fail() {
    echo "$1" >&2
    exit 1
}

changed() { echo "changed=$1"; }

must_restart() { rm -f "$prefix/started"; } # also if this is interrupted before it restarts anything

has_systemd() { [ -d /run/systemd/system ]; }

lock() {
    mkdir -p "$prefix"
    exec 9>"$prefix/lock"
    flock -n 9 || fail "another installation is running on this device; wait for it"
}

find_release() { # LINK
    target=$(readlink "$prefix/$1" 2>/dev/null) && [ -e "$prefix/$target/complete" ] && echo "${target##*/}"
    return 0
}

probe() {
    echo "machine=$(uname -m)"
    echo "system=$(. /etc/os-release 2>/dev/null && echo "${PRETTY_NAME-}")"
    if [ -r /proc/device-tree/model ]; then echo "model=$(tr -d '\0' </proc/device-tree/model)"; fi
    echo "libc=$(getconf GNU_LIBC_VERSION 2>/dev/null || true)"
    started=
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        file=$(readlink -f "$(command -v "$name")") || continue
        case "$started " in *" $file "*) continue ;; esac
        started="$started $file"
        found=$("$name" -c '
import importlib.util, platform, sys
if importlib.util.find_spec("venv") is None: sys.exit(1)
has_tensorrt = importlib.util.find_spec("tensorrt") is not None
bits = 64 if sys.maxsize > 1 << 32 else 32
print(sys.executable, platform.python_version(), platform.python_implementation(), int(has_tensorrt), bits)
' 2>/dev/null) || continue
        echo "python=$found"
    done
    folder=$prefix
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    echo "free_kb=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')"
    if [ "$(id -u)" = 0 ]; then
        echo "rights=root"
    elif sudo -n true 2>/dev/null; then
        echo "rights=sudo"
    else
        echo "rights=none"
    fi
    echo "release=$(find_release current)"
    echo "previous=$(find_release previous)"
    if has_systemd; then
        echo "service=$(systemctl is-active edgekit 2>/dev/null || true)"
        echo "agent=$(systemctl is-active edgekit-agent 2>/dev/null || true)"
    fi
}

make_release() { # ID PYTHON ENGINE SYSTEM-PACKAGES
    release=$prefix/releases/$1
    [ ! -e "$release/complete" ] || return 0
    [ -d "$prefix/stage/wheels" ] || fail "the packages are not on the device; run the command again"
    rm -rf "$release"
    mkdir -p "$prefix/releases"
    options=--without-pip
    [ "$4" = 0 ] || options="$options --system-site-packages"
    "$2" -m venv $options "$release"
    "$release/bin/python" "$prefix/stage/pip.zip/pip" install --quiet --disable-pip-version-check \
        --no-warn-script-location --ignore-installed --no-deps --no-index --find-links "$prefix/stage/wheels" \
        --require-hashes -r "$prefix/stage/requirements.txt" || fail "pip could not install the packages"
    "$release/bin/python" -c "import $3" || fail "the engine cannot be imported on this device: $3"
    print_units "$1"
    sync # without it, a power cut may leave the mark below and empty files
    : >"$release/complete"
    sync "$release/complete"
    changed "release $1"
}

print_units() { # ID
    for pair in edgekit:serve edgekit-agent:agent; do
        printed=$prefix/releases/$1/${pair%:*}.printed
        [ ! -s "$printed" ] || continue
        "$prefix/releases/$1/bin/edgekit-device" "${pair#*:}" --print-unit >"$printed.new" ||
            fail "edgekit-device does not start on this device"
        mv "$printed.new" "$printed" # so half a unit is never taken for one
    done
}

make_user() {
    if ! id edgekit >/dev/null 2>&1; then
        useradd --system --user-group --no-create-home --home-dir "$state" --shell /usr/sbin/nologin edgekit
        changed "user edgekit"
    fi
    for group in video render; do # of the devices of a GPU
        if getent group "$group" >/dev/null; then usermod -aG "$group" edgekit; fi
    done
    install -d -m 755 "$config"
    install -d -m 755 -o edgekit -g edgekit "$config/keys"
    install -d -m 700 -o edgekit -g edgekit "$config/fleet"
    install -d -m 750 -o edgekit -g edgekit "$state"
}

trust_keys() {
    for key in "$prefix"/stage/keys/*.pub.pem; do
        [ -e "$key" ] || continue
        name=${key##*/}
        if cmp -s "$key" "$config/keys/$name"; then continue; fi
        [ ! -e "$config/keys/$name" ] || fail "another installation has just brought another key ${name%.pub.pem}"
        # As the owner of the folder, who could put links to files of root there meanwhile.
        runuser -u edgekit -- sh -c 'rm -f "$1/.$2.new" && cat >"$1/.$2.new" && mv -T "$1/.$2.new" "$1/$2"' \
            sh "$config/keys" "$name" <"$key"
        changed "key ${name%.pub.pem}"
    done
}

write_units() { # ID TARGET; beside the release, which keeps them for a way back
    edit="s|$prefix/releases/$1/|$prefix/current/|"
    if [ -n "$2" ]; then edit="$edit; s|^\[Service\]\$|&\nEnvironment=EDGEKIT_TARGET=$2|"; fi
    print_units "$1" # a release that an earlier edgekit made lacks them
    for name in edgekit edgekit-agent; do
        sed "$edit" "$prefix/releases/$1/$name.printed" >"$prefix/releases/$1/$name.service"
    done
}

use_units() { # ID
    mkdir -p "$units"
    for name in edgekit.service edgekit-agent.service; do
        if cmp -s "$prefix/releases/$1/$name" "$units/$name"; then continue; fi
        must_restart
        cp "$prefix/releases/$1/$name" "$units/.$name.new"
        mv "$units/.$name.new" "$units/$name"
        changed "$name"
    done
}

point() { # LINK ID
    ln -sfn "releases/$2" "$prefix/$1.new"
    mv -T "$prefix/$1.new" "$prefix/$1"
}

start_services() { # ID; whether the service has started, and the agent where the device is in a fleet
    systemctl daemon-reload && systemctl enable --quiet edgekit && systemctl restart edgekit || return
    if [ -e "$config/fleet/enrolment.json" ]; then
        systemctl enable --quiet edgekit-agent && systemctl restart edgekit-agent || return
    fi
    echo "$1" >"$prefix/started"
}

is_running() { # ID
    [ "$(cat "$prefix/started" 2>/dev/null)" = "$1" ] && systemctl is-active --quiet edgekit || return
    [ ! -e "$config/fleet/enrolment.json" ] || systemctl is-active --quiet edgekit-agent
}

activate() { # ID
    before=$(find_release current)
    if [ "$before" != "$1" ]; then
        must_restart
        if [ -n "$before" ]; then point previous "$before"; fi
        point current "$1"
        changed "current release"
    fi
    if ! has_systemd; then
        echo "note=systemd does not run here: nothing was started"
        return
    fi
    if is_running "$1"; then return; fi
    if start_services "$1"; then
        changed "services started"
        return
    fi
    reason=$(journalctl -u edgekit -n 3 -o cat 2>/dev/null | tr '\n' ' ' || true)
    before=$(find_release previous)
    [ -n "$before" ] && [ "$before" != "$1" ] || fail "the service does not start: $reason"
    must_restart
    use_units "$before"
    point current "$before"
    rm -rf "$prefix/releases/$1" "$prefix/previous"
    start_services "$before" || fail "the service of $1 does not start, nor does that of $before: $reason"
    fail "the service of release $1 does not start ($reason); $before runs again"
}

enrol() { # CODE TARGET
    if [ -e "$config/fleet/enrolment.json" ]; then
        echo "note=this device is in a fleet already; the code was not used"
        return
    fi
    # By standard input: arguments stand in the list of processes.
    printf '%s\n' "$1" |
        $as_edgekit EDGEKIT_TARGET="$2" "$prefix/current/bin/edgekit-device" enroll --code - >/dev/null
    must_restart
    changed "enrolment"
}

remove_old() {
    current=$(find_release current) previous=$(find_release previous)
    for folder in "$prefix"/releases/*; do
        case ${folder##*/} in "$current" | "$previous") ;; *) rm -rf "$folder" ;; esac
    done
    rm -rf "$prefix/stage"
}

install_release() { # ID PYTHON ENGINE SYSTEM-PACKAGES TARGET CODE
    lock
    make_release "$1" "$2" "$3" "$4"
    make_user
    trust_keys
    write_units "$1" "$5"
    use_units "$1"
    activate "$1"
    if [ -n "$6" ]; then
        enrol "$6" "$5"
        if has_systemd && ! is_running "$1"; then start_services "$1" || fail "the agent does not start"; fi
    fi
    remove_old
    sync # what is set up now is so after a power cut too
}

uninstall() { # whether to remove models, keys and membership too: 1 or 0
    lock
    if has_systemd; then systemctl disable --quiet --now edgekit-agent edgekit 2>/dev/null || true; fi
    for path in "$units/edgekit.service" "$units/edgekit-agent.service" "$prefix/current"; do
        if [ -e "$path" ] || [ -h "$path" ]; then changed "${path##*/} removed"; fi
    done
    rm -f "$units/edgekit.service" "$units/edgekit-agent.service"
    if has_systemd; then systemctl daemon-reload; fi
    rm -rf "$prefix"
    [ "$1" = 1 ] || return 0
    for path in "$config" "$state"; do
        if [ -e "$path" ]; then changed "$path removed"; fi
    done
    rm -rf "$config" "$state" /var/cache/edgekit
    if id edgekit >/dev/null 2>&1; then userdel edgekit && changed "user edgekit removed"; fi
}

status() { # whether to ask for the models, which takes a start of Python: 1 or 0
    probe
    if [ -e "$config/fleet/enrolment.json" ]; then
        echo "device=$(sed -n 's/.*"device": *"\([^"]*\)".*/\1/p' "$config/fleet/enrolment.json")"
    fi
    for key in "$config"/keys/*.pub.pem; do
        if [ -e "$key" ]; then echo "key=$(basename "$key" .pub.pem) $(sha256sum <"$key" | cut -c -64)"; fi
    done
    if [ "$1" = 1 ] && [ -n "$(find_release current)" ] && [ "$(id -u)" = 0 ]; then
        echo "models=$($as_edgekit "$prefix/current/bin/edgekit-device" status --json 2>/dev/null | tr -d '\n' || true)"
    fi
}
