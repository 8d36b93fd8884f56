"""Stands for pip on a device of the tests: `unpacker install --find-links FOLDER …` unpacks the wheels there.

pip itself takes two seconds of a processor for each installation. The test of a first set-up runs it.
"""

import sys
import sysconfig
import zipfile
from pathlib import Path

PATHS = {name: Path(path) for name, path in sysconfig.get_paths().items()}

if __name__ == "__main__":
    for wheel in Path(sys.argv[sys.argv.index("--find-links") + 1]).glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(PATHS["purelib"])
    program = PATHS["scripts"] / "edgekit-device"
    start = "import sys\nfrom edgekit_runtime.cli import main\nsys.exit(main())\n"
    program.write_text(f"#!{PATHS['scripts'] / 'python'}\n{start}")
    program.chmod(0o755)
