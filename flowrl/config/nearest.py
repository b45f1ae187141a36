"""Names that other trainers have for the keys and values of a configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["key_hint", "meant_word", "word_hint"]

_KEY_SYNONYMS: Mapping[str, str] = {
    "train.optimizer.learning_rate": "lr actorlr stepsize",
    "train.prompts_per_step (prompts; each has train.group_size samples)": (
        "batchsize trainbatchsize globalbatchsize rolloutbatchsize numprompts"
    ),
    "train.mini_batches (their number in a step, not their size)": (
        "minibatchsize ppominibatchsize numminibatches"
    ),
    "train.micro_batch": (
        "gradientaccumulationsteps microbatchsize ppomicrobatchsize perdevicetrainbatchsize"
    ),
    "train.group_size": ("n numgenerations numsamples nsamplesperprompt samplesperprompt rolloutn"),
    "train.steps": (
        "epochs numepochs numtrainepochs totalepochs iterations numiterations maxsteps numsteps "
        "totalsteps trainingsteps"
    ),
    "train.sampling.max_tokens": (
        "maxnewtokens maxcompletionlength maxresponselength responselength"
    ),
    "train.sampling.temperature": "temp",
    "train.optimizer.beta1": "adambeta1",
    "train.optimizer.beta2": "adambeta2",
    "train.optimizer.beta1 and train.optimizer.beta2": "betas",
    "train.optimizer.eps": "adameps adamepsilon",
    "train.optimizer.weight_decay": "wd",
    "train.optimizer.max_grad_norm": "clipgrad gradclip gradclipping gradientclip maxnorm",
    "train.optimizer.warmup_updates": "warmup warmupsteps lrwarmupsteps",
    "train.optimizer.schedule": "scheduler lrscheduler lrschedulertype",
    "train.optimizer.final_fraction (of the learning rate)": "minlr",
    "train.optimizer.final_fraction": "minlrratio",
    "train.max_staleness": "staleness maxoffpolicyness",
    "algorithm.clip_low and algorithm.clip_high": "clip cliprange clipratio epsclip epsilon",
    "algorithm.clip_low": "clipratiolow epsilonlow",
    "algorithm.clip_high": "clipratiohigh epsilonhigh",
    "algorithm.aggregation": "lossaggmode",
    "algorithm.aggregation (the loss itself is the workflow's)": "losstype",
    "workflow (an algorithm is a program: workflow=rloo)": "advestimator advantageestimator",
    "args.kl (an argument of the workflow)": "beta klbeta klcoef klcoeff initklcoef kllosscoef",
    "args.gamma (an argument of the workflow)": "gamma",
    "args.lam (an argument of the workflow)": "gaelambda",
    "roles.actor.model": "modelname modelnameorpath modelpath pretrained",
    "rewards.terms": "rewardfn rewardfunction",
    "data.max_prompt_tokens": "maxpromptlength",
    "data.train": "dataset trainfiles traindata",
    "data.eval": "valfiles evaldata",
    "eval.every": "evalfreq evalinterval evalsteps testfreq",
    "runtime.checkpoint_every": "saveevery savefreq savesteps",
    "runtime.runs": "outputdir logdir savedir",
    "seed": "randomseed",
    "name": "experimentname runname",
    "cluster": "gpus numgpus ngpuspernode nnodes",
}
"""Keys here, and their names in other trainers in lower case, without `_` and `-`."""

_CALLED = {name: key for key, names in _KEY_SYNONYMS.items() for name in names.split()}


def key_hint(section: Sequence[str], name: str, allowed: Collection[str]) -> str | None:
    """Returns the hint for another trainer's name of a key; None for a name that is none.

    Args:
        section: The section that the key was written in: `("train",)`.
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


_WORD_SYNONYMS: Mapping[str, str] = {
    "cuda": "gpu nvidia",
    "npu": "ascend",
    "network": "infiniband ib roce rocev2 rdma ethernet eth net nic efa slingshot",
    "nvlink": "nvswitch nvl",
    "pcie": "pciexpress pci",
    "temporal": "colocated colocate",
    "spatial": "disaggregated separated",
}
"""Choices of cluster files and plans, and other words for them: lower case, letters and digits."""

_NEXT_BEST: Sequence[tuple[str, str, str]] = (
    ("ampere", "ada adalovelace lovelace", "take ampere, whose kernels Ada runs"),
    ("ampere", "ascend", "take ampere, which Ascend is priced by"),
    ("hopper", "blackwell", "take hopper, which Blackwell for data centres is priced by"),
    (
        "ampere",
        "volta turing",
        "take ampere, the earlier of the generations that were calibrated",
    ),
    ("auto", "hybrid", "take auto, which gives hybrid plans where they are the best"),
)
"""Choices, words that none of the choices means but that this one serves, and the hint."""


def meant_word(word: str, choices: Collection[str]) -> str | None:
    """Returns the choice that a word is a synonym of; None for a word that is none.

    >>> meant_word("InfiniBand", ("nvlink", "network"))
    'network'
    """
    plain = _plain(word)
    matches = (choice for choice, words in _WORD_SYNONYMS.items() if plain in words.split())
    return next((choice for choice in matches if choice in choices), None)


def word_hint(word: str, choices: Collection[str]) -> str | None:
    """Returns the hint for a word that is no choice, where a choice serves its purpose."""
    plain = _plain(word)
    hints = (
        hint for choice, words, hint in _NEXT_BEST if choice in choices and plain in words.split()
    )
    return next(hints, None)


def _plain(word: str) -> str:
    """Returns the word in lower case, its letters and digits alone."""
    return "".join(letter for letter in word.lower() if letter.isalnum())
