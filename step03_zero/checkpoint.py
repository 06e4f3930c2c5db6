"""Weights in and out: drawn from (seed, name), or read from a Hugging Face checkpoint, or written as one."""
import hashlib
import json
import os
import re
import shutil
import time

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from config import to_hugging_face
from messages import RANK, fail, print0
from model import Llama
from zero import unsharded_param

MODEL_FILES = re.compile(r"(generation_)?config\.json|model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def materialize(model, config, args):
    """Turns a model on the meta device into a real one, parameter by parameter."""
    saved = open_checkpoint(args.init_from) if args.init_from else None
    for name, meta in list(model.named_parameters()):
        weight = read_weight(name, meta, saved, args) if saved else initial_weight(name, meta, config, args)
        param = nn.Parameter(weight.to(args.device, args.dtype, copy=True))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, param)
        param.placement = meta.placement
        if args.zero:
            meta.unit.add_to_unit(param)


def initial_weight(name, meta, config, args):
    """Depends on the seed and the name (and on the kind of device), so it does not matter who else draws."""
    if meta.dim() == 1:
        return torch.ones(meta.shape)                     # the norms
    seed = int.from_bytes(hashlib.sha256(f"{args.seed} {name}".encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator(args.device).manual_seed(seed)
    return torch.randn(meta.shape, generator=generator, device=args.device) * config.initializer_range


def open_checkpoint(name):
    """{tensor name: the open file that has it}"""
    try:
        folder = name if os.path.isdir(name) else snapshot_download(name, allow_patterns=["model*.safe*"])
        index, names = os.path.join(folder, "model.safetensors.index.json"), ["model.safetensors"]
        if os.path.isfile(index):
            with open(index) as file:
                names = sorted(set(json.load(file)["weight_map"].values()))
        files = [safe_open(os.path.join(folder, name), framework="pt") for name in names]
    except Exception as error:
        fail(f"--init_from {name}: not to be had, or damaged ({error})")
    saved = {key: file for file in files for key in file.keys()}
    if "lm_head.weight" not in saved and "model.embed_tokens.weight" in saved:
        print0(f"{name} ties the head to the embedding; they start equal here and are trained apart")
        saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    return saved


def read_weight(name, meta, saved, args):
    if name not in saved:
        fail(f"--init_from {args.init_from}: has no {name}; is it a checkpoint of --model {args.model}?")
    stored = name if name in saved[name].keys() else "model.embed_tokens.weight"   # tied
    weight = saved[name].get_slice(stored)                # nothing is read yet
    if weight.get_shape() != list(meta.shape) or weight.get_dtype() not in ("F64", "F32", "BF16", "F16"):
        fail(f"--init_from {args.init_from}: {name} is {weight.get_dtype()} {weight.get_shape()}, "
               f"--model {args.model} has numbers of {list(meta.shape)}")
    return weight[:]


def save_checkpoint(model, config, args):
    """A Hugging Face checkpoint in files of at most 5 GB, one of which is in memory at a time."""
    with torch.device("meta"):
        params = {name: param.to(args.dtype) for name, param in Llama(config).named_parameters()}
    split = split_torch_state_dict_into_shards(params)
    if RANK == 0:                                         # one process writes; every one has a part to give
        new = os.path.realpath(args.save) + f".saving-{time.time_ns()}"
        os.mkdir(new)
    for file, names in split.filename_to_tensors.items():
        weights = {}
        for name in names:
            weight = unsharded_param(model.get_parameter(name))
            if RANK == 0:
                weights[name] = weight.cpu()
        if RANK == 0:
            save_file(weights, os.path.join(new, file), {"format": "pt"})
    if RANK > 0:
        return
    to_hugging_face(config, args.dtype).save_pretrained(new)
    if split.is_sharded:
        with open(os.path.join(new, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": split.metadata, "weight_map": split.tensor_to_filename}, file)
    replace_directory(new, os.path.realpath(args.save))


def replace_directory(new, folder):
    """Until here the model that was there is whole. Files that are no model's stay."""
    old = new + "-before"
    for name in os.listdir(new):
        os.chmod(os.path.join(new, name), 0o644)          # safetensors leaves them to their owner alone
    try:
        if os.path.isdir(folder):
            os.rename(folder, old)
        os.rename(new, folder)
    except OSError as error:                              # another run was faster, or it is a mount point
        fail(f"--save {folder}: {error}; the model is in {new}, what was there in {old}")
    for name in os.listdir(old) if os.path.isdir(old) else []:
        if not MODEL_FILES.fullmatch(name):
            os.rename(os.path.join(old, name), os.path.join(folder, name))
    shutil.rmtree(old, ignore_errors=True)
