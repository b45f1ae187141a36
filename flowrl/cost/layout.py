"""How one model is divided over devices.

`tp` (tensor) divides every layer, `pp` (pipeline) the layers among stages, `cp` (context) each
sequence; together they make one replica. `dp` (data) is the number of replicas, which divide the
batch. `ep` (expert) divides the routed experts of a layer; it uses the devices that the others
have, so it adds none.

Experts where `tp` and `ep` meet: a layer's experts are divided over `expert_shards = max(tp, ep)`
devices. With `ep` below `tp`, each of the `ep` sets of experts is divided over `tp / ep` devices
(SGLang and vLLM: `moe_tp x moe_ep = tp`); with `ep` from `tp` upwards, experts are whole (Megatron
with an expert tensor size of 1). So one of the two must divide the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A parallel layout; the product of tp, pp, cp and dp is the number of devices.

        >>> Layout(tp=2, pp=2, dp=4).num_devices
        16

    Raises:
        PlanError: a size below 1, or an `ep` that the other sizes do not hold.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.cp, self.ep) < 1:
            raise PlanError(
                "every size of a layout is at least 1",
                found=self.describe(),
                where="layout",
                expected="whole numbers from 1",
                hint="leave a size out to have it at 1",
            )
        if self.ep == 1:
            return
        if (self.tp * self.cp * self.dp) % self.ep:
            raise PlanError(
                f"ep={self.ep} does not divide the {self.tp * self.cp * self.dp} devices of a "
                "pipeline stage (tp x cp x dp)",
                found=self.describe(),
                where="layout",
                hint="take an ep that divides tp x cp x dp",
            )
        if self.ep % self.tp and self.tp % self.ep:
            raise PlanError(
                f"of tp={self.tp} and ep={self.ep}, neither divides the other",
                found=self.describe(),
                expected="each expert on one device, or divided over tp / ep of them",
                where="layout",
                hint="take an ep that divides tp, or that tp divides",
            )

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def model_devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def server_replicas(self) -> int:
        """Replicas of an inference server: those over which its experts are divided."""
        return max(1, self.ep // self.tp)

    @property
    def server_devices(self) -> int:
        """Devices of an inference server."""
        return self.model_devices * self.server_replicas

    @property
    def shards(self) -> int:
        """Devices that hold the same part of the model: what ZeRO and FSDP divide over."""
        return self.cp * self.dp

    @property
    def expert_shards(self) -> int:
        """Devices over which the routed experts of a layer are divided."""
        return max(self.tp, self.ep)

    @property
    def expert_replicas(self) -> int:
        """Devices that hold the same part of the routed experts."""
        return max(1, self.tp * self.cp * self.dp // max(self.tp, self.ep))

    def describe(self) -> str:
        """`tp 2, pp 2, dp 4`, without sizes of 1; `one device`."""
        sizes = (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep))
        parts = [f"{name} {size}" for name, size in (*sizes, ("dp", self.dp)) if size != 1]
        return ", ".join(parts) or "one device"


ONE_DEVICE = Layout()
"""Nothing is divided."""
