"""Run schemathesis, then hostile requests, against a fleet of its own: `scripts/fuzz-api`."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.fleet.api.hostile import attack, temporary_api

CONFIG = Path(__file__).with_name("schemathesis.toml")
PROGRAM = ".venv-fuzz/bin/schemathesis"


def main() -> int:
    examples, count = map(int, sys.argv[1:])
    with temporary_api() as api:
        begin_s = time.monotonic()
        url = f"{api.url}/api/v1"
        command = [PROGRAM, "--config-file", str(CONFIG), "run", f"{url}/openapi.json", "--url", url]
        command += ["--seed", "14", "--max-examples", str(examples), "--phases", "coverage,fuzzing"]
        environment = {**os.environ, "EDGEKIT_FLEET_TOKEN": api.token}
        # It reads names in answers, and would revoke its own token in the middle.
        codes = [
            subprocess.run([*command, option, "revokeToken"], check=False, env=environment).returncode
            for option in ("--exclude-operation-id", "--include-operation-id")
        ]
        code = max(codes)
        print(f"schemathesis: exit code {code}, {time.monotonic() - begin_s:.0f} s", flush=True)
        begin_s = time.monotonic()
        for place, counts in asyncio.run(attack(api, 1, count)).items():
            print(f"{place:35} {sum(counts.values()):6} {dict(sorted(counts.items()))}", flush=True)
        print(f"hostile requests: no 500, {time.monotonic() - begin_s:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
