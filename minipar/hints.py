"""The flag or name that was probably meant: by its spelling, or by what other programs call it."""

import difflib
import re
from collections.abc import Iterable

# Flags of Megatron-LM, DeepSpeed, Hugging Face, nanoGPT, torchrun and vLLM, without dashes and
# underscores, and ours. Of several flags of ours the first that the command has is named. What
# follows a flag is its value, or how it differs.
FOREIGN = {
    "zero": ("--zero-stage",),
    "zerooptimizationstage": ("--zero-stage",),
    "usedistributedoptimizer": ("--zero-stage 1",),
    "fsdp": ("--zero-stage 3",),
    "deepspeed": ("--zero-stage",),
    "nproc": ("mpirun -n N",),
    "nprocpernode": ("mpirun -n N",),
    "numgpus": ("--gpus", "mpirun -n N"),
    "nnodes": ("--gpus", "mpirun -n N"),
    "worldsize": ("--gpus", "mpirun -n N"),
    # the mesh
    "dataparallelsize": ("--dp",),
    "tensorparallelsize": ("--tp",),
    "tensormodelparallelsize": ("--tp",),
    "pipelineparallelsize": ("--pp",),
    "pipelinemodelparallelsize": ("--pp",),
    "contextparallelsize": ("--cp",),
    "expertparallelsize": ("--ep",),
    "expertmodelparallelsize": ("--ep",),
    "enableexpertparallel": ("--ep",),
    "cpcommtype": ("--context-parallel",),
    "numlayerspervirtualpipelinestage": ("--virtual-stages (how many a rank has)",),
    "numvirtualstagesperpipelinerank": ("--virtual-stages",),
    # the model
    "numlayers": ("--layers",),
    "nlayer": ("--layers",),
    "numhiddenlayers": ("--layers",),
    "hiddensize": ("--hidden",),
    "nembd": ("--hidden",),
    "dmodel": ("--hidden",),
    "numattentionheads": ("--heads",),
    "nhead": ("--heads",),
    "numqueryheads": ("--heads",),
    "numquerygroups": ("--kv-heads",),
    "numkeyvalueheads": ("--kv-heads",),
    "ffnhiddensize": ("--ffn",),
    "intermediatesize": ("--ffn",),
    "seqlength": ("--seq-len",),
    "sequencelength": ("--seq-len",),
    "blocksize": ("--seq-len",),
    "maxlength": ("--seq-len",),
    "maxseqlength": ("--seq-len",),
    "maxmodellen": ("--seq-len",),
    "maxpositionembeddings": ("--seq-len",),
    "npositions": ("--seq-len",),
    "paddedvocabsize": ("--vocab-size",),
    "numexperts": ("--experts",),
    "numlocalexperts": ("--experts",),
    "moeroutertopk": ("--top-k",),
    "numexpertspertok": ("--top-k",),
    "moeauxlosscoeff": ("--aux-loss",),
    "moeexpertcapacityfactor": ("--capacity-factor",),
    "modelnameorpath": ("--init-from", "--from", "--model"),
    "initmodel": ("--init-from",),
    # the batch
    "batchsize": ("--global-batch (the samples of all ranks)", "--batch"),
    "globalbatchsize": ("--global-batch", "--batch"),
    "trainbatchsize": ("--global-batch (the samples of all ranks)", "--batch"),
    "perdevicetrainbatchsize": ("--global-batch (the samples of all ranks)", "--batch"),
    "microbatchsize": ("--microbatch", "--microbatches (how many, not how large)", "--batch"),
    "trainmicrobatchsizepergpu": ("--microbatch", "--microbatches (how many, not how large)", "--batch"),
    "numberofmicrobatches": ("--microbatches",),
    "gradientaccumulationsteps": ("--microbatches",),
    "gradaccumsteps": ("--microbatches",),
    "datapath": ("--data",),
    "dataset": ("--data",),
    "trainfile": ("--data",),
    # the optimizer
    "learningrate": ("--lr",),
    "trainiters": ("--steps",),
    "maxiters": ("--steps",),
    "iterations": ("--steps",),
    "numiterations": ("--steps", "--repeat"),
    "maxsteps": ("--steps",),
    "epochs": ("--steps",),
    "numtrainepochs": ("--steps",),
    "lrdecaystyle": ("--lr-schedule",),
    "lrschedulertype": ("--lr-schedule",),
    "decaylr": ("--lr-schedule cosine",),
    "lrwarmupiters": ("--warmup-steps",),
    "warmupiters": ("--warmup-steps",),
    "warmup": ("--warmup-steps",),
    "beta1": ("--betas",),
    "beta2": ("--betas",),
    "adambeta1": ("--betas",),
    "adambeta2": ("--betas",),
    "adamepsilon": ("--eps",),
    "adameps": ("--eps",),
    "gradclip": ("--clip-grad",),
    "maxgradnorm": ("--clip-grad",),
    "gradientclipping": ("--clip-grad",),
    "hiddendropout": ("--dropout",),
    "attentiondropout": ("--dropout",),
    # precision and memory
    "bf16": ("--dtype bf16", "--precision bf16"),
    "fp16": ("--dtype fp16", "--precision fp16"),
    "fp32": ("--dtype fp32",),
    "fp64": ("--dtype fp64",),
    "mixedprecision": ("--dtype bf16", "--precision bf16"),
    "torchdtype": ("--dtype", "--precision"),
    "gradreducedtype": ("--reduce-dtype",),
    "gradientcheckpointing": ("--recompute full",),
    "activationcheckpointing": ("--recompute full",),
    "recomputeactivations": ("--recompute full",),
    "recomputegranularity": ("--recompute",),
    "useflashattn": ("--attention blockwise", "--attention flash"),
    "flashattention": ("--attention blockwise", "--attention flash"),
    "attnimplementation": ("--attention",),
    # files
    "load": ("--resume",),
    "ckptpath": ("--resume",),
    "resumefromcheckpoint": ("--resume",),
    "outputdir": ("--save", "--out"),
    "outdir": ("--save", "--out"),
    "output": ("--save", "--out", "--json"),
    "saveinterval": ("--save-every",),
    "savesteps": ("--save-every",),
    "evalinterval": ("--eval-every",),
    "evalsteps": ("--eval-every",),
    "profile": ("--trace",),
    "maxnewtokens": ("--tokens",),
    "maxtokens": ("--tokens",),
}


def letters(name: str) -> str:
    """Return a name without case and punctuation, which do not count where names are compared."""
    return re.sub(r"[\W_]", "", name).lower()


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is spelled most like `name`, or "".

    Case and punctuation do not count.
    """
    spelled = {letters(choice): choice for choice in choices}
    close = difflib.get_close_matches(letters(name), spelled, n=1, cutoff=0.7)
    return spelled[close[0]] if close else ""


def suggest_flag(flag: str, known: Iterable[str]) -> str:
    """Return which of a command's flags an unknown one means, by its meaning elsewhere or its spelling, or ""."""
    known = list(known)
    for ours in FOREIGN.get(letters(flag), ()):
        name = re.split(r"[^\w-]", ours, maxsplit=1)[0]
        if not ours.startswith("--") or name in known:
            return ours
    return suggest(flag, known)


def did_you_mean(suggestion: str) -> str:
    """Return "; did you mean ...?", or "" if there is no suggestion."""
    return f"; did you mean {suggestion}?" if suggestion else ""
