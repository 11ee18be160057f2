#!/usr/bin/env bash
# Unpack the offline bundle on the GPU host, and use it:
#
#   unpack.sh BUNDLE_DIR SITE_DIR && source SITE_DIR/activate.sh
#
# `python3` has to be the one with torch. Run from a checkout (envs/cuda/offline/unpack.sh) it takes the engine plugin
# from there, so that a plugin that has changed needs no new bundle.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bundle=${1:?usage: unpack.sh BUNDLE_DIR SITE_DIR}
mkdir -p "${2:?usage: unpack.sh BUNDLE_DIR SITE_DIR}"
site=$(cd "$2" && pwd)

if [ -f "$bundle/SHA256SUMS" ]; then (cd "$bundle" && sha256sum --quiet -c SHA256SUMS); fi
cat "$bundle"/site.* | xz -dc -T0 | tar -xf - -C "$site"
mkdir -p "$site/.libs" && tar -xzf "$bundle/libs.tgz" -C "$site/.libs"
chmod +x "$site"/mooncake/mooncake_master "$site"/mooncake/mooncake_client "$site"/mooncake/transfer_engine_bench

plugin=$here/../../plugin
if [ -f "$plugin/pyproject.toml" ]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  cp -r "$plugin" "$scratch/plugin" && rm -rf "$scratch"/plugin/*.egg-info "$scratch"/plugin/build
  # With the bundle's own setuptools: there is no network to fetch one for the build.
  PYTHONPATH=$site python3 -m pip -q --disable-pip-version-check install --root-user-action=ignore --no-deps --no-index \
    --no-build-isolation --upgrade --target "$site" "$scratch/plugin"
fi

# Console scripts name the building machine's interpreter in their first line.
for script in "$site"/bin/*; do
  if [ -f "$script" ] && head -c 2 "$script" | grep -q '#!'; then
    sed -i '1s|^#!.*python.*|#!/usr/bin/env python3|' "$script"
  fi
done

# Once, on all cores, instead of in the first start of each engine.
PYTHONPATH=$site python3 -m compileall -q -j 0 "$site" >/dev/null 2>&1 || true

cat >"$site/activate.sh" <<EOF
export PYTHONPATH=$site\${PYTHONPATH:+:\$PYTHONPATH} PATH=$site/bin:\$PATH:$site/.libs/usr/bin
_torch=\$(python3 -c 'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("torch").origin))')
# The host's own libraries come first: the bundled ones only fill gaps.
export LD_LIBRARY_PATH=\$_torch/lib:\${LD_LIBRARY_PATH:+\$LD_LIBRARY_PATH:}$site/.libs/usr/lib/x86_64-linux-gnu
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 LMCACHE_TRACK_USAGE=false HF_HUB_OFFLINE=1
EOF
