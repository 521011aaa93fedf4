"""The flag or name that was probably meant: by its spelling, or by what other programs call it."""

import difflib
import re
from collections.abc import Iterable

# Our flags, each with its value or how it differs, and what Megatron-LM, DeepSpeed, Hugging Face,
# nanoGPT, torchrun and vLLM call it, without dashes and underscores. The first of our flags that a
# command has is named.
ELSEWHERE = {
    "--gpus": "numgpus nnodes worldsize",
    "mpirun -n N": "nproc nprocpernode numgpus nnodes worldsize",
    # the mesh
    "--zero-stage": "zero zerooptimizationstage deepspeed",
    "--zero-stage 1": "usedistributedoptimizer",
    "--zero-stage 3": "fsdp",
    "--dp": "dataparallelsize",
    "--tp": "tensorparallelsize tensormodelparallelsize",
    "--pp": "pipelineparallelsize pipelinemodelparallelsize",
    "--cp": "contextparallelsize",
    "--ep": "expertparallelsize expertmodelparallelsize enableexpertparallel",
    "--etp": "experttensorparallelsize",
    "--context-parallel": "cpcommtype",
    "--virtual-stages (how many a rank has)": "numlayerspervirtualpipelinestage",
    "--virtual-stages": "numvirtualstagesperpipelinerank",
    # the model
    "--layers": "numlayers nlayer numhiddenlayers",
    "--hidden": "hiddensize nembd dmodel",
    "--heads": "numattentionheads nhead numqueryheads",
    "--kv-heads": "numquerygroups numkeyvalueheads",
    "--ffn": "ffnhiddensize intermediatesize",
    "--seq-len": "seqlength sequencelength blocksize maxlength maxseqlength maxmodellen "
    "maxpositionembeddings npositions",
    "--vocab-size": "paddedvocabsize",
    "--experts": "numexperts numlocalexperts",
    "--top-k": "moeroutertopk numexpertspertok",
    "--aux-loss": "moeauxlosscoeff",
    "--capacity-factor": "moeexpertcapacityfactor",
    "--init-from": "modelnameorpath initmodel",
    "--from": "modelnameorpath",
    "--model": "modelnameorpath",
    # the batch
    "--global-batch (the samples of all ranks)": "batchsize trainbatchsize perdevicetrainbatchsize",
    "--global-batch": "globalbatchsize",
    "--microbatch": "microbatchsize trainmicrobatchsizepergpu",
    "--microbatches (how many, not how large)": "microbatchsize trainmicrobatchsizepergpu",
    "--microbatches": "numberofmicrobatches gradientaccumulationsteps gradaccumsteps",
    "--batch": "batchsize globalbatchsize trainbatchsize perdevicetrainbatchsize microbatchsize "
    "trainmicrobatchsizepergpu",
    "--data": "datapath dataset trainfile",
    "--pack": "resetpositionids resetattentionmask eodmaskloss packing samplepacking",
    # the optimizer
    "--lr": "learningrate",
    "--steps": "trainiters maxiters iterations numiterations maxsteps epochs numtrainepochs",
    "--repeat": "numiterations",
    "--lr-schedule": "lrdecaystyle lrschedulertype",
    "--lr-schedule cosine": "decaylr",
    "--warmup-steps": "lrwarmupiters warmupiters warmup",
    "--betas": "beta1 beta2 adambeta1 adambeta2",
    "--eps": "adamepsilon adameps",
    "--clip-grad": "gradclip maxgradnorm gradientclipping",
    "--dropout": "hiddendropout attentiondropout",
    # precision and memory
    "--dtype bf16": "bf16 mixedprecision",
    "--precision bf16": "bf16 mixedprecision",
    "--dtype fp16": "fp16",
    "--precision fp16": "fp16",
    "--dtype fp32": "fp32",
    "--dtype fp64": "fp64",
    "--dtype": "torchdtype",
    "--precision": "torchdtype",
    "--reduce-dtype": "gradreducedtype",
    "--recompute full": "gradientcheckpointing activationcheckpointing recomputeactivations",
    "--recompute": "recomputegranularity",
    "--attention blockwise": "useflashattn flashattention",
    "--attention flash": "useflashattn flashattention",
    "--attention": "attnimplementation",
    # files
    "--resume": "load ckptpath resumefromcheckpoint",
    "--save": "outputdir outdir output",
    "--out": "outputdir outdir output",
    "--json": "output",
    "--save-every": "saveinterval savesteps",
    "--eval-every": "evalinterval evalsteps",
    "--trace": "profile",
    "--tokens": "maxnewtokens maxtokens",
}


def letters(name: str) -> str:
    """Return a name without case and punctuation, which do not count where names are compared."""
    return re.sub(r"[\W_]", "", name).lower()


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return the choice that is spelled most like `name`, or "".

    Case and punctuation do not count.
    """
    spelled = {letters(choice): choice for choice in choices}
    close = difflib.get_close_matches(letters(name), spelled, cutoff=0.7)  # the most alike first
    return spelled[close[0]] if close else ""


def suggest_flag(flag: str, known: Iterable[str]) -> str:
    """Return which of a command's flags an unknown one means, by its meaning elsewhere or its spelling, or ""."""
    known = list(known)
    for ours, theirs in ELSEWHERE.items():
        if letters(flag) in theirs.split() and ours.split()[0] in [*known, "mpirun"]:
            return ours
    return suggest(flag, known)


def did_you_mean(suggestion: str) -> str:
    """Return "; did you mean ...?", or "" if there is no suggestion."""
    return f"; did you mean {suggestion}?" if suggestion else ""
