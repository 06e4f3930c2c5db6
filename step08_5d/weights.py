"""Create the initial weights, from the seed or a Hugging Face checkpoint, and save such a checkpoint."""
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from config import FAMILIES, to_hugging_face
from messages import RANK, fail, print0
from model import Llama
from pipeline_parallel import gather_from_pipeline
from shards import global_shape, local_slices
from zero import add_to_unit


def materialize(model, config, args):
    """Replace the meta-device parameters with real ones, one at a time."""
    saved = open_weights(args.init_from) if args.init_from else None
    for name, meta in list(model.named_parameters()):
        weights = [read_weight(*tensor, saved, args) if args.init_from
                   else initial_weight(*tensor, config, args)
                   for tensor in to_hf_tensors(name, meta, config)]
        weight = torch.stack(weights) if ".experts." in name else weights[0]
        # copy: memory of its own, not a part of a larger tensor or of a mapped file
        param = nn.Parameter(weight.to(args.device, args.dtype, copy=True))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, param)
        param.placement = meta.placement
        if args.zero:
            add_to_unit(param, meta.unit)


def initial_weight(name, meta, config, args):
    """Draw a weight from the seed and the parameter's name alone, so every layout starts from the same model.

    (A CPU and a GPU draw different numbers.)
    """
    if meta.dim() == 1:
        return torch.ones(meta.shape)                     # the norms
    seed = int.from_bytes(hashlib.sha256(f"{args.seed} {name}".encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator(args.device).manual_seed(seed)
    whole = torch.randn(global_shape(meta), generator=generator, device=args.device)
    return whole[local_slices(meta)] * config.initializer_range


def open_weights(name):
    """Return {tensor name: the open file that holds it}."""
    try:
        folder = name if os.path.isdir(name) else snapshot_download(name, allow_patterns=["model*.safe*"])
        index, names = os.path.join(folder, "model.safetensors.index.json"), ["model.safetensors"]
        if os.path.isfile(index):
            with open(index) as file:
                names = sorted(set(json.load(file)["weight_map"].values()))
        files = [safe_open(os.path.join(folder, name), framework="pt") for name in names]
    except Exception as error:
        fail(f"--init_from {name}: not found or corrupt ({error})")
    saved = {key: file for file in files for key in file.keys()}
    if "lm_head.weight" not in saved and "model.embed_tokens.weight" in saved:
        print0(f"--init_from {name}: has no lm_head.weight; the head starts as a copy of the embedding")
        saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    return saved


def read_weight(name, meta, saved, args):
    if name not in saved:
        fail(f"--init_from {args.init_from}: no tensor {name}; is this a checkpoint of --model {args.model}?")
    stored = name if name in saved[name].keys() else "model.embed_tokens.weight"   # a tied head
    weight = saved[name].get_slice(stored)                # reads nothing yet
    if weight.get_shape() != global_shape(meta) or weight.get_dtype() not in ("F64", "F32", "BF16", "F16"):
        fail(f"--init_from {args.init_from}: {name} is {weight.get_dtype()} {weight.get_shape()}; "
             f"--model {args.model} needs floating-point numbers of shape {global_shape(meta)}")
    return weight[local_slices(meta)]


def to_hf_tensors(name, param, config):
    """Return a parameter's tensors in a checkpoint: a list of (name, tensor), one per expert it holds."""
    for part, hf_part in FAMILIES[config.family].renamed.items():
        name = name.replace(part, hf_part)
    if ".experts." not in name:
        return [(name, param)]
    placement = getattr(param, "placement", None)         # save_model passes whole tensors without one
    first = sum(shard.index * len(param) for shard in placement.shards) if placement else 0
    tensors = []
    for i, expert in enumerate(param.unbind(), start=first):
        expert.placement = placement and dataclasses.replace(placement, shards=[])
        tensors.append((name.replace(".experts.", f".experts.{i}."), expert))
    return tensors


def save_model(model, config, mesh, args):
    """Write a Hugging Face checkpoint in files of at most 5 GB, holding one of them in memory at a time."""
    with torch.device("meta"):
        params = {name: param.to(args.dtype) for name, param in Llama(config).named_parameters()}
    split = split_torch_state_dict_into_shards(params)
    unfinished = os.path.realpath(args.save) + ".unfinished"
    if RANK == 0:
        shutil.rmtree(unfinished, ignore_errors=True)     # a killed run may have left it
        os.makedirs(unfinished)
    for file, names in split.filename_to_tensors.items():
        weights = {}
        for name in names:
            weight = gather_from_pipeline(model, name, params[name].shape, mesh, args)
            if RANK == 0:
                weights.update(to_hf_tensors(name, weight.cpu(), config))
        if RANK > 0:
            continue
        save_file(weights, os.path.join(unfinished, file), {"format": "pt"})
    if RANK > 0:
        return
    to_hugging_face(config, args.dtype).save_pretrained(unfinished)
    for file in split.filename_to_tensors:                # save_file lets only its owner read the file
        with contextlib.suppress(OSError):
            shutil.copymode(os.path.join(unfinished, "config.json"), os.path.join(unfinished, file))
    if split.is_sharded:
        with open(os.path.join(unfinished, "model.safetensors.index.json"), "w") as file:
            weight_map = {hf_name: file for name, file in split.tensor_to_filename.items()
                          for hf_name, _ in to_hf_tensors(name, params[name], config)}
            json.dump({"metadata": split.metadata, "weight_map": weight_map}, file)
    os.sync()                                             # force all files to disk before the rename
    os.rename(unfinished, os.path.realpath(args.save))    # replaces the empty directory, all at once
    os.sync()
    with contextlib.suppress(OSError):
        os.remove(os.path.realpath(args.save) + ".lock")  # resume.py has locked it
