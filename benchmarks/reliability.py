"""What clients see while pods, ranks, the node, the operator and the API server fail.

Runs on a real node (kubelet, containerd, kube-proxy, in separate namespaces) with the images of this tree, the chart
and the sample SmolLM2. For each fault there is a steady load of the official openai client, with its default retries,
from inside the node's network; every second request streams. The results are the errors that the client programs saw,
the longest wait compared with a load without a fault, and the time until resource, operator and node are Ready again.
Requires root and the prerequisites of `make e2e`.

    python benchmarks/reliability.py
    python benchmarks/reliability.py --fault leader --fault link --requests 60
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from peers.command_line import positive, print_table

ROOT = Path(__file__).parent.parent
# The support modules of the tests provide a node and a release on it.
sys.path += [str(ROOT / "tests" / "cluster"), str(ROOT / "tests")]

from cluster_support import binaries  # noqa: E402
from cluster_support.errors import ClusterSupportError  # noqa: E402
from cluster_support.helm import find_helm  # noqa: E402
from cluster_support.progress import say_at_once  # noqa: E402
from node_support import requirements  # noqa: E402
from node_support.prepared import BUILT, Prepared  # noqa: E402
from node_support.stage import Stage  # noqa: E402

from chaos import faults, load, table  # noqa: E402
from chaos.site import Site  # noqa: E402
from chaos.trial import Load, Trial, ask_each, try_fault  # noqa: E402

PARIS = "The capital of France is Paris."


def run(site: Site, chosen: argparse.Namespace, folder: Path) -> int:
    """Runs all faults in order and prints the results; returns 1 for wrong or missing answers and final errors."""
    answers = ask_each(site, len(load.QUESTIONS), folder)
    if answers.get(0) != PARIS:
        raise SystemExit(f"{load.QUESTIONS[0]} {answers.get(0)!r}: the model answers incorrectly without a fault")
    steady = Load(chosen.requests, chosen.every)
    known = {fault.name: fault for fault in faults.FAULTS}
    wanted = [faults.UNDISTURBED, *(known[name] for name in chosen.fault or known)]
    baseline, *trials = [
        _tried(site, fault, steady, folder / f"{number}-{fault.name}.jsonl") for number, fault in enumerate(wanted)
    ]
    print_table(table.rows(trials, baseline, answers))
    violations = table.verdict([baseline, *trials], answers)
    for complaint in violations:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if violations else 0


def _tried(site: Site, fault: faults.Fault, steady: Load, out: Path) -> Trial:
    say_at_once(f"{fault.words} ...")
    trial = try_fault(site, fault, steady, out)
    for problems in trial.problems:
        say_at_once(f"  {problems}")
    for error in [*trial.errors, *trial.interrupted]:
        say_at_once(f"  seen: {error}: {error.message}")
    return trial


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=faults.NAMES, action="append", help="repeatable, in order; default: all")
    parser.add_argument("--requests", type=positive, default=200, help="requests per fault; default: 200")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between two requests; default: 0.25")
    parser.add_argument("--keep", type=Path, help="folder for the outcome of each request, as JSON lines")
    parser.add_argument("--replicas", type=positive, default=2, help="replica groups; default: 2")
    chosen = parser.parse_args()
    source = binaries.find(os.environ, say_at_once)
    if isinstance(source, binaries.ExternalCluster):
        parser.error(f"needs its own node, for the faults; {source} is set: unset it")
    if missing := requirements.why_not(source):
        parser.error(f"a real node is not possible here: {missing}")
    prepared = Prepared(source, os.environ, say_at_once)
    with (
        tempfile.TemporaryDirectory() as name,
        prepared.node(binaries.find_kubectl(os.environ), _made(Path(name, "node"))) as node,
    ):
        stage = Stage(node, BUILT, find_helm(os.environ, say_at_once), _made(Path(name, "stage")))
        stage.install()
        site = Site(node, node.make_namespace(), chosen.replicas)
        site.serve()
        return run(site, chosen, _made(chosen.keep or Path(name, "load")))


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterSupportError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
