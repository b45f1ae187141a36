"""`flowrl launch`: writes what starts a Ray cluster on several machines, and a run on it.

A script for Slurm, a script for machines that ssh reaches, or a RayJob for KubeRay. Each cluster
asks everyone who connects for a token: the scripts make one, in a file that only its user reads,
and KubeRay makes its own. Nothing is submitted, and nothing here imports Ray.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import yaml

from flowrl.cli.files import machine_words, require_output, write_output
from flowrl.errors import ConfigError, FlowError
from flowrl.graph import Op
from flowrl.wording import counted

if TYPE_CHECKING:
    from flowrl.api import Compiled


_TEMPLATES = Path(__file__).parent / "templates"
_PORT = 6379
_JOIN_S = 300.0
_RETRY_S = 2.0
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._:-]*")
_RAY = "2.60.0"
"""The version of Ray in the image, for KubeRay; tokens need 2.52."""
_RESOURCES = {"cuda": "GPU", "npu": "NPU"}
_MOST_NAME = 47
"""Characters of a RayJob's name, by KubeRay's own check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of the command line; `flowrl.cli.app` describes each."""

    slurm: bool = False
    hosts: Path | None = None
    kuberay: bool = False
    image: str | None = None
    claim: str | None = None
    cluster: str | None = None
    output: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a plan needs, and what is started on it.

    Attributes:
        name: Name of the run.
        words: The words after `flowrl run`.
        folder: The folder in which it is started.
        num_nodes: Machines.
        num_cpus: CPUs of each.
        accelerators: Accelerators of each.
        kind: `cuda` or `npu`; empty without accelerators.
    """

    name: str
    words: Sequence[str]
    folder: Path
    num_nodes: int
    num_cpus: int
    accelerators: int = 0
    kind: str = ""


class _Text(Template):
    """A text with `@{NAME}`, because shells have their own `$`."""

    delimiter = "@"


def run(config: Path, overrides: Sequence[str], options: LaunchOptions) -> None:
    """Writes the script or RayJob of a configuration's plan, and says how to submit it.

    Raises:
        FlowError: The configuration or an option is wrong, or there are too few hosts.
    """
    from flowrl import api

    _check(options)
    if options.output is not None:
        require_output(options.output)
    planned = [*overrides, *machine_words(options.cluster, ()), "executor=ray"]
    compiled = api.compile(None, config, overrides=planned, runs=False)
    words = [word for word in overrides if not word.startswith(("executor=", "cluster="))]
    needs = _needs(compiled, config, words)
    if any(stage.plan.schedule is not None for stage in compiled.stages):
        print(
            "warning: the executor does not run plans over many devices: the run takes one device "
            "for the models that it trains, and one for each engine (roles.ROLE.num_engines)",
            file=sys.stderr,
        )
    file = options.output or Path("FILE")
    bin_folder = Path(sys.executable).parent
    if options.hosts is not None:
        hosts = _hosts_in(options.hosts)
        text, how = hosts_script(needs, hosts, bin_folder), f"on {hosts[0]}: bash {file}"
    elif options.slurm:
        text, how = slurm_script(needs, bin_folder), f"sbatch --partition=NAME --time=TIME {file}"
    else:
        text = ray_job(needs, str(options.image), str(options.claim))
        how = f"kubectl create -f {file}"
    if options.output is None:
        print(text, end="")
    else:
        write_output(options.output, text)
    parts = [counted(needs.num_nodes, "node"), f"{counted(needs.num_cpus, 'CPU')} each"]
    if needs.kind:
        parts.append(f"{counted(needs.accelerators, _RESOURCES[needs.kind])} each")
    print(f"the plan needs {', '.join(parts)}; to submit it, {how}", file=sys.stderr)


def _check(options: LaunchOptions) -> None:
    kinds = [options.slurm, options.hosts is not None, options.kuberay]
    if sum(kinds) != 1:
        raise ConfigError(
            "`flowrl launch` writes one of three kinds of files",
            where="command line",
            found=f"{sum(kinds)} of --slurm, --hosts FILE and --kuberay",
            expected="one of them",
            hint="flowrl launch CONFIG --slurm",
        )
    given = {"--image": options.image, "--claim": options.claim}
    wrong = [name for name, value in given.items() if bool(value) != options.kuberay]
    if wrong:
        what = "needs" if options.kuberay else "is not there, which alone takes"
        raise ConfigError(
            f"--kuberay {what} {' and '.join(wrong)}",
            where="command line",
            expected="an image with flowrl and Ray, and the PersistentVolumeClaim that holds this "
            "folder",
            hint="flowrl launch CONFIG --kuberay --image IMAGE --claim CLAIM",
        )


def _needs(compiled: Compiled, config: Path, words: Sequence[str]) -> Needs:
    """Returns what the plans of all stages need.

    A plan for one device needs one node, with a device for its models and one for each engine.
    CPUs are for the threads of who computes on devices, and for scorers.
    """
    from flowrl.plan.local import engines_of

    plans = [stage.plan for stage in compiled.stages]
    devices = {d for plan in plans for placement in plan.placements for d in placement.devices}
    kinds = {device.rpartition("/")[2].partition(":")[0] for device in devices} - {"cpu"}
    by_node = Counter(d.rpartition("/")[0] for d in devices if not kinds or "/cpu:" not in d)
    workers = max(by_node.values(), default=1)
    if all(plan.schedule is None for plan in plans):
        workers = 1 + max(
            sum(engines_of(plan, placement.role).processes for placement in plan.placements)
            for plan in plans
        )
    scorers = max(sum(o.replicas for o in plan.operations if o.op == Op.SCORE) for plan in plans)
    return Needs(
        name=compiled.config.name,
        words=[str(config), *words, "executor=ray", "cluster=auto"],
        folder=Path.cwd(),
        num_nodes=max(1, len(by_node)),
        num_cpus=workers * max(1, compiled.config.runtime.num_threads) + scorers,
        accelerators=workers if kinds else 0,
        kind=min(kinds, default=""),
    )


def _hosts_in(file: Path) -> list[str]:
    """Returns the hosts of a file, one a line; `#` begins a comment.

    Raises:
        ConfigError: It cannot be read, or a line is no host, or one that was there before.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the file of hosts cannot be read",
            where=f"--hosts {file}",
            found=str(error),
            hint="name a text file with one host a line",
        ) from error
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        host = line.partition("#")[0].strip()
        if host and (not _HOST.fullmatch(host) or host in hosts):
            raise ConfigError(
                "this line names no host, or one that is named before",
                where=f"{file}:{number}",
                found=repr(host),
                expected="HOST or USER@HOST, each once; the first is where the script starts",
                hint="correct the line or remove it",
            )
        hosts += [host] if host else []
    if not hosts:
        raise ConfigError(
            "the file names no host",
            where=f"--hosts {file}",
            expected="one a line",
            hint="name at least one",
        )
    return hosts


def _filled(template: str, needs: Needs, bin_folder: Path, **values: object) -> str:
    names = {
        "num_nodes": needs.num_nodes,
        "bin": shlex.quote(str(bin_folder)),
        "folder": shlex.quote(str(needs.folder)),
        "words": shlex.join(needs.words),
        **values,
    }
    for part in ("begin", "run", template):
        text = (_TEMPLATES / f"{part}.sh").read_text(encoding="utf-8")
        names[part] = _Text(text).substitute(names).rstrip("\n")
    return f"{names[template]}\n"


def hosts_script(needs: Needs, hosts: Sequence[str], bin_folder: Path) -> str:
    """Returns the script for machines that ssh reaches, of which the first starts it.

    Raises:
        ConfigError: The plan needs more machines.
    """
    if len(hosts) < needs.num_nodes:
        raise ConfigError(
            "the plan needs more machines than the file names",
            where="--hosts",
            found=counted(len(hosts), "host"),
            expected=f"at least {needs.num_nodes}",
            hint="add hosts, or plan for a smaller cluster (cluster=FILE)",
        )
    return _filled(
        "hosts",
        needs,
        bin_folder,
        machines=" ".join(hosts),
        others=shlex.join(hosts[1:]),
        num_nodes=len(hosts),
        token_folder="/tmp",
        port=_PORT,
    )


def slurm_script(needs: Needs, bin_folder: Path) -> str:
    """Returns the batch script for Slurm."""
    option = {"cuda": "--gpus-per-node=", "npu": "--gres=npu:"}.get(needs.kind)
    return _filled(
        "slurm",
        needs,
        bin_folder,
        token_folder='"$PWD"',  # which all nodes read
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", needs.name).strip("-") or "flowrl",
        num_cpus=needs.num_cpus,
        accelerators=f"#SBATCH {option}{needs.accelerators}\n" if option else "",
    )


def ray_job(needs: Needs, image: str, claim: str) -> str:
    """Returns the RayJob for KubeRay 1.5.1 or later.

    The folder of the run is that of the volume, at the same path. The operator submits the command
    itself (HTTPMode): a submitter's shell would read it a second time.
    """
    amounts: dict[str, object] = {"cpu": needs.num_cpus}
    if needs.kind:
        name = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}[needs.kind]
        amounts[name] = needs.accelerators
    pod = {
        "spec": {
            "containers": [
                {
                    "name": "ray",
                    "image": image,
                    "resources": {"limits": amounts, "requests": amounts},
                    "volumeMounts": [{"name": "work", "mountPath": str(needs.folder)}],
                }
            ],
            "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": claim}}],
        }
    }
    cluster: dict[str, object] = {
        "rayVersion": _RAY,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": pod},
    }
    if (workers := needs.num_nodes - 1) > 0:
        counts = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), workers)
        group = {"groupName": "workers", **counts, "rayStartParams": {}, "template": pod}
        cluster["workerGroupSpecs"] = [group]
    name = re.sub(r"[^a-z0-9]+", "-", needs.name.lower()).lstrip("-0123456789")
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name[:_MOST_NAME].rstrip("-") or "flowrl"},
        "spec": {
            "submissionMode": "HTTPMode",
            "entrypoint": f"cd {shlex.quote(str(needs.folder))} && "
            f"exec flowrl run {shlex.join(needs.words)}",
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": cluster,
        },
    }
    return yaml.dump(job, Dumper=_Plain, sort_keys=False, width=1000)


class _Plain(yaml.SafeDumper):
    """Writes equal parts out in full."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _wait(address: str, num_nodes: int) -> None:
    """Waits until a Ray cluster has so many nodes; what the scripts do before they start a run.

    Raises:
        FlowError: It has fewer in the end, or cannot be asked.
    """
    from flowrl.runtime.ray_pool import ask_ray

    end = time.monotonic() + _JOIN_S
    while True:
        try:
            number = sum(bool(node.get("Alive")) for node in ask_ray(address))
        except FlowError:
            number = 0
            if time.monotonic() > end:
                raise
        if number >= num_nodes:
            return
        if time.monotonic() > end:
            raise ConfigError(
                f"not all nodes have joined the Ray cluster in {_JOIN_S:g} s",
                where=address,
                found=str(number),
                expected=str(num_nodes),
                hint="what the nodes wrote is above, or in the output of the job",
            )
        time.sleep(_RETRY_S)


if __name__ == "__main__":
    try:
        _wait(sys.argv[1], int(sys.argv[2]))
    except FlowError as reason:
        sys.exit(f"error: {reason}")
