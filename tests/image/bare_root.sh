#!/bin/bash
# Runs the steps of the Dockerfile in a bare Debian root, without a container engine, and trains there. As root,
# with debootstrap.
#
#   bare_root.sh [WORD OF tailrace quickstart ...]
#
# Settings of pip in the environment reach the root. $BINDS: folders that it may read, such as a local package
# index. $TORCH: the build argument. $ROOT: a bare root that is there already.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
    echo "bare_root.sh needs root and debootstrap" >&2
    exit 1
fi
root=$(mktemp --directory)
trap 'rm -rf --one-file-system "$root"' EXIT
if [ -n "${ROOT:-}" ]; then
    cp --archive "$ROOT/." "$root"
else
    debootstrap --variant=minbase bookworm "$root"
fi
cp --remove-destination --dereference /etc/resolv.conf "$root/etc/"
mkdir -p "$root/src" "$root/runs" "$root/dev/shm" "$root/usr/local/share/ca-certificates"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference --target-directory "$root/src" # COPY . /src
cp --archive /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/" 2>/dev/null || true
export root
# Mounts and processes end with the namespaces.
unshare --mount --pid --fork --kill-child bash -euo pipefail -s -- "$@" <<'INSIDE'
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev/shm"
for folder in ${BINDS:-}; do
    mkdir -p "$root$folder"
    mount --bind "$folder" "$root$folder"
    mount -o remount,bind,ro "$root$folder" # what the steps install stays in the root
done
steps=$(sed -n 's/^RUN //p' Dockerfile)
mapfile -t settings < <(env | grep '^PIP_\|^OMP_')
inside=(chroot "$root" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TORCH="${TORCH:-torch}" "${settings[@]}")
"${inside[@]}" sh -euc "$steps"
"${inside[@]}" sh -euc 'cd /runs && tailrace quickstart --output-dir first "$@" && test -e first/model/model.safetensors' sh "$@"
INSIDE
