"""Do `nybble bench linear` and `nybble tune` do on this card what docs/tune.md says?

    python tune_check.py --out FOLDER [--rounds N]     runs both commands; writes tune-check.json and their output
    python tune_check.py --out FOLDER --uncovered      only the shapes that no record covers

Each step is a process of its own, as a user's is. Checked: both commands end with 0; tuning changes nothing by itself;
with NYBBLE_TUNE `auto` takes the table's path and the plan has the table's hash; a table that names another path
changes the bits of what it names, the same bits in every process, and of nothing else (other shapes, tokens, dtypes,
modes, batch_invariant); where it names dequant the bits are mode "dequant"'s; a missing file is an error at the first
plan; shapes that no record covers are called unmeasured, until they are tuned. Exit code 1 when one does not hold.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys

SHAPES, TOKENS = "4096x4096,1024x4096", "1,64,512,2048"
UNCOVERED, UNCOVERED_TOKENS = "4100x4096", "64,512"  # n % 8 != 0: the kernels that the records are of do not take it
N, K, M = 4096, 4096, 512  # what the table of the probe names
CASES = {  # name -> (n, k, m, direction, dtype, mode, batch_invariant)
    "named forward": (N, K, M, "forward", "bfloat16", "auto", False),
    "named grad_input": (N, K, M, "grad_input", "bfloat16", "auto", False),
    "mode dequant": (N, K, M, "grad_input", "bfloat16", "dequant", False),
    "mode fused": (N, K, M, "forward", "bfloat16", "fused", False),
    "batch_invariant": (N, K, M, "forward", "bfloat16", "auto", True),
    "float16": (N, K, M, "forward", "float16", "auto", False),
    "other tokens": (N, K, M + 1, "forward", "bfloat16", "auto", False),
    "other shape": (N // 4, K, M, "forward", "bfloat16", "auto", False),
}
NAMED = ("named forward", "named grad_input")


def probe():
    """In a process of its own: the plan of every case, its path by the counters, and a hash of its bits."""
    import torch

    import nybble
    from nybble import _ops
    from nybble.quant_state import MODE_CODES
    from nybble.timing import Weights

    found = {}
    for name, (n, k, m, direction, dtype, mode, batch_invariant) in CASES.items():
        torch.manual_seed(7)
        dtype = getattr(torch, dtype)
        weights = Weights(n, k, dtype, torch.device("cuda", torch.cuda.current_device()))
        x = torch.randn(m, k if direction == "forward" else n, device="cuda", dtype=dtype)
        w = weights.states[0]
        spec = (*w.shape, w.blocksize, w.quant_type, w.state_dtype, w.nested_dtype, MODE_CODES[mode], batch_invariant)
        nybble.reset_path_counters()
        if direction == "forward":
            y = _ops.linear_4bit(x, *w.tensors, None, None, *spec)
        else:
            y = _ops.linear_4bit_grad_input(x, *w.tensors, None, *spec)
        dense = weights.matmul(x, 0, direction, torch.empty_like(y))
        ran = [path for path, counts in nybble.path_counters().items() if counts[direction]]
        plan = nybble.explain(x, *weights.packed[0], direction=direction, batch_invariant=batch_invariant)
        bits = hashlib.sha256(y.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
        found[name] = dict(path="+".join(ran), plan=plan, bits=bits, error=(torch.dist(y, dense) / dense.norm()).item())
    print(json.dumps(found))


class Check:
    """Runs the steps, keeps their output, counts what does not hold."""

    def __init__(self, out, rounds):
        self.out, self.rounds, self.claims, self.number = out, ["--rounds", str(rounds)], [], 0
        command = pathlib.Path(os.environ.get("NYBBLE_BUILD_DIR", "")) / "cli" / "nybble"
        self.command = [str(command)] if command.is_file() else None

    def claim(self, what, holds, detail=""):
        self.claims.append(dict(claim=what, holds=bool(holds), detail=str(detail)))
        print(f"{'ok' if holds else 'NO':3s} {what}{'' if holds else f': {detail}'}", flush=True)

    def run(self, arguments, table=None):
        """A process, with NYBBLE_TUNE when there is a table: (exit code, standard output, standard error)."""
        environment = {key: value for key, value in os.environ.items() if key != "NYBBLE_TUNE"}
        environment.setdefault("NYBBLE_PYTHON", sys.executable)
        if table:
            environment["NYBBLE_TUNE"] = str(table)
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
        self.number += 1
        text = f"$ {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}exit {done.returncode}\n"
        (self.out / f"tune-check-{self.number}.log").write_text(text)
        return done.returncode, done.stdout, done.stderr

    def nybble(self, *arguments, table=None):
        command = self.command or [sys.executable, "-m", f"nybble.{arguments[0]}"]
        return self.run([*command, *(arguments if self.command else arguments[1:]), *self.rounds], table)

    def bench(self, shapes, tokens, table=None):
        """(rows of the JSON, what was printed)."""
        file = self.out / "bench.json"
        code, text, errors = self.nybble(
            "bench", "linear", "--shapes", shapes, "--m", tokens, "--json", str(file), table=table
        )
        self.claim(f"bench linear {shapes} ends with 0{' under a table' if table else ''}", code == 0, errors[-300:])
        return json.loads(file.read_text()), text

    def probe(self, table=None):
        code, text, errors = self.run([sys.executable, __file__, "--probe"], table)
        return json.loads(text) if code == 0 else {"error": errors[-400:]}

    def tuned(self, shapes, tokens, name):
        """`nybble tune`, and `bench linear` under its table: every auto is the table's, every plan has its hash."""
        table = self.out / name
        code, text, errors = self.nybble("tune", "--shapes", shapes, "--m", tokens, "--out", str(table))
        self.claim(f"tune {shapes} ends with 0", code == 0, errors[-300:])
        entries = json.loads(table.read_text())["entries"]
        digest = text.split("hash ")[1][:16]
        after, _ = self.bench(shapes, tokens, table)

        def path(row):
            keys = ("n", "k", "direction", "dtype")
            return next(
                e["path"]
                for e in entries
                if all(e[key] == row[key] for key in keys) and e["m_min"] <= row["m"] <= e["m_max"]
            )

        wrong = [row["plan"] for row in after["rows"] if row["auto"] != path(row) or digest not in row["plan"]]
        self.claim(f"under the table of {shapes} auto takes its paths, plans print its hash", not wrong, wrong)
        unmeasured = [row["plan"] for row in after["rows"] if ", measured" not in row["plan"]]
        self.claim(f"under the table of {shapes} every plan is measured", not unmeasured, unmeasured)
        return after["device"]

    def table(self, device):
        """A table that names portable and dequant for the probe's shape, whatever is faster."""
        from nybble import tune
        from nybble.timing import Problem

        lines = [tune.entry(device, Problem(N, K, M, "forward"), M, M, "portable")]
        lines.append(tune.entry(device, Problem(N, K, M, "grad_input"), M, M, "dequant"))
        file = self.out / "other-paths.json"
        file.write_text(tune.to_text(lines))
        return file

    def bits(self, plain, device):
        table = self.table(device)
        followed, again = self.probe(table), self.probe(table)
        paths = [followed[name]["path"] for name in NAMED]
        self.claim("a table's paths are taken", paths == ["portable", "dequant"], paths)
        self.claim("a table changes bits of what it names", all(followed[n]["bits"] != plain[n]["bits"] for n in NAMED))
        errors = [case["error"] for case in (*plain.values(), *followed.values())]
        self.claim("every result is that of a dense multiply", max(errors) < 5e-3, errors)
        self.claim("the same table gives the same bits in another process", followed == again)
        same = followed["named grad_input"]["bits"] == followed["mode dequant"]["bits"]
        self.claim('where it names dequant, the bits are those of mode "dequant"', same)
        moved = [n for n in CASES if n not in NAMED and any(followed[n][k] != plain[n][k] for k in ("bits", "path"))]
        self.claim("modes, batch_invariant, float16, other tokens and shapes do not follow it", not moved, moved)


def check_covered(c):
    """Shapes that the records cover; the name of the card."""
    before = c.probe()
    rows, text = c.bench(SHAPES, TOKENS)
    unmeasured = [row["plan"] for row in rows["rows"] if ", measured" not in row["plan"]]
    c.claim("what the records cover is called measured", not unmeasured and "was not measured" not in text, unmeasured)
    device = c.tuned(SHAPES, TOKENS, "tuned.json")
    c.claim("tuning changes nothing by itself", before == c.probe() and "error" not in before, before)
    c.bits(before, device)
    missing = c.probe(c.out / "missing.json")
    c.claim("a missing table is an error that names it", "missing.json" in missing.get("error", ""), missing)


def check(out, rounds, uncovered):
    c = Check(out, rounds)
    if not uncovered:
        check_covered(c)
    rows, text = c.bench(UNCOVERED, UNCOVERED_TOKENS)
    covered = [row["plan"] for row in rows["rows"] if ", unmeasured" not in row["plan"]]
    c.claim("what no record covers is called unmeasured", not covered and "was not measured" in text, covered or text)
    device = c.tuned(UNCOVERED, UNCOVERED_TOKENS, "uncovered.json")
    held = sum(claim["holds"] for claim in c.claims)
    print(f"{held} of {len(c.claims)} hold on {device}")
    record = dict(device=device, command="nybble" if c.command else "python -m nybble.*", claims=c.claims)
    (out / "tune-check.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0 if held == len(c.claims) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--uncovered", action="store_true", help="only what no record covers")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        return probe()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return check(arguments.out.resolve(), arguments.rounds, arguments.uncovered)


if __name__ == "__main__":
    sys.exit(main())
