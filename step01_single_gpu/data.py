"""Tokens: a flat array of integers, read in order. The array, the flags and t determine step t's batch."""
import os

import numpy as np
import torch
from numpy.lib.format import open_memmap

from messages import fail

FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_tokens(args, vocab_size):
    """Return the dataset's tokens: any object with a length whose slices are integer arrays."""
    if args.dataset == "builtin":
        from pydoc_data.topics import topics              # the text of Python's help(), 465,000 characters
        tokens = np.frombuffer("\n".join(topics[key] for key in sorted(topics)).encode(), dtype=np.uint8)
    elif args.dataset.endswith((".npy", ".bin")):
        tokens = open_token_file(args.dataset)
    else:
        tokens = tokenize(args)
    if len(tokens) <= args.seq_len:
        fail(f"--dataset {args.dataset}: has {len(tokens)} tokens, but a sequence needs seq_len + 1 = "
             f"{args.seq_len + 1}; use a larger dataset or a smaller --seq_len")
    if args.dataset.endswith(".bin") and vocab_size > 2**16:
        fail(f"--dataset {args.dataset}: a .bin file holds uint16 tokens, at most 65,535, but the "
             f"vocabulary of --model has {vocab_size} tokens; use a .npy file")
    try:
        check_vocabulary(tokens[:args.global_batch_size * args.seq_len + 1], vocab_size)
    except OSError as error:
        fail(str(error))
    return tokens


def check_vocabulary(tokens, vocab_size):
    """Raise OSError, which clean_exit prints in one line on any rank, if a token is not in the vocabulary."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise OSError(f"--dataset: tokens range from {tokens.min()} to {tokens.max()}, but the vocabulary of "
                      f"--model has {vocab_size} tokens, numbered from 0; use this model's tokenizer")


def open_token_file(path):
    if os.path.exists(path) and not os.path.isfile(path):          # opening a pipe could wait forever
        fail(f"--dataset {path}: is not a regular file; give a .npy or .bin file")
    try:
        tokens = open_memmap(path, "r") if path.endswith(".npy") else np.memmap(path, np.uint16, "r")
    except (ValueError, OSError) as error:
        fail(f"--dataset {path}: not a token file ({error})")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        fail(f"--dataset {path}: must be a 1-D array of integers, but is {tokens.ndim}-D of {tokens.dtype}")
    return tokens


def tokenize(args):
    """Tokenize text, with an end-of-text token after each document. The datasets library caches it."""
    if not args.tokenizer:
        fail(f"--dataset {args.dataset}: text needs --tokenizer (a directory or hub id)")
    from datasets import load_dataset
    from datasets.fingerprint import Hasher
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
        kind = FORMATS.get(os.path.splitext(args.dataset)[1].lower())
        source = dict(path=kind, data_files=args.dataset) if kind else dict(path=args.dataset)
        documents = load_dataset(**source, split="train")
    except Exception as error:                            # each library raises its own exceptions
        reason = " ".join(str(error.__cause__ or error).split())
        fail(f"--dataset {args.dataset} --tokenizer {args.tokenizer}: cannot be loaded ({reason})")
    columns, end = documents.column_names, tokenizer.eos_token_id
    column = columns[0] if len(columns) == 1 else "text"
    if column not in columns or len(documents) == 0:
        fail(f"--dataset {args.dataset}: needs documents in a column 'text'; "
             f"found {len(documents)} documents with columns {columns}")
    if end is None:
        fail(f"--tokenizer {args.tokenizer}: has no end-of-text token (eos_token) to separate documents")

    def encode(batch):
        if not all(isinstance(text, str) for text in batch[column]):
            raise ValueError(f"a document in column {column!r} is not text")
        rows = tokenizer(batch[column], add_special_tokens=False)["input_ids"]
        return {"tokens": np.concatenate([np.array([*row, end], dtype=np.uint32) for row in rows])}
    key = Hasher.hash((documents._fingerprint, column, tokenizer.backend_tokenizer.to_str(), end))
    try:
        rows = documents.map(encode, batched=True, remove_columns=columns, new_fingerprint=key)
    except ValueError as error:
        fail(f"--dataset {args.dataset}: {error}")
    return rows.with_format("numpy")["tokens"]


def micro_batches(tokens, config, args, step):
    """Return a step's batch, as a list of (inputs, positions, targets)."""
    indices = np.arange(step * args.global_batch_size, (step + 1) * args.global_batch_size)
    start = indices % ((len(tokens) - 1) // args.seq_len) * args.seq_len
    batch = np.stack([tokens[i:i + args.seq_len + 1] for i in start]).astype(np.int64)
    check_vocabulary(batch, config.vocab_size)
    batch = torch.from_numpy(batch).to(args.device)                                # [sequences, seq + 1]
    positions = torch.arange(args.seq_len).to(args.device)
    return [(rows[:, positions], positions, rows[:, positions + 1])
            for rows in batch.split(args.micro_batch_size)]


def batches(tokens, config, args):
    """Yield every step's number and its micro-batches."""
    for step in range(args.first_step, args.steps):
        yield step, micro_batches(tokens, config, args, step)
