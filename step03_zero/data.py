"""Tokens: a flat array of integers, read in order. Step t's batch depends on the array and on t alone."""
import os

import numpy as np
import torch

from messages import fail

FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_tokens(args, vocab_size):
    """Anything that has a length and slices that are arrays of integers."""
    if args.dataset == "builtin":
        from pydoc_data.topics import topics              # the text of Python's help(), 465,000 characters
        tokens = np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode(), dtype=np.uint8)
    elif args.dataset.endswith((".npy", ".bin")):
        tokens = open_token_file(args.dataset)
    else:
        tokens = tokenize(args)
    if len(tokens) <= args.seq_len:
        fail(f"--dataset {args.dataset}: {len(tokens)} tokens; one sequence takes seq_len + 1 = "
               f"{args.seq_len + 1}, so --seq_len could be at most {len(tokens) - 1}")
    if args.dataset.endswith(".bin") and vocab_size > 2**16:
        fail(f"--dataset {args.dataset}: a .bin has tokens below 65,536 (uint16), the model's vocabulary "
               f"is {vocab_size}; a .npy may have others")
    try:
        check_vocabulary(tokens[:args.global_batch_size * args.seq_len + 1], vocab_size)
    except OSError as error:
        fail(str(error))
    return tokens


def check_vocabulary(tokens, vocab_size):
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise OSError(f"--dataset has tokens from {tokens.min()} to {tokens.max()}; with a vocabulary of "
                      f"{vocab_size} the --model takes 0 to {vocab_size - 1}")


def open_token_file(path):
    try:
        tokens = np.load(path, mmap_mode="r") if path.endswith(".npy") else np.memmap(path, np.uint16, "r")
    except (ValueError, OSError, EOFError) as error:
        fail(f"--dataset {path}: not a file of tokens ({error})")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        fail(f"--dataset {path}: {tokens.ndim}-D array of {tokens.dtype}; tokens are one row of integers")
    return tokens


def tokenize(args):
    """A text's tokens, documents parted by the end-of-text token; the cache of `datasets` keeps them."""
    if not args.tokenizer:
        fail(f"--dataset {args.dataset}: a text needs --tokenizer, a directory or hub id")
    from datasets import load_dataset
    from datasets.fingerprint import Hasher
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
        kind = FORMATS.get(os.path.splitext(args.dataset)[1].lower())
        where = dict(path=kind, data_files=args.dataset) if kind else dict(path=args.dataset)
        documents = load_dataset(**where, split="train")
    except Exception as error:                            # of whichever library
        reason = " ".join(str(error).split())
        fail(f"--dataset {args.dataset} --tokenizer {args.tokenizer}: not to be had ({reason})")
    columns, end = documents.column_names, tokenizer.eos_token_id
    column = columns[0] if len(columns) == 1 else "text"
    if column not in columns or len(documents) == 0 or end is None:
        fail(f"--dataset {args.dataset}: {len(documents)} documents with columns {columns}; one has to be "
               f"'text'; the tokenizer's end-of-text token, which it must have: {tokenizer.eos_token}")

    def encode(batch):
        rows = tokenizer(batch[column], add_special_tokens=False)["input_ids"]
        return {"tokens": np.concatenate([np.array([*row, end], dtype=np.uint32) for row in rows])}
    key = Hasher.hash((documents._fingerprint, column, tokenizer.backend_tokenizer.to_str(), end))
    rows = documents.map(encode, batched=True, remove_columns=columns, new_fingerprint=key)
    return rows.with_format("numpy")["tokens"]


def micro_batches(tokens, config, mesh, args, step):
    """What is computed here in a step, as a list of (inputs, positions, targets)."""
    indices = np.arange(step * args.global_batch_size, (step + 1) * args.global_batch_size)
    indices = indices.reshape(args.dp, -1)[mesh.get_local_rank("dp")]
    start = indices % ((len(tokens) - 1) // args.seq_len) * args.seq_len
    batch = np.stack([tokens[i:i + args.seq_len + 1] for i in start]).astype(np.int64)
    check_vocabulary(batch, config.vocab_size)
    batch = torch.from_numpy(batch).to(args.device)                                # [sequences, seq + 1]
    positions = torch.arange(args.seq_len).to(args.device)
    return [(rows[:, positions], positions, rows[:, positions + 1])
            for rows in batch.split(args.micro_batch_size)]


def batches(tokens, config, mesh, args):
    """(step, its micro-batches) of all steps."""
    for step in range(args.first_step, args.steps):
        yield step, micro_batches(tokens, config, mesh, args, step)
