"""Names that papers, other libraries and vendors have for what flowrl has under another name.

The topics are modules of programs (`fl.loss`), attributes of data and of roles in programs
(`handle`, `role`), the arguments of a function (`generate()`), and the keys and the values of a
configuration (`key`, `value`).
"""

from __future__ import annotations

from collections.abc import Mapping

SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "fl": {
        "fl.Policy": (
            "actor agent generator lm llm model policymodel ref reference referencepolicy student "
            "teacher"
        ),
        # fl.data is a package of flowrl.
        "fl.Prompts (or fl.Examples, fl.Pairs)": "dataset",
        "fl.Examples": "demonstrations",
        "fl.Environment": "env",
        "fl.workflow": "flow",
        "fl.Reward": "grader judge scorer rewardfn rewardfunction verifier",
        "fl.Pairs": "preferences",
        "fl.Prompts": "problems questions tasks",
        "fl.Rollout": "responses",
        "fl.RewardModel": "rm",
        "fl.run": "train",
        "fl.Critic": "valuemodel value",
        "fl.where(prompts, row=..., equals=...)": "partition route split subset",
        "fl.concat(a, b)": "cat join merge mix union",
        # Families of functions.
        "fl.advantage": "advantages",
        "fl.filter": "filters",
        "fl.loss": "losses",
        # Operations of roles.
        "actor.generate(prompts), an operation of a role": "generate sample",
        "reward.score(rollout), an operation of a role": "score",
        "reference.logprobs(rollout), an operation of a role": "logprobs",
        "critic.values(rollout), an operation of a role": "values",
        "actor.update(rollout, rewards), an operation of a role": "update",
        "reference.sync(actor), an operation of a role": "sync",
    },
    "fl.loss": {
        "fl.loss.cross_entropy()": "bc ce nll sft",
        "fl.loss.policy_clip(0.2)": "clip grpo policyloss ppo ppoclip",
        "fl.loss.policy_clip(0.2, 0.28)": "cliphigher dapo",
        'fl.loss.policy_clip(0.2, aggregation="constant")': "drgrpo",
        "fl.loss.mask_outside(...), as correction= of a loss": "icepop",
        "fl.loss.truncate(2.0), as correction= of a loss": "importancesampling tis",
        'fl.loss.dpo(0.1, form="ipo")': "ipo",
        "kl=fl.kl.k3(0.001) of the update": "kl",
        "fl.loss.value_clip(0.2)": "mse valueloss",
        "fl.loss.reinforce()": "pg policygradient vanilla",
        "fl.loss.bradley_terry()": "ranking rewardmodel rm",
    },
    "fl.kl": {
        "fl.kl.kl_abs(...)": "abs",
        "fl.kl.k3(coefficient, target=...)": "adaptive",
        "fl.kl.full(...)": "exact",
        "fl.kl.k1(...)": "kl",
        "fl.kl.k3(...)": "lowvar lowvarkl",
        "fl.kl.k2(...)": "mse",
    },
    "fl.advantage": {
        'fl.advantage.group_relative(scores, std="none")': "drgrpo",
        "fl.advantage.normalise_then_sum(...)": "gdpo",
        "fl.advantage.group_in_group(...)": "gigpo",
        "fl.advantage.group_relative(scores)": "grpo groupnorm",
        "fl.advantage.max_rl(scores)": "maxrl",
        "fl.advantage.distill(...)": "opd",
        "fl.advantage.length_weighted(scores, rollout)": "opo",
        "fl.advantage.optimal_token_baseline(scores, rollout, policy=...)": "otb",
        "fl.advantage.gae(scores, values, rollout)": "ppo",
        "fl.advantage.reinforce_pp(scores, rollout)": "reinforce reinforceplusplus",
        "fl.advantage.leave_one_out(scores)": "rloo",
    },
    "fl.filter": {
        "fl.filter.difficulty(...)": "curriculum solverate",
        "fl.filter.zero_variance(rollout, scores)": "dapo dynamic dynamicsampling zerostd",
        "fl.select.threshold(rollout, scores, at_least=...)": "threshold",
    },
    "fl.select": {
        "fl.select.threshold(rollout, scores, at_least=...)": (
            "above atleast correct raft rejection rejectionsampling"
        ),
        "fl.select.top(rollout, scores, k=1)": "best bestofn",
        "fl.select.best_and_worst(rollout, scores)": "pairs preferences",
    },
    "fl.shaping": {
        "fl.shaping.cosine_length(...)": "cosine",
        "fl.shaping.soft_overlong(...)": "overlong",
    },
    "fl.cut": {
        "fl.cut.at(tokens)": "after fixed length position token tokens",
        "fl.cut.least_likely(), which cuts before the most surprising token": (
            "entropy highentropy maxentropy surprising uncertain"
        ),
        "fl.cut.share(share)": "fraction proportion ratio",
    },
    "fl.grammar": {"fl.grammar.json_schema(...)": "json schema"},
    "handle": {
        "logprobs = reference.logprobs(rollout); the engine's go along with the rollout": (
            "logprob logprobs"
        ),
        "scores = reward.score(rollout)": "reward rewards score scores",
        "advantages = fl.advantage.group_relative(scores)": "advantage advantages",
        "advantages, returns = fl.advantage.gae(scores, values, rollout)": "returns gae",
        "values = critic.values(rollout), or .value for data with executor=eager": "values",
        "rollout, scores = fl.filter.zero_variance(rollout, scores)": "filter drop",
        "rollout, scores = fl.select.top(rollout, scores, k=1)": "best select sort topk",
    },
    "role": {
        "generate": "act rollout sample complete",
        "logprobs": "forward logprob logits",
        "score": "compute evaluate grade judge rate reward verify",
        "sync": "copy copyfrom load refresh setweights",
        "update": "backward fit learn optimize step train",
        "values": "baseline predict",
    },
    "Sampling() generate() interact()": {
        "temperature": "t temp",
        "temperature=0, which takes the likeliest token": "dosample greedy",
        "max_tokens": (
            "maxlength maxnewtokens maxcompletionlength maxresponselength maxgenerationlength"
        ),
        "seed=... in the config": "seed",
    },
    "Sampling() generate()": {
        "min_tokens": "minlength minnewtokens",
        "stop": "stopsequences stopstrings stopwords",
    },
    "generate() interact()": {
        "n": "numgenerations numreturnsequences numsamples groupsize rollouts samples",
        'grammar=fl.grammar.regex("...")': "regex guidedregex",
        "grammar=fl.grammar.json_schema({...})": "json schema jsonschema",
    },
    "prompts_of()": {
        "actor.generate(fl.prompts_of(...), n=4)": (
            "n numgenerations numreturnsequences numsamples groupsize rollouts samples"
        ),
        "cut": "at cutat position",
        "template": "format prompt text",
    },
    "interact()": {"environment": "env", "max_turns": "turns"},
    "update()": {
        "advantages": "adv weights",
        "kl=fl.kl.k3(0.001)": "beta klcoef klcoefficient",
        "loss=fl.loss.policy_clip(0.2)": "clip epsilon cliprange",
        "old": "oldlogprobs logprobs behaviour",
        "reference": "ref reflogprobs referencelogprobs",
        "rewards": "score scores reward",
        "every": "interval frequency period",
        "train.mini_batches in the config": "minibatches",
        "train.mini_batches in the config, or a loop: for _ in range(3): role = role.update(...)": (
            "epochs steps numupdates"
        ),
        "reference.sync(actor, decay=0.99) for an average of the actor's weights": (
            "decay ema polyak tau"
        ),
        "train.optimizer.learning_rate in the config, or roles.NAME.optimizer for one role": (
            "lr learningrate"
        ),
    },
    "score()": {
        "prm: fl.RewardModel in the parameters: a model scores each token or step": (
            "per separator pertoken perstep"
        ),
    },
    "sync()": {"decay": "ema polyak", "every": "interval steps frequency period"},
    "weighted_sum()": {
        "each weight next to its scores: fl.weighted_sum((accuracy, 1.0), (style, 0.2))": (
            "weight weights coefficients"
        ),
    },
    "difficulty()": {
        "high": "max upper atmost below maximum",
        "low": "min lower atleast above minimum",
    },
    "zero_variance()": {"tolerance": "eps epsilon threshold tol"},
    "group_relative()": {
        "eps": "epsilon delta",
        "std": "normalise normalize scale scalerewards",
    },
    "gae()": {
        "gamma": "discount discountfactor",
        "lam": "lambda lamda lmbda lambd gaelambda",
    },
    "soft_overlong()": {
        "buffer": "cache bufferlen margin",
        "factor": "penalty weight",
        "max_tokens": "maxlength maxresponselength maxlen",
    },
    "top() random()": {"k": "n num number count"},
    "policy_clip() gspo() luspo() gmpo()": {
        "aggregation": "lossaggmode losstype reduction",
        "clip_high": "epshigh epsilonhigh clipratiohigh",
        "clip_low": "clip cliprange clipratio epsclip eps epsilon epslow epsilonlow clipratiolow",
        "entropy": "entropycoef entropycoefficient entropycoeff",
        "kl=fl.kl.k3(0.001) of the update": "beta kl klcoef klcoefficient",
    },
    "value_clip()": {"clip": "epsilon eps cliprange cliprangevalue"},
    "k1() k2() k3() kl_abs() full()": {"coefficient": "beta coef klcoef weight"},
    "dpo()": {"beta": "coefficient tau"},
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
        "train.steps": "iterations numiterations maxsteps numsteps totalsteps trainingsteps",
        "train.epochs": "epochs numepochs numtrainepochs totalepochs",
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
"""By topic and by name here, other names for it as their lower-case letters and digits."""


def meanings(topic: str, name: str) -> list[str]:
    """Returns what another library's name is called here; nothing for an unknown name.

    >>> meanings("value", "InfiniBand"), meanings("interact()", "max_new_tokens")
    (['network'], ['max_tokens'])
    """
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    tables = (table for topics, table in SYNONYMS.items() if topic in topics.split())
    return [meant for table in tables for meant, names in table.items() if plain in names.split()]
