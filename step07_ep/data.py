"""Tokens: a flat array of integers, read in order. Step t's batch depends on the array and on t alone."""
import fcntl
import functools
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from config import refuse
from context_parallel import local_positions


def load_tokens(args, vocab_size):
    if args.dataset == "builtin":
        from pydoc_data.topics import topics              # the text of Python's help(), 465,000 characters
        tokens = np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode(), dtype=np.uint8)
    elif args.dataset.endswith((".npy", ".bin")):
        tokens = open_token_file(args.dataset)
    else:
        tokens = open_token_file(tokenized(args))
    if args.dataset.endswith(".bin") and vocab_size > 2**16:
        refuse(f"--dataset {args.dataset}: a .bin has tokens below 65,536 (uint16), the model's vocabulary "
               f"is {vocab_size}; a .npy may have others")
    sequences = (len(tokens) - 1) // args.seq_len
    if sequences < 1:
        refuse(f"--dataset {args.dataset}: {len(tokens)} tokens; one sequence takes seq_len + 1 = "
               f"{args.seq_len + 1}, so --seq_len could be at most {len(tokens) - 1}")
    args.vocab_size, first = vocab_size, tokens[:args.global_batch_size * args.seq_len + 1]
    wrong = first.min() if first.min() < 0 else first.max()
    if not 0 <= wrong < vocab_size:
        refuse(f"--dataset {args.dataset}: token {wrong}, but the model's vocabulary is {vocab_size}; "
               f"a --model takes tokens from 0 up to its config.json's vocab_size")
    return tokens


def open_token_file(path):
    if not os.path.isfile(path):
        refuse(f"--dataset {path}: no such file")
    try:
        is_npy = path.endswith(".npy")
        tokens = np.lib.format.open_memmap(path, "r") if is_npy else np.memmap(path, np.uint16, "r")
    except (ValueError, EOFError) as error:
        refuse(f"--dataset {path}: not a file of tokens ({error})")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        refuse(f"--dataset {path}: {tokens.ndim}-D array of {tokens.dtype}; tokens are one row of integers")
    return tokens


def tokenized(args):
    """Tokenizes a text once, documents parted by the end-of-text token; returns its cache, a .npy file."""
    if not args.tokenizer:
        refuse(f"--dataset {args.dataset}: a text needs --tokenizer, a directory or hub id")
    from datasets import config, load_dataset
    from transformers import AutoTokenizer
    os.makedirs(config.HF_DATASETS_CACHE, exist_ok=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    except Exception as error:
        refuse(f"--tokenizer {args.tokenizer}: not to be had ({type(error).__name__})")
    if tokenizer.eos_token_id is None:
        refuse(f"--tokenizer {args.tokenizer}: it has no end-of-text token (eos_token) to part documents")
    with open(os.path.join(config.HF_DATASETS_CACHE, "tokenized.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                  # one process tokenizes, others wait, and read that
        try:
            if os.path.isfile(args.dataset):
                ending = os.path.splitext(args.dataset)[1].lower()[1:]
                kind = {"txt": "text", "md": "text", "jsonl": "json"}.get(ending, ending)
                documents = load_dataset(kind, data_files=args.dataset, split="train")
            else:
                documents = load_dataset(args.dataset, split="train")
        except Exception as error:
            missing = not os.path.exists(args.dataset)
            what = "no such file, and the hub gave none" if missing else "no text, json or parquet file"
            refuse(f"--dataset {args.dataset}: {what} ({type(error).__name__})")
        if not len(documents):
            refuse(f"--dataset {args.dataset}: there is no document in it")
        column = documents.column_names[0] if len(documents.column_names) == 1 else "text"
        if column not in documents.column_names:
            refuse(f"--dataset {args.dataset}: of its columns none is 'text': {documents.column_names}")
        text = tokenizer.backend_tokenizer.to_str()
        key = f"{documents._fingerprint} {column} {text} {tokenizer.eos_token_id}"
        path = os.path.join(config.HF_DATASETS_CACHE, hashlib.sha256(key.encode()).hexdigest()[:16] + ".npy")
        if not os.path.isfile(path):
            write_tokens(documents, column, tokenizer, path)
    return path


def write_tokens(documents, column, tokenizer, path):
    def encode(batch):
        if not all(isinstance(text, str) for text in batch[column]):
            refuse(f"--dataset: not every document has a text in the column {column!r}")
        rows = tokenizer(batch[column], add_special_tokens=False)["input_ids"]
        return {"tokens": [row + [tokenizer.eos_token_id] for row in rows]}
    rows = documents.map(encode, batched=True, remove_columns=documents.column_names, desc="tokenizing")
    length = sum(len(row) for row in rows["tokens"])
    tokens = np.lib.format.open_memmap(path + ".part", mode="w+", dtype=np.uint32, shape=(length,))
    at = 0
    for batch in rows.with_format("numpy").iter(1000):
        flat = np.concatenate(batch["tokens"])
        tokens[at:at + len(flat)] = flat
        at += len(flat)
    tokens.flush()
    os.replace(path + ".part", path)                      # a name that exists is a file that is whole


def micro_batches(tokens, mesh, args, step):
    """What is computed here in a step, as a list of (inputs, positions, targets)."""
    wanted = np.arange(step * args.global_batch_size, (step + 1) * args.global_batch_size)
    wanted = wanted.reshape(args.dp, -1)[mesh.get_local_rank("dp")]
    start = wanted % ((len(tokens) - 1) // args.seq_len) * args.seq_len
    batch = np.stack([tokens[i:i + args.seq_len + 1] for i in start]).astype(np.int64)
    if batch.min() < 0 or batch.max() >= args.vocab_size:
        raise OSError(f"--dataset {args.dataset}: tokens from {batch.min()} to {batch.max()} in step {step}, "
                      f"the vocabulary is {args.vocab_size}")
    batch = torch.from_numpy(batch)                                                # [sequences, seq + 1]
    positions = local_positions(mesh, args)
    pin = lambda t: t.pin_memory() if args.device == "cuda" else t                 # which the device can read
    return [(pin(rows[:, positions]), pin(positions), pin(rows[:, positions + 1]))
            for rows in batch.split(args.micro_batch_size)]


def batches(tokens, mesh, args):
    """Each step's micro-batches; a thread reads those of step t + 1 while step t is computed."""
    read = functools.partial(micro_batches, tokens, mesh, args)
    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(read, 0)
        for step in range(args.steps):
            batch, ahead = ahead.result(), pool.submit(read, step + 1)
            # not in that thread, whose CUDA device is the first one, whichever this process has chosen
            yield [tuple(t.to(args.device, non_blocking=True) for t in micro_batch) for micro_batch in batch]
