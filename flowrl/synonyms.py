"""Names that other trainers and vendors have for the keys and values of a configuration."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SYNONYMS", "meanings"]

SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "key": {
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
        "train.group_size": (
            "n numgenerations numsamples nsamplesperprompt samplesperprompt rolloutn"
        ),
        "train.steps": (
            "epochs numepochs numtrainepochs totalepochs iterations numiterations maxsteps "
            "numsteps totalsteps trainingsteps"
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
    },
    "value": {
        "cuda": "gpu nvidia",
        "npu": "ascend",
        "network": "infiniband ib roce rocev2 rdma ethernet eth net nic efa slingshot",
        "nvlink": "nvswitch nvl",
        "pcie": "pciexpress pci",
        "temporal": "colocated colocate",
        "spatial": "disaggregated separated",
        # After a comma: why a choice serves for a word that means none of them.
        "ampere, whose kernels Ada runs": "ada adalovelace lovelace",
        "ampere, which Ascend is priced by": "ascend",
        "hopper, which Blackwell for data centres is priced by": "blackwell",
        "ampere, the earlier of the generations that were calibrated": "volta turing",
        "auto, which gives hybrid plans where they are the best": "hybrid",
    },
}
"""Names here, and other names for them as their lower-case letters and digits, by topic."""


def meanings(topic: str, name: str) -> list[str]:
    """Returns what a name of another library is called here; nothing for an unknown name.

    >>> meanings("value", "InfiniBand")
    ['network']
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return [meant for meant, names in SYNONYMS[topic].items() if plain in names.split()]
