#!/usr/bin/env bash
# Build the offline bundle of the cuda stack: for a GPU host that has Python 3.12 with torch 2.11.0+cu130, and no network.
#
#   build.sh OUT_DIR [CHUNK_BYTES]        needs pip and apt-get; any Python; x86-64 packages are made on any machine
#
# OUT_DIR gets site.00, site.01, … (an xz-compressed tar of one folder with everything of overlay.txt and the engine
# plugin), libs.tgz (shared libraries that the host lacks), overlay.txt and unpack.sh. On the host: unpack.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUT_DIR [CHUNK_BYTES]}
chunk=${2:-30000000}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" && out=$(cd "$out" && pwd)
pip() { python3 -m pip --disable-pip-version-check "$@"; }

# pip matches platform tags exactly, so every manylinux level that a wheel may carry is named.
target=(--python-version 3.12 --implementation cp --platform any)
for glibc in 39 35 34 31 28 27 26 24 17; do target+=(--platform "manylinux_2_${glibc}_x86_64"); done
for year in 2014 2010 1; do target+=(--platform "manylinux${year}_x86_64"); done

echo "packages of overlay.txt"
# This one is published as a source archive only; it is pure Python.
grep -vE '^(#|$)|^connection-pool==' "$here/overlay.txt" >"$work/wheels.txt"
source_only=$(grep '^connection-pool==' "$here/overlay.txt")
pip install -q --no-deps --no-compile --only-binary=:all: "${target[@]}" --target "$work/site" -r "$work/wheels.txt"
pip download -q --no-deps --no-binary :all: -d "$work/source" "$source_only"
tar -xzf "$work"/source/connection_pool-*.tar.gz -C "$work/source"
cp -r "$work"/source/connection_pool-*/connection_pool "$work/site/"

echo "engine plugin"
# From a copy, which a build may litter. The wheel is pure Python, so any Python can make it, in an environment of
# its own: this machine's setuptools may be too old.
cp -r "$here/../../plugin" "$work/plugin"
rm -rf "$work"/plugin/*.egg-info "$work"/plugin/build
pip wheel -q --no-deps -w "$work/wheels" "$work/plugin"
pip install -q --no-deps --no-compile --no-index --target "$work/site" "$work"/wheels/*.whl

echo "pruning"
# Never loaded on a Hopper GPU: FlashAttention 2 (it takes 3), kernels for Blackwell or other Pythons, the Rust front
# end; nor anywhere here: headers for run-time compilation, solvers of other systems, test and locale data.
(cd "$work/site" && rm -rf \
  vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/third_party/fmha_sm100 \
  vllm/third_party/deep_gemm/include vllm/third_party/deep_gemm/_C.cpython-31[0134]* \
  flashinfer/data mistral_common/data pycountry/locales include pulp/solverdir/cbc/osx pulp/solverdir/cbc/win)
rm -f "$work"/site/*/direct_url.json # names the folder that the plugin was built in
find "$work/site" -name __pycache__ -type d -prune -exec rm -rf {} +

echo "shared libraries"
# Mooncake is linked against libibverbs; nsys' importer needs libdw; etcd is for Mooncake's metadata.
mkdir "$work/debs" "$work/libs"
(cd "$work/debs" && apt-get -o APT::Sandbox::User=root download -qq libdw1 libelf1 libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200 etcd-server)
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/libs"; done
tar -C "$work/libs" -czf "$out/libs.tgz" .

echo "compressing"
rm -f "$out"/site.*
tar -C "$work/site" --owner=0 --group=0 -cf - . | xz -T0 -5 | split -b "$chunk" -d - "$out/site."
cp "$here/unpack.sh" "$here/overlay.txt" "$out/"
(cd "$out" && sha256sum site.* libs.tgz >SHA256SUMS)
ls -l "$out"
