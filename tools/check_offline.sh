#!/usr/bin/env bash
# For a machine without network: says what is there and what will not be run. Usage: tools/check_offline.sh PYTHON BUILD_DIR
set -euo pipefail
python=$1 build=$2
[ -e "$build/binding/libnybble_torch.so" ] ||
  { echo "NYBBLE_PYTHON is set, so nothing is built here, but $build/binding/libnybble_torch.so is missing; bring a build folder and name it in NYBBLE_BUILD_DIR" >&2; exit 1; }
"$python" - <<'PY'
import importlib.util as u, sys
if not u.find_spec("torch"):
    sys.exit("torch is missing in this interpreter; 2.10 or newer is needed")
missing = [m for m in ("transformers", "peft", "accelerate", "bitsandbytes", "trl", "hypothesis") if not u.find_spec(m)]
print("offline: python", sys.version.split()[0], "- not run, because missing:", ", ".join(missing) or "nothing")
PY
