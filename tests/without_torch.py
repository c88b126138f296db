"""Run in an environment without torch: everything but recording must work there. Arguments: run directories."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main(runs: list[str]) -> None:
    if importlib.util.find_spec("torch") is not None:
        sys.exit("this environment has torch: the check would prove nothing")
    traces = [path for run in runs for path in Path(run).rglob("run.json")]
    if not traces:
        sys.exit(f"no recorded runs among {runs}")
    for path in traces:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "report.json"
            command = [sys.executable, "-m", "z3trace", "report", str(path.parent)]
            subprocess.run([*command, "-o", str(output)], check=True, timeout=60)
            report = json.loads(output.read_text())
            subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
        if not report["steps"] or not report["gathers"]:
            sys.exit(f"{path.parent}: an empty report")
        print(f"{path.parent.name}: {len(report['steps'])} steps, {len(report['gathers'])} gathers")
    refused = [sys.executable, "-m", "z3trace", "record", "script.py"]
    result = subprocess.run(refused, capture_output=True, text=True, timeout=60)
    if result.returncode != 2 or "torch" not in result.stderr or "Traceback" in result.stderr:
        sys.exit(f"record without torch: exit {result.returncode}: {result.stderr}")


if __name__ == "__main__":
    main(sys.argv[1:])
