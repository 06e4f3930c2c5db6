"""Create the initial weights, from the seed or a Hugging Face checkpoint, and save such a checkpoint."""
import contextlib
import hashlib
import json
import os
import shutil

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from config import to_hugging_face
from messages import RANK, fail, print0
from model import Llama
from zero import add_to_unit, unsharded_param


def materialize(model, config, args):
    """Replace the meta-device parameters with real ones, one at a time."""
    saved = open_weights(args.init_from) if args.init_from else None
    for name, meta in list(model.named_parameters()):
        weight = (read_weight(name, meta, saved, args) if args.init_from
                  else initial_weight(name, meta, config, args))
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
    return torch.randn(meta.shape, generator=generator, device=args.device) * config.initializer_range


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
    if weight.get_shape() != list(meta.shape) or weight.get_dtype() not in ("F64", "F32", "BF16", "F16"):
        fail(f"--init_from {args.init_from}: {name} is {weight.get_dtype()} {weight.get_shape()}; "
             f"--model {args.model} needs floating-point numbers of shape {list(meta.shape)}")
    return weight[:]


def save_model(model, config, args):
    """Write a Hugging Face checkpoint in files of at most 5 GB, holding one of them in memory at a time."""
    with torch.device("meta"):
        params = {name: param.to(args.dtype) for name, param in Llama(config).named_parameters()}
    split = split_torch_state_dict_into_shards(params)
    for file, names in split.filename_to_tensors.items():
        weights = {}
        for name in names:
            weight = unsharded_param(model.get_parameter(name))        # all ranks take part in gathering
            if RANK == 0:
                weights[name] = weight.cpu()
        if RANK > 0:
            continue
        save_file(weights, os.path.join(args.save, file), {"format": "pt"})
    if RANK > 0:
        return
    to_hugging_face(config, args.dtype).save_pretrained(args.save)
    for file in split.filename_to_tensors:                # save_file lets only its owner read the file
        with contextlib.suppress(OSError):
            shutil.copymode(os.path.join(args.save, "config.json"), os.path.join(args.save, file))
    if split.is_sharded:
        with open(os.path.join(args.save, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": split.metadata, "weight_map": split.tensor_to_filename}, file)
