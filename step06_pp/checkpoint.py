"""Weights in and out: drawn from (seed, name), or read from a Hugging Face checkpoint, or written as one."""
import contextlib
import hashlib
import json
import os
import re
import shutil

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from config import local_folder, refuse, to_hugging_face
from model import Llama
from parts import my_part, whole_shape
from pipeline_parallel import whole

SHARD_BYTES = 5 * 10**9                                   # a file of a checkpoint holds at most this much
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def materialize(model, config, args):
    """Turns a model on the meta device into a real one, parameter by parameter."""
    saved = open_checkpoint(args.init_from) if args.init_from else None
    weight_of, source = (initial_weight, config) if saved is None else (read_weight, saved)
    for name, meta in list(model.named_parameters()):
        weight = weight_of(name, meta, source, args)
        param = nn.Parameter(weight.to(args.device, args.dtype, copy=True))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, param)
        param.placement = meta.placement
        if args.zero:
            meta.unit.add(param)


def initial_weight(name, meta, config, args):
    """Depends on the seed and the name (and on the kind of device), so it does not matter who else draws."""
    if meta.dim() == 1:
        return torch.ones(meta.shape)                     # the norms
    seed = int.from_bytes(hashlib.sha256(f"{args.seed} {name}".encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator(args.device).manual_seed(seed)
    whole = torch.randn(whole_shape(meta), generator=generator, device=args.device) * config.initializer_range
    return whole[my_part(meta)]


def open_checkpoint(name):
    """{tensor name: the open file that has it}"""
    folder = local_folder("--init_from", name)
    try:
        files = files_of(folder)
        opened = [safe_open(os.path.join(folder, file), framework="pt") for file in files]
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        refuse(f"--init_from {name}: damaged, or a file is missing ({error})")
    if not files:
        refuse(f"--init_from {name}: no .safetensors file there")
    saved = {key: file for file in opened for key in file.keys()}
    if "lm_head.weight" not in saved and "model.embed_tokens.weight" in saved:
        if os.environ.get("RANK", "0") == "0":
            print(f"{name} ties the head to the embedding; they start equal here and are trained apart",
                  flush=True)
        saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    return saved


def files_of(folder):
    """Of a model, though others lie beside it: the one file, or those of its index; without either all."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.isfile(os.path.join(folder, "model.safetensors")):
        return ["model.safetensors"]
    if os.path.isfile(index):
        with open(index) as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    return sorted(file for file in os.listdir(folder) if file.endswith(".safetensors"))


def read_weight(name, meta, saved, args):
    if name not in saved:
        refuse(f"--init_from {args.init_from}: has no {name}; is it a checkpoint of --model {args.model}?")
    stored = name if name in saved[name].keys() else "model.embed_tokens.weight"   # tied
    weight = saved[name].get_slice(stored)                # nothing is read yet
    if weight.get_dtype() not in ("F64", "F32", "BF16", "F16"):
        refuse(f"--init_from {args.init_from}: {name} is {weight.get_dtype()}: quantized weights are unknown")
    if weight.get_shape() != whole_shape(meta):
        refuse(f"--init_from {args.init_from}: {name} is {weight.get_shape()}, "
               f"--model {args.model} has {whole_shape(meta)}")
    return weight[my_part(meta)]


def save_checkpoint(model, config, mesh, args):
    """config.json and model.safetensors, in several files if it is large; one tensor in memory at a time."""
    with torch.device("meta"):
        params = dict(Llama(config).named_parameters())
    shapes = {name: param.shape for name, param in params.items()}
    files = split_into_files(shapes, args.dtype.itemsize)
    with replacing(args.save) if dist.get_rank() == 0 else contextlib.nullcontext() as folder:
        for file, names in files.items():
            with create(folder, file) as out:
                tensors = {name: shapes[name] for name in names}
                out.write(header(tensors, args.dtype))
                for name in names:
                    weight = whole(model, name, shapes[name], mesh, args)
                    if not weight.isfinite().all():
                        refuse(f"--save {args.save}: {name} is not finite, nothing saved", status=3)
                    out.write(weight.cpu().contiguous().view(torch.uint8).numpy().data)
        with create(folder, "config.json") as out:
            out.write(json.dumps(to_hugging_face(config, args.dtype), indent=2).encode())
        if len(files) > 1:
            elements = sum(shape.numel() for shape in shapes.values())
            index = {"metadata": {"total_size": elements * args.dtype.itemsize},
                     "weight_map": {name: file for file, names in files.items() for name in names}}
            with create(folder, "model.safetensors.index.json") as out:
                out.write(json.dumps(index, indent=2).encode())


@contextlib.contextmanager
def replacing(folder):
    """A new folder, for a model to be written. When it is whole it takes the place of the one in `folder`."""
    new = os.path.join(folder, ".new_model")
    try:
        shutil.rmtree(new + ".tmp", ignore_errors=True)   # these two of a run that was killed
        put_in_place(new, folder)
        os.makedirs(new + ".tmp")
        yield new + ".tmp"
        os.sync()                                         # on the disk before the old one goes
        os.rename(new + ".tmp", new)                      # from now on this one is read (local_folder)
        put_in_place(new, folder)
    except OSError as error:
        refuse(f"--save {folder}: {error}; the model that was there is not lost")
    finally:
        shutil.rmtree(new + ".tmp", ignore_errors=True)


def put_in_place(new, folder):
    """File by file, with all of them in `new` to the end. Files of others stay."""
    names, link = os.listdir(new) if os.path.isdir(new) else [], os.path.join(folder, ".new_model.link")
    for name in filter(WEIGHTS.fullmatch, set(os.listdir(folder)) - set(names) if names else ()):
        os.remove(os.path.join(folder, name))             # of the old model
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            os.remove(link)
        try:
            os.link(os.path.join(new, name), link)
        except OSError:                                   # not every file system has links
            shutil.copyfile(os.path.join(new, name), link)
        os.replace(link, os.path.join(folder, name))
    if names:
        os.rename(new, new + ".tmp")                      # half deleted it must not look whole
        shutil.rmtree(new + ".tmp")


def create(folder, file):
    return open(os.path.join(folder, file) if dist.get_rank() == 0 else os.devnull, "wb")


def split_into_files(shapes, itemsize):
    groups, size = [[]], 0
    for name, shape in shapes.items():
        size += shape.numel() * itemsize
        if size > SHARD_BYTES and groups[-1]:
            groups.append([])
            size = shape.numel() * itemsize
        groups[-1].append(name)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def header(shapes, dtype):
    """A safetensors file: the length of the header, the header (JSON), then the bytes of the tensors."""
    code = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}[dtype]
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = at + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
