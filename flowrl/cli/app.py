"""The commands of `flowrl` and their options.

Reading commands (`graph`, `plan`, `size`, `diff`, `data`, `score`, `why`, `samples`, `trace`,
`backends`, `doctor`) print to standard output, and with `--json` nothing but JSON.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.groups import backends, data, plugin
from flowrl.cli.options import Config, Debug, Json, Overrides, RunPath, config_file
from flowrl.cli.run_commands import report, samples, trace, watch
from flowrl.errors import ConfigError

app = typer.Typer(
    name="flowrl",
    help="Reinforcement-learning post-training of language models as a dataflow graph.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# Options of plans, which several commands have.
Cluster = Annotated[
    str | None, typer.Option("--cluster", metavar="FILE", help="The machines to plan for.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="WHAT=VALUE", help="Keep a decision: rollout.tp=2."),
]
GivenPlan = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", help="Take the decisions of this plan instead of making one."
    ),
]

# Options of `flowrl plan` and `flowrl size`.
Top = Annotated[
    int | None, typer.Option("--top", metavar="N", help="List the N best plans.", min=1)
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="A device of the catalogue.")
]
NodeSize = Annotated[
    int | None,
    typer.Option("--node-size", help="With --device: devices of a node.", min=1, max=1024),
]
Sweep = Annotated[
    str | None,
    typer.Option("--sweep", metavar="devices=A:B", help="Step times on several numbers of them."),
]
Routes = Annotated[
    str | None,
    typer.Option("--routes", metavar="GLOB", help="Where slices of parameters go: '*layers.0.*'."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"flowrl {version('flowrl')}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models as a dataflow graph."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turns garbage collection off for commands that answer and end.

    Their modules and plans stay until the end; looking for garbage among them would take a tenth of
    the time, and as much again when the interpreter ends.
    """
    collects = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():
                # Existing objects count as old then; as new ones they would be scanned at once.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@app.command()
@_without_collections()
def graph(
    target: Annotated[
        str,
        typer.Argument(
            metavar="WORKFLOW", help="FILE.py, FILE.py:NAME, a registered name or a config file."
        ),
    ],
    overrides: Overrides = None,
    format: Annotated[  # noqa: A002  (the option's name)
        str | None,
        typer.Option(
            "--format",
            help="tree, text, mermaid, dot, json, svg or html; default of the file's end, or tree.",
        ),
    ] = None,
    level: Annotated[str, typer.Option("--level", help="traced, lowered or placed.")] = "traced",
    print_after: Annotated[
        list[str] | None,
        typer.Option("--print-after", metavar="PASS", help="Show the graph after this pass."),
    ] = None,
    disable_pass: Annotated[
        list[str] | None,
        typer.Option("--disable-pass", metavar="PASS", help="Lower without this pass."),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="NAME", help="Of a config's stages; default the last."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write to .svg, .png, .html, .txt, .mmd, .dot or .json."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a workflow as a graph."""
    from flowrl.cli import graph as command

    options = command.GraphOptions(
        form="json" if json else format,
        level=level,
        print_after=print_after or (),
        disable_pass=disable_pass or (),
        stage=stage,
        output=output,
    )
    command.run(target, overrides or [], options)


@app.command()
@_without_collections()
def plan(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A config file, or a plan's file.")
    ],
    overrides: Overrides = None,
    cluster: Cluster = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every rejected choice and why.")
    ] = False,
    top: Top = None,
    pin: Pins = None,
    plan: GivenPlan = None,
    routes: Routes = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="NAME", help="Of a config's stages; -o: default the last."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan: .json, .yaml or .html."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a plan, or show one: devices of each role, memory, and the time of a step."""
    from flowrl.cli import plan as command

    options = command.PlanOptions(
        output=output,
        json=json,
        cluster=cluster,
        explain=explain,
        top=top,
        pin=tuple(pin or ()),
        plan=plan,
        routes=routes,
        stage=stage,
    )
    command.run(config_file(config, "plan"), overrides or [], options)


@app.command()
@_without_collections()
def size(
    config: Config,
    overrides: Overrides = None,
    cluster: Cluster = None,
    device: Device = None,
    node_size: NodeSize = None,
    sweep: Sweep = None,
    pin: Pins = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find how many devices a job needs, or what a step takes on several numbers of them."""
    from flowrl.cli import size as command

    options = command.SizeOptions(
        cluster=cluster,
        device=device,
        node_size=node_size,
        sweep=sweep,
        pin=tuple(pin or ()),
        json=json,
    )
    command.run(config_file(config, "size"), overrides or [], options)


@app.command()
@_without_collections()
def diff(
    before: Annotated[
        str,
        typer.Argument(metavar="A", help="A config, plan, graph's JSON, workflow or run."),
    ],
    after: Annotated[str, typer.Argument(metavar="B", help="What A is compared with.")],
    overrides: Overrides = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="KIND", help="configs, graphs, plans or runs; default by content."
        ),
    ] = None,
    level: Annotated[
        str | None, typer.Option("--level", help="Of graphs: traced (default), lowered or placed.")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="NAME", help="Graphs of this stage; default the last."),
    ] = None,
    cluster: Cluster = None,
    pin: Pins = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw two runs: a page, .html.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what differs between two configs, graphs, plans or runs."""
    from flowrl.cli import diff as command

    options = command.DiffOptions(
        kind=kind,
        level=level,
        stage=stage,
        cluster=cluster,
        pin=tuple(pin or ()),
        output=output,
        json=json,
    )
    command.run(before, after, overrides or [], options)


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A config file.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with a run folder.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --resume: go on with files that changed since the run began.",
        ),
    ] = False,
    plan: GivenPlan = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all that can be known, and open nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run a config, or go on with a run that was stopped."""
    from flowrl.cli import run as command

    if dry_run and resume is not None:
        raise ConfigError(
            "--dry-run checks a run that has not begun",
            where="command line",
            found=f"--resume {resume}",
            hint="leave one of them out",
        )
    if dry_run:
        command.dry_run(config_file(config, "run"), overrides or [], plan)
    elif resume is not None:
        words = ([str(config)] if config is not None else []) + (overrides or [])
        command.resume(resume, words, plan, accept_changes=accept_changes)
    elif accept_changes:
        raise ConfigError(
            "--accept-changes belongs to a run that is resumed",
            where="command line",
            hint="add --resume RUN, or leave --accept-changes out",
        )
    else:
        command.run(config_file(config, "run"), overrides or [], plan)


@app.command()
def launch(
    config: Config,
    overrides: Overrides = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script for Slurm.")] = False,
    hosts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a script for machines that ssh reaches, one a line."
        ),
    ] = None,
    kuberay: Annotated[
        bool, typer.Option("--kuberay", help="Write a RayJob; it needs --image and --claim.")
    ] = False,
    image: Annotated[str | None, typer.Option(help="An image with flowrl and Ray.")] = None,
    claim: Annotated[
        str | None, typer.Option(help="The PersistentVolumeClaim that holds this folder.")
    ] = None,
    cluster: Cluster = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write what starts a Ray cluster and a run on it: on Slurm, over ssh or on Kubernetes."""
    from flowrl.cli import launch as command

    options = command.LaunchOptions(
        slurm=slurm,
        hosts=hosts,
        kuberay=kuberay,
        image=image,
        claim=claim,
        cluster=cluster,
        output=output,
    )
    command.run(config_file(config, "launch"), overrides or [], options)


@app.command("eval")
def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_OR_RUN", help="A model's folder, or a run folder.")
    ],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="Held-out sets and rewards; a run has its own."),
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a model on held-out data: the means of its scores, with standard errors."""
    from flowrl.cli import evaluate as command

    if config is not None and "=" in config.name and not config.exists():
        overrides, config = [str(config), *(overrides or [])], None
    command.run(model, config, overrides or [], as_json=json)


@app.command()
def simulate(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps to simulate.", min=1)] = 20,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            help="constant:N, lognormal:mean=N,sigma=X, a file of lengths, or a run folder.",
        ),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option("--faults", metavar="FILE", help="Faults to simulate.")
    ] = None,
    engines: Annotated[
        int | None, typer.Option("--engines", help="Engines in place of the plan's.", min=1)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Times that `flowrl profile` measured."),
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="A stage but the last.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Where the trace goes.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--against", metavar="RUN", help="A run to compare with the prediction."),
    ] = None,
    cluster: Cluster = None,
    pin: Pins = None,
    plan: GivenPlan = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the last steps: a page, .html.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a plan on a virtual clock: step time, throughput, idle devices, staleness."""
    from flowrl.cli import simulate as command

    options = command.SimulateOptions(
        steps=steps,
        faults=faults,
        lengths=lengths,
        engines=engines,
        profile=profile,
        stage=stage,
        trace=trace,
        against=against,
        cluster=cluster,
        pin=tuple(pin or ()),
        plan=plan,
        output=output,
        json=json,
    )
    command.run(config_file(config, "simulate"), overrides or [], options)


@app.command()
def profile(
    config: Config,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profile here.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure on this machine what `flowrl simulate` needs to know."""
    from flowrl.cli import profile as command

    command.run(config_file(config, "profile"), overrides or [], output, as_json=json)


@app.command("import-config")
def import_config(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A shell script or YAML of the framework.")
    ],
    framework: Annotated[
        str | None,
        typer.Option("--from", help="verl, slime, mindspeed_rl or mindrlhf; default by content."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the config here, not to standard output."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Turn a configuration of verl, slime, MindSpeed-RL or MindRLHF into a config."""
    from flowrl.cli import import_config as command

    command.run(file, framework, output, as_json=json)


@app.command()
def why(
    run: RunPath,
    sample: Annotated[
        str, typer.Argument(metavar="SAMPLE", help="EPOCH/PROMPT/MEMBER; a group's: EPOCH/PROMPT.")
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what happened to one sample of a run, or to those of a group."""
    from flowrl.cli import why as command

    command.run(run, sample, as_json=json)


app.command()(samples)
app.command()(trace)
app.command()(report)
app.command()(watch)


@app.command()
@_without_collections()
def status(
    run: Annotated[
        Path, typer.Argument(metavar="[RUN]", help="A run folder, or a folder of runs.")
    ] = Path("runs"),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a run does now, who waits for whom, or how it ended; of a folder, all its runs."""
    from flowrl.files import encode_json
    from flowrl.observe.run_folder import runs_in
    from flowrl.observe.run_status import list_reports, report_of

    if reports := [report_of(each) for each in runs_in(run)]:
        several = encode_json([report.to_json() for report in reports])
        print(several if json else list_reports(reports), end="" if json else "\n")
    else:
        report = report_of(run)
        print(encode_json(report.to_json()) if json else report, end="" if json else "\n")


@app.command()
def scale(
    run: RunPath,
    target: Annotated[
        str, typer.Argument(metavar="ROLE.generate=+N", help="Or =-N to leave, or =N in all.")
    ],
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds to wait for the run.", min=1.0)
    ] = 120.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Have engines join or leave a run that goes on."""
    from dataclasses import asdict

    from flowrl.files import encode_json
    from flowrl.observe.scale_requests import ask_to_scale, read_target

    answer = ask_to_scale(run, read_target(target), timeout)
    if json:
        print(encode_json(asdict(answer)), end="")
    else:
        print(answer.text, file=sys.stdout if answer.done else sys.stderr)
    raise typer.Exit(0 if answer.done else 2)


@app.command()
def score(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Completions, one a row.")],
    reward: Annotated[
        str, typer.Option("--reward", metavar="NAME", help="gsm8k, mine.py:score, {use: ...}.")
    ],
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="NAME", help="Show where this one differs.")
    ] = None,
    response: Annotated[
        str | None, typer.Option("--response", metavar="FIELD", help="The completion's field.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option("--answer", metavar="FIELD", help="The reference answer's field.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="FIELD", help="The prompt's field.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", help="Seconds a score may take.", min=0.001)
    ] = 10.0,
    num: Annotated[int, typer.Option("--num", help="Differences that are shown.", min=0)] = 10,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Score a file of completions, and show where two rewards differ."""
    from flowrl.cli import score as command

    fields = command.Fields(response=response, answer=answer, prompt=prompt)
    command.run(file, reward, compare, fields, timeout_s=timeout_s, num=num, as_json=json)


app.add_typer(data, name="data")
app.add_typer(backends, name="backends")
app.add_typer(plugin, name="plugin")


@app.command()
def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check each node of the Ray cluster at RAY_ADDRESS.")
    ] = False,
    runs: Annotated[
        Path, typer.Option(help="The folder of runs (runtime.runs), which all nodes share.")
    ] = Path("runs"),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine, or each node of a Ray cluster, and say what to do."""
    from flowrl.cli import doctor as command

    raise typer.Exit(command.run(json, cluster, runs))
