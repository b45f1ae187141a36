"""What `flowrl profile` prints."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.sim.costs import HostCost, LinearCost
from flowrl.sim.profile import EngineProfile, OpProfile, Profile
from flowrl.sim.report import seconds_text
from flowrl.sim.sharing import Beside
from flowrl.wording import percent


def profile_text(profile: Profile) -> str:
    """A profile for people, as plain lines."""
    machine = profile.machine
    lines = [
        f"profile of {profile.name}",
        f"  on {', '.join(machine.devices) or 'devices that it does not name'}, "
        f"{machine.num_cores} cores, load {machine.load[0]:g} before and {machine.load[1]:g} after",
    ]
    if machine.was_busy:
        lines.append(
            "  the machine was busy: measure again when it is quiet, or times are too long"
        )
    for engine in profile.engines:
        lines += ["", *_engine(engine)]
    ops = [(f"{op.role}.{op.op}", op.cost, op.fit) for op in profile.ops]
    if ops:
        width = max(len(name) for name, _, _ in ops)
        lines += ["", "on whole batches"]
        lines += [f"  {name:<{width}}  {_cost(cost)}{_fit(fit)}" for name, cost, fit in ops]
        for op in profile.ops:
            if op.beside != Beside() or not op.beside_told:
                lines.append(f"  {op.role}.{op.op} with a busy driver: {_beside(op)}")
    if profile.scorers:
        lines += ["", "rewards"]
        lines += [
            f"  {s.role}: {seconds_text(s.times.sample_s)} a sample, "
            f"{seconds_text(s.times.latency_s)} latency"
            for s in profile.scorers
        ]
    for one in profile.environments:
        lines.append(
            f"  {one.role}: {seconds_text(one.times.call_s)} a call, "
            f"{seconds_text(one.times.wait_s)} of waiting"
        )
    for switch in profile.switches:
        seconds = seconds_text(switch.seconds)
        lines.append(f"  {switch.role} {switch.action}s its {switch.what}: {seconds}")
    host = profile.host
    lines += ["", f"driver: {_driver(host)} a sample"]
    if profile.host_apart is not None:
        lines.append(f"  of engines in processes of their own: {_driver(profile.host_apart)}")
    lines.append(
        f"trainer besides its operations: {seconds_text(host.step_s)} a step, "
        f"{seconds_text(host.row_s)} a sample"
    )
    return "\n".join(lines) + "\n"


def _driver(host: HostCost) -> str:
    parts = ((host.offer_s, "to offer"), (host.sample_s, "to take"), (host.answer_s, "to score"))
    return ", ".join(f"{seconds_text(seconds)} {what}" for seconds, what in parts)


def _engine(engine: EngineProfile) -> Iterator[str]:
    yield f"{engine.role}: seconds of a decode step, by rows and tokens of a row"
    contexts = sorted({point.context for point in engine.decode})
    yield "  rows" + "".join(f"{context:>12,.0f}" for context in contexts)
    for batch in sorted({point.batch for point in engine.decode}):
        found = {p.context: p.seconds for p in engine.decode if p.batch == batch}
        cells = (seconds_text(found[c]) if c in found else "-" for c in contexts)
        yield f"  {batch:>4}" + "".join(f"{cell:>12}" for cell in cells)
    prefill = engine.prefill
    yield (
        f"  prefill: {seconds_text(prefill.call_s)} + {seconds_text(prefill.row_s)} a row "
        f"+ {seconds_text(prefill.token_s)} a token"
    )
    apart = engine.apart
    if apart.call_s or apart.row_s:
        yield (
            f"  in a process of its own: {seconds_text(apart.call_s)} + "
            f"{seconds_text(apart.row_s)} a row more"
        )


def _cost(cost: LinearCost) -> str:
    parts = (
        (cost.call_s, "a call"),
        (cost.pass_s, "a micro-batch"),
        (cost.row_s, "a row"),
        (cost.token_s, "a token"),
        (cost.distinct_s, "a distinct token"),
    )
    return " + ".join(f"{seconds_text(s)} {what}" for s, what in parts if s) or "nothing"


def _beside(op: OpProfile) -> str:
    if not op.beside_told:
        return (
            "could not be measured, for other processes used the cores; it counts as stopped "
            "while the driver works"
        )
    return (
        f"takes {seconds_text(op.beside.loses)} longer for each second that the driver works "
        f"meanwhile, and the driver works at {percent(op.beside.lets)} of its speed"
    )


def _fit(error: float) -> str:
    return f"  (at most {percent(error)} off what was measured)" if error else ""
