"""What other trainers call the keys of a config: `lr`, `batch_size`, `num_generations`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["called_here", "how_to_get", "meant_word"]

_RATE = "train.optimizer.learning_rate"
_PROMPTS = "train.prompts_per_step (prompts; each has train.group_size samples)"
_MINI = "train.mini_batches (their number in a step, not their size)"
_MICRO = "train.micro_batch"
_GROUP = "train.group_size"
_STEPS = "train.steps"
_TOKENS = "train.sampling.max_tokens"
_NORM = "train.optimizer.max_grad_norm"
_WARMUP = "train.optimizer.warmup_updates"
_SCHEDULE = "train.optimizer.schedule"
_CLIP = "algorithm.clip_low and algorithm.clip_high"
_KL = "args.kl (an argument of the workflow)"
_MODEL = "roles.actor.model"

_CALLED: Mapping[str, str] = {
    "lr": _RATE,
    "actorlr": _RATE,
    "stepsize": _RATE,
    "batchsize": _PROMPTS,
    "trainbatchsize": _PROMPTS,
    "globalbatchsize": _PROMPTS,
    "rolloutbatchsize": _PROMPTS,
    "numprompts": _PROMPTS,
    "minibatchsize": _MINI,
    "ppominibatchsize": _MINI,
    "numminibatches": _MINI,
    "gradientaccumulationsteps": _MICRO,
    "microbatchsize": _MICRO,
    "ppomicrobatchsize": _MICRO,
    "perdevicetrainbatchsize": _MICRO,
    "n": _GROUP,
    "numgenerations": _GROUP,
    "numsamples": _GROUP,
    "nsamplesperprompt": _GROUP,
    "samplesperprompt": _GROUP,
    "rolloutn": _GROUP,
    "epochs": _STEPS,
    "numepochs": _STEPS,
    "numtrainepochs": _STEPS,
    "totalepochs": _STEPS,
    "iterations": _STEPS,
    "numiterations": _STEPS,
    "maxsteps": _STEPS,
    "numsteps": _STEPS,
    "totalsteps": _STEPS,
    "trainingsteps": _STEPS,
    "maxnewtokens": _TOKENS,
    "maxcompletionlength": _TOKENS,
    "maxresponselength": _TOKENS,
    "responselength": _TOKENS,
    "temp": "train.sampling.temperature",
    "maxpromptlength": "data.max_prompt_tokens",
    "adambeta1": "train.optimizer.beta1",
    "adambeta2": "train.optimizer.beta2",
    "betas": "train.optimizer.beta1 and train.optimizer.beta2",
    "adameps": "train.optimizer.eps",
    "adamepsilon": "train.optimizer.eps",
    "wd": "train.optimizer.weight_decay",
    "clipgrad": _NORM,
    "gradclip": _NORM,
    "gradclipping": _NORM,
    "gradientclip": _NORM,
    "maxnorm": _NORM,
    "warmup": _WARMUP,
    "warmupsteps": _WARMUP,
    "lrwarmupsteps": _WARMUP,
    "scheduler": _SCHEDULE,
    "lrscheduler": _SCHEDULE,
    "lrschedulertype": _SCHEDULE,
    "minlr": "train.optimizer.final_fraction (of the learning rate)",
    "minlrratio": "train.optimizer.final_fraction",
    "clip": _CLIP,
    "cliprange": _CLIP,
    "clipratio": _CLIP,
    "epsclip": _CLIP,
    "epsilon": _CLIP,
    "clipratiolow": "algorithm.clip_low",
    "epsilonlow": "algorithm.clip_low",
    "clipratiohigh": "algorithm.clip_high",
    "epsilonhigh": "algorithm.clip_high",
    "lossaggmode": "algorithm.aggregation",
    "losstype": "algorithm.aggregation (the loss itself is the workflow's)",
    "advestimator": "workflow (an algorithm is a program: workflow=rloo)",
    "advantageestimator": "workflow (an algorithm is a program: workflow=rloo)",
    "beta": _KL,
    "klbeta": _KL,
    "klcoef": _KL,
    "klcoeff": _KL,
    "initklcoef": _KL,
    "kllosscoef": _KL,
    "gamma": "args.gamma (an argument of the workflow)",
    "gaelambda": "args.lam (an argument of the workflow)",
    "modelname": _MODEL,
    "modelnameorpath": _MODEL,
    "modelpath": _MODEL,
    "pretrained": _MODEL,
    "staleness": "train.max_staleness",
    "maxoffpolicyness": "train.max_staleness",
    "rewardfn": "rewards.terms",
    "rewardfunction": "rewards.terms",
    "dataset": "data.train",
    "trainfiles": "data.train",
    "traindata": "data.train",
    "valfiles": "data.eval",
    "evaldata": "data.eval",
    "evalfreq": "eval.every",
    "evalinterval": "eval.every",
    "evalsteps": "eval.every",
    "testfreq": "eval.every",
    "saveevery": "runtime.checkpoint_every",
    "savefreq": "runtime.checkpoint_every",
    "savesteps": "runtime.checkpoint_every",
    "outputdir": "runtime.runs",
    "logdir": "runtime.runs",
    "savedir": "runtime.runs",
    "randomseed": "seed",
    "experimentname": "name",
    "runname": "name",
    "gpus": "cluster",
    "numgpus": "cluster",
    "ngpuspernode": "cluster",
    "nnodes": "cluster",
}
"""Keys of other trainers without capitals and `_`, and what they are here."""


def called_here(section: Sequence[str], name: str, allowed: Collection[str]) -> str | None:
    """What a key is called in these configs; None where nothing is known of it.

    Args:
        section: Where it was written: `("train",)`.
        allowed: The keys of that section.
    """
    meant = _CALLED.get(name.lower().replace("_", "").replace("-", ""))
    if meant is None:
        return None
    key, _, more = meant.partition(" ")
    last = key.rpartition(".")[2]
    # A role's own optimizer has the keys of `train.optimizer`.
    here = ".".join([*section, last]) if last in allowed else key
    return f"it is called {here}{' ' + more if more else ''}"


_WORDS: Mapping[str, str] = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "ascend": "npu",
    "infiniband": "network",
    "ib": "network",
    "roce": "network",
    "rocev2": "network",
    "rdma": "network",
    "ethernet": "network",
    "eth": "network",
    "net": "network",
    "nic": "network",
    "efa": "network",
    "slingshot": "network",
    "nvswitch": "nvlink",
    "nvl": "nvlink",
    "pciexpress": "pcie",
    "pci": "pcie",
    "colocated": "temporal",
    "colocate": "temporal",
    "disaggregated": "spatial",
    "separated": "spatial",
}
"""Words of descriptions of machines and plans without capitals, spaces, `_` and `-`, and what they
are here."""

_FOUND_BY: Mapping[str, tuple[str, str]] = {
    "ada": ("ampere", "take ampere, whose kernels Ada runs"),
    "adalovelace": ("ampere", "take ampere, whose kernels Ada runs"),
    "lovelace": ("ampere", "take ampere, whose kernels Ada runs"),
    "ascend": ("ampere", "take ampere, which Ascend is priced by"),
    "blackwell": ("hopper", "take hopper, which Blackwell for data centres is priced by"),
    "volta": ("ampere", "take ampere, the earlier of the generations that were calibrated"),
    "turing": ("ampere", "take ampere, the earlier of the generations that were calibrated"),
    "hybrid": ("auto", "take auto, which gives hybrid plans where they are the best"),
}
"""Words that nobody can ask for, spelt as those above; the choice that may give it; what to do."""


def meant_word(word: str, choices: Collection[str]) -> str | None:
    """Which of the choices a word is another name of; None where nothing is known of it.

    >>> meant_word("InfiniBand", ("nvlink", "network"))
    'network'
    """
    meant = _WORDS.get(_plain(word))
    return meant if meant in choices else None


def how_to_get(word: str, choices: Collection[str]) -> str | None:
    """What to do about a word that nobody can ask for, where one of the choices may give it."""
    choice, how = _FOUND_BY.get(_plain(word), ("", ""))
    return how if choice in choices else None


def _plain(word: str) -> str:
    """In lower case, of letters and digits alone."""
    return "".join(letter for letter in word.lower() if letter.isalnum())
